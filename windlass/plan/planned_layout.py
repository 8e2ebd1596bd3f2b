"""Units and gradient slots of one rank of a run that has not started, built by the engine's code without allocation.

A unit is a group of parameters that are gathered together. A gradient slot holds the gradients of a unit."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
from torch import nn

from windlass.base.errors import ConfigError
from windlass.comm.mesh import Mesh
from windlass.comm.mesh_axis import MeshAxis
from windlass.comm.mesh_shape import DATA_AXES, EXPERT_DATA_AXES, MeshShape
from windlass.comm.planned_axis import PlannedAxis
from windlass.comm.rank_group import DataMesh, RankGroup
from windlass.config import Config
from windlass.engine.parallelize import apply_memory_savings, partition_axes
from windlass.engine.sharded_init_partition import interleave
from windlass.engine.sharded_model_builder import build_settings, planned_placements, policy_of, staging_bytes
from windlass.engine.tier_planning import planned_dp_groups, sizes_of_units, step_traffic, with_placement
from windlass.optim.muon import muon_groups
from windlass.parallel.placement import get_placement
from windlass.plan.optimizer_states import OptimizerStates
from windlass.storage.slot import Tier
from windlass.storage.tier_rates import TierRates
from windlass.zero.core.completion_order import CompletionOrder
from windlass.zero.core.dp_group import DataParallelGroup
from windlass.zero.core.gradient_reducer import GradientReducer
from windlass.zero.core.gradient_slot import GradientSlot
from windlass.zero.core.unit import Unit
from windlass.zero.core.unit_layout import LayoutPiece
from windlass.zero.core.unit_plan import Block, UnitPlan
from windlass.zero.setup.tier_choice import TierChoice, TierMemory, choose_tiers
from windlass.zero.setup.unit_builder import effective_tiers, make_units
from windlass.zero.setup.unit_partition import plan_units
from windlass.zero.setup.zero_settings import Placements, ZeroSettings
from windlass.zero.update.update_chunk import pipeline_numel
from windlass.zero.update.whole_parameter_update import choose_owners

PLANNED_RATES = TierRates(2e12, 4e10, 2.5e10, 2.5e10, 3e9, 2e9)
"""Transfer rates of memory and disk by which tiers are planned: about those of a GPU of 2020 or later and its host.
A run measures its own rates.
"""
_ABSENT: Any = None  # placeholder for parts that only a started run has; nothing here calls it


@dataclass(frozen=True)
class Target:
    """Machine that a run is planned for.

    Attributes:
        device: `cpu` or `cuda`.
        transport: `auto`, `shm`, `gloo`, `nccl` or `mpi`.
    """

    device: str = "cpu"
    transport: str = "auto"

    @property
    def has_own_memory(self) -> bool:
        """True if the device has memory of its own, so that host memory is a separate tier."""
        return self.device != "cpu"

    def shares_memory(self, ranks: int) -> bool:
        """Return True if the ranks of a data-parallel group of size `ranks` read each other's buffers in place."""
        return self.device == "cpu" and ranks > 1 and self.transport in ("auto", "shm")


@dataclass(frozen=True)
class BuiltParameter:
    """Parameter of the full model, as the script builds it.

    Attributes:
        nbytes: Bytes of the full parameter.
        local_nbytes: Bytes of this rank's part along pp, ep and tp; 0: the rank has none of it.
        is_split: The part is a copy of a slice of the full parameter.
    """

    nbytes: int
    local_nbytes: int
    is_split: bool


