"""Units that pruning removes from transformer models: heads, feed-forward features and experts.

The dependencies between tensors are taken from tensor parallelism (`windlass.parallel.tensor`), for all families that
can be sharded: sharding over as many ranks as there are units gives each rank the elements of one unit.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from windlass.base.errors import ModelError
from windlass.compress.pruning_units import CoupledTensor, UnitGroup
from windlass.parallel.placement import Ranges
from windlass.parallel.tensor.dependency_chains import ChainResolver, DependencyChain, find_dependency_chains
from windlass.parallel.tensor.fused_experts_layout import read_fused_experts_layout
from windlass.parallel.tensor.head_counts import FUSED_NAMES, KEY_NAMES, VALUE_NAMES
from windlass.parallel.tensor.linear_layers import as_linear_layer, iterate_parent_names
from windlass.parallel.tensor.local_attention_heads import HEAD_BIASES, set_head_counts
from windlass.parallel.tensor.plan_builder import collect_plan_entries
from windlass.parallel.tensor.plan_entry import PlanEntry
from windlass.parallel.tensor.tensor_parallel_plan import ModuleShard, ShardStyle

_CHAINED = (ShardStyle.COLUMN, ShardStyle.ROW, ShardStyle.PARAMETER)
_FFN_SIZES = ("intermediate_size", "ffn_dim", "inner_dim", "expert_dim", "intermediate_dim", "hidden_features")
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "num_routed_experts", "n_experts")
_CHOSEN_EXPERTS = ("top_k", "num_experts_per_tok", "moe_top_k")


def find_transformer_units(model: nn.Module, kinds: Sequence[str]) -> list[UnitGroup]:
    """Return the units of some kinds: heads, groups, ffn, experts.

    In grouped-query attention, `heads` are query heads, and each key head loses equally many of its query heads;
    `groups` are key heads with all their query heads. If each head has its own key, both kinds are the same.

    Raises:
        ModelError: a dependency is unknown; the message names the module.
    """
    entries, _ = collect_plan_entries(model)
    found: list[UnitGroup] = []
    for chain in find_dependency_chains(entries):
        found += _chain_units(model, entries, chain, kinds)
    for name, entry in entries.items():
        if entry.style is ShardStyle.EXPERTS:
            module = model.get_submodule(name)
            if "ffn" in kinds:
                found.append(_expert_features(name, module))
            if "experts" in kinds:
                found.append(_experts(model, name, module))
    return found


def _chain_units(
    model: nn.Module, entries: dict[str, PlanEntry], chain: DependencyChain, kinds: Sequence[str]
) -> list[UnitGroup]:
    resolver = ChainResolver(model, entries, 1)
    shards = resolver.shards_of(chain)
    if any(shard.style in (ShardStyle.COLUMN_GATHERED, ShardStyle.ROW_SPLIT) for shard in shards):
        # The features of the chain cannot be separated, e.g. since a norm is over all heads.
        if chain.row.style is ShardStyle.ROW_SPLIT and {"heads", "groups"} & set(kinds):
            raise ModelError(
                f"the heads of {chain.row.name.rpartition('.')[0]} cannot be removed: the features of all heads are "
                "normalized together, or their order is unknown; prune other kinds"
            )
        return []
    if not resolver.head_partitions:
        if "ffn" not in kinds:
            return []
        row = next(shard for shard in shards if shard.style is ShardStyle.ROW)
        each = ChainResolver(model, entries, row.sharded_size).shards_of(chain)
        return [_unit_group(model, _holder(each), "ffn", row.sharded_size, each)]
    heads = resolver.head_partitions[0]
    if {"heads", "groups"} & set(kinds) and _has_head_biases(model, heads.module_name):
        raise ModelError(
            f"the heads of {heads.module_name} cannot be removed: each has a bias of its own that follows from the "
            "number of heads (ALiBi); prune other kinds"
        )
    query, key = heads.num_query_heads, heads.num_key_heads
    found = []
    groups = _unit_group(
        model, heads.module_name, "groups", key, ChainResolver(model, entries, key).shards_of(chain), (query, key)
    )
    if "groups" in kinds and not (key == query and "heads" in kinds):
        found.append(groups)
    if "heads" in kinds:
        found.append(replace(groups, kind="heads") if key == query else _heads_of(groups))
    return found


def _has_head_biases(model: nn.Module, name: str) -> bool:
    """Return True if an attention module adds biases to the scores of each head."""
    arguments = inspect.signature(model.get_submodule(name).forward).parameters
    return any(one in HEAD_BIASES for one in arguments) and bool(getattr(model.config, "alibi", True))


def _heads_of(groups: UnitGroup) -> UnitGroup:
    """Return single query heads as units, if several of them share a key head. Keys and values are not removed."""
    query, key = groups.heads
    each = query // key
    tensors = []
    size = next(tensor.index.shape[1] for tensor in groups.tensors if tensor.reads) // each
    for tensor in groups.tensors:
        index, layer = tensor.index, tensor.name.rpartition(".")[0].rpartition(".")[2]
        if layer in FUSED_NAMES:
            index = index[:, : each * size]  # in each unit, rows of queries come before keys and values
        elif layer in (*KEY_NAMES, *VALUE_NAMES) or index.shape[1] % each:
            continue
        tensors.append(replace(tensor, index=index.reshape(query, -1)))
    return replace(groups, kind="heads", units=query, tensors=tuple(tensors), sections=key, least=key)


def _unit_group(
    model: nn.Module,
    name: str,
    kind: str,
    units: int,
    shards: Sequence[ModuleShard],
    heads: tuple[int, int] = (0, 0),
) -> UnitGroup:
    tensors = []
    for shard in shards:
        if not shard.rank_ranges or shard.style not in _CHAINED:
            continue
        index = torch.stack([_positions(ranges) for ranges in shard.rank_ranges])
        if shard.style is ShardStyle.PARAMETER:
            tensors.append(CoupledTensor(shard.name, shard.dim, index))
            continue
        layer = as_linear_layer(shard.name, model.get_submodule(shard.name))
        assert layer is not None
        reads = shard.style is ShardStyle.ROW
        tensors.append(
            CoupledTensor(f"{shard.name}.weight", layer.input_dim if reads else layer.output_dim, index, reads)
        )
        if not reads and layer.module._parameters.get("bias") is not None:
            tensors.append(CoupledTensor(f"{shard.name}.bias", 0, index))
    return UnitGroup(name, kind, units, tuple(tensors), heads=heads)


def _positions(ranges: Ranges) -> Tensor:
    return torch.cat([torch.arange(start, stop) for start, stop in ranges])


def _holder(shards: Sequence[ModuleShard]) -> str:
    """Return the name of the nearest module that contains a feed-forward chain."""
    parts = [shard.name.split(".") for shard in shards if shard.style in (ShardStyle.COLUMN, ShardStyle.ROW)]
    common = []
    for level in zip(*parts, strict=False):
        if len(set(level)) > 1:
            break
        common.append(level[0])
    return ".".join(common if len(common) < min(map(len, parts)) else common[:-1])


def _expert_features(name: str, module: nn.Module) -> UnitGroup:
    """Return the intermediate features of experts that are in one tensor. Each expert may lose different features."""
    layout = read_fused_experts_layout(module)
    if isinstance(layout, str):
        raise ModelError(f"the features of the experts {name} cannot be removed: {layout}; prune other kinds")
    size, sections = layout.intermediate_size, layout.num_sections
    steps = torch.arange(sections)[None]
    up = (
        torch.arange(size)[:, None] * sections + steps
        if layout.is_interleaved
        else (torch.arange(size)[:, None] + steps * size)
    )
    down = torch.arange(size)[:, None]
    tensors = []
    for part in range(module.get_parameter(layout.down_name).shape[0]):
        tensors.append(CoupledTensor(f"{name}.{layout.up_name}", layout.up_dim, up, part=part))
        tensors.append(CoupledTensor(f"{name}.{layout.down_name}", layout.down_dim, down, reads=True, part=part))
        if layout.up_bias is not None:
            tensors.append(CoupledTensor(f"{name}.{layout.up_bias}", 1, up, part=part))
    return UnitGroup(name, "ffn", size, tuple(tensors))


def _experts(model: nn.Module, name: str, module: nn.Module) -> UnitGroup:
    """Return the experts of a module: their matrices, and the rows of the router."""
    own = dict(module.named_parameters(recurse=False))
    count = own["down_proj"].shape[0]
    tensors = [
        CoupledTensor(f"{name}.{leaf}", 0, torch.arange(count)[:, None], reads=leaf.startswith("down_proj"))
        for leaf, value in own.items()
        if value.dim() > 1
    ]
    holder = name.rpartition(".")[0]
    parent = model.get_submodule(holder)
    routers = 0
    for inner, child in parent.named_modules(prefix=holder):
        if inner == name or inner.startswith(f"{name}."):
            continue
        for leaf, value in [*child.named_parameters(recurse=False), *child.named_buffers(recurse=False)]:
            if value.dim() and value.shape[0] == count and _counts_experts(child, count):
                tensors.append(CoupledTensor(f"{inner}.{leaf}", 0, torch.arange(count)[:, None]))
                routers += value.dim() == 2
    chosen = max((_number(one, _CHOSEN_EXPERTS) for one in parent.modules()), default=1)
    if routers != 1:
        raise ModelError(f"the experts {name} have {routers} routers, not one; their number cannot change")
    if any(_number(one, ("n_group", "num_expert_group")) > 1 for one in parent.modules()):
        raise ModelError(
            f"the router of {name} chooses among groups of experts, whose sizes cannot change; prune other units"
        )
    return UnitGroup(name, "experts", count, tuple(tensors), least=max(chosen, 1))


def _counts_experts(module: nn.Module, count: int) -> bool:
    """Return True if a module is a router: a linear layer with an output for each expert, or a module with an attribute
    for the number of experts.
    """
    return _number(module, _EXPERT_COUNTS) == count or getattr(module, "out_features", None) == count


def _number(module: Any, names: Sequence[str]) -> int:
    return next((value for name in names if isinstance(value := getattr(module, name, None), int)), 0)


def fit_module(model: nn.Module, group: UnitGroup, kept: int) -> None:
    """Set the attributes for the number of units of a group, on the modules that contain the units, to `kept`."""
    module = model.get_submodule(group.name)
    if group.kind in ("heads", "groups"):
        query, key = group.heads
        fewer = (kept, kept if group.has_own_keys else key)
        after = fewer if group.kind == "heads" else (query // key * kept, kept)
        reader = next(tensor for tensor in group.tensors if tensor.reads)
        elements = reader.index.shape[1] // (query // key if group.kind == "groups" else 1)
        set_head_counts(module, group.heads, after, elements)
    elif group.kind == "ffn":
        _set_equal([module], _FFN_SIZES, group.units, kept)
    elif group.kind == "experts":
        around = [model.get_submodule(name) for name in iterate_parent_names(group.name)]
        _set_equal([*around, *around[0].modules()], _EXPERT_COUNTS, group.units, kept)


def _set_equal(modules: Any, names: Sequence[str], before: int, after: int) -> None:
    for module in modules:
        for name in names:
            if vars(module).get(name) == before:
                setattr(module, name, after)
