"""Batch sizes: train = micro-batch x accumulation x data-loading ranks. Missing numbers are derived, never rounded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from windlass.base.errors import ConfigError

TRAIN = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
ACCUMULATION = "gradient_accumulation_steps"
KEYS = (TRAIN, MICRO, ACCUMULATION)


@dataclass(frozen=True)
class BatchSizes:
    """The three batch sizes, all positive: `train` and `micro` in samples, `accumulation` in micro-batches.

    `train == micro * accumulation * data-loading ranks`.
    """

    train: int
    micro: int
    accumulation: int


@dataclass(frozen=True)
class GivenBatchSize:
    """One of the three batch sizes as the user set it.

    `value` is None if it was not set. `origin` is the source of the value, for messages, and `location` the file
    and line in which to change it.
    """

    value: int | None
    origin: str
    location: str


@dataclass(frozen=True)
class DataLoadingRanks:
    """Number of data-loading ranks, and for messages: its name, and where the number comes from."""

    count: int
    name: str
    origin: str


def solve_batch_sizes(given: Mapping[str, GivenBatchSize], data_ranks: DataLoadingRanks) -> BatchSizes:
    """Return the three batch sizes, with those that `given` leaves out derived from the others. Nothing is rounded.

    If two are missing, the accumulation count is 1.

    Raises:
        ConfigError: neither the train batch size nor the micro-batch size is given, a number is not positive, or the
            train batch size cannot be micro-batch size x accumulation count x ranks. The message lists the batch sizes
            and the number of ranks, each with its origin, and the change to make.
    """
    world_size = data_ranks.count

    def fail(why: str, key: str, change: str) -> ConfigError:
        place = given[key].location if key in given else data_ranks.origin
        return ConfigError(_explain_failure(numbers, data_ranks, why, f"{place}: {change}"))

    numbers = dict(given)
    if world_size < 1:
        raise fail(f"the {data_ranks.name} {world_size} is not positive", data_ranks.name, "a number >= 1")
    for key in KEYS:
        value = given[key].value
        if value is not None and value < 1:
            raise fail(f"{key} = {value} is not positive", key, f'"{key}": a number >= 1')
    train, micro, accumulation = (given[key].value for key in KEYS)
    if train is None and micro is None:
        why = f"neither {TRAIN} nor {MICRO} is given, so no batch size follows"
        raise fail(why, MICRO, f'"{MICRO}": the number of samples that fit on one device')
    if accumulation is None and (train is None or micro is None):
        accumulation = 1
        numbers[ACCUMULATION] = GivenBatchSize(
            1, f"derived ({given[ACCUMULATION].origin})", given[ACCUMULATION].location
        )
    if train is None:
        assert micro is not None and accumulation is not None
        return BatchSizes(micro * accumulation * world_size, micro, accumulation)
    return _solve_for_train_size(train, micro, accumulation, data_ranks, fail)


def _solve_for_train_size(
    train: int,
    micro: int | None,
    accumulation: int | None,
    data_ranks: DataLoadingRanks,
    fail: Callable[[str, str, str], ConfigError],
) -> BatchSizes:
    world = data_ranks.count
    if micro is not None and accumulation is not None:
        product = micro * accumulation * world
        if product != train:
            raise fail(
                f"{TRAIN} {train} is not {MICRO} {micro} x {ACCUMULATION} {accumulation} x {data_ranks.name} {world}"
                f" = {product}",
                TRAIN,
                f'"{TRAIN}": {product}, or delete that line and it is derived',
            )
        return BatchSizes(train, micro, accumulation)
    known = (micro if micro is not None else accumulation) or 1
    name = MICRO if micro is not None else ACCUMULATION
    quotient, remainder = divmod(train, known * world)
    if remainder:
        below, above = quotient * known * world, (quotient + 1) * known * world
        nearest = f"{above}" if below == 0 else f"{below} or {above}"
        raise fail(
            f"{TRAIN} {train} is not divisible by {name} {known} x {data_ranks.name} {world} = {known * world}",
            TRAIN,
            f'"{TRAIN}": {nearest}',
        )
    return BatchSizes(train, known, quotient) if micro is not None else BatchSizes(train, quotient, known)


def _explain_failure(given: Mapping[str, GivenBatchSize], data_ranks: DataLoadingRanks, why: str, change: str) -> str:
    rows = [(key, "-" if given[key].value is None else str(given[key].value), given[key].origin) for key in KEYS]
    rows.append((data_ranks.name, str(data_ranks.count), data_ranks.origin))
    table = "\n".join(f"  {name:<31}{value:>8}  {origin}" for name, value, origin in rows)
    return f"the batch sizes do not fit together: {why}\n{table}\n  change: {change}"
