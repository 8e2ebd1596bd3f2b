"""Construction of a model's tensor-parallel plan from the model's own `tp_plan`, by tracing, and from the user's table,
which takes precedence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from windlass.base.errors import ModelError
from windlass.parallel.experts.expert_list import Experts
from windlass.parallel.experts.mixture_of_experts import MixtureOfExperts
from windlass.parallel.tensor.block_tracing import find_blocks, trace_block, trace_known_layers
from windlass.parallel.tensor.dependency_chains import ChainResolver, find_dependency_chains
from windlass.parallel.tensor.find_language_model import find_language_model
from windlass.parallel.tensor.fused_experts_layout import read_fused_experts_layout
from windlass.parallel.tensor.linear_layers import (
    find_linear_layers,
    find_local_modules,
    is_inside,
    is_pipeline_stage,
)
from windlass.parallel.tensor.model_tp_plan import read_tp_plan, read_tp_plan_entries
from windlass.parallel.tensor.plan_entry import PlanEntry
from windlass.parallel.tensor.rank_ranges import join_sections, make_even_ranges, make_expert_ranges
from windlass.parallel.tensor.tensor_parallel_plan import (
    ModuleShard,
    ShardStyle,
    TensorParallelPlan,
    make_cannot_shard_error,
)
from windlass.parallel.tensor.tensor_table import read_tensor_table
from windlass.parallel.tensor.vocabulary_modules import find_vocabulary_modules, get_hidden_size

_UNCHAINED_STYLES = (ShardStyle.PARTIAL, ShardStyle.IDENTITY)
_MIXTURE_HINT = "; the experts of {} are sharded if it has enable_expert_tensor_parallelism=True"


def build_tensor_parallel_plan(
    model: nn.Module, ranks: int, tensor_table: Mapping[str, str] | None = None
) -> TensorParallelPlan:
    """Build the plan to shard a model over `ranks` ranks. The model is not changed, and its values are not read.

    A transformers model, by itself or inside another module, is sharded by its own `tp_plan`, except that a fused
    projection with known sections is sharded instead of gathered. Modules that the plan does not mention are traced as
    far as possible, models without a plan completely (`block_tracing`). The table takes precedence over all of these.

    Args:
        model: full model, or model on the meta device.
        ranks: size of the axis.
        tensor_table: see `read_tensor_table`.

    Raises:
        ConfigError: the table is invalid.
        ModelError: a module cannot be sharded, or the model, which is not a stage of a pipeline, has no module to
            shard. The message names a fix, usually a table entry.
    """
    if ranks > 1:
        _check_distributed_experts(model)
    entries, sources = collect_plan_entries(model, tensor_table)
    resolver = ChainResolver(model, entries, ranks)
    shards = [shard for chain in find_dependency_chains(entries) for shard in resolver.shards_of(chain)]
    known = {shard.name for shard in shards}
    for name, entry in entries.items():
        if name not in known:
            shards += _shard_unchained(model, entry, ranks)
    if not any(shard.rank_ranges for shard in shards) and not is_pipeline_stage(model):
        mixture = next((name for name, one in model.named_modules() if isinstance(one, MixtureOfExperts)), None)
        hint = "" if mixture is None else _MIXTURE_HINT.format(mixture or type(model).__name__)
        raise ModelError(
            f"tensor parallelism found no layer to shard in this {type(model).__name__}; write "
            "parallel.tensor_table, which maps regular expressions for module names to column or row, e.g. "
            f'{{"layers\\\\.\\\\d+\\\\.up": "column", "layers\\\\.\\\\d+\\\\.down": "row"}}{hint}'
        )
    return TensorParallelPlan(
        ranks,
        " and ".join(sources),
        _in_model_order(model, shards),
        tuple(resolver.head_partitions),
        _replicated_modules(model, shards),
    )


def collect_plan_entries(
    model: nn.Module, tensor_table: Mapping[str, str] | None = None
) -> tuple[dict[str, PlanEntry], list[str]]:
    """Return the plan entries of a model, and texts that name their origins; see `build_tensor_parallel_plan`.

    Raises:
        ConfigError: the table is invalid.
        ModelError: the role of a module is unknown.
    """
    table_entries = read_tensor_table(model, tensor_table or {})
    plan = read_tp_plan(model)
    entries = read_tp_plan_entries(model, plan) if plan else {}
    entries = _apply_table(entries, table_entries)
    vocabulary = find_vocabulary_modules(model, entries)
    ends = {
        name: entry for name, entry in entries.items() if entry.style is not ShardStyle.VOCABULARY or name in vocabulary
    }
    entries = {**ends, **vocabulary}
    num_planned = len(entries)
    entries = {**_replicated_in_mixtures(model), **entries}
    _add_traced_entries(model, entries, strict=not plan)
    sources = ["the model's own tp_plan"] if plan else []
    sources += ["the names and sizes of its layers"] if len(entries) > num_planned else []
    sources += ["the table"] if table_entries else []
    return entries, sources


def _check_distributed_experts(model: nn.Module) -> None:
    """Raise a ModelError if experts that are separate modules on different ranks should also be sharded by tp.

    A placement with the axis ep describes a part of a parameter of all experts, or the full parameter of one expert,
    but not a part of the parameter of one expert.
    """
    for name, module in model.named_modules():
        if isinstance(module, MixtureOfExperts) and module.enable_expert_tensor_parallelism:
            experts = module.deepspeed_moe["experts"]
            if isinstance(experts, Experts) and experts.axis.size > 1:
                raise ModelError(
                    f"{name} has enable_expert_tensor_parallelism=True, and its experts are separate modules, which "
                    f"parallel.ep distributes over {experts.axis.size} ranks; pass a StackedMLP as the expert, or "
                    "enable_expert_tensor_parallelism=False"
                )


def _replicated_in_mixtures(model: nn.Module) -> dict[str, PlanEntry]:
    """Return entries for the replicated modules of each `MixtureOfExperts`: its router, and its experts unless tensor
    parallelism is enabled for them.
    """
    names: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, MixtureOfExperts):
            inside = [f"{name}.{one}".lstrip(".") for one in ("deepspeed_moe.gate", "coefficient")]
            if not module.enable_expert_tensor_parallelism:
                inside.append(f"{name}.deepspeed_moe.experts".lstrip("."))
            names += inside
            names += [layer.name for layer in find_linear_layers(module, name) if _is_in_any(layer.name, inside)]
    return {name: PlanEntry(name, ShardStyle.REPLICATED) for name in names}


def _is_in_any(name: str, modules: list[str]) -> bool:
    return any(is_inside(name, one) for one in modules)


def _apply_table(entries: dict[str, PlanEntry], table_entries: Mapping[str, PlanEntry]) -> dict[str, PlanEntry]:
    """Override the model's entries by the table. A module in the table replaces all entries inside it."""
    kept = {name: entry for name, entry in entries.items() if not any(is_inside(name, one) for one in table_entries)}
    return {**kept, **table_entries}


