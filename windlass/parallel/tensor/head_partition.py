"""Assignment of attention heads, and of the key and value heads that they need, to ranks."""

from __future__ import annotations

from dataclasses import dataclass

from windlass.base.errors import ModelError
from windlass.parallel.placement import compute_shard_range

# Query heads with a common key head stay on one rank if the largest number of heads on a rank is at most this multiple
# of an even share.
_MAX_IMBALANCE = 1.25


@dataclass(frozen=True)
class HeadPartition:
    """Partition of the heads of one attention module over the ranks of the tensor-parallel axis.

    Query head `h` attends to key and value head `h // queries_per_key`, as in all models of transformers.

    Attributes:
        module_name: name of the module.
        num_query_heads: total number of query heads.
        num_key_heads: total number of key and value heads; divides `num_query_heads`.
        query_ranges: the query heads `[start, stop)` of each rank.
    """

    module_name: str
    num_query_heads: int
    num_key_heads: int
    query_ranges: tuple[tuple[int, int], ...]

    @property
    def queries_per_key(self) -> int:
        """Number of query heads for each key head."""
        return self.num_query_heads // self.num_key_heads

    @property
    def has_shared_keys(self) -> bool:
        """True if several ranks need the same key head, so that keys and values cannot be sharded."""
        needed = [self.key_range(rank) for rank in range(len(self.query_ranges))]
        return any(before[1] > after[0] for before, after in zip(needed, needed[1:], strict=False))

    def key_range(self, rank: int) -> tuple[int, int]:
        """Return the key heads `[start, stop)` to which the rank's query heads attend."""
        start, stop = self.query_ranges[rank]
        return start // self.queries_per_key, -(-stop // self.queries_per_key)

    def local_counts(self, rank: int) -> tuple[int, int]:
        """Return the numbers of query and key heads in this rank's attention.

        The key heads are those of `key_range` if each of them serves the same number of local query heads; otherwise
        there is one key head for each query head.
        """
        start, stop = self.query_ranges[rank]
        order = self.repeated_keys(rank)
        first, last = self.key_range(rank)
        return stop - start, last - first if order is None else len(order)

    def repeated_keys(self, rank: int) -> tuple[int, ...] | None:
        """Return None if no key head is repeated, else for each key head in this rank's attention its index in
        `key_range`.
        """
        start, stop = self.query_ranges[rank]
        first, last = self.key_range(rank)
        serves = [head // self.queries_per_key - first for head in range(start, stop)]
        if len({serves.count(key) for key in range(last - first)}) <= 1:
            return None
        return tuple(serves)


def partition_heads(
    name: str, num_query_heads: int, num_key_heads: int, ranks: int, *, keep_groups: bool = False
) -> HeadPartition:
    """Distribute query heads over the ranks. The first ranks have more heads if they cannot be distributed evenly.

    Query heads with a common key head stay on one rank if there are at least as many key heads as ranks, and if
    `keep_groups` is set or the largest share grows by at most a quarter. Keys and values are then sharded too.
    Otherwise neighbouring ranks share key heads.

    Args:
        keep_groups: True if query heads cannot be separated from their key head.

    Raises:
        ModelError: `keep_groups` is set, and there are fewer key heads than ranks.
    """
    if keep_groups and num_key_heads < ranks:
        raise ModelError(
            f"tensor parallelism can't shard {name}: its query heads are stored with their key head, and "
            f"{num_key_heads} key heads are too few for {ranks} ranks; use at most {num_key_heads}, or replicate its "
            "layers by parallel.tensor_table"
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
