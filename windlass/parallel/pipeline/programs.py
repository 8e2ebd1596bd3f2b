"""Schedules with their transfers put in: what each rank computes, sends and receives, in an order that can't hang.

[Note: one order of transfers] Played through, the actions of a schedule end one after the other; their results travel
in that order, and every rank starts its halves of transfers in it. So it does not matter whether a send waits for its
receive: the first transfer that is not over always has both its ranks there, or on their way without waiting for any
other. That holds for NCCL, which runs what a pair of ranks tells each other in order, and for a send that blocks. A
receive is started one action before the one that needs it, so that what arrives does so while the rank computes.
"""

from __future__ import annotations

from collections.abc import Sequence

from windlass.parallel.pipeline.action import Action, Kind, Order
from windlass.parallel.pipeline.simulation import Costs, Played, play


def programs(found: Sequence[Order], costs: Costs = Costs()) -> list[Order]:  # noqa: B008  (it is frozen)
    """What each rank does: `found`, which it computes, with transfers put in. On one rank there are none.

    Args:
        found: what each rank computes, in order (`schedule.orders`).
        costs: in which proportion actions take time; they decide on the order of transfers alone.

    Raises:
        ModelError: ranks would wait for each other.
    """
    ranks = len(found)
    played = play(found, costs)
    stages = 1 + max(action.stage for action in played.spans)
    halves: list[list[tuple[Action, Action]]] = [[] for _ in found]  # of each rank: one, and the action it belongs to
    if ranks > 1:
        for done, send, receive, wanted in _transfers(played, stages):
            halves[send.stage % ranks].append((send, done))
            halves[receive.stage % ranks].append((receive, wanted))
    return [_merged(order, mine) for order, mine in zip(found, halves, strict=True)]


def _transfers(played: Played, stages: int) -> list[tuple[Action, Action, Action, Action]]:
    """All transfers, in their order: what is sent, both halves, and what needs it."""
    back = Kind.INPUT if any(action.kind is Kind.INPUT for action in played.spans) else Kind.BACKWARD
    ended = sorted(played.spans, key=lambda one: (played.spans[one][1], one.stage, one.micro, one.kind.value))
    found = []
    for done in ended:
        if done.kind is Kind.FORWARD and done.stage < stages - 1:
            other, halves = done.stage + 1, (Kind.SEND_ACTIVATION, Kind.RECEIVE_ACTIVATION)
        elif done.kind is back and done.stage > 0:
            other, halves = done.stage - 1, (Kind.SEND_GRADIENT, Kind.RECEIVE_GRADIENT)
        else:
            continue
        send, receive = Action(halves[0], done.stage, done.micro), Action(halves[1], other, done.micro)
        found.append((done, send, receive, Action(done.kind, other, done.micro)))
    return found


def _merged(order: Order, halves: list[tuple[Action, Action]]) -> Order:
    """What a rank computes, and its halves of transfers, which stay in their order.

    A send follows what it sends at once; a receive stands before the action ahead of the one that needs it, or earlier
    where a later half has to.
    """
    places = {action: index for index, action in enumerate(order)}
    latest, limits = len(order), []
    for half, action in reversed(halves):
        latest = min(latest, places[action] + half.kind.sends)
        limits.append(latest)
    slots: list[Order] = [[] for _ in range(len(order) + 1)]  # before each action, and behind the last
    at = 0
    for (half, action), limit in zip(halves, reversed(limits), strict=True):
        wish = places[action] + 1 if half.kind.sends else places[action] - 1
        at = max(at, min(wish, limit))
        slots[at].append(half)
    return [one for slot, action in zip(slots, [*order, None], strict=True) for one in (*slot, action) if one]
