"""Schedules with transfers: the computations, sends and receives of each rank, in an order that can't deadlock.

[Note: one order of transfers] In a simulation the actions of a schedule end in a total order. Results are transferred
in that order, and every rank starts its halves of the transfers (sends and receives) in that order. So a send may block
until its receive starts: both ranks of the first unfinished transfer have started their halves, or reach them without
waiting for another transfer. This holds for NCCL, which runs the transfers of a pair of ranks in order, and for sends
that block. If the order allows, a receive starts one action before the action that needs it, so that the data arrives
while the rank computes.
"""

from __future__ import annotations

from collections.abc import Sequence

from windlass.parallel.pipeline.pipeline_action import Action, ActionKind, RankActions
from windlass.parallel.pipeline.schedule_simulation import ActionCosts, SimulatedSchedule, simulate_schedule


def add_transfers(schedule: Sequence[RankActions], costs: ActionCosts = ActionCosts()) -> list[RankActions]:  # noqa: B008  (it is frozen)
    """Return the actions of each rank: its computations and transfers. With one rank there are no transfers.

    Args:
        schedule: compute actions of each rank, in order (`pipeline_schedules.build_schedule`).
        costs: relative times of the actions. They affect only the order of transfers.

    Raises:
        ModelError: the ranks would wait for each other.
    """
    ranks = len(schedule)
    played = simulate_schedule(schedule, costs)
    stages = 1 + max(action.stage for action in played.spans)
    # For each rank: pairs of a send or receive and the compute action that it belongs to.
    halves: list[list[tuple[Action, Action]]] = [[] for _ in schedule]
    if ranks > 1:
        for done, send, receive, requested in _transfers(played, stages):
            halves[send.stage % ranks].append((send, done))
            halves[receive.stage % ranks].append((receive, requested))
    return [_merge_transfers(order, local) for order, local in zip(schedule, halves, strict=True)]


def _transfers(simulated: SimulatedSchedule, stages: int) -> list[tuple[Action, Action, Action, Action]]:
    """Return all transfers in order, as `(producing action, send, receive, consuming action)`."""
    back = (
        ActionKind.BACKWARD_INPUT
        if any(action.kind is ActionKind.BACKWARD_INPUT for action in simulated.spans)
        else ActionKind.BACKWARD
    )
    ended = sorted(
        simulated.spans, key=lambda one: (simulated.spans[one][1], one.stage, one.micro_batch, one.kind.value)
    )
    found = []
    for done in ended:
        if done.kind is ActionKind.FORWARD and done.stage < stages - 1:
            other, halves = done.stage + 1, (ActionKind.SEND_ACTIVATION, ActionKind.RECEIVE_ACTIVATION)
        elif done.kind is back and done.stage > 0:
            other, halves = done.stage - 1, (ActionKind.SEND_GRADIENT, ActionKind.RECEIVE_GRADIENT)
        else:
            continue
        send, receive = Action(halves[0], done.stage, done.micro_batch), Action(halves[1], other, done.micro_batch)
        found.append((done, send, receive, Action(done.kind, other, done.micro_batch)))
    return found


def _merge_transfers(actions: RankActions, halves: list[tuple[Action, Action]]) -> RankActions:
    """Merge a rank's computations with its halves of transfers (sends and receives), in the order of the halves.

    A send directly follows the action whose result it sends. A receive precedes the action before its consumer, or
    comes earlier or directly before its consumer if the order of the halves requires it.
    """
    places = {action: index for index, action in enumerate(actions)}
    latest, limits = len(actions), []
    for half, action in reversed(halves):
        latest = min(latest, places[action] + half.kind.is_send)
        limits.append(latest)
    slots: list[RankActions] = [[] for _ in range(len(actions) + 1)]  # halves before each action, and after the last
    at = 0
    for (half, action), limit in zip(halves, reversed(limits), strict=True):
        position = places[action] + 1 if half.kind.is_send else places[action] - 1
        at = max(at, min(position, limit))
        slots[at].append(half)
    return [one for slot, action in zip(slots, [*actions, None], strict=True) for one in (*slot, action) if one]
