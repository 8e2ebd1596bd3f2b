"""What becomes of an attention module's other parameters: norms of single heads, and what each head has of its own."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from torch import nn

from windlass.parallel.tensor.heads import Heads
from windlass.parallel.tensor.heads_found import HEAD_SIZES, number
from windlass.parallel.tensor.plan import Cut, Style, refused
from windlass.parallel.tensor.shares import scaled
from windlass.parallel.tensor.wishes import Wish

_OF_KEYS = re.compile(r"(k|v|key|value)_?(layer)?_?norm")
_OF_HEADS = re.compile(r"(q|k|v|query|key|value)_?(layer)?_?norm")


def attention_parameters(
    name: str, module: nn.Module, heads: Heads, wishes: Mapping[str, Wish], layers: Sequence[str], chain: str
) -> list[Cut]:
    """The cuts of what lies in the attention module `name` beside its linear layers.

    Raises:
        ModelError: a parameter of whose part in the attention nothing is known.
    """
    cuts = [
        _by_itself(f"{name}.{leaf}" if name else leaf, parameter, heads, wishes, chain)
        for leaf, parameter in module.named_parameters(recurse=False)
    ]
    for leaf, child in module.named_children():
        inner = f"{name}.{leaf}" if name else leaf
        if inner not in layers and inner not in wishes and next(child.parameters(), None) is not None:
            cuts += _norm(inner, leaf, child, module, heads, layers)
    return [cut for cut in cuts if cut.style is not Style.REPLICATED]


def _by_itself(name: str, parameter: nn.Parameter, heads: Heads, wishes: Mapping[str, Wish], chain: str) -> Cut:
    """A parameter that the module holds directly: a number for each head, such as an attention sink."""
    wish = wishes.get(name)
    if wish is not None and wish.said:
        return Cut(name, wish.style, what="", chain=chain)
    leaf = name.rpartition(".")[2]
    size = parameter.shape[0] if parameter.dim() else 0
    if (wish is not None or "sink" in leaf) and size and size % heads.query == 0:
        grain = size // heads.query
        return Cut(
            name, Style.PARAMETER, size, scaled(heads.spans, grain), f"{heads.query} heads of {grain}", chain, dim=0
        )
    raise refused(
        name,
        f"it is not known what a parameter of shape {tuple(parameter.shape)} does in attention of {heads.query} heads",
        (name, "partial"),
        (name, "replicated"),
    )


def _norm(name: str, leaf: str, child: nn.Module, module: nn.Module, heads: Heads, layers: Sequence[str]) -> list[Cut]:
    """A norm of single heads is whole and sees the rank's heads alone; one with weights for each head is cut."""
    own = list(child.named_parameters(recurse=False))
    chain, whole = layers[-1], [(layer, "replicated") for layer in layers]
    if not _OF_HEADS.fullmatch(leaf):
        return []  # before the heads are made: gradients that arrive there are whole
    if len(own) != len(list(child.parameters())):
        raise refused(name, "norms in a list belong to single heads, and a rank would take the first ones", *whole)
    if all(parameter.dim() == 1 for _, parameter in own):
        sizes = {parameter.numel() for _, parameter in own}
        size = number(module, HEAD_SIZES)
        if size is not None and sizes != {size}:
            raise refused(
                name,
                f"it norms {max(sizes)} features at once, over heads of {size} on several ranks",
                *whole,
            )
        return [Cut(name, Style.PARTIAL, chain=chain)]
    of_keys = _OF_KEYS.fullmatch(leaf) is not None and heads.key != heads.query
    count = heads.key if of_keys else heads.query
    if (of_keys and heads.shared) or any(parameter.shape[0] != count for _, parameter in own):
        shapes = ", ".join(str(tuple(parameter.shape)) for _, parameter in own)
        raise refused(name, f"its weights of shape {shapes} can't be cut for {count} heads over several ranks", *whole)
    spans = [heads.needed(rank) for rank in range(len(heads.spans))] if of_keys else heads.spans
    return [Cut(f"{name}.{each}", Style.PARAMETER, count, scaled(spans, 1), f"{count} heads", chain) for each, _ in own]