@dataclass(frozen=True)
class PlannedLayout:
    """Parts of one rank's sharded model.

    Attributes:
        model: The part of the model on this rank, partitioned along pp, ep, tp and sp, with the configuration's
            recomputation.
        original: Plans of the units, with the original dtypes of their parameters.
        units: Units in model order, bound to no memory.
        reducer: Reducer of the trainable units; its buffers are not allocated.
        batch_numel: Maximum number of elements that one optimizer call updates.
        states: States of the configuration's optimizer.
        owned: Indices of the parameters that this rank steps, by unit index, for an optimizer that steps whole
            parameters; empty for others.
        hidden: Ids of the parameters that Muon orthogonalizes; empty for other optimizers.
        shares_memory: Ranks read each other's buffers in place.
        staging: Limit of the host memory that stages NVMe transfers, in bytes; 0: nothing is on NVMe.
        choice: Placement that `offload` chose; None: the configuration sets the tiers.
        mesh: The rank's mesh. Its groups cannot communicate.
        built_numel: Number of elements of all parameters of the full model.
        built: Parameters of the full model, as the script builds it.
        built_buffers: Bytes of the buffers of the full model.
        unshards_per_step: A pipeline keeps parameters and gradients unsharded from its first forward to its last
            backward.
    """

    model: nn.Module
    settings: ZeroSettings
    tiers: Placements
    blocks: list[Block]
    original: list[UnitPlan]
    units: list[Unit]
    reducer: GradientReducer
    batch_numel: int
    states: OptimizerStates
    owned: dict[int, list[int]]
    hidden: frozenset[int]
    target: Target
    shares_memory: bool
    staging: int
    mesh: Mesh
    built_numel: int
    built: list[BuiltParameter]
    built_buffers: int
    unshards_per_step: bool
    choice: TierChoice | None = None

    def partitioning_bytes(self) -> int:
        """Return the most bytes that a rank holds while a model from sharded init is partitioned along pp, ep or tp.

        The parameters are gathered one after the other (`ShardedInitPartitioner`). The rank keeps its part of each, and
        its shards of the ones that are still to come.
        """
        shards = [-(-one.nbytes // self.mesh.grid.world) for one in self.built]
        held = most = sum(shards)
        for one, shard in interleave(list(zip(self.built, shards, strict=True))):
            # The shard stays until the part is copied. A parameter that is not split is its own part.
            most = max(most, held + one.nbytes + (one.local_nbytes if one.is_split else 0))
            held += one.local_nbytes - shard
        return most + self.built_buffers

    @property
    def slots(self) -> list[GradientSlot]:
        """Gradient slots of the trainable units."""
        return self.reducer.slots

    def group_size(self, unit: Unit) -> int:
        """Return the number of ranks of the unit's data-parallel group."""
        return unit.dp_group.group.size

    def is_shared(self, unit: Unit) -> bool:
        """Return True if all ranks of the host use one buffer of the unit's full parameters."""
        return unit.buffer_request().shared and self.shares_memory and self.group_size(unit) > 1

    def frees_memory(self, unit: Unit) -> bool:
        """Return True if resharding frees the memory of the unit's full parameters."""
        return unit.reshards and not self.is_shared(unit)

    def master_dtype(self, unit: Unit, plan: UnitPlan) -> torch.dtype:
        """Return the dtype of the unit's master weights."""
        return self.settings.master_dtype or (torch.float64 if plan.dtype == torch.float64 else torch.float32)

    def has_separate_masters(self, unit: Unit, plan: UnitPlan) -> bool:
        """Return True if master weights are separate from the parameters, see `MasterWeights`."""
        if not unit.trainable:
            return False
        if self.states.separates_masters or self.settings.delayed_update or unit.dtype != self.master_dtype(unit, plan):
            return True
        tier = unit.tier if self.frees_memory(unit) else Tier.DEVICE
        return unit.state_tier is Tier.NVME or tier is not unit.state_tier

    def state_tensors(self, unit: Unit, pieces: Iterable[LayoutPiece]) -> Iterator[int]:
        """Yield the size in bytes of each optimizer state of `pieces`: segments of `unit` that this rank updates.

        An optimizer that steps whole parameters ignores `pieces`: it has the states of all parameters of the unit that
        this rank steps.
        """
        if self.states.steps_whole:
            for index in self.owned[unit.index]:
                yield from self.states.of_parameter(
                    unit.shapes[index], hidden=id(unit.parameters[index]) in self.hidden
                )
            return
        for piece in pieces:
            yield from self.states.of_piece(piece.numel)


def plan_layout(
    model: nn.Module,
    config: Config,
    world_size: int,
    target: Target,
    *,
    rank: int = 0,
    memory: TierMemory | None = None,
    host_memory: int | None = None,
) -> PlannedLayout:
    """Lay out `model`, which may be on the meta device, as `initialize` would for one of `world_size` ranks.

    Args:
        rank: Rank whose part is laid out.
        memory: Memory for which `offload` chooses tiers, by `PLANNED_RATES`; needed only if `offload` is set.
        host_memory: Host memory of a rank, a part of which stages NVMe transfers; None: that of this machine.

    Raises:
        ConfigError: the memory of the configuration cannot be planned, its axes do not fit the ranks, or no placement
            of `offload` fits.
    """
    axes = config.axes(world_size, "--world-size")
    grid = MeshShape(**axes.sizes)
    mesh = _planned_mesh(grid, rank, axes.secondary_size)
    built_buffers = sum(_nbytes(buffer) for buffer in {id(buffer): buffer for buffer in model.buffers()}.values())
    built_numel = sum(parameter.numel() for parameter in model.parameters())
    model, built = _local_model(model, mesh, config)
    _add_stage_axes(model, mesh)
    is_on_disk = any(
        section is not None and section.device == "nvme"
        for section in (config.zero_optimization.offload_optimizer, config.zero_optimization.offload_param)
    )
    staging = staging_bytes(config, host_memory) if is_on_disk else 0
    settings = build_settings(model, config, mesh, planned_placements(config, staging or None), timedelta(minutes=30))
    states = OptimizerStates(
        config,
        settings.state_dtype or settings.master_dtype or torch.float32,
        shards_states=settings.policy.state,
    )
    choice = None
    if config.offload is not None:
        staging = staging_bytes(config, host_memory) if config.offload.nvme_path else 0
        settings, choice = _with_chosen_tiers(model, config, settings, mesh, states, staging, memory, target)
        staging = staging if choice.is_on_disk else 0
    tiers = _effective_tiers(settings, target)
    dp_groups = planned_dp_groups(mesh, sharded=settings.policy.state)
    blocks, plans = plan_units(model, settings.unit_rules)
    units = make_units(plans, settings, tiers, mesh, dp_groups, _ABSENT, trains=True)
    reducer = GradientReducer(
        [unit for unit in units if unit.trainable],
        settings.policy,
        CompletionOrder(),
        _ABSENT,
        accumulation_dtype=settings.accumulation_dtype,
        reduce_dtype=settings.reduce_dtype,
        lowered_reduce_dtype=settings.lowered_reduce_dtype,
        overlap=settings.overlap_comm,
        predivide_factor=settings.predivide_factor,
        postdivide_factor=settings.postdivide_factor,
        contiguous=settings.contiguous_gradients,
        offload=_ABSENT,
    )
    return PlannedLayout(
        model=model,
        settings=settings,
        tiers=tiers,
        blocks=blocks,
        original=plans,
        units=units,
        reducer=reducer,
        batch_numel=min(settings.sub_group_size, pipeline_numel(reducer.slots), tiers.max_update_numel),
        states=states,
        owned=_owned_parameters(units, shards_states=settings.policy.state) if states.steps_whole else {},
        hidden=_hidden_matrices(model) if states.orthogonalizes else frozenset(),
        target=target,
        shares_memory=_shares_memory(target, settings, dp_groups[0]),
        staging=staging,
        mesh=mesh,
        built_numel=built_numel,
        built=built,
        built_buffers=built_buffers,
        unshards_per_step=grid.pp > 1 and config.pipeline.unshard_per == "step",
        choice=choice,
    )


def stage_ranks(config: Config, world_size: int) -> list[int]:
    """Return the first rank of each pipeline stage."""
    grid = MeshShape(**config.axes(world_size, "--world-size").sizes)
    return list(range(0, grid.world, grid.world // grid.pp))


def _with_chosen_tiers(
    model: nn.Module,
    config: Config,
    settings: ZeroSettings,
    mesh: Mesh,
    states: OptimizerStates,
    staging: int,
    memory: TierMemory | None,
    target: Target,
) -> tuple[ZeroSettings, TierChoice]:
    """Return `settings` with the tiers that `offload` chooses for `memory`, as the engine does at its start."""
    if memory is None:
        raise ConfigError(
            '"offload" is set, and its tiers follow from limits of memory that are unknown here; give them to '
            "`windlass plan` (--gpu, --host-memory), or write zero_optimization.offload_optimizer and offload_param"
        )
    units, sizes = sizes_of_units(
        model,
        settings,
        mesh,
        states.bytes_per_element,
        trains=True,
        separates_masters=states.separates_masters,
        reduces_itself=states.reduces_itself,
        rank_states=len(states.rank_keys),
        shares_memory=_shares_memory(target, settings, planned_dp_groups(mesh, sharded=settings.policy.state)[0]),
        staging=staging,
    )
    accumulation = config.resolve_batch(mesh.grid.world, "--world-size").accumulation
    traffic = step_traffic(accumulation, settings)
    choice = choose_tiers(sizes.units, PLANNED_RATES, memory, sizes.fixed, traffic)
    live = sizes.max_live_numel(choice, max((unit.dtype.itemsize for unit in units), default=4))
    settings = with_placement(settings, choice.units, live)
    return replace(settings, policy=policy_of(config, mesh, settings.tiers)), choice


def _shares_memory(target: Target, settings: ZeroSettings, data: DataParallelGroup) -> bool:
    """Return True if sharded parameters on the device are in memory that the ranks of `data` read."""
    return target.shares_memory(data.group.size) and not settings.wire_options.quantizes


def _hidden_matrices(model: nn.Module) -> frozenset[int]:
    """Return the ids of the parameters that Muon orthogonalizes."""
    return frozenset(id(one) for group in muon_groups(model) if group["use_muon"] for one in group["params"])


def _owned_parameters(units: list[Unit], *, shards_states: bool) -> dict[int, list[int]]:
    """Return the indices of the parameters that this rank steps whole, by index of the trainable unit."""
    units = [unit for unit in units if unit.trainable]
    loads = {id(unit.dp_group): [0] * unit.dp_group.group.size for unit in units}
    owners = choose_owners(units, loads, shards_states=shards_states)
    return {
        unit.index: [index for index, owner in enumerate(of_unit) if owner == unit.dp_group.group.index]
        for unit, of_unit in zip(units, owners, strict=True)
    }


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _local_model(model: nn.Module, mesh: Mesh, config: Config) -> tuple[nn.Module, list[BuiltParameter]]:
    """Return the part of `model` on one rank, and the parameters of the full model.

    The part is `model` itself, or a changed copy on the meta device.
    """
    axes = [axis for axis in ("pp", "ep", "tp", "sp") if mesh.axes[axis].size > 1]
    section = config.parallel
    if not axes and not (section.tiled_mlp or section.tiled_loss or section.recompute):
        return model, [BuiltParameter(_nbytes(one), _nbytes(one), is_split=False) for one in model.parameters()]
    if "pp" in axes and config.pipeline.partition_method == "time":
        raise ConfigError(
            "pipeline.partition is 'time', and the times of layers are measured when a run starts; write 'parameters' "
            "to plan its memory"
        )
    local = copy.deepcopy(model).to("meta")
    full = [(parameter, _nbytes(parameter)) for parameter in local.parameters()]
    partition_axes(local, mesh, config, axes)
    kept = {id(parameter) for parameter in local.parameters()}
    built = [
        BuiltParameter(nbytes, _nbytes(one) if id(one) in kept else 0, is_split=not get_placement(one).is_full)
        for one, nbytes in full
    ]
    apply_memory_savings(local, config, opens_tiers=False)
    return local, built


def _add_stage_axes(model: nn.Module, mesh: Mesh) -> None:
    """Add to `mesh` an axis for each set of pipeline stages that share a parameter, such as a tied embedding."""
    column = mesh.pp.group.ranks
    for stages in {get_placement(parameter).shared_stages for parameter in model.parameters()}:
        if stages:
            ranks = tuple(column[stage] for stage in stages)
            at = mesh.pp.index
            mesh.stages[stages] = PlannedAxis("pp", RankGroup(_ABSENT, ranks, stages.index(at)))


def _effective_tiers(settings: ZeroSettings, target: Target) -> Placements:
    # On a CPU the host tier is the device tier. The device is passed, since the planning machine may have a GPU.
    if target.has_own_memory:
        return settings.tiers
    return effective_tiers(settings.tiers, torch.device("cpu"), delayed=settings.delayed_update)


def _planned_mesh(grid: MeshShape, rank: int, secondary: int | None) -> Mesh:
    """Return the mesh of a run that has not started. Its groups cannot communicate."""

    def over(*axes: str) -> RankGroup:
        ranks = grid.along(rank, *axes)
        return RankGroup(_ABSENT, ranks, ranks.index(rank))

    def data_mesh(axes: tuple[str, ...], near: RankGroup | None) -> DataMesh:
        shard = over(*(axis for axis in axes if axis != "dp_replicate"))
        return DataMesh(over(*axes), shard, over("dp_replicate"), near)

    near = None
    data = over(*DATA_AXES)
    if secondary is not None and 1 < secondary < data.size:
        start = data.index // secondary * secondary
        ranks = data.ranks[start : start + secondary]
        near = RankGroup(_ABSENT, ranks, ranks.index(rank))
    dense = data_mesh(DATA_AXES, near)
    experts = dense if grid.ep == 1 else data_mesh(EXPERT_DATA_AXES, None)
    axes: dict[str, MeshAxis] = {name: PlannedAxis(name, over(name)) for name in ("pp", "ep", "sp", "tp")}
    return Mesh(grid, RankGroup(_ABSENT, tuple(range(grid.world)), rank), dense, experts, axes)
