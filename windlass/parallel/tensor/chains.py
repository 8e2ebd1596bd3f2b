"""From wishes to cuts: layers that belong together get shares that fit together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from windlass.parallel.tensor.attention_parameters import attention_parameters
from windlass.parallel.tensor.attention_shares import Projection, attention_cuts
from windlass.parallel.tensor.fused import GATE_AND_UP, Layout, layout_of_fused, sections_of
from windlass.parallel.tensor.heads import Heads, spread_heads
from windlass.parallel.tensor.heads_found import FUSED, KEY, VALUE, count_heads, is_attention
from windlass.parallel.tensor.inner import language_model
from windlass.parallel.tensor.linear_layers import Linear, below, computes_plainly, linear, parents, plain_adapters
from windlass.parallel.tensor.plan import Cut, Style, refused
from windlass.parallel.tensor.shares import evenly, joined
from windlass.parallel.tensor.wishes import Wish


@dataclass(frozen=True)
class Chain:
    """Columns, and the row that ends them."""

    row: Wish
    columns: tuple[Wish, ...]


def find_chains(wishes: Mapping[str, Wish]) -> list[Chain]:
    """The columns that belong to each row: those that say so, else those in the nearest module that holds both.

    Raises:
        ModelError: a column without a row, or a row without columns.
    """
    rows = [wish for wish in wishes.values() if wish.style in (Style.ROW, Style.SPLIT)]
    free = {name: wish for name, wish in wishes.items() if wish.style in (Style.COLUMN, Style.GATHERED)}
    found: dict[str, list[Wish]] = {row.name: [free.pop(name) for name in _saying(free, row)] for row in rows}
    for row in sorted(rows, key=lambda wish: -wish.name.count(".")):
        if found[row.name]:
            continue
        holder = next((one for one in parents(row.name) if any(below(name, one) for name in free)), None)
        found[row.name] = [free.pop(name) for name in list(free) if holder is not None and below(name, holder)]
    for row in rows:
        if not found[row.name] and row.style is Style.ROW:
            raise refused(row.name, "it is to take cut features, and nothing beside it makes such")
    for wish in free.values():
        if wish.style is Style.COLUMN:
            raise refused(wish.name, "its output features are to be cut, and nothing beside it takes such")
    alone = [Chain(Wish(wish.name, Style.REPLICATED), (wish,)) for wish in free.values()]
    return [*(Chain(row, tuple(found[row.name])) for row in rows), *alone]


def _saying(free: Mapping[str, Wish], row: Wish) -> list[str]:
    return [name for name, wish in free.items() if wish.chain and wish.chain == row.name]


class Resolver:
    """Makes the cuts of chains over `ranks` ranks.

    Args:
        model: of which the chains are.
        wishes: for parameters by themselves, and norms between layers.
        ranks: of the axis.
    """

    def __init__(self, model: nn.Module, wishes: Mapping[str, Wish], ranks: int) -> None:
        self._modules = dict(model.named_modules())
        config: Any = getattr(language_model(model)[1], "config", None)
        text = getattr(config, "get_text_config", None)
        self._config = text() if callable(text) else config
        self._wishes, self._ranks = wishes, ranks
        self.heads: list[Heads] = []

    def cuts(self, chain: Chain) -> list[Cut]:
        """The cuts of one chain.

        Raises:
            ModelError: sizes don't fit, or heads don't suffice.
        """
        columns = [self._linear(wish) for wish in chain.columns]
        if chain.row.style is Style.REPLICATED:
            return [self._gathered(layer, layer.name) for layer in columns]
        row = self._linear(chain.row)
        chain = self._ungathered(chain, columns, row)
        if any(wish.style is Style.GATHERED for wish in chain.columns) or chain.row.style is Style.SPLIT:
            return self._loose(chain, columns, row)
        holder = self._holder(columns)
        counts = self._counts(chain, columns, row, holder)
        if counts is None:
            return self._features(chain, columns, row)
        return self._attention(chain, columns, row, holder, counts)

    def _linear(self, wish: Wish) -> Linear:
        layer = linear(wish.name, self._modules[wish.name]) if wish.name in self._modules else None
        if layer is None:
            kind = type(self._modules[wish.name]).__name__ if wish.name in self._modules else "parameter"
            raise refused(wish.name, f"it is to be a {wish.style} and is a {kind}, no linear layer")
        if wish.style in (Style.ROW, Style.SPLIT) and not computes_plainly(layer.module):
            raise refused(wish.name, f"{type(layer.module).__name__} computes more than a product with its weight")
        if layer.outer is not None and not plain_adapters(layer.outer):
            raise refused(
                wish.name,
                f"its adapters (a {type(layer.outer).__name__} of peft) are DoRA's or another variant of LoRA, which "
                "compute with norms of whole rows of the weight",
            )
        return layer

    def _holder(self, columns: Sequence[Linear]) -> str:
        """The nearest module that holds all columns."""
        first, *others = columns
        return next(one for one in parents(first.name) if all(below(other.name, one) for other in others))

    def _ungathered(self, chain: Chain, columns: Sequence[Linear], row: Linear) -> Chain:
        """A chain whose one fused projection a plan gathers only because it can't cut it where sections meet."""
        gathers = chain.row.style is Style.SPLIT and len(columns) == 1 and chain.columns[0].style is Style.GATHERED
        if not gathers:
            return chain
        known = columns[0].leaf in GATE_AND_UP and columns[0].outputs == 2 * row.inputs
        known |= columns[0].leaf in FUSED and layout_of_fused(self._modules[self._holder(columns)]) is not None
        if not known:
            return chain
        return Chain(replace(chain.row, style=Style.ROW), (replace(chain.columns[0], style=Style.COLUMN),))

    def _gathered(self, layer: Linear, chain: str) -> Cut:
        shares = evenly(layer.outputs, self._ranks)
        return Cut(layer.name, Style.GATHERED, layer.outputs, shares, f"{layer.outputs} features", chain)

    def _loose(self, chain: Chain, columns: Sequence[Linear], row: Linear) -> list[Cut]:
        """What is gathered in between may be cut anywhere."""
        if chain.row.style is not Style.SPLIT or any(wish.style is not Style.GATHERED for wish in chain.columns):
            raise refused(row.name, "some layers before it are gathered, and others are not")
        cut = Cut(
            row.name, Style.SPLIT, row.inputs, evenly(row.inputs, self._ranks), f"{row.inputs} features", row.name
        )
        return [*(self._gathered(layer, row.name) for layer in columns), cut]

    def _counts(self, chain: Chain, columns: Sequence[Linear], row: Linear, holder: str) -> tuple[int, int] | None:
        """Query and key heads; None: the chain has no heads."""
        said = [wish.heads for wish in (*chain.columns, chain.row) if wish.heads]
        if said:
            each = [count for heads in said for count in heads]
            return max(each), min(each)
        module = self._modules[holder]
        if not is_attention(module, columns):
            return None
        return count_heads(holder, module, self._config, columns, row)

    def _features(self, chain: Chain, columns: Sequence[Linear], row: Linear) -> list[Cut]:
        """A feed-forward chain: each section of each column has a feature for each that the row takes."""
        shares = evenly(row.inputs, self._ranks)
        if row.inputs < self._ranks:
            raise refused(row.name, f"{row.inputs} features are too few for {self._ranks} ranks")
        cuts = []
        for wish, layer in zip(chain.columns, columns, strict=True):
            sections = wish.sections or (layer.outputs,)
            if not wish.sections and layer.leaf in GATE_AND_UP and layer.outputs == 2 * row.inputs:
                sections = (row.inputs, row.inputs)
            if sum(sections) != layer.outputs or set(sections) != {row.inputs}:
                raise refused(
                    layer.name,
                    f"its {'+'.join(map(str, sections))} of {layer.outputs} output features don't fit the "
                    f"{row.inputs} that {row.leaf} takes",
                    (layer.name, f"column:{row.inputs}+{row.inputs}"),
                    (row.name, "row"),
                )
            what = f"{'2 x ' if len(sections) == 2 else ''}{row.inputs} features"
            both = joined([(size, shares) for size in sections])
            cuts.append(Cut(layer.name, Style.COLUMN, layer.outputs, both, what, row.name))
        return [*cuts, Cut(row.name, Style.ROW, row.inputs, shares, f"{row.inputs} features", row.name)]

    def _attention(
        self, chain: Chain, columns: Sequence[Linear], row: Linear, holder: str, counts: tuple[int, int]
    ) -> list[Cut]:
        query, key = counts
        if query < self._ranks:
            raise refused(
                holder,
                f"{query} query heads are too few for {self._ranks} ranks; take at most {query}, or leave it whole",
                *((name, "replicated") for name in (*(layer.name for layer in columns), row.name)),
            )
        projections = [
            self._projection(wish, layer, row, holder, counts)
            for wish, layer in zip(chain.columns, columns, strict=True)
        ]
        by_head = any(projection.by_head for projection in projections) and key < query
        heads = spread_heads(holder, query, key, self._ranks, grouped=by_head)
        self.heads.append(heads)
        cuts = attention_cuts(heads, projections, row)
        plain = [layer.name for layer in (*columns, row)]
        return cuts + attention_parameters(holder, self._modules[holder], heads, self._wishes, plain, row.name)

    def _projection(self, wish: Wish, layer: Linear, row: Linear, holder: str, counts: tuple[int, int]) -> Projection:
        """How heads lie in one column."""
        query, key = counts
        if wish.sections:
            heads = wish.heads if len(wish.heads) == len(wish.sections) else (query, key, key)[: len(wish.sections)]
            if sum(wish.sections) != layer.outputs or len(heads) != len(wish.sections):
                raise refused(
                    layer.name,
                    f"sections of {'+'.join(map(str, wish.sections))} don't make its {layer.outputs} output features",
                )
            return Projection(layer, wish.sections, heads)
        if layer.leaf in FUSED and not wish.heads:
            return self._fused(layer, row, holder, counts)
        count = wish.heads[0] if wish.heads else key if layer.leaf in (*KEY, *VALUE) else query
        return Projection(layer, (layer.outputs,), (count,))

    def _fused(self, layer: Linear, row: Linear, holder: str, counts: tuple[int, int]) -> Projection:
        query, key = counts
        sections = sections_of(query, key, layer)
        layout = layout_of_fused(self._modules[holder])
        if sections is None or layout is None:
            why = f"it is not known how {query} query and {key} key heads lie in its {layer.outputs} features"
            sizes = "+".join(map(str, sections or (layer.outputs // 3,) * 3))
            raise refused(layer.name, why, (layer.name, f"column:{sizes}"), (row.name, "row"))
        if layout is Layout.CONCATENATED:
            return Projection(layer, sections, (query, key, key))
        return Projection(layer, (layer.outputs,), (key,), by_head=True)
