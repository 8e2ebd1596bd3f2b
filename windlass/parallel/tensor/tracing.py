"""What the layers of a block tell by their names, sizes and places, for models that don't say it themselves.

An attention module has layers that are called like queries, keys and values, or like all of them, and one that takes
what they make; everything else that widens and narrows again is a chain of a block's feed-forward part. What can't be
told is refused, never guessed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence

from torch import nn

from windlass.base.errors import ModelError
from windlass.parallel.tensor.experts_layout import is_experts
from windlass.parallel.tensor.fused import GATE_AND_UP
from windlass.parallel.tensor.heads_found import FUSED, KEY, QUERY, VALUE
from windlass.parallel.tensor.linear_layers import Linear, below, linears, parents
from windlass.parallel.tensor.plan import Style, refused
from windlass.parallel.tensor.wishes import Wish

_GATED = {"gate_proj", "up_proj", "down_proj"}


def find_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The blocks of a model: elements of its outermost lists of modules with linear layers; else the model itself."""
    found: list[tuple[str, nn.Module]] = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential) or any(below(name, block) for block, _ in found):
            continue
        children = list(module.named_children())
        composite = [bool(list(child.children())) and next(linears(child), None) is not None for _, child in children]
        if any(composite):
            found += [(f"{name}.{child}" if name else child, element) for child, element in children]
    return found or [("", model)]


def trace_block(name: str, block: nn.Module, taken: Collection[str], hidden: int | None) -> list[Wish]:
    """What to cut in a block, but for the modules in `taken`.

    Args:
        hidden: features between blocks, where they are known; else the layer that was registered last ends a chain.

    Raises:
        ModelError: a linear layer or a matrix has no place in what is known; the message shows how to write the table.
    """
    experts = [inner for inner, module in block.named_modules(prefix=name) if is_experts(module)]
    routing = {_holder(inner) for inner, _ in block.named_modules(prefix=name) if inner.endswith(".experts")}
    routing |= {_holder(inner) for inner in experts}
    layers = [layer for layer in linears(block, name) if layer.name not in taken and _holder(layer.name) not in routing]
    wishes = [wish for found in _attentions(layers, block, name) for wish in found]
    left = [layer for layer in layers if layer.name not in {wish.name for wish in wishes}]
    wishes += _feed_forward(name, block, left, hidden)
    wishes += [Wish(inner, Style.EXPERTS) for inner in experts if inner not in taken]
    _no_strangers(name, block, {*taken, *(wish.name for wish in wishes)}, routing)
    return wishes


def trace_known(name: str, block: nn.Module, taken: Collection[str]) -> list[Wish]:
    """Attention, and feed-forward layers of the usual names, in a block of which nobody spoke, as far as they are
    understood; the rest of it stays whole."""
    layers = list(linears(block, name))
    found: list[list[Wish]] = []
    with contextlib.suppress(ModelError):
        found += _attentions(layers, block, name)
    for holder in dict.fromkeys(_holder(layer.name) for layer in layers):
        own = [layer for layer in layers if _holder(layer.name) == holder]
        if {layer.leaf for layer in own} == _GATED:
            with contextlib.suppress(ModelError):
                found.append(_chain(holder or name, own, dict(block.named_modules(prefix=name)), own[0].inputs))
    return [wish for wishes in found if not _spoken_of(wishes, taken) for wish in wishes]


def _spoken_of(wishes: Sequence[Wish], taken: Collection[str]) -> bool:
    """Somebody said something of the module that holds these layers, or of one that holds that."""
    holder = _holder(wishes[0].name)
    return any(below(one, holder) or one == holder or below(holder, one) for one in taken)


def _attentions(layers: Sequence[Linear], block: nn.Module, name: str) -> Iterator[list[Wish]]:
    """The layers of each attention module: columns, then the row."""
    for holder in dict.fromkeys(_holder(layer.name) for layer in layers):
        own = [layer for layer in layers if _holder(layer.name) == holder]
        latent = _latent(own)
        if latent:
            yield latent
            continue
        columns = _queries_keys_values(own)
        if not columns:
            continue
        others = [layer for layer in own if layer not in columns]
        if not others:  # as in BERT, where it lies in a module beside
            later = layers[layers.index(columns[-1]) + 1 :]
            others = [layer for layer in later if layer.inputs == columns[0].outputs][:1]
        if len(others) != 1:
            raise refused(
                holder or name,
                f"of {', '.join(layer.leaf for layer in others) or 'its layers'} none can be told to take what "
                f"{', '.join(layer.leaf for layer in columns)} make",
                *((layer.name, "column") for layer in columns),
                (others[0].name if others else f"{holder}.out_proj", "row"),
            )
        row = others[0]
        yield [
            *(Wish(layer.name, Style.COLUMN, chain=row.name) for layer in columns),
            Wish(row.name, Style.ROW, chain=row.name),
        ]


