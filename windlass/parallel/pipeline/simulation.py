"""A schedule played through with given costs: when each action runs, how long ranks are idle, how much they hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from windlass.base.errors import ModelError
from windlass.parallel.pipeline.action import Action, Kind, Order


@dataclass(frozen=True)
class Costs:
    """Seconds (or any unit) of each kind of action, of one stage.

    Attributes:
        forward, input, weight: of a micro-batch; a whole backward costs what its two parts do.
        transfer: from the end of an action to where its result is on the next rank.
    """

    forward: float = 1.0
    input: float = 1.0
    weight: float = 1.0
    transfer: float = 0.0

    def of(self, kind: Kind) -> float:
        """Of one action that computes."""
        return {
            Kind.FORWARD: self.forward,
            Kind.BACKWARD: self.input + self.weight,
            Kind.INPUT: self.input,
            Kind.WEIGHT: self.weight,
        }[kind]


@dataclass
class Played:
    """What came of it.

    Attributes:
        spans: `(start, stop)` of each action that computes.
        ended: when the last one stopped.
        busy: seconds in which each rank computed.
        held: the most forwards of which each rank held what their backward needs, at once.
    """

    spans: dict[Action, tuple[float, float]] = field(default_factory=dict)
    ended: float = 0.0
    busy: list[float] = field(default_factory=list)
    held: list[int] = field(default_factory=list)

    @property
    def bubble(self) -> float:
        """The part of all ranks' time in which they are idle."""
        return 1.0 - sum(self.busy) / (self.ended * len(self.busy)) if self.ended else 0.0


def needs(action: Action, stages: int, split: bool) -> list[Action]:
    """What has to be done before `action`, on any rank.

    Args:
        stages: of the pipeline.
        split: backwards come in two parts.
    """
    stage, micro = action.stage, action.micro
    back = Kind.INPUT if split else Kind.BACKWARD
    if action.kind is Kind.FORWARD:
        return [Action(Kind.FORWARD, stage - 1, micro)] if stage else []
    if action.kind is Kind.WEIGHT:
        return [Action(Kind.INPUT, stage, micro)]
    found = [Action(Kind.FORWARD, stage, micro)]
    return found if stage == stages - 1 else [*found, Action(back, stage + 1, micro)]


def play(found: Sequence[Order], costs: Costs | Sequence[Costs] = Costs()) -> Played:  # noqa: B008  (it is frozen)
    """Play a schedule through; each action begins once its rank is free and what it needs has arrived.

    Args:
        found: what each rank computes, in order.
        costs: of every stage, or of each.

    Raises:
        ModelError: ranks wait for each other; the text says where each of them is.
    """
    stages = 1 + max(action.stage for order in found for action in order)
    split = any(action.kind is Kind.INPUT for order in found for action in order)
    price = [costs] * stages if isinstance(costs, Costs) else list(costs)
    played = Played(busy=[0.0] * len(found), held=[_held(order) for order in found])
    at, free = [0] * len(found), [0.0] * len(found)
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(found):
            while at[rank] < len(order):
                action = order[at[rank]]
                before = needs(action, stages, split)
                if any(one not in played.spans for one in before):
                    break
                start = max([free[rank], *(_arrival(played, one, action, price) for one in before)])
                free[rank] = start + price[action.stage].of(action.kind)
                played.spans[action] = start, free[rank]
                played.busy[rank] += free[rank] - start
                at[rank] += 1
                moved = True
    stuck = [f"rank {rank} at {order[at[rank]]}" for rank, order in enumerate(found) if at[rank] < len(order)]
    if stuck:
        raise ModelError(f"the ranks of this schedule wait for each other: {', '.join(stuck)}")
    played.ended = max(free)
    return played


def _arrival(played: Played, done: Action, wanted: Action, price: list[Costs]) -> float:
    return played.spans[done][1] + (price[done.stage].transfer if done.stage != wanted.stage else 0.0)


def _held(order: Order) -> int:
    """Between a forward and the end of its backward a rank holds its micro-batch."""
    most = now = 0
    for action in order:
        now += action.kind is Kind.FORWARD
        most = max(most, now)
        now -= action.kind in (Kind.BACKWARD, Kind.WEIGHT)
    return most


def bubble(name: str, ranks: int, micros: int, each: int = 1, costs: Costs = Costs()) -> float:  # noqa: B008
    """The part of all ranks' time in which they are idle, by the papers' formulas, for equal stages.

    `(p-1)/(m+p-1)` for GPipe and 1F1B; with `v` stages on each rank (p-1)/(vm+p-1), if they divide the micro-batches
    (Narayanan et al. 2021b, section 2.2); of ZB-H1 only `(p-1)(F+I-W)` is idle, from p micro-batches on (Qi et al.
    2024, table 1). Transfers cost nothing here.
    """
    whole = costs.forward + costs.input + costs.weight
    idle = (ranks - 1) * (whole / each if name != "zero-bubble" else costs.forward + costs.input - costs.weight)
    work = micros * whole
    return idle / (work + idle)
