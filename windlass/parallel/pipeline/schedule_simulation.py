"""Simulation of a schedule with given costs: start times, idle time and memory of each rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from windlass.base.errors import ModelError
from windlass.parallel.pipeline.pipeline_action import Action, ActionKind, RankActions


@dataclass(frozen=True)
class ActionCosts:
    """Cost of each kind of action of one stage, in seconds or any other unit.

    Attributes:
        forward, backward_input, backward_weight: cost for one micro-batch. An unsplit backward costs the sum of
            its two parts.
        transfer: time from the end of an action until its result is on the next rank.
    """

    forward: float = 1.0
    backward_input: float = 1.0
    backward_weight: float = 1.0
    transfer: float = 0.0

    def of_kind(self, kind: ActionKind) -> float:
        """Return the cost of a compute action."""
        return {
            ActionKind.FORWARD: self.forward,
            ActionKind.BACKWARD: self.backward_input + self.backward_weight,
            ActionKind.BACKWARD_INPUT: self.backward_input,
            ActionKind.BACKWARD_WEIGHT: self.backward_weight,
        }[kind]


@dataclass
class SimulatedSchedule:
    """Result of a simulation.

    Attributes:
        spans: `(start, stop)` of each compute action.
        end_time: time at which the last action stops.
        busy_times: compute time of each rank.
        peak_micro_batches: for each rank, the largest number of micro-batches whose activations are in memory at once
            for their backward. A micro-batch counts once for each stage of the rank.
    """

    spans: dict[Action, tuple[float, float]] = field(default_factory=dict)
    end_time: float = 0.0
    busy_times: list[float] = field(default_factory=list)
    peak_micro_batches: list[int] = field(default_factory=list)

    @property
    def bubble_fraction(self) -> float:
        """Fraction of all ranks' time in which they are idle."""
        return 1.0 - sum(self.busy_times) / (self.end_time * len(self.busy_times)) if self.end_time else 0.0


def list_dependencies(action: Action, stages: int, has_split_backward: bool) -> list[Action]:
    """Return the compute actions, of all ranks, that must end before `action` can begin.

    Args:
        stages: number of stages of the pipeline.
        has_split_backward: True if backwards have two parts.
    """
    stage, micro = action.stage, action.micro_batch
    back = ActionKind.BACKWARD_INPUT if has_split_backward else ActionKind.BACKWARD
    if action.kind is ActionKind.FORWARD:
        return [Action(ActionKind.FORWARD, stage - 1, micro)] if stage else []
    if action.kind is ActionKind.BACKWARD_WEIGHT:
        return [Action(ActionKind.BACKWARD_INPUT, stage, micro)]
    found = [Action(ActionKind.FORWARD, stage, micro)]
    return found if stage == stages - 1 else [*found, Action(back, stage + 1, micro)]


def simulate_schedule(
    schedule: Sequence[RankActions], costs: ActionCosts | Sequence[ActionCosts] = ActionCosts()
) -> SimulatedSchedule:  # noqa: B008  (it is frozen)
    """Simulate a schedule. Each action begins once its rank is free and its inputs have arrived.

    Args:
        schedule: compute actions of each rank, in order.
        costs: costs of every stage, or a sequence with the costs of each stage.

    Raises:
        ModelError: the ranks wait for each other. The text gives the position of each rank.
    """
    stages = 1 + max(action.stage for order in schedule for action in order)
    split = any(action.kind is ActionKind.BACKWARD_INPUT for order in schedule for action in order)
    price = [costs] * stages if isinstance(costs, ActionCosts) else list(costs)
    played = SimulatedSchedule(
        busy_times=[0.0] * len(schedule), peak_micro_batches=[_peak_micro_batches(order) for order in schedule]
    )
    at, free = [0] * len(schedule), [0.0] * len(schedule)
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(schedule):
            while at[rank] < len(order):
                action = order[at[rank]]
                before = list_dependencies(action, stages, split)
                if any(one not in played.spans for one in before):
                    break
                start = max([free[rank], *(_arrival(played, one, action, price) for one in before)])
                free[rank] = start + price[action.stage].of_kind(action.kind)
                played.spans[action] = start, free[rank]
                played.busy_times[rank] += free[rank] - start
                at[rank] += 1
                moved = True
    stuck = [f"rank {rank} at {order[at[rank]]}" for rank, order in enumerate(schedule) if at[rank] < len(order)]
    if stuck:
        raise ModelError(
            f"the ranks of this schedule wait for each other: {', '.join(stuck)}; change the order of its actions"
        )
    played.end_time = max(free)
    return played


def _arrival(simulated: SimulatedSchedule, done: Action, wanted: Action, costs: list[ActionCosts]) -> float:
    return simulated.spans[done][1] + (costs[done.stage].transfer if done.stage != wanted.stage else 0.0)


def _peak_micro_batches(actions: RankActions) -> int:
    """Return the peak number of micro-batches between their forward and the end of their backward."""
    most = now = 0
    for action in actions:
        now += action.kind is ActionKind.FORWARD
        most = max(most, now)
        now -= action.kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT)
    return most


def compute_bubble_fraction(
    name: str, ranks: int, num_micro_batches: int, virtual_stages: int = 1, costs: ActionCosts = ActionCosts()
) -> float:  # noqa: B008
    """Return the fraction of all ranks' time in which they are idle, by the papers' formulas, for equal stages.

    For `p` ranks and `m` micro-batches the fraction is `(p-1)/(m+p-1)` in GPipe and 1F1B. With `v` stages on each rank
    it is `(p-1)/(vm+p-1)`, if `p` divides `m` (Narayanan et al. 2021b, section 2.2). In ZB-H1, with forward cost `F`,
    backward cost of inputs `I` and of weights `W`, each rank is idle for `(p-1)(F+I-W)`, if `m` is at least `p` (Qi et
    al. 2024, table 1). Transfers cost nothing here.
    """
    full = costs.forward + costs.backward_input + costs.backward_weight
    idle = (ranks - 1) * (
        full / virtual_stages if name != "zero-bubble" else costs.forward + costs.backward_input - costs.backward_weight
    )
    work = num_micro_batches * full
    return idle / (work + idle)