def _latent(own: Sequence[Linear]) -> list[Wish]:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): what widens the latents is cut, what makes them is
    whole, and the rotary part of keys goes from there to all heads."""
    by_leaf = {layer.leaf: layer.name for layer in own}
    query = by_leaf.get("q_b_proj", by_leaf.get("q_proj"))
    if query is None or not {"kv_a_proj_with_mqa", "kv_b_proj", "o_proj"} <= by_leaf.keys():
        return []
    if by_leaf.keys() - {"q_a_proj", "q_b_proj", "q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"}:
        return []
    row = by_leaf["o_proj"]
    return [
        *(Wish(name, Style.COLUMN, chain=row) for name in (query, by_leaf["kv_b_proj"])),
        *(Wish(by_leaf[leaf], Style.REPLICATED) for leaf in ("q_a_proj",) if leaf in by_leaf),
        Wish(by_leaf["kv_a_proj_with_mqa"], Style.TAIL),
        Wish(row, Style.ROW, chain=row),
    ]


def _queries_keys_values(own: Sequence[Linear]) -> list[Linear]:
    for names in ((QUERY, KEY, VALUE), (FUSED,)):
        found = [next((layer for layer in own if layer.leaf in one), None) for one in names]
        if all(found):
            return [layer for layer in found if layer is not None]
    return []


def _feed_forward(name: str, block: nn.Module, layers: Sequence[Linear], hidden: int | None) -> list[Wish]:
    """Chains of what widens and what narrows again: within one module, else of two modules, one after the other."""
    wishes: list[Wish] = []
    alone: list[Linear] = []
    modules = dict(block.named_modules(prefix=name))
    for holder in dict.fromkeys(_holder(layer.name) for layer in layers):
        own = [layer for layer in layers if _holder(layer.name) == holder]
        if len(own) == 1:
            alone += own
        else:
            wishes += _chain(holder or name, own, modules, hidden)
    for first, second in zip(alone[::2], alone[1::2], strict=False):
        wishes += _chain(
            _common(first.name, second.name), [first, second], dict(block.named_modules(prefix=name)), hidden
        )
    if len(alone) % 2:
        raise refused(alone[-1].name, "no other layer takes what it makes", (alone[-1].name, "replicated"))
    return wishes


def _chain(holder: str, own: Sequence[Linear], modules: dict[str, nn.Module], hidden: int | None) -> list[Wish]:
    row = _last(own, hidden)
    columns = [layer for layer in own if layer is not row]
    lines = [*((layer.name, "column") for layer in columns), (row.name if row else own[-1].name, "row")]
    if row is None:
        sizes = ", ".join(f"{layer.leaf} {layer.inputs} to {layer.outputs}" for layer in own)
        raise refused(holder, f"its layers are no chain: {sizes}", *((layer.name, "replicated") for layer in own))
    between = _normed(holder, modules, row.inputs, row.outputs)
    if between:
        raise refused(between, f"it computes with all {row.inputs} features that {row.leaf} takes", *lines)
    sections: tuple[int, ...] = ()
    if columns[0].outputs == 2 * row.inputs:
        if columns[0].leaf not in GATE_AND_UP:
            fused = f"column:{row.inputs}+{row.inputs}"
            raise refused(
                columns[0].name,
                f"{row.leaf} takes half of its {columns[0].outputs} features, and it is not known which go together",
                (columns[0].name, fused),
                (row.name, "row"),
            )
        sections = (row.inputs, row.inputs)
    return [
        *(Wish(layer.name, Style.COLUMN, sections, chain=row.name) for layer in columns),
        Wish(row.name, Style.ROW, chain=row.name),
    ]


def _last(own: Sequence[Linear], hidden: int | None) -> Linear | None:
    """The layer that takes what all others make; None: they are no such chain."""
    for row in reversed(own):
        columns = [layer for layer in own if layer is not row]
        if hidden is not None and row.outputs != hidden:
            continue
        made = {layer.outputs for layer in columns}
        if {layer.inputs for layer in columns} != {row.outputs}:
            continue
        if made == {row.inputs} or (len(columns) == 1 and made == {2 * row.inputs}):
            return row
    return None


def _normed(holder: str, modules: dict[str, nn.Module], features: int, outside: int) -> str:
    """A module in `holder` with a parameter for each feature between the layers; empty: there is none."""
    if features == outside:
        return ""
    for name, module in modules.items():
        if not below(name, holder) or isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D":
            continue
        if any(parameter.dim() == 1 and parameter.numel() == features for parameter in module.parameters(False)):
            return name
    return ""


def _no_strangers(name: str, block: nn.Module, known: Collection[str], routing: Collection[str]) -> None:
    """Refuse matrices that belong to no linear layer, but for routers, which lie beside experts."""
    for inner, module in block.named_modules(prefix=name):
        if inner in known or _holder(inner) in routing or any(below(inner, one) for one in known):
            continue
        for parameter, value in module.named_parameters(prefix=inner, recurse=False):
            if value.dim() > 1 and parameter not in known and not isinstance(module, nn.Embedding):
                raise refused(
                    inner,
                    f"its {parameter.rpartition('.')[2]} of shape {tuple(value.shape)} is no linear layer's",
                    (inner, "replicated"),
                )


def _holder(name: str) -> str:
    return name.rpartition(".")[0]


def _common(first: str, second: str) -> str:
    return next(parent for parent in parents(first) if below(second, parent))
