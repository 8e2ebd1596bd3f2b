"""Partitioning of a full model over the mesh axes other than data, before it is sharded in units."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TypeVar
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn

from windlass.base.collective_activity import WaitScope
from windlass.base.errors import ConfigError, ModelError, WindlassError
from windlass.base.log import logger
from windlass.comm.mesh import Mesh
from windlass.comm.point_to_point import as_bytes
from windlass.comm.rank_group import RankGroup
from windlass.config import Config
from windlass.engine.module_buffers import as_writable, broadcast_sparse_buffers
from windlass.engine.sharded_init_partition import ShardedInitPartitioner
from windlass.kernels.packed_linear import PackedMatrix
from windlass.parallel.experts import apply_expert_parallel
from windlass.parallel.megatron_flags import place_flagged_parameters
from windlass.parallel.pipeline import PipelineSequential, apply_pipeline_parallel, measure_model_layer_times
from windlass.parallel.placement import get_placement, has_placement
from windlass.parallel.sequence.apply_sequence_parallel import apply_sequence_parallel, sequence_parallel_of
from windlass.parallel.sequence.long_context import apply_long_context
from windlass.parallel.tensor.apply_tensor_parallel import apply_tensor_parallel
from windlass.parallel.tensor.tensor_table import find_unused_keys
from windlass.zero.sharded_init import initial_shard

_Result = TypeVar("_Result")

AxisPartitioner = Callable[[nn.Module, Mesh, Config], object]
"""Function that partitions a model along one axis, in place, and returns the plan that it applied, or None."""

_meshes: WeakKeyDictionary[nn.Module, Mesh] = WeakKeyDictionary()  # mesh of each partitioned model
_memory_optimized: WeakSet[nn.Module] = WeakSet()  # models to which tiling or recomputation was applied


def mesh_of_model(model: nn.Module) -> Mesh | None:
    """Return the mesh over which a model was partitioned; None: it is not partitioned."""
    return _meshes.get(model)


def parallelize(model: nn.Module, mesh: Mesh, config: Config, *, script_axes: Collection[str] = ()) -> None:
    """Partition `model` in place along every mesh axis except the data axes. Collective.

    Before a partition along pp, ep or tp, each value is broadcast from the first of the ranks that built the same part
    of the model. If a parameter already has a placement (`windlass.parallel.placement`), the model was partitioned
    before, and is not partitioned again.

    Args:
        script_axes: axes along which the script partitions its own layers (with an `mpu`). The tensor-parallel
            parameters of these layers must carry Megatron's flags.

    Raises:
        ConfigError, ModelError: the model cannot be partitioned as requested. Raised on all ranks; the model is still
            usable.
    """
    axes = [axis for axis in ("pp", "ep", "tp", "sp") if mesh.axes[axis].size > 1]
    if not axes:
        apply_memory_savings(model, config)
        return
    given = any(has_placement(parameter) for parameter in model.parameters())
    if "tp" in script_axes:
        place_flagged_parameters(model, mesh.tp)
    if not given:
        if {"pp", "tp"}.issubset(axes) and "tp" not in script_axes:
            _check_table_of_stages(model, mesh, config)
        built_apart = isinstance(model, PipelineSequential) and model.num_stages > 1
        apart = {*script_axes, "pp"} if built_apart else {*script_axes}
        parts = {"pp", "ep", "tp"}
        if mesh.grid.size(*parts) > 1:
            _check_sharded_init(model, mesh, [axis for axis in axes if axis in apart & parts], config)
        own_axes = [axis for axis in axes if axis not in script_axes]
        if mesh.grid.size(*parts.difference(script_axes)) > 1:
            with ShardedInitPartitioner(model) as init_parts:
                _broadcast_model(model, _broadcast_groups(mesh, apart), init_parts)
                plans = _partition_all_stages(model, mesh, config, own_axes)
        else:
            plans = _partition_all_stages(model, mesh, config, own_axes)
        for plan in plans:
            _log_plan(mesh, plan)
        _on_all_stages(mesh, partial(apply_memory_savings, model, config))
    here = {get_placement(parameter).shared_stages for parameter in model.parameters()}
    for stages in sorted({stages for ties in mesh.gather_from_world(here) for stages in ties if stages}):
        mesh.add_stage_group(stages)
    if isinstance(model, PipelineSequential):
        _broadcast_tied_parameters(model, mesh)
    _meshes[model] = mesh


def _partition_all_stages(model: nn.Module, mesh: Mesh, config: Config, axes: Sequence[str]) -> list[object]:
    """Call `partition_axes` for one axis after the other, and raise on all ranks if a stage fails. Collective."""
    return [
        plan for axis in axes for plan in _on_all_stages(mesh, partial(partition_axes, model, mesh, config, [axis]))
    ]


def _on_all_stages(mesh: Mesh, function: Callable[[], _Result]) -> _Result:
    """Return the result of `function`, which may raise on some ranks of a pipeline alone, as each stage has other
    modules. Collective.

    Raises:
        ConfigError, ModelError: `function` raised on another rank. A rank on which it raised raises its own error.
    """
    if mesh.pp.size == 1:
        return function()
    error: Exception | None = None
    try:
        result = function()
    except Exception as raised:
        error = raised
    text = f"{error}" if isinstance(error, WindlassError) else f"{type(error).__name__}: {error}"
    of_ranks = mesh.gather_from_world((isinstance(error, ConfigError), text) if error is not None else None)
    if error is not None:
        raise error
    for rank, failure in enumerate(of_ranks):
        if failure is not None:
            kind = ConfigError if failure[0] else ModelError
            raise kind(f"{failure[1]} (raised on rank {rank})")
    return result


def _check_table_of_stages(model: nn.Module, mesh: Mesh, config: Config) -> None:
    """Check that each key of `parallel.tensor_table` applies to a module of some stage. Collective.

    A stage cannot check this alone: the modules that a key matches may be on other stages.

    Raises:
        ConfigError: a key applies to no module of any stage. Raised on all ranks.
    """
    unused = mesh.gather_from_world(find_unused_keys(model, config.parallel.tensor_table or {}))
    for key, problem in unused[0].items():
        if all(key in of_rank for of_rank in unused):
            raise ConfigError(problem)


def _broadcast_groups(mesh: Mesh, separately_built_axes: Collection[str]) -> list[RankGroup]:
    """Return the groups over which a value of the model is broadcast, in the order of the broadcasts.

    Together the broadcasts copy the value from the first of the ranks that built the same part of the model.

    Args:
        separately_built_axes: axes whose ranks built different parts of the model.
    """
    if not {"pp", "tp"}.intersection(separately_built_axes):
        return [mesh.world]
    other_groups = [mesh.axes[axis].group for axis in ("tp", "pp") if axis not in separately_built_axes]
    return [group for group in (mesh.dense.data, *other_groups) if group.size > 1]


def _broadcast_tied_parameters(model: nn.Module, mesh: Mesh) -> None:
    """Broadcast each parameter that several stages share, and have built separately, from the first of these stages.

    Collective over these stages.
    """
    for name, parameter in sorted(model.named_parameters()):
        stages = get_placement(parameter).shared_stages
        if stages and parameter.numel():
            values = parameter.detach().contiguous()
            mesh.stages[stages].broadcast(as_bytes(values))
            logger.debug("%s has the value of stage %d", name, stages[0])
            if values.data_ptr() != parameter.data_ptr():
                parameter.detach().copy_(values)


def _broadcast_model(model: nn.Module, groups: list[RankGroup], deferred: ShardedInitPartitioner) -> None:
    """Broadcast full parameters and buffers, except those in `deferred`, from the first rank of each group in turn.

    Collective.

    Raises:
        ModelError: a parameter is on the meta device.
    """
    with WaitScope("the broadcast of the first rank's model"), torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.device.type == "meta":
                raise ModelError(
                    f"parameter {name!r} is on the meta device and has no values; build the model in "
                    "`with windlass.zero.Init():`, also around from_pretrained: no rank holds the full model then"
                )
        writable: dict[int, torch.Tensor] = {}  # a buffer under two names stays one
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = writable.setdefault(id(buffer), as_writable(buffer))
        for group in groups:
            broadcast_sparse_buffers(model.modules(), group)
        for tensor in (*model.parameters(), *(one for one in model.buffers() if one.layout is torch.strided)):
            if tensor.numel() and tensor not in deferred:
                values = tensor.detach().contiguous()
                for group in groups:
                    group.broadcast(as_bytes(values))
                if values.data_ptr() != tensor.data_ptr():
                    tensor.detach().copy_(values)
    logger.debug("the model of rank %d was broadcast", groups[0].ranks[0] if groups else 0)


def _check_sharded_init(model: nn.Module, mesh: Mesh, separately_built_axes: Sequence[str], config: Config) -> None:
    """Check that parameters constructed under `zero.Init` are parts of the same model on all ranks. Collective.

    Raises:
        ModelError: a parameter was sharded by `zero.Init`, and ranks build different parts of the model.
        ConfigError: `pipeline.partition_method` is `time`, which runs the full model before its values are gathered.
    """
    sharded_names = [name for name, parameter in model.named_parameters() if initial_shard.find(parameter) is not None]
    if separately_built_axes and (
        of_any := [name for names in mesh.gather_from_world(sharded_names[:1]) for name in names]
    ):
        raise ModelError(
            f"{of_any[0]!r} was sharded by zero.Init, which needs the same model on all ranks, but the ranks build "
            f"different parts along {' and '.join(separately_built_axes)}; build it without zero.Init: no rank holds "
            "the full model anyway"
        )
    if sharded_names and config.pipeline.partition_method == "time" and not isinstance(model, PipelineSequential):
        raise ConfigError(
            "pipeline.partition_method 'time' runs the full model on one rank, and zero.Init sharded it; "
            "balance by 'parameters', or build the model without zero.Init"
        )


def partition_axes(model: nn.Module, mesh: Mesh, config: Config, axes: Sequence[str]) -> list[object]:
    """Partition `model`, which has the same values on all ranks or is on the meta device, along `axes` in this order.

    Returns:
        The plans that were applied, for messages.
    """
    plans = [_PARTITIONERS[axis](model, mesh, config) for axis in axes]
    return [plan for plan in plans if plan is not None]


def _partition_experts(model: nn.Module, mesh: Mesh, config: Config) -> object:
    return apply_expert_parallel(model, mesh.ep, required=mesh.pp.size == 1)


def _partition_matrices(model: nn.Module, mesh: Mesh, config: Config) -> object:
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    matrices = [name for name, module in model.named_modules() if _has_matrix(module)]
    return apply_tensor_parallel(
        model,
        mesh.tp,
        tensor_table=config.tensor_table(matrices, model_type) or None,
        tp_sequence_norms=config.parallel.tp_sequence_norms,
        tp_overlap_chunks=config.tp_overlap_chunks,
    )


def _has_matrix(module: nn.Module) -> bool:
    if isinstance(module, PackedMatrix) or isinstance(getattr(module, "base_layer", None), PackedMatrix):
        return True  # reading the attribute `weight` would unpack the matrix
    weight = getattr(module, "weight", None)
    return isinstance(weight, torch.Tensor) and weight.dim() == 2


def _partition_sequences(model: nn.Module, mesh: Mesh, config: Config) -> None:
    section = config.parallel
    exchanges_itself = any(getattr(m, "exchanges_sequence_shards", False) for m in model.modules())
    if sequence_parallel_of(model) is None and not exchanges_itself:
        apply_sequence_parallel(
            model, mesh.sp, sp_mode=section.sp_mode, ulysses_degree=section.ulysses_degree, rng_stream=mesh.tp.index
        )


def apply_memory_savings(model: nn.Module, config: Config, *, opens_tiers: bool = True) -> None:
    """Apply tiling and recomputation as the configuration requests, once per model.

    Args:
        opens_tiers: False: recomputed layers keep their inputs on the device, e.g. for a plan.
    """
    section = config.parallel
    if isinstance(model, PipelineSequential) and config.pipeline.activation_checkpoint_interval:
        model.set_activation_checkpoint_interval(config.pipeline.activation_checkpoint_interval)
    if not (section.tiled_mlp or section.tiled_loss or section.recompute) or model in _memory_optimized:
        return
    _memory_optimized.add(model)
    tier = section.activation_tier if opens_tiers and section.activation_tier != "device" else None
    apply_long_context(
        model,
        tiled_mlp=section.tiled_mlp,
        tiled_loss=section.tiled_loss,
        recompute=section.recompute,
        activation_tier=tier,
        nvme_path=config.activation_paths if tier == "nvme" else None,
    )


def _log_plan(mesh: Mesh, plan: object) -> None:
    if mesh.world.index == 0:
        for line in str(plan).splitlines():
            logger.info(line)


def _partition_stages(model: nn.Module, mesh: Mesh, config: Config) -> None:
    section = config.pipeline
    method: str | Sequence[float] = section.partition_method
    # the measurement of rank 0, because all ranks must make the same partition
    if method == "time" and not isinstance(model, PipelineSequential):
        measured = _on_all_stages(mesh, lambda: measure_model_layer_times(model) if mesh.world.index == 0 else None)
        method = mesh.gather_from_world(measured)[0]
    apply_pipeline_parallel(
        model,
        mesh.pp,
        virtual_stages=section.resolved_virtual_stages,
        partition_method=method,
        activation_checkpoint_interval=section.activation_checkpoint_interval,
    )


_PARTITIONERS: dict[str, AxisPartitioner] = {
    "pp": _partition_stages,
    "ep": _partition_experts,
    "tp": _partition_matrices,
    "sp": _partition_sequences,
}
