"""Which attention heads each rank computes, and which key and value heads those need: arithmetic alone."""

from __future__ import annotations

from dataclasses import dataclass

from windlass.base.errors import ModelError
from windlass.parallel.placement import compute_shard_range

_MAX_IMBALANCE = 1.25  # how much larger the largest share may be so that no key or value head is needed on two ranks


@dataclass(frozen=True)
class HeadPartition:
    """The heads of one attention module, over the ranks of the axis.

    Query head `h` attends to key and value head `h // (query // key)`, as in all of transformers.

    Attributes:
        name: of the module.
        query: query heads in all.
        key: key and value heads in all; divides `query`.
        spans: the query heads `[start, stop)` of each rank.
    """

    module_name: str
    num_query_heads: int
    num_key_heads: int
    query_ranges: tuple[tuple[int, int], ...]

    @property
    def queries_per_key(self) -> int:
        """Query heads for each key head."""
        return self.num_query_heads // self.num_key_heads

    @property
    def has_shared_keys(self) -> bool:
        """Some key head is needed on more than one rank, so keys and values can't be cut."""
        needed = [self.key_range(rank) for rank in range(len(self.query_ranges))]
        return any(before[1] > after[0] for before, after in zip(needed, needed[1:], strict=False))

    def key_range(self, rank: int) -> tuple[int, int]:
        """The key heads `[start, stop)` that the rank's query heads attend to."""
        start, stop = self.query_ranges[rank]
        return start // self.queries_per_key, -(-stop // self.queries_per_key)

    def local_counts(self, rank: int) -> tuple[int, int]:
        """Query and key heads that the attention of this rank sees.

        Its key heads are the needed ones where each serves as many query heads; else there is one for each query head.
        """
        start, stop = self.query_ranges[rank]
        order = self.repeated_keys(rank)
        first, last = self.key_range(rank)
        return stop - start, last - first if order is None else len(order)

    def repeated_keys(self, rank: int) -> tuple[int, ...] | None:
        """For each key head that the attention of this rank sees, which of the needed ones it is; None: they are the
        same."""
        start, stop = self.query_ranges[rank]
        first, last = self.key_range(rank)
        serves = [head // self.queries_per_key - first for head in range(start, stop)]
        if len({serves.count(key) for key in range(last - first)}) <= 1:
            return None
        return tuple(serves)


def partition_heads(
    name: str, num_query_heads: int, num_key_heads: int, ranks: int, *, keep_groups: bool = False
) -> HeadPartition:
    """Whole query heads spread over the ranks, the first ones having one more where they don't divide.

    They are spread in groups that share a key head where there are enough and the largest share grows by at most a
    quarter: then keys and values are cut too. Otherwise neighbours share key heads.

    Args:
        grouped: query heads can't be parted from their key head.

    Raises:
        ModelError: they can't, and there are too few key heads.
    """
    if keep_groups and num_key_heads < ranks:
        raise ModelError(
            f"tensor parallelism can't cut {name}: its query heads lie with the key head that they share, and {num_key_heads} "
            f"key heads are too few for {ranks} ranks; take at most {num_key_heads}, or leave its layers whole by "
            f"parallel.tensor_table"
        )
    single = HeadPartition(
        name,
        num_query_heads,
        num_key_heads,
        tuple(compute_shard_range(num_query_heads, ranks, rank) for rank in range(ranks)),
    )
    if num_key_heads < ranks:
        return single
    groups = tuple(
        compute_shard_range(num_query_heads, ranks, rank, grain=num_query_heads // num_key_heads)
        for rank in range(ranks)
    )
    largest = max(stop - start for start, stop in groups)
    return (
        HeadPartition(name, num_query_heads, num_key_heads, groups)
        if keep_groups or largest <= _MAX_IMBALANCE * -(-num_query_heads // ranks)
        else single
    )
