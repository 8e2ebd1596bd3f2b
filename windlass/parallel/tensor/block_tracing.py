"""Deduction of a block's shards from the names, sizes and positions of its layers, for models without a plan of their
own.

An attention module has layers named like queries, keys and values, or like a fused projection, and one layer that takes
the attention output. Other layers that widen and then narrow form a feed-forward chain. A layer whose role cannot be
deduced raises an error; nothing is guessed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence

from torch import nn

from windlass.base.errors import ModelError
from windlass.parallel.tensor.fused_experts_layout import has_fused_experts
from windlass.parallel.tensor.fused_qkv import FUSED_GATE_UP_NAMES
from windlass.parallel.tensor.head_counts import FUSED_NAMES, KEY_NAMES, QUERY_NAMES, VALUE_NAMES
from windlass.parallel.tensor.linear_layers import (
    LinearLayer,
    as_linear_layer,
    find_linear_layers,
    is_inside,
    iterate_parent_names,
)
from windlass.parallel.tensor.plan_entry import PlanEntry
from windlass.parallel.tensor.tensor_parallel_plan import ShardStyle, make_cannot_shard_error

_SOFTMAXES = (nn.Softmax, nn.LogSoftmax, nn.Softmin)

_GATED_MLP_NAMES = {"gate_proj", "up_proj", "down_proj"}


def find_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the blocks of a model: the elements of its outermost module lists with linear layers, or the model
    itself."""
    found: list[tuple[str, nn.Module]] = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential) or any(is_inside(name, block) for block, _ in found):
            continue
        children = list(module.named_children())
        composite = [
            bool(list(child.children())) and next(find_linear_layers(child), None) is not None for _, child in children
        ]
        if any(composite):
            found += [(f"{name}.{child}" if name else child, element) for child, element in children]
    return found or [("", model)]


def trace_block(name: str, block: nn.Module, covered: Collection[str], hidden_size: int | None) -> list[PlanEntry]:
    """Return the plan entries of a block, except for the modules in `covered`.

    Args:
        hidden_size: number of features between blocks, and so of the output of each chain; None: unknown, the last
            registered layer whose sizes fit ends a chain.

    Raises:
        ModelError: the role of a linear layer or a matrix is unknown. The message shows the table entry to write.
    """
    experts = [inner for inner, module in block.named_modules(prefix=name) if has_fused_experts(module)]
    routing = {_parent_name(inner) for inner, _ in block.named_modules(prefix=name) if inner.endswith(".experts")}
    routing |= {_parent_name(inner) for inner in experts}
    layers = [
        layer
        for layer in find_linear_layers(block, name)
        if layer.name not in covered and _parent_name(layer.name) not in routing
    ]
    entries = [entry for found in _trace_attention(layers, name) for entry in found]
    left = [layer for layer in layers if layer.name not in {entry.name for entry in entries}]
    entries += _trace_feed_forward(name, block, left, hidden_size)
    entries += [PlanEntry(inner, ShardStyle.EXPERTS) for inner in experts if inner not in covered]
    _check_unknown_matrices(name, block, {*covered, *(entry.name for entry in entries)}, routing)
    return entries


def trace_known_layers(name: str, block: nn.Module, covered: Collection[str]) -> list[PlanEntry]:
    """Return plan entries for attention, and for feed-forward layers with the usual names, in a block without plan
    entries. All other layers stay replicated.
    """
    layers = list(find_linear_layers(block, name))
    found: list[list[PlanEntry]] = []
    with contextlib.suppress(ModelError):
        found += _trace_attention(layers, name)
    for holder in dict.fromkeys(_parent_name(layer.name) for layer in layers):
        own = [layer for layer in layers if _parent_name(layer.name) == holder]
        if {layer.leaf_name for layer in own} == _GATED_MLP_NAMES:
            with contextlib.suppress(ModelError):
                found.append(
                    _trace_chain(holder or name, own, dict(block.named_modules(prefix=name)), own[0].in_features)
                )
    return [entry for entries in found if not _is_covered(entries, covered) for entry in entries]


def _is_covered(entries: Sequence[PlanEntry], covered: Collection[str]) -> bool:
    """Return True if `covered` names the module that contains the layers of `entries`, or a module around or inside
    that module."""
    holder = _parent_name(entries[0].name)
    return any(is_inside(one, holder) or one == holder or is_inside(holder, one) for one in covered)


