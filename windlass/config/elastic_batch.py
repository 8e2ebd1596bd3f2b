"""Batch size for a run whose number of ranks may change: one size that divides evenly for many numbers of ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass

from windlass.base.errors import ConfigError
from windlass.config.batch_sizes import BatchSizes
from windlass.config.elasticity_section import Elasticity

# Highly composite numbers: each has more divisors than any smaller number (OEIS A002182).
_MANY_DIVISORS = (
    1, 2, 4, 6, 12, 24, 36, 48, 60, 120, 180, 240, 360, 720, 840, 1260, 1680, 2520, 5040, 7560, 10080, 15120, 20160,
    25200, 27720, 45360, 50400, 55440, 83160, 110880, 166320, 221760, 277200, 332640, 498960, 554400, 665280, 720720,
)  # fmt: skip


@dataclass(frozen=True)
class ElasticBatch:
    """A batch size, and the sorted numbers of ranks for which it equals `micro x accumulation x ranks`."""

    train: int
    rank_counts: tuple[int, ...]


def find_elastic_batch(section: Elasticity) -> ElasticBatch:
    """Find the batch size that fits the most numbers of ranks.

    Candidates: each micro-batch size, and their least common multiple, times the largest highly composite number for
    which the product does not exceed max_train_batch_size.

    Raises:
        ConfigError: a micro-batch is larger than max_train_batch_size, or no number of ranks from min_gpus to max_gpus
            fits.
    """
    sizes, bound = sorted(set(section.micro_batch_sizes)), section.max_train_batch_size
    if sizes[-1] > bound:
        raise ConfigError(
            f"elasticity.micro_batch_sizes has {sizes[-1]}, which is more than elasticity.max_train_batch_size {bound}"
            "; leave it out or write a larger bound"
        )
    bases = [base for base in (*sizes, math.lcm(*sizes)) if base <= bound]
    candidates = {base * max(n for n in _MANY_DIVISORS if base * n <= bound) for base in bases}
    found = [ElasticBatch(train, _valid_rank_counts(train, sizes, section)) for train in sorted(candidates)]
    best = max(found, key=lambda one: (len(one.rank_counts), one.train if section.prefer_larger_batch else -one.train))
    if not best.rank_counts:
        raise ConfigError(
            f"elasticity: no batch up to max_train_batch_size {bound} of micro_batch_sizes {sizes} fits any number of "
            f"ranks from min_gpus {section.min_gpus} to max_gpus {section.max_gpus}; write other bounds"
        )
    return best


def solve_elastic_batch(section: Elasticity, world_size: int) -> BatchSizes:
    """Return the three batch sizes for `world_size` ranks.

    Raises:
        ConfigError: this number of ranks does not fit; the message has the nearest numbers that fit.
    """
    best = find_elastic_batch(section)
    if world_size not in best.rank_counts:
        near = [max((n for n in best.rank_counts if n < world_size), default=None)]
        near.append(min((n for n in best.rank_counts if n > world_size), default=None))
        choices = " or ".join(str(n) for n in near if n is not None)
        raise ConfigError(
            f"elasticity: the batch of {best.train} samples cannot be shared by {world_size} ranks in micro-batches of "
            f"{sorted(set(section.micro_batch_sizes))}; start {choices} ranks, or change elasticity.micro_batch_sizes"
        )
    share = best.train // world_size
    micro = max(size for size in section.micro_batch_sizes if share % size == 0)
    return BatchSizes(best.train, micro, share // micro)


def _valid_rank_counts(train: int, sizes: list[int], section: Elasticity) -> tuple[int, ...]:
    """Return the numbers of ranks that can share `train` samples in micro-batches of one of `sizes`."""
    found: set[int] = set()
    for size in sizes:
        if train % size == 0:
            for divisor in _divisors(train // size):
                if section.min_gpus <= divisor <= section.max_gpus:
                    found.add(divisor)
    return tuple(sorted(found))


def _divisors(number: int) -> set[int]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return {*small, *(number // n for n in small)}
