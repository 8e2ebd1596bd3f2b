"""Units (parameters that ZeRO gathers together) of one rank, from the sizes of a model or from the model itself.

[Note: modules of one rank] A tree of modules on the meta device has the parameters of one rank in the order of
transformers' Llama and Mixtral, each with its placement. The engine's own rules divide the tree into units, so that
padding, merged neighbours and persistent parameters are those of a run. A model that is passed is used instead of the
tree, with its biases and positions, if no axis divides its parameters and its layers are in one list.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from windlass.parallel.placement import Placement, PlacementKey, set_placement
from windlass.simulate.layer_work import LayerSizes
from windlass.simulate.step_workload import StepWork
from windlass.storage.slot import Tier
from windlass.zero.core.unit import ShardState
from windlass.zero.core.unit_layout import UnitLayout
from windlass.zero.core.unit_plan import UnitPlan
from windlass.zero.setup.unit_partition import plan_units

if TYPE_CHECKING:
    from windlass.simulate.event_loop import SimulatedTask

EMBEDDING, NORM, HEAD = "embedding", "norm", "head"
"""Names of the blocks that are not layers."""


@dataclass(eq=False)
class SimulatedUnit:
    """Unit without memory. The engine's prefetcher reads `numel`, `shard_state` and `tier`.

    Attributes:
        layout: Parameters of this rank in the unit's buffer, before ZeRO shards them.
        shapes: Shapes of these parameters.
        kind: Axes over which the parameters are sharded and reduced.
        index: Index among the units of the rank.
        is_expert: The parameters belong to experts, which fewer ranks share.
        reshards: The unit is resharded between two uses.
        sums_over_tp: Each rank along tp computes a part of the gradient.
        is_on_both_ends: The first and the last pipeline stage have the unit.
        trainable: The unit has gradients and states.
        gathered: Task that unshards the unit; None: the unit is sharded, or no task is needed.
        uses: Number of blocks that use the unit.
        backwards, last_backwards: Number of these blocks whose backward is done: in the running micro-batch, and in the
            last micro-batch of the step.
    """

    name: str
    layout: UnitLayout
    shapes: tuple[torch.Size, ...] = ()
    kind: PlacementKey = PlacementKey()
    index: int = 0
    is_expert: bool = False
    reshards: bool = False
    sums_over_tp: bool = False
    is_on_both_ends: bool = False
    trainable: bool = True
    tier: Tier = Tier.DEVICE
    shard_state: ShardState = ShardState.SHARDED
    gathered: SimulatedTask | None = None
    uses: int = 0
    backwards: int = 0
    last_backwards: int = 0

    @property
    def numel(self) -> int:
        """Elements of the unit's parameters."""
        return self.layout.numel

    @property
    def padded(self) -> int:
        """Elements of the unit's buffer, with padding."""
        return self.layout.padded