def _add_traced_entries(model: nn.Module, entries: dict[str, PlanEntry], *, strict: bool) -> None:
    """Add traced entries: of all blocks if `strict`, else only known layers that have no entry."""
    hidden, local = get_hidden_size(model), find_local_modules(model)
    for name, block in find_blocks(model):
        if name not in local:  # a stub, or a block that occurred before under another name
            continue
        taken = {one for one in entries if is_inside(one, name) or one == name}
        taken |= {
            layer.name
            for layer in find_linear_layers(block, name)
            if any(is_inside(layer.name, one) for one in taken if entries[one].is_from_user)
        }
        # Modules that another block has under another name are sharded in that block.
        taken |= {inner for inner, _ in block.named_modules(prefix=name) if inner not in local}
        found = trace_block(name, block, taken, hidden) if strict else trace_known_layers(name, block, taken)
        entries.update({entry.name: entry for entry in found if entry.name not in entries})


def _shard_unchained(model: nn.Module, entry: PlanEntry, ranks: int) -> list[ModuleShard]:
    """Return the shards of a module or parameter that belongs to no chain."""
    if entry.style is ShardStyle.VOCABULARY:
        weight = model.get_submodule(entry.name).weight
        size = int(weight.shape[0])  # type: ignore[index]
        if size < ranks:
            raise make_cannot_shard_error(entry.name, f"{size} tokens are too few for {ranks} ranks")
        return [
            ModuleShard(
                entry.name, ShardStyle.VOCABULARY, size, make_even_ranges(size, ranks), f"{size} tokens", entry.name
            )
        ]
    if entry.style is ShardStyle.EXPERTS:
        return _shard_experts(entry.name, model.get_submodule(entry.name), ranks)
    if entry.style is ShardStyle.TAIL_FEATURES:
        return [
            ModuleShard(
                entry.name,
                ShardStyle.TAIL_FEATURES,
                _rotary_features(model, entry.name),
                description="its rotary features",
            )
        ]
    return [ModuleShard(entry.name, entry.style)] if entry.style in _UNCHAINED_STYLES else []


