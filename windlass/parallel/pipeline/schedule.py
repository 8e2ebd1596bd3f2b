"""In which order each rank of a pipeline computes: GPipe, 1F1B, interleaved 1F1B and ZB-H1; arithmetic alone.

[Note: torch's schedules] `torch.distributed.pipelining` has tables of the same schedules, and a test holds ours against
them where they can be had. They are not run by it, since its stages fix the shapes of activations before the first
step, take tensors and no dicts, know neither tied weights nor layers that need no gradient, wrap modules of their own,
and gather and reduce parameters around every action where we do it once a schedule. Its tables, and its split of a
backward, can only be had through private names of its runtime, and refuse most numbers of micro-batches where stages
are interleaved.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

from windlass.base.errors import ConfigError
from windlass.parallel.pipeline.action import Action, Kind, Order

Name = Literal["gpipe", "1f1b", "interleaved", "zero-bubble"]
SCHEDULES: tuple[Name, ...] = get_args(Name)


def orders(name: Name, ranks: int, micros: int, each: int = 1) -> list[Order]:
    """What each rank computes, in order.

    Args:
        name: which schedule. `"gpipe"` (Huang et al. 2019): all forwards, then all backwards. `"1f1b"` (PipeDream's,
            Narayanan et al. 2021a): one forward, one backward, so that a rank holds at most as many micro-batches as
            there are ranks from it on. `"interleaved"` (Narayanan et al. 2021b): the same with several stages a rank.
            `"zero-bubble"` (ZB-H1, Qi et al. 2024): backwards of weights wait until there is nothing else to do.
        ranks: of the pipeline.
        micros: micro-batches in a step.
        each: stages that each rank holds.

    Raises:
        ConfigError: there is no such schedule, it can't have so many stages a rank, or a number is below 1.
    """
    _check(name, ranks, micros, each)
    if name == "zero-bubble":
        return _zero_bubble(ranks, micros)
    table: dict[str, Callable[[int, int, int, int], Order]] = {
        "gpipe": _gpipe,
        "1f1b": _one_forward_one_backward,
        "interleaved": _one_forward_one_backward,
    }
    return [_without(table[name](rank, ranks, micros, each), micros) for rank in range(ranks)]


def forward_orders(ranks: int, micros: int, each: int = 1) -> list[Order]:
    """What each rank computes where nothing is trained: all forwards."""
    _check("interleaved", ranks, micros, each)
    return [_without(_forwards(rank, ranks, micros, each), micros) for rank in range(ranks)]


def _check(name: str, ranks: int, micros: int, each: int) -> None:
    if name not in SCHEDULES:
        raise ConfigError(f"there is no schedule {name!r}; write one of {', '.join(SCHEDULES)}")
    for value, what in ((ranks, "ranks"), (micros, "micro-batches"), (each, "stages on each rank")):
        if value < 1:
            raise ConfigError(f"a pipeline of {value} {what} can't run; it needs at least 1")
    if each > 1 and name in ("1f1b", "zero-bubble"):
        raise ConfigError(
            f'the schedule "{name}" has one stage on each rank, not {each}; write "interleaved", or one stage'
        )


def _forwards(rank: int, ranks: int, micros: int, each: int) -> Order:
    """Micro-batches pass a rank's stages in groups of as many as there are ranks."""
    stages = [part * ranks + rank for part in range(each)]
    groups = [range(start, start + ranks) for start in range(0, micros, ranks)]
    return [Action(Kind.FORWARD, s, m) for group in groups for s in stages for m in group]


def _backwards(rank: int, ranks: int, micros: int, each: int) -> Order:
    back = {part * ranks + rank: (each - 1 - part) * ranks + rank for part in range(each)}
    return [Action(Kind.BACKWARD, back[one.stage], one.micro) for one in _forwards(rank, ranks, micros, each)]


def _without(order: Order, micros: int) -> Order:
    """[Note: micro-batches that are not there] Groups are always full: of what does not divide by the ranks the last
    ones are planned and left out. No other micro-batch waits for them, so what remains runs if the whole plan does; the
    published order alone does not, with a last group that is not full."""
    return [action for action in order if action.micro < micros]


def _gpipe(rank: int, ranks: int, micros: int, each: int) -> Order:
    return [*_forwards(rank, ranks, micros, each), *_backwards(rank, ranks, micros, each)]


def _one_forward_one_backward(rank: int, ranks: int, micros: int, each: int) -> Order:
    """Forwards until the first backward can begin, then one of each, then the backwards that are left."""
    forwards, backwards = _forwards(rank, ranks, micros, each), _backwards(rank, ranks, micros, each)
    ahead = ranks - 1 - rank if each == 1 else 2 * (ranks - 1 - rank) + (each - 1) * ranks
    ahead = min(ahead, len(forwards))
    order = forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        order += [forward, backward]
    return order + backwards[len(forwards) - ahead :]


def _zero_bubble(ranks: int, micros: int) -> list[Order]:
    """ZB-H1: as 1F1B, with the backward of weights put off by as many micro-batches as the rank's place, which is what
    it holds less of than the first rank; so none holds more than that one does under 1F1B."""
    found = []
    for rank in range(ranks):
        ahead = min(ranks - 1 - rank, micros)
        order = [Action(Kind.FORWARD, rank, micro) for micro in range(ahead)]
        for micro in range(micros):
            if ahead + micro < micros:
                order.append(Action(Kind.FORWARD, rank, ahead + micro))
            order.append(Action(Kind.INPUT, rank, micro))
            if micro >= rank:
                order.append(Action(Kind.WEIGHT, rank, micro - rank))
        order += [Action(Kind.WEIGHT, rank, micro) for micro in range(max(0, micros - rank), micros)]
        found.append(order)
    return found
