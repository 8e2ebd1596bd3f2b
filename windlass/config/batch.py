"""The batch triangle: train = micro x accumulation x readers, solved from what is given or refused with all of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from windlass.base.errors import ConfigError

TRAIN = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
ACCUMULATION = "gradient_accumulation_steps"
KEYS = (TRAIN, MICRO, ACCUMULATION)


@dataclass(frozen=True)
class Batch:
    """A solved triangle: `train == micro * accumulation * readers`, all positive, in samples."""

    train: int
    micro: int
    accumulation: int


@dataclass(frozen=True)
class Given:
    """One of the three numbers: its value, or None; where that comes from; and the place where it can be changed."""

    value: int | None
    origin: str
    place: str


@dataclass(frozen=True)
class Readers:
    """Ranks that read samples of their own: how many, what an error calls them, and where the number is from."""

    count: int
    name: str
    origin: str


def solve(given: Mapping[str, Given], readers: Readers) -> Batch:
    """Complete the three numbers for ranks that read samples of their own; nothing is ever rounded.

    Raises:
        ConfigError: too little is given, a number does not divide, the product is wrong, or a size is not positive.
            The text shows each number, where it came from, the ranks and their source, and what to change.
    """
    world_size = readers.count

    def fail(why: str, key: str, change: str) -> ConfigError:
        place = given[key].place if key in given else readers.origin
        return ConfigError(_failure(numbers, readers, why, f"{place}: {change}"))

    numbers = dict(given)
    if world_size < 1:
        raise fail(f"the {readers.name} {world_size} is not positive", readers.name, "a number >= 1")
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
        numbers[ACCUMULATION] = Given(1, f"derived ({given[ACCUMULATION].origin})", given[ACCUMULATION].place)
    if train is None:
        assert micro is not None and accumulation is not None
        return Batch(micro * accumulation * world_size, micro, accumulation)
    return _with_train(train, micro, accumulation, readers, fail)


def _with_train(
    train: int,
    micro: int | None,
    accumulation: int | None,
    readers: Readers,
    fail: Callable[[str, str, str], ConfigError],
) -> Batch:
    world = readers.count
    if micro is not None and accumulation is not None:
        product = micro * accumulation * world
        if product != train:
            raise fail(
                f"{TRAIN} {train} is not {MICRO} {micro} x {ACCUMULATION} {accumulation} x {readers.name} {world}"
                f" = {product}",
                TRAIN,
                f'"{TRAIN}": {product}, or delete that line and it is derived',
            )
        return Batch(train, micro, accumulation)
    known = (micro if micro is not None else accumulation) or 1
    name = MICRO if micro is not None else ACCUMULATION
    quotient, remainder = divmod(train, known * world)
    if remainder:
        below, above = quotient * known * world, (quotient + 1) * known * world
        nearest = f"{above}" if below == 0 else f"{below} or {above}"
        raise fail(
            f"{TRAIN} {train} is not divisible by {name} {known} x {readers.name} {world} = {known * world}",
            TRAIN,
            f'"{TRAIN}": {nearest}',
        )
    return Batch(train, known, quotient) if micro is not None else Batch(train, quotient, known)


def _failure(given: Mapping[str, Given], readers: Readers, why: str, change: str) -> str:
    rows = [(key, "-" if given[key].value is None else str(given[key].value), given[key].origin) for key in KEYS]
    rows.append((readers.name, str(readers.count), readers.origin))
    table = "\n".join(f"  {name:<31}{value:>8}  {origin}" for name, value, origin in rows)
    return f"the batch sizes do not fit together: {why}\n{table}\n  change: {change}"