def _trace_attention(layers: Sequence[LinearLayer], name: str) -> Iterator[list[PlanEntry]]:
    """Yield the entries of each attention module: the column-parallel layers, then the row-parallel one."""
    for holder in dict.fromkeys(_parent_name(layer.name) for layer in layers):
        own = [layer for layer in layers if _parent_name(layer.name) == holder]
        latent = _trace_latent_attention(own)
        if latent:
            yield latent
            continue
        columns = _find_qkv(own)
        if not columns:
            continue
        others = [layer for layer in own if layer not in columns]
        if not others:  # as in BERT, where the output layer is in a sibling module
            later = layers[layers.index(columns[-1]) + 1 :]
            others = [layer for layer in later if layer.in_features == columns[0].out_features][:1]
        if len(others) != 1:
            raise make_cannot_shard_error(
                holder or name,
                f"of {', '.join(layer.leaf_name for layer in others) or 'its layers'} none was identified as the "
                f"consumer of the outputs of {', '.join(layer.leaf_name for layer in columns)}",
                *((layer.name, "column") for layer in columns),
                (others[0].name if others else f"{holder}.out_proj", "row"),
            )
        row = others[0]
        yield [
            *(PlanEntry(layer.name, ShardStyle.COLUMN, chain=row.name) for layer in columns),
            PlanEntry(row.name, ShardStyle.ROW, chain=row.name),
        ]


def _trace_latent_attention(layers: Sequence[LinearLayer]) -> list[PlanEntry]:
    """Return the entries of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434).

    The layers that expand the latents are sharded. The layers that compute the latents and the rotary part of the keys
    are replicated, because all heads use their outputs.
    """
    by_leaf = {layer.leaf_name: layer.name for layer in layers}
    query = by_leaf.get("q_b_proj", by_leaf.get("q_proj"))
    if query is None or not {"kv_a_proj_with_mqa", "kv_b_proj", "o_proj"} <= by_leaf.keys():
        return []
    if by_leaf.keys() - {"q_a_proj", "q_b_proj", "q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"}:
        return []
    row = by_leaf["o_proj"]
    return [
        *(PlanEntry(name, ShardStyle.COLUMN, chain=row) for name in (query, by_leaf["kv_b_proj"])),
        *(PlanEntry(by_leaf[leaf], ShardStyle.REPLICATED) for leaf in ("q_a_proj",) if leaf in by_leaf),
        PlanEntry(by_leaf["kv_a_proj_with_mqa"], ShardStyle.TAIL_FEATURES),
        PlanEntry(row, ShardStyle.ROW, chain=row),
    ]


def _find_qkv(layers: Sequence[LinearLayer]) -> list[LinearLayer]:
    for names in ((QUERY_NAMES, KEY_NAMES, VALUE_NAMES), (FUSED_NAMES,)):
        found = [next((layer for layer in layers if layer.leaf_name in one), None) for one in names]
        if all(found):
            return [layer for layer in found if layer is not None]
    return []


def _trace_feed_forward(
    name: str, block: nn.Module, layers: Sequence[LinearLayer], hidden_size: int | None
) -> list[PlanEntry]:
    """Return the entries of chains of a widening and a narrowing layer: within one module, or in two consecutive
    modules.
    """
    entries: list[PlanEntry] = []
    alone: list[LinearLayer] = []
    modules = dict(block.named_modules(prefix=name))
    for holder in dict.fromkeys(_parent_name(layer.name) for layer in layers):
        own = [layer for layer in layers if _parent_name(layer.name) == holder]
        if len(own) == 1:
            alone += own
        else:
            entries += _trace_chain(holder or name, own, modules, hidden_size)
    for first, second in zip(alone[::2], alone[1::2], strict=False):
        entries += _trace_chain(
            _common_parent(first.name, second.name),
            [first, second],
            dict(block.named_modules(prefix=name)),
            hidden_size,
        )
    if len(alone) % 2:
        raise make_cannot_shard_error(
            alone[-1].name, "no other layer consumes its output", (alone[-1].name, "replicated")
        )
    return entries


