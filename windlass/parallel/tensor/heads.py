"""Which attention heads each rank computes, and which key and value heads those need: arithmetic alone."""

from __future__ import annotations

from dataclasses import dataclass

from windlass.base.errors import ModelError
from windlass.parallel.placement import spread

_IMBALANCE = 1.25  # how much larger the largest share may be so that no key or value head is needed on two ranks


@dataclass(frozen=True)
class Heads:
    """The heads of one attention module, over the ranks of the axis.

    Query head `h` attends to key and value head `h // (query // key)`, as in all of transformers.

    Attributes:
        name: of the module.
        query: query heads in all.
        key: key and value heads in all; divides `query`.
        spans: the query heads `[start, stop)` of each rank.
    """

    name: str
    query: int
    key: int
    spans: tuple[tuple[int, int], ...]

    @property
    def group(self) -> int:
        """Query heads for each key head."""
        return self.query // self.key

    @property
    def shared(self) -> bool:
        """Some key head is needed on more than one rank, so keys and values can't be cut."""
        needed = [self.needed(rank) for rank in range(len(self.spans))]
        return any(before[1] > after[0] for before, after in zip(needed, needed[1:], strict=False))

    def needed(self, rank: int) -> tuple[int, int]:
        """The key heads `[start, stop)` that the rank's query heads attend to."""
        start, stop = self.spans[rank]
        return start // self.group, -(-stop // self.group)

    def counts(self, rank: int) -> tuple[int, int]:
        """Query and key heads that the attention of this rank sees.

        Its key heads are the needed ones where each serves as many query heads; else there is one for each query head.
        """
        start, stop = self.spans[rank]
        order = self.order(rank)
        first, last = self.needed(rank)
        return stop - start, last - first if order is None else len(order)

    def order(self, rank: int) -> tuple[int, ...] | None:
        """For each key head that the attention of this rank sees, which of the needed ones it is; None: they are the
        same."""
        start, stop = self.spans[rank]
        first, last = self.needed(rank)
        serves = [head // self.group - first for head in range(start, stop)]
        if len({serves.count(key) for key in range(last - first)}) <= 1:
            return None
        return tuple(serves)


def spread_heads(name: str, query: int, key: int, ranks: int, *, grouped: bool = False) -> Heads:
    """Whole query heads spread over the ranks, the first ones having one more where they don't divide.

    They are spread in groups that share a key head where there are enough and the largest share grows by at most a
    quarter: then keys and values are cut too. Otherwise neighbours share key heads.

    Args:
        grouped: query heads can't be parted from their key head.

    Raises:
        ModelError: they can't, and there are too few key heads.
    """
    if grouped and key < ranks:
        raise ModelError(
            f"tensor parallelism can't cut {name}: its query heads lie with the key head that they share, and {key} "
            f"key heads are too few for {ranks} ranks; take at most {key}, or leave its layers whole by "
            f"parallel.tensor_table"
        )
    single = Heads(name, query, key, tuple(spread(query, ranks, rank) for rank in range(ranks)))
    if key < ranks:
        return single
    groups = tuple(spread(query, ranks, rank, grain=query // key) for rank in range(ranks))
    largest = max(stop - start for start, stop in groups)
    return Heads(name, query, key, groups) if grouped or largest <= _IMBALANCE * -(-query // ranks) else single
