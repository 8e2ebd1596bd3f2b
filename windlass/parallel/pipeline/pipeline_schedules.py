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
from windlass.parallel.pipeline.pipeline_action import Action, ActionKind, RankActions

ScheduleName = Literal["gpipe", "1f1b", "interleaved", "zero-bubble"]
SCHEDULES: tuple[ScheduleName, ...] = get_args(ScheduleName)


def build_schedule(
    name: ScheduleName, ranks: int, num_micro_batches: int, virtual_stages: int = 1
) -> list[RankActions]:
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
    _check_schedule(name, ranks, num_micro_batches, virtual_stages)
    if name == "zero-bubble":
        return _zero_bubble(ranks, num_micro_batches)
    table: dict[str, Callable[[int, int, int, int], RankActions]] = {
        "gpipe": _gpipe,
        "1f1b": _one_forward_one_backward,
        "interleaved": _one_forward_one_backward,
    }
    return [
        _drop_padding_micro_batches(table[name](rank, ranks, num_micro_batches, virtual_stages), num_micro_batches)
        for rank in range(ranks)
    ]


def build_forward_schedule(ranks: int, num_micro_batches: int, virtual_stages: int = 1) -> list[RankActions]:
    """What each rank computes where nothing is trained: all forwards."""
    _check_schedule("interleaved", ranks, num_micro_batches, virtual_stages)
    return [
        _drop_padding_micro_batches(_forward_actions(rank, ranks, num_micro_batches, virtual_stages), num_micro_batches)
        for rank in range(ranks)
    ]


def _check_schedule(name: str, ranks: int, num_micro_batches: int, virtual_stages: int) -> None:
    if name not in SCHEDULES:
        raise ConfigError(f"there is no schedule {name!r}; write one of {', '.join(SCHEDULES)}")
    for value, what in (
        (ranks, "ranks"),
        (num_micro_batches, "micro-batches"),
        (virtual_stages, "stages on each rank"),
    ):
        if value < 1:
            raise ConfigError(f"a pipeline of {value} {what} can't run; it needs at least 1")
    if virtual_stages > 1 and name in ("1f1b", "zero-bubble"):
        raise ConfigError(
            f'the schedule "{name}" has one stage on each rank, not {virtual_stages}; write "interleaved", or one stage'
        )


def _forward_actions(rank: int, ranks: int, num_micro_batches: int, virtual_stages: int) -> RankActions:
    """Micro-batches pass a rank's stages in groups of as many as there are ranks."""
    stages = [part * ranks + rank for part in range(virtual_stages)]
    groups = [range(start, start + ranks) for start in range(0, num_micro_batches, ranks)]
    return [Action(ActionKind.FORWARD, s, m) for group in groups for s in stages for m in group]


def _backward_actions(rank: int, ranks: int, num_micro_batches: int, virtual_stages: int) -> RankActions:
    back = {part * ranks + rank: (virtual_stages - 1 - part) * ranks + rank for part in range(virtual_stages)}
    return [
        Action(ActionKind.BACKWARD, back[one.stage], one.micro_batch)
        for one in _forward_actions(rank, ranks, num_micro_batches, virtual_stages)
    ]


def _drop_padding_micro_batches(actions: RankActions, num_micro_batches: int) -> RankActions:
    """[Note: micro-batches that are not there] Groups are always full: of what does not divide by the ranks the last
    ones are planned and left out. No other micro-batch waits for them, so what remains runs if the whole plan does; the
    published order alone does not, with a last group that is not full."""
    return [action for action in actions if action.micro_batch < num_micro_batches]


def _gpipe(rank: int, ranks: int, num_micro_batches: int, virtual_stages: int) -> RankActions:
    return [
        *_forward_actions(rank, ranks, num_micro_batches, virtual_stages),
        *_backward_actions(rank, ranks, num_micro_batches, virtual_stages),
    ]


def _one_forward_one_backward(rank: int, ranks: int, num_micro_batches: int, virtual_stages: int) -> RankActions:
    """Forwards until the first backward can begin, then one of each, then the backwards that are left."""
    forwards, backwards = (
        _forward_actions(rank, ranks, num_micro_batches, virtual_stages),
        _backward_actions(rank, ranks, num_micro_batches, virtual_stages),
    )
    ahead = ranks - 1 - rank if virtual_stages == 1 else 2 * (ranks - 1 - rank) + (virtual_stages - 1) * ranks
    ahead = min(ahead, len(forwards))
    order = forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        order += [forward, backward]
    return order + backwards[len(forwards) - ahead :]


def _zero_bubble(ranks: int, num_micro_batches: int) -> list[RankActions]:
    """ZB-H1: as 1F1B, with the backward of weights put off by as many micro-batches as the rank's place, which is what
    it holds less of than the first rank; so none holds more than that one does under 1F1B."""
    found = []
    for rank in range(ranks):
        ahead = min(ranks - 1 - rank, num_micro_batches)
        order = [Action(ActionKind.FORWARD, rank, micro) for micro in range(ahead)]
        for micro in range(num_micro_batches):
            if ahead + micro < num_micro_batches:
                order.append(Action(ActionKind.FORWARD, rank, ahead + micro))
            order.append(Action(ActionKind.BACKWARD_INPUT, rank, micro))
            if micro >= rank:
                order.append(Action(ActionKind.BACKWARD_WEIGHT, rank, micro - rank))
        order += [
            Action(ActionKind.BACKWARD_WEIGHT, rank, micro)
            for micro in range(max(0, num_micro_batches - rank), num_micro_batches)
        ]
        found.append(order)
    return found