def _trace_chain(
    module_name: str, layers: Sequence[LinearLayer], modules: dict[str, nn.Module], hidden_size: int | None
) -> list[PlanEntry]:
    row = _find_row(layers, hidden_size)
    columns = [layer for layer in layers if layer is not row]
    lines = [*((layer.name, "column") for layer in columns), (row.name if row else layers[-1].name, "row")]
    if row is None:
        sizes = ", ".join(f"{layer.leaf_name} {layer.in_features} to {layer.out_features}" for layer in layers)
        raise make_cannot_shard_error(
            module_name, f"its layers do not form a chain: {sizes}", *((layer.name, "replicated") for layer in layers)
        )
    between = _norm_between(module_name, modules, row.in_features, row.out_features)
    between = between or _softmax_between(module_name, modules, layers)
    if between:
        raise make_cannot_shard_error(
            between, f"it computes with all {row.in_features} input features of {row.leaf_name}", *lines
        )
    sections: tuple[int, ...] = ()
    if columns[0].out_features == 2 * row.in_features:
        if columns[0].leaf_name not in FUSED_GATE_UP_NAMES:
            fused = f"column:{row.in_features}+{row.in_features}"
            raise make_cannot_shard_error(
                columns[0].name,
                f"{row.leaf_name} has half as many input features as its {columns[0].out_features} output features, "
                "and their pairing is unknown",
                (columns[0].name, fused),
                (row.name, "row"),
            )
        sections = (row.in_features, row.in_features)
    return [
        *(PlanEntry(layer.name, ShardStyle.COLUMN, sections, chain=row.name) for layer in columns),
        PlanEntry(row.name, ShardStyle.ROW, chain=row.name),
    ]


def _find_row(layers: Sequence[LinearLayer], hidden_size: int | None) -> LinearLayer | None:
    """Return the layer that takes the outputs of all other layers, or None if no layer's sizes fit."""
    for row in reversed(layers):
        columns = [layer for layer in layers if layer is not row]
        if hidden_size is not None and row.out_features != hidden_size:
            continue
        made = {layer.out_features for layer in columns}
        if {layer.in_features for layer in columns} != {row.out_features}:
            continue
        if made == {row.in_features} or (len(columns) == 1 and made == {2 * row.in_features}):
            return row
    return None


def _norm_between(module_name: str, modules: dict[str, nn.Module], features: int, outside: int) -> str:
    """Return the name of a module inside `module_name` that has a parameter of shape `[features]` or normalizes over
    `features`, such as a norm between the layers, or "" if there is none, or if `outside` is equal to `features`.
    """
    if features == outside:
        return ""
    for name, module in modules.items():
        if not is_inside(name, module_name) or as_linear_layer(name, module) is not None:
            continue
        if any(parameter.dim() == 1 and parameter.numel() == features for parameter in module.parameters(False)):
            return name
        if getattr(module, "normalized_shape", None) == (features,):
            return name
    return ""


def _softmax_between(module_name: str, modules: dict[str, nn.Module], layers: Sequence[LinearLayer]) -> str:
    """Return the name of a softmax beside the layers of a chain, or "" if there is none, or if `module_name` has other
    linear layers, to which the softmax may belong.
    """
    chain = {layer.name for layer in layers}
    beside = {name: module for name, module in modules.items() if _parent_name(name) == module_name}
    if any(name not in chain and as_linear_layer(name, module) is not None for name, module in beside.items()):
        return ""
    return next((name for name, module in beside.items() if isinstance(module, _SOFTMAXES)), "")


def _check_unknown_matrices(name: str, block: nn.Module, covered: Collection[str], routing: Collection[str]) -> None:
    """Raise a ModelError for a matrix that belongs to no linear layer. Routers, which are siblings of experts, are
    exempt.
    """
    for inner, module in block.named_modules(prefix=name):
        if inner in covered or _parent_name(inner) in routing or any(is_inside(inner, one) for one in covered):
            continue
        for parameter, value in module.named_parameters(prefix=inner, recurse=False):
            if value.dim() > 1 and parameter not in covered and not isinstance(module, nn.Embedding):
                raise make_cannot_shard_error(
                    inner,
                    f"its {parameter.rpartition('.')[2]} of shape {tuple(value.shape)} does not belong to a linear "
                    "layer",
                    (inner, "replicated"),
                )


def _parent_name(name: str) -> str:
    return name.rpartition(".")[0]


def _common_parent(first: str, second: str) -> str:
    return next(parent for parent in iterate_parent_names(first) if is_inside(second, parent))