def _rotary_features(model: nn.Module, name: str) -> int:
    holder = model.get_submodule(name.rpartition(".")[0])
    config: Any = getattr(holder, "config", None) or getattr(find_language_model(model)[1], "config", None)
    size = getattr(config, "qk_rope_head_dim", None)
    if not isinstance(size, int):
        raise make_cannot_shard_error(name, "its config lacks qk_rope_head_dim, the number of rotary features")
    return size


def _shard_experts(name: str, module: nn.Module, ranks: int) -> list[ModuleShard]:
    """Shard each expert along its intermediate features, in all parameters."""
    layout = read_fused_experts_layout(module)
    if isinstance(layout, str):
        raise make_cannot_shard_error(name, layout)
    size, sections = layout.intermediate_size, layout.num_sections
    if size < ranks:
        raise make_cannot_shard_error(name, f"{size} features of an expert are too few for {ranks} ranks")
    shares = make_expert_ranges(size, ranks)
    if layout.is_interleaved:
        first = tuple(tuple((start * sections, stop * sections) for start, stop in ranges) for ranges in shares)
    else:
        first = join_sections([(size, shares)] * sections)
    what = f"{sections} x {size} features" if sections > 1 else f"{size} features"
    shards = [
        ModuleShard(name, ShardStyle.EXPERTS, chain=name),
        ModuleShard(
            f"{name}.{layout.up_name}", ShardStyle.PARAMETER, sections * size, first, what, name, layout.up_dim
        ),
        ModuleShard(
            f"{name}.{layout.down_name}", ShardStyle.PARAMETER, size, shares, f"{size} features", name, layout.down_dim
        ),
    ]
    if layout.up_bias is not None:
        shards.append(
            ModuleShard(f"{name}.{layout.up_bias}", ShardStyle.PARAMETER, sections * size, first, what, name, 1)
        )
    if layout.down_bias is not None:
        shards.append(ModuleShard(f"{name}.{layout.down_bias}", ShardStyle.PARTIAL, chain=name))
    # Trained activation functions with one parameter for all features: each rank's gradient covers only its features.
    numbers = [leaf for leaf, parameter in module.named_parameters() if "." in leaf and parameter.numel() == 1]
    return [*shards, *(ModuleShard(f"{name}.{leaf}", ShardStyle.PARTIAL) for leaf in numbers)]


def _in_model_order(model: nn.Module, shards: list[ModuleShard]) -> tuple[ModuleShard, ...]:
    """Sort shards in the order of the model, a module before its parameters."""
    order: dict[str, int] = {}
    for name, module in model.named_modules():
        order.setdefault(name, len(order))
        for parameter, _ in module.named_parameters(prefix=name, recurse=False):
            order.setdefault(parameter, len(order))
    return tuple(sorted(shards, key=lambda shard: order[shard.name]))


def _replicated_modules(model: nn.Module, shards: list[ModuleShard]) -> tuple[str, ...]:
    shard = {one.name for one in shards if one.rank_ranges}
    kinds = [name for name, module in model.named_modules() if isinstance(module, nn.Embedding)]
    return tuple(name for name in (*kinds, *(layer.name for layer in find_linear_layers(model))) if name not in shard)
