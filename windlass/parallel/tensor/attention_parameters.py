"""Sharding of an attention module's parameters outside of linear layers: norms of heads, and values for each head."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from torch import nn

from windlass.parallel.tensor.head_counts import HEAD_DIM_ATTRIBUTES, find_positive_int
from windlass.parallel.tensor.head_partition import HeadPartition
from windlass.parallel.tensor.linear_layers import iterate_parent_names
from windlass.parallel.tensor.plan_entry import PlanEntry
from windlass.parallel.tensor.rank_ranges import scale_ranges
from windlass.parallel.tensor.tensor_parallel_plan import ModuleShard, ShardStyle, make_cannot_shard_error

_KEY_NORM = re.compile(r"(k|v|key|value)_?(layer)?_?norm")
_HEAD_NORM = re.compile(r"(q|k|v|query|key|value)_?(layer)?_?norm")


def shard_attention_parameters(
    name: str,
    module: nn.Module,
    head_partition: HeadPartition,
    entries: Mapping[str, PlanEntry],
    layers: Sequence[str],
    chain: str,
    head_size: int | None = None,
) -> list[ModuleShard]:
    """Return the shards of the parameters in the attention module `name` that belong to no linear layer.

    Args:
        head_size: number of features of a head, if no column-parallel layer has as many input features; else None.

    Raises:
        ModelError: the role of a parameter in the attention is unknown, or a norm cannot be divided by heads.
    """
    shards = [
        _shard_direct_parameter(f"{name}.{leaf}" if name else leaf, parameter, head_partition, entries, chain)
        for leaf, parameter in module.named_parameters(recurse=False)
    ]
    for leaf, child in module.named_children():
        inner = f"{name}.{leaf}" if name else leaf
        if inner in layers or inner in entries or next(child.parameters(), None) is None:
            continue
        if isinstance(child, nn.Embedding) and child.embedding_dim == head_partition.num_query_heads:
            shards.append(_shard_head_bias(f"{inner}.weight", head_partition, layers[-1]))
        else:
            shards += _shard_head_norm(inner, leaf, child, module, head_partition, entries, layers, head_size)
    return [shard for shard in shards if shard.style is not ShardStyle.REPLICATED]


def _shard_direct_parameter(
    name: str, parameter: nn.Parameter, head_partition: HeadPartition, entries: Mapping[str, PlanEntry], chain: str
) -> ModuleShard:
    """Return the shard of a direct parameter of the module: with values for each head, such as attention sinks, or with
    an entry in the user's table.

    Raises:
        ModelError: the role of the parameter is unknown.
    """
    entry = entries.get(name)
    if entry is not None and entry.is_from_user:
        return ModuleShard(name, entry.style, description="", chain=chain)
    leaf = name.rpartition(".")[2]
    size = parameter.shape[0] if parameter.dim() else 0
    if (entry is not None or "sink" in leaf) and size and size % head_partition.num_query_heads == 0:
        grain = size // head_partition.num_query_heads
        return ModuleShard(
            name,
            ShardStyle.PARAMETER,
            size,
            scale_ranges(head_partition.query_ranges, grain),
            f"{head_partition.num_query_heads} heads of {grain}",
            chain,
            dim=0,
        )
    raise make_cannot_shard_error(
        name,
        f"the role of a parameter of shape {tuple(parameter.shape)} in attention of {head_partition.num_query_heads} "
        "heads is unknown",
        (name, "partial"),
        (name, "replicated"),
    )


def _shard_head_bias(name: str, head_partition: HeadPartition, chain: str) -> ModuleShard:
    """Shard a table of relative positions that has a column for each head, as in T5."""
    count = head_partition.num_query_heads
    ranges = scale_ranges(head_partition.query_ranges, 1)
    return ModuleShard(name, ShardStyle.PARAMETER, count, ranges, f"{count} heads", chain, dim=1)


def _shard_head_norm(
    name: str,
    leaf: str,
    child: nn.Module,
    module: nn.Module,
    head_partition: HeadPartition,
    entries: Mapping[str, PlanEntry],
    layers: Sequence[str],
    head_size: int | None,
) -> list[ModuleShard]:
    """Replicate a norm whose weight all heads share, with a partial gradient, since each rank computes only its heads.
    Shard a norm that has weights for each head.

    Raises:
        ModelError: the norm cannot be divided by heads, or another module trains a single number.
    """
    own = list(child.named_parameters(recurse=False))
    chain, full = layers[-1], [(layer, "replicated") for layer in layers]
    if not _HEAD_NORM.fullmatch(leaf):
        _check_trained_numbers(name, child, head_partition, entries)
        # A module for the features of a head, such as a norm or an embedding of distances, computes with local heads.
        # Assume that other modules, such as `q_a_layernorm`, act before the features are split into heads. Each rank
        # then has its complete gradient.
        each = {parameter.shape[-1] if parameter.dim() else 0 for parameter in child.parameters()}
        return [ModuleShard(name, ShardStyle.PARTIAL, chain=chain)] if each == {head_size} else []
    if len(own) != len(list(child.parameters())):
        raise make_cannot_shard_error(
            name, "norms in a list belong to single heads, and each rank would use the norms of the first heads", *full
        )
    if all(parameter.dim() <= 1 for _, parameter in own):
        sizes = {parameter.numel() for _, parameter in own}
        size = find_positive_int(module, HEAD_DIM_ATTRIBUTES)
        if size is not None and sizes != {size}:
            raise make_cannot_shard_error(
                name,
                f"it normalizes {max(sizes)} features at once, over heads of {size} that are on several ranks",
                *full,
            )
        return [ModuleShard(name, ShardStyle.PARTIAL, chain=chain)]
    of_keys = _KEY_NORM.fullmatch(leaf) is not None and head_partition.num_key_heads != head_partition.num_query_heads
    count = head_partition.num_key_heads if of_keys else head_partition.num_query_heads
    if (of_keys and head_partition.has_shared_keys) or any(parameter.shape[0] != count for _, parameter in own):
        shapes = ", ".join(str(tuple(parameter.shape)) for _, parameter in own)
        raise make_cannot_shard_error(
            name, f"its weights of shape {shapes} can't be sharded for {count} heads over several ranks", *full
        )
    spans = (
        [head_partition.key_range(rank) for rank in range(len(head_partition.query_ranges))]
        if of_keys
        else head_partition.query_ranges
    )
    return [
        ModuleShard(f"{name}.{each}", ShardStyle.PARAMETER, count, scale_ranges(spans, 1), f"{count} heads", chain)
        for each, _ in own
    ]


def _check_trained_numbers(
    name: str, child: nn.Module, head_partition: HeadPartition, entries: Mapping[str, PlanEntry]
) -> None:
    """Raise a ModelError if a module trains a single number, e.g. a temperature, and the user's table has no entry for
    it. Each rank computes only a part of its gradient if the number acts on scores or heads, and the complete gradient
    if it acts before the heads, which the module does not show.
    """
    for leaf, parameter in child.named_parameters(prefix=name):
        known = leaf in entries or any(holder in entries for holder in iterate_parent_names(leaf) if holder)
        if parameter.numel() == 1 and parameter.requires_grad and not known:
            raise make_cannot_shard_error(
                leaf,
                f"it trains one number in attention of {head_partition.num_query_heads} heads, and it is unknown "
                "whether the heads use it, so that each rank computes a part of its gradient (partial), or not "
                "(replicated)",
                (leaf, "partial"),
            )