class RankUnits:
    """Units of a rank of one pipeline stage, and the blocks that use them.

    Attributes:
        units: Units in model order.
        of_block: Units of each block: `embedding`, `layer 0` and the following ones, `norm`, and `head`.
        layer_numel: Elements of one layer on this rank.
    """

    def __init__(self, work: StepWork, sizes: LayerSizes, stage: int) -> None:
        self._work, self._sizes = work, sizes
        chunks = range(stage, work.chunks, work.grid.pp)
        # With pp, ep or tp, parameters of a rank have other shapes than those of the model, which are full.
        whole = work.model if work.grid.size("pp", "ep", "tp") == 1 else None
        own = _layers_of(whole, work.shape.layers) if whole is not None else None
        if own is not None and work.model is not None:
            model, layers = work.model, list(own.values())
            block_of = _block_names(work.model, own).__getitem__
        else:
            model, layers = self._build(chunks)
            block_of = _block_of
        self.layer_numel = sum(parameter.numel() for parameter in layers[0].parameters())
        self.units: list[SimulatedUnit] = []
        self.of_block: dict[str, list[SimulatedUnit]] = {}
        for plan in plan_units(model, work.unit_rules)[1]:
            blocks = dict.fromkeys(block_of(block.name) for block in plan.blocks)
            unit = self._unit(plan, next(iter(blocks)))
            unit.uses = len(blocks)
            self.units.append(unit)
            for block in blocks:
                self.of_block.setdefault(block, []).append(unit)

    def _unit(self, plan: UnitPlan, block: str) -> SimulatedUnit:
        grid, kind = self._work.grid, plan.kind
        ranks = grid.data // (grid.ep if kind.is_expert else 1)
        layout = UnitLayout(tuple(parameter.numel() for parameter in plan.parameters), ranks)
        # Experts that no other rank holds have no shards to gather.
        alone = ranks == grid.dp_replicate and grid.data > grid.dp_replicate
        alone = alone and self._work.offloading.parameters == "none"
        name = f"{block} experts" if kind.is_expert else "small parameters" if plan.persistent else block
        return SimulatedUnit(
            name,
            layout,
            tuple(parameter.shape for parameter in plan.parameters),
            kind,
            len(self.units),
            is_expert=kind.is_expert,
            reshards=self._work.sharding_stage == 3 and not plan.persistent and not alone,
            sums_over_tp="tp" in kind.partial_axes,
            is_on_both_ends=bool(kind.shared_stages),
            trainable=plan.trainable,
        )

    # Tree of modules on the meta device.

    def _build(self, chunks: range) -> tuple[nn.Module, list[nn.Module]]:
        """Return the model and its layers."""
        work, shape = self._work, self._work.shape
        first, last = 0 in chunks, work.chunks - 1 in chunks
        both = (0, work.grid.pp - 1) if shape.tied and work.grid.pp > 1 else ()
        table = self._vocabulary(both)
        model, inner = nn.Module(), nn.Module()
        model.model = inner
        if first:
            inner.embed_tokens = _with_weight(table)
        layers = {
            str(number): self._layer()
            for chunk in chunks
            for number in range(work.layer_bounds[chunk], work.layer_bounds[chunk + 1])
        }
        inner.layers = nn.ModuleDict(layers)
        if last:
            inner.norm = _with_weight(self._parameter((shape.hidden,)))
            model.lm_head = _with_weight(table if shape.tied else self._vocabulary(()))
        if work.model is not None:
            _freeze_like(model, work.model, shape.layers)
        return model, list(layers.values())

    def _layer(self) -> nn.Module:
        shape, sizes, cut = self._work.shape, self._sizes, self._work.volumes.tp_sequence_norms
        head, hidden, heads, keys = shape.resolved_head_dim, shape.hidden, shape.heads, shape.resolved_kv_heads
        layer, attention = nn.Module(), nn.Module()
        layer.self_attn = attention
        attention.q_proj = _with_weight(self._matrix(heads * head, hidden, sizes.heads * head))
        for name in ("k_proj", "v_proj"):
            setattr(
                attention,
                name,
                _with_weight(
                    self._parameter((keys * head, hidden), partial=True)
                    if sizes.shares_keys
                    else self._matrix(keys * head, hidden, sizes.kv_heads * head)
                ),
            )
        attention.o_proj = _with_weight(self._matrix(hidden, heads * head, sizes.heads * head, dim=1))
        layer.mlp = self._experts() if shape.experts else self._feed_forward()
        for name in ("input_layernorm", "post_attention_layernorm"):
            setattr(layer, name, _with_weight(self._parameter((hidden,), partial=cut)))
        return layer

    def _feed_forward(self) -> nn.Module:
        shape, inner = self._work.shape, nn.Module()
        width = shape.intermediate or 4 * shape.hidden
        for name in ("gate_proj", "up_proj") if shape.gated else ("up_proj",):
            setattr(inner, name, _with_weight(self._matrix(width, shape.hidden, self._sizes.inner)))
        inner.down_proj = _with_weight(self._matrix(shape.hidden, width, self._sizes.inner, dim=1))
        return inner

    def _experts(self) -> nn.Module:
        shape, outer, inner, grid = self._work.shape, nn.Module(), nn.Module(), self._work.grid
        width, local = shape.intermediate or 4 * shape.hidden, -(-shape.experts // grid.ep)
        outer.gate = _with_weight(self._parameter((shape.experts, shape.hidden)))
        outer.experts = inner
        axes = [axis for axis in ("ep", "tp") if grid.size(axis) > 1]
        sections, part = 2 if shape.gated else 1, self._sizes.inner
        for name, whole, own in (
            ("gate_up_proj", (sections * width, shape.hidden), (sections * part, shape.hidden)),
            ("down_proj", (shape.hidden, width), (shape.hidden, part)),
        ):
            one = self._parameter((shape.experts, *whole), (local, *own), axes=axes, is_expert=grid.ep > 1)
            setattr(inner, name, one)
        return outer

    def _vocabulary(self, both: tuple[int, ...]) -> nn.Parameter:
        shape = self._work.shape
        return self._matrix(shape.vocabulary, shape.hidden, self._sizes.vocabulary, both=both)

    def _matrix(self, rows: int, columns: int, local: int, *, dim: int = 0, both: tuple[int, ...] = ()) -> nn.Parameter:
        """Return a matrix of which this rank has `local` rows (`dim` 0) or columns (`dim` 1)."""
        axes = ["tp"] if self._work.grid.tp > 1 else []
        return self._parameter((rows, columns), (rows, local) if dim else (local, columns), axes=axes, both=both)

    def _parameter(
        self,
        shape: tuple[int, ...],
        local: tuple[int, ...] | None = None,
        *,
        axes: list[str] | None = None,
        partial: bool = False,
        is_expert: bool = False,
        both: tuple[int, ...] = (),
    ) -> nn.Parameter:
        parameter = nn.Parameter(torch.empty(local or shape, device="meta"))
        if axes or partial or both:
            placement = Placement(
                shape,
                tuple(((0, size),) for size in local or shape),
                frozenset(axes or ()),
                frozenset({"tp"} if partial and self._work.grid.tp > 1 else ()),
                is_expert,
                both,
            )
            set_placement(parameter, placement)
        return parameter


def _with_weight(weight: nn.Parameter) -> nn.Module:
    module = nn.Module()
    module.weight = weight
    return module


def _layers_of(model: nn.Module, count: int) -> dict[str, nn.Module] | None:
    """Return the modules of the model's outermost list of `count` modules, by name; None: there is no such list.

    A list in the decoder comes before a list in another part of the model, e.g. a vision tower.
    """
    found = {
        path: module
        for path, module in model.named_modules()
        if path and isinstance(module, nn.ModuleList) and len(module) == count
    }
    path = next((path for path in found if _is_in_decoder(model, path)), next(iter(found), None))
    return None if path is None else {f"{path}.{name}": layer for name, layer in found[path].named_children()}


def _is_in_decoder(model: nn.Module, path: str) -> bool:
    """Return True if the innermost module around `path` with a configuration has that of the model's text."""
    whole: Any = getattr(model, "config", None)
    if not hasattr(whole, "get_text_config"):
        return False
    owner = path
    while owner:
        owner = owner.rpartition(".")[0]
        own = getattr(model.get_submodule(owner), "config", None)
        if own is not None:
            # Compare classes, because some models copy the configurations of their parts.
            return isinstance(own, type(whole.get_text_config(decoder=True)))
    return False


def _freeze_like(tree: nn.Module, model: nn.Module, count: int) -> None:
    """Freeze the parameters of a decoder's tree that are frozen in a model with `count` layers. Parameters of other
    names in the model are frozen if all parameters of their block are."""
    if all(parameter.requires_grad for parameter in model.parameters()):
        return
    parts: dict[str, list[tuple[str, nn.Parameter]]] = {}  # names and parameters of each block of the model
    layers = _layers_of(model, count) or {}
    blocks = _block_names(model, layers)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner = name.rpartition(".")[0]
        layer = next((path for path in layers if name.startswith(f"{path}.")), "")
        parts.setdefault(blocks[owner], []).append((name.removeprefix(f"{layer}."), parameter))
    for name, parameter in tree.named_parameters():
        block = parts.get(_block_of(name.rpartition(".")[0]), [])
        inside = re.sub(r"^model\.layers\.\d+\.", "", name)
        same = [one.requires_grad for other, one in block if other == inside]
        parameter.requires_grad_(any(same or [one.requires_grad for _, one in block] or [True]))


def _block_names(model: nn.Module, layers: dict[str, nn.Module]) -> dict[str, str]:
    """Return the block of each module by module name: modules before the layers belong to the embedding, the output
    embedding to the head, other modules after the layers to the last norm. So does a module before the layers whose
    name has `final`, e.g. `final_layer_norm` of OPT."""
    own = getattr(model, "get_output_embeddings", lambda: None)()
    found, at = {"": HEAD}, EMBEDDING
    numbers = {path: number for number, path in enumerate(layers)}
    inside = ""
    for name, module in model.named_modules(remove_duplicate=False):
        if not name:
            continue
        if name in numbers:
            inside, at = f"layer {numbers[name]}", NORM
        outside = NORM if "final" in name.rpartition(".")[2] else at
        found[name] = inside if any(f"{name}.".startswith(f"{path}.") for path in layers) else outside
        if module is own:
            found[name] = HEAD
    return found


def _block_of(name: str) -> str:
    """Return the name of the block that the module of this name belongs to."""
    parts = name.split(".")
    if "layers" in parts:
        return f"layer {parts[parts.index('layers') + 1]}"
    return {"embed_tokens": EMBEDDING, "norm": NORM}.get(parts[-1], HEAD)
