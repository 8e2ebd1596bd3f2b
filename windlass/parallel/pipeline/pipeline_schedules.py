"""Compute order of each pipeline rank for GPipe, 1F1B, interleaved 1F1B and ZB-H1.

[Note: torch's schedules] `torch.distributed.pipelining` has tables of the same schedules. A test compares these tables
with windlass's, if torch provides them. windlass does not execute its pipelines with torch's runtime: torch's stages
fix the shapes of activations before the first step, accept tensors but no dicts, support neither tied weights nor
layers that need no gradient, and wrap modules in additional modules. They all-gather parameters and reduce gradients
around every action, and windlass only once per schedule. torch's tables and its split backward are private, and its
interleaved schedules refuse most numbers of micro-batches.
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
    """Return the computations of each rank, in order.

    Args:
        name: the schedule. `"gpipe"` (Huang et al. 2019): all forwards, then all backwards. `"1f1b"` (PipeDream,
            Narayanan et al. 2021a): forwards and backwards alternate, so that rank `r` holds the activations of at
            most `ranks - r` micro-batches. `"interleaved"` (Narayanan et al. 2021b): 1F1B with several stages on each
            rank. `"zero-bubble"` (ZB-H1, Qi et al. 2024): backwards of weights fill the time in which a rank would be
            idle.
        ranks: ranks of the pipeline.
        num_micro_batches: micro-batches in a step.
        virtual_stages: stages on each rank.

    Raises:
        ConfigError: the schedule is unknown, does not support this number of stages on a rank, or a number is below 1.
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
    """Return the computations of each rank without training: all forwards, in order."""
    _check_schedule("interleaved", ranks, num_micro_batches, virtual_stages)
    return [
        _drop_padding_micro_batches(_forward_actions(rank, ranks, num_micro_batches, virtual_stages), num_micro_batches)
        for rank in range(ranks)
    ]


def _check_schedule(name: str, ranks: int, num_micro_batches: int, virtual_stages: int) -> None:
    if name not in SCHEDULES:
        raise ConfigError(f"pipeline schedule {name!r} does not exist; write one of {', '.join(SCHEDULES)}")
    for value, what in (
        (ranks, "ranks"),
        (num_micro_batches, "micro-batches"),
        (virtual_stages, "stages on each rank"),
    ):
        if value < 1:
            raise ConfigError(f"a pipeline has {value} {what}; it needs at least 1")
    if virtual_stages > 1 and name in ("1f1b", "zero-bubble"):
        raise ConfigError(
            f'the schedule "{name}" has one stage on each rank, not {virtual_stages}; write "interleaved", or one stage'
        )


def _forward_actions(rank: int, ranks: int, num_micro_batches: int, virtual_stages: int) -> RankActions:
    """Return a rank's forwards. Micro-batches pass the rank's stages in groups of `ranks` micro-batches."""
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
    """Drop the actions of micro-batches that only complete the last group.

    [Note: missing micro-batches] Groups are always full: if `ranks` does not divide the number of
    micro-batches, extra ones are scheduled and then dropped. No other micro-batch waits for them, so the remaining
    actions can run if the full schedule can. The published order, with a last group that is not full, can deadlock.
    """
    return [action for action in actions if action.micro_batch < num_micro_batches]


def _gpipe(rank: int, ranks: int, num_micro_batches: int, virtual_stages: int) -> RankActions:
    return [
        *_forward_actions(rank, ranks, num_micro_batches, virtual_stages),
        *_backward_actions(rank, ranks, num_micro_batches, virtual_stages),
    ]


def _one_forward_one_backward(rank: int, ranks: int, num_micro_batches: int, virtual_stages: int) -> RankActions:
    """Return a rank's forwards until its first backward, then forwards and backwards alternately, then the last
    backwards.
    """
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
    """Return the ZB-H1 schedule: 1F1B with delayed backwards of weights.

    Rank `r` delays the backward of weights by `r` micro-batches. Under 1F1B rank `r` holds `r` micro-batches fewer than
    rank 0. So with the delay no rank holds more micro-batches than rank 0 does under 1F1B.
    """
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
