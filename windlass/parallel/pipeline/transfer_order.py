"""Schedules with their transfers put in: what each rank computes, sends and receives, in an order that can't hang.

[Note: one order of transfers] Played through, the actions of a schedule end one after the other; their results travel
in that order, and every rank starts its halves of transfers in it. So it does not matter whether a send waits for its
receive: the first transfer that is not over always has both its ranks there, or on their way without waiting for any
other. That holds for NCCL, which runs what a pair of ranks tells each other in order, and for a send that blocks. A
receive is started one action before the one that needs it, so that what arrives does so while the rank computes.
"""

from __future__ import annotations

from collections.abc import Sequence

from windlass.parallel.pipeline.pipeline_action import Action, ActionKind, RankActions
from windlass.parallel.pipeline.schedule_simulation import ActionCosts, SimulatedSchedule, simulate_schedule


def add_transfers(schedule: Sequence[RankActions], costs: ActionCosts = ActionCosts()) -> list[RankActions]:  # noqa: B008  (it is frozen)
    """What each rank does: `found`, which it computes, with transfers put in. On one rank there are none.

    Args:
        found: what each rank computes, in order (`schedule.orders`).
        costs: in which proportion actions take time; they decide on the order of transfers alone.

    Raises:
        ModelError: ranks would wait for each other.
    """
    ranks = len(schedule)
    played = simulate_schedule(schedule, costs)
    stages = 1 + max(action.stage for action in played.spans)
    halves: list[list[tuple[Action, Action]]] = [
        [] for _ in schedule
    ]  # of each rank: one, and the action it belongs to
    if ranks > 1:
        for done, send, receive, wanted in _transfers(played, stages):
            halves[send.stage % ranks].append((send, done))
            halves[receive.stage % ranks].append((receive, wanted))
    return [_merge_transfers(order, mine) for order, mine in zip(schedule, halves, strict=True)]


def _transfers(simulated: SimulatedSchedule, stages: int) -> list[tuple[Action, Action, Action, Action]]:
    """All transfers, in their order: what is sent, both halves, and what needs it."""
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
    """What a rank computes, and its halves of transfers, which stay in their order.

    A send follows what it sends at once; a receive stands before the action ahead of the one that needs it, or earlier
    where a later half has to.
    """
    places = {action: index for index, action in enumerate(actions)}
    latest, limits = len(actions), []
    for half, action in reversed(halves):
        latest = min(latest, places[action] + half.kind.is_send)
        limits.append(latest)
    slots: list[RankActions] = [[] for _ in range(len(actions) + 1)]  # before each action, and behind the last
    at = 0
    for (half, action), limit in zip(halves, reversed(limits), strict=True):
        wish = places[action] + 1 if half.kind.is_send else places[action] - 1
        at = max(at, min(wish, limit))
        slots[at].append(half)
    return [one for slot, action in zip(slots, [*actions, None], strict=True) for one in (*slot, action) if one]
