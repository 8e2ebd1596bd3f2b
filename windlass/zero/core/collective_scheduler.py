"""The one order in which all ranks start the collectives of a model, whatever modules each of them runs.

[Note: agreed order] A gather over a wire, or through the windows of shared memory, and every reduction need all ranks,
in one order. Ranks may run different modules (an expert chosen per rank, a tower that a batch has no input for), or
more micro-batches than others. So all collectives of forwards and backwards are started here, and nowhere else.

*Windows.* A forward, and a backward, is a window. Each rank remembers what it needed in the same window of the step
before: which units it had to gather and which it reduced, in its program's order. When a window begins, the ranks tell
each other a hash of that; who has not heard all yet goes on with what needs nobody. If all say the same, they are bound
to it: each starts these collectives in this order, and no word is needed until the window ends. If they differ, they
tell each other the lists themselves and are bound to what all of them have, laid into one another. A rank that skips a
unit of the list joins its collective all the same when it comes to a later one, or at the end of its window: it gathers
and lets go, it reduces zeros.

*Rounds.* Who needs what is not on the list (any more), first joins all that is left of it, then asks: in a round every
rank says where it is, and all join every collective that anybody asks for, in the order of ranks. Who begins a window,
or is at a meeting point (a step, say), repeats that until all are there, and so serves the others. Nothing else waits
for peers than rounds and collectives that all are bound to; so ranks wait for ever only if one of them never comes.

*Experts.* Ranks along ep hold other experts, and may hold more or fewer of them. Who reads or sets one needs those that
hold it too, and nobody else: so all ranks meet at the first such reading after a step or a window, since when nobody is
in a window, and at none after that.

*One after the other.* Whoever waits for a collective first finishes all that were started before. So the oldest that
any rank has not finished was started by all, and nobody who could finish it waits for something else.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache

from windlass.base.collective_activity import WaitScope
from windlass.base.errors import CommunicationError
from windlass.base.pending import Pending
from windlass.comm.agreement_board import AgreementBoard, Posted
from windlass.zero.core.unit import ShardState, Unit

FORWARD, EVALUATION, BACKWARD = "forward", "forward without gradients", "backward"
SYNC_POINTS = (
    "a step",
    "the end of a delayed update",
    "the reading of a gradient",
    "the reading of parameters or states",
    "a change of parameters or states",
    "parameters gathered whole",
    "a checkpoint",
    "the sending of buffers",
    "the end of a schedule",
    "destroy",
)
_REMEMBERED = 64  # windows of one kind in a step that are remembered one by one
_LATEST = -1


class _Message(IntEnum):
    REQUEST = 0  # a collective, now
    BEGIN_PHASE = 1  # a window, with a hash of the list that it expects
    SYNC = 2  # at a meeting point
    SHARE_FAILURES = 3  # whether all is well with everybody


class _Operation(IntEnum):
    GATHER = 0
    REGATHER = 1  # in a backward, from nearer ranks where these have a second copy
    REDUCE = 2


class CollectiveScheduler:
    """Starts the collectives of one model. A rank that is alone starts what it needs when it needs it.

    Args:
        units: all of the model.
        hoists: gathers are started one ahead of need.

    Attributes:
        contribute: starts the reduction of a trainable unit, by its number, with what this rank has of its gradient.
        ready: whether this rank's part of a unit's gradient is complete.
        drop: releases a unit that was gathered for others, unless this rank uses it.
        bad: whether this rank has failed at something that all must hear of.
        told: raises what they then raise. Collective.
        doing: what this rank waits for, in words; empty while it waits for no answer.
        paused: all that is gathered stays until this ends, on every rank, so that forwards need nobody.
        trusts: ranks are taken to agree and nobody asks, which is what bench/collective_agreement.py compares with.
    """

    def __init__(self, units: list[Unit], *, hoist_gathers: bool) -> None:
        self._units, self._hoist_gathers = units, hoist_gathers
        self._board: AgreementBoard | None = None
        self._has_gathers = False
        self._synced_since_step = False  # since the last step or window
        self.start_reduction: Callable[[int], None] = lambda number: None
        self.is_gradient_ready: Callable[[int], bool] = lambda number: False
        self.reshard_unused: Callable[[Unit], None] = lambda unit: None
        self.has_local_failure: Callable[[], bool] = lambda: False
        self.raise_failure: Callable[[], None] = lambda: None
        self.waiting_for = ""
        self.paused = False
        self.skips_agreement = False
        self._agreed: tuple[int, ...] = ()  # what all ranks are bound to start
        self._position = 0  # how far this one has come
        self._phase: tuple[str, int] | None = None  # the window of this rank
        self._pending_begin: _PendingBegin | None = None  # its begin, told and not heard yet
        self._interrupted_kind = ""  # the kind of one that a meeting ended, of which there may be more
        self._recorded: list[int] = []  # in it, so far
        self._previous: dict[tuple[str, int], tuple[int, ...]] = {}
        self._counts: Counter[str] = Counter()
        self._in_flight: deque[OrderedPending] = deque()
        self._gathered_for_peers: deque[Unit] = deque()

    def use_board(self, board: AgreementBoard) -> None:
        """From now on there are peers."""
        self._board = board
        for unit in self._units:
            if unit.frees_memory:
                unit.order_pending, self._has_gathers = self.enqueue, True

    @property
    def is_single_rank(self) -> bool:
        """There is nobody to agree with."""
        return self._board is None

    # windows

    def begin_phase(self, kind: str, *, reduces: bool) -> None:
        """A forward or backward of this rank begins. Collective over windows and meetings of all ranks.

        Args:
            reduces: gradients of it are reduced.
        """
        self._synced_since_step = False
        if self._board is None or self.paused or not (self._has_gathers or reduces):
            return
        self.end_phase()
        self._interrupted_kind = ""
        number = min(self._counts[kind], 1 if kind == EVALUATION else _REMEMBERED)
        self._counts[kind] += 1
        known = self._previous.get((kind, number), self._previous.get((kind, _LATEST), ()))
        expected, what = self._without_unsharded(known), f"the begin of a {kind}"
        self._phase = (kind, number)
        mine = [_Message.BEGIN_PHASE, hash(expected) >> 1, len(expected), int(self.has_local_failure())]
        self._pending_begin = _PendingBegin(
            expected, what, mine, None if self.skips_agreement else self._board.post(mine, what)
        )

    def _finish_begin(self) -> None:
        """Wait for the others' begin of a window, if this rank's own was only told so far."""
        if (begun := self._pending_begin) is None:
            return
        self._pending_begin = None
        self._finish_all()
        posts = [begun.mine] if begun.posted is None else self._wait_for(begun.posted, begun.what)
        value = begun.mine[1]
        if not self._act_on_posts(posts, _Message.BEGIN_PHASE, value, begun.expected):
            while not self._agreement_round(_Message.BEGIN_PHASE, value, begun.what, begun.expected):
                pass

    def end_phase(self, *kinds: str) -> None:
        """The window that is open (if it is one of `kinds`) ends: join what is left of the list."""
        if self._interrupted_kind in kinds:
            self._interrupted_kind = ""
        if self._phase is None or (kinds and self._phase[0] not in kinds):
            return
        self._finish_begin()
        self._join_remaining()
        self._reshard_gathered_for_peers(0)
        kind, _ = self._phase
        self._previous[self._phase] = self._previous[kind, _LATEST] = tuple(self._recorded)
        self._phase, self._recorded = None, []

    def sync(self, what: str, *, experts_only: bool = False) -> None:
        """Wait, and serve the others, until all ranks are at the same of `MEETINGS`. Collective.

        Args:
            apart: what comes next needs only ranks that hold the same experts, and others may have none of it to do:
                nothing happens if all have met since the last step or window.

        Raises:
            CommunicationError: they are all at some, but not at the same.
        """
        if self._board is None or (experts_only and self._synced_since_step):
            return
        self._interrupted_kind = self._phase[0] if self._phase is not None else self._interrupted_kind
        self.end_phase()
        while not self._agreement_round(_Message.SYNC, SYNC_POINTS.index(what), what):
            self._join_remaining()  # of a window of others
        self._synced_since_step = True

    def new_step(self) -> None:
        """A step was made: windows are counted anew."""
        self._counts.clear()
        self._synced_since_step = False

    def share_failures(self) -> None:
        """Have all ranks hear if one of them failed. Collective, as a part of a forward."""
        if self._board is not None:
            self._finish_begin()
            self._join_remaining()
            self._agreement_round(_Message.SHARE_FAILURES, 0, "news of a failure in a forward")

    # gathers

    def unshard(self, unit: Unit, *, backward: bool) -> None:
        """Start to make `unit` present: it is needed now."""
        if not unit.frees_memory or self._board is None:
            unit.unshard(backward=backward)
            return
        self._resume_after_sync()
        code = _code(unit.index, _Operation.REGATHER if backward else _Operation.GATHER)
        if unit.shard_state is ShardState.SHARDED or unit.unsharded_for_peers:
            self._record(code)
        if unit.shard_state is ShardState.SHARDED:
            self._finish_begin()
            at = self._position_of(unit)
            while at is not None and self._position <= at:
                self._start_next(wanted=self._position == at)
            if at is None:
                self._join_remaining()
            if unit.shard_state is ShardState.SHARDED:
                self._agreement_round(_Message.REQUEST, code, f"a gather of {unit.names[0]!r}")
        unit.unsharded_for_peers = False
        self.advance()

    def prefetch(self, unit: Unit, *, backward: bool) -> bool:
        """Start to gather a unit that is needed soon, if that is next in order; whether it was."""
        if self._board is None:
            unit.unshard(backward=backward)
            return True
        if self._pending_begin is not None and (
            self._pending_begin.posted is None or self._pending_begin.posted.poll()
        ):
            self._finish_begin()
        if self._position >= len(self._agreed) or _unit_of(self._agreed[self._position]) != unit.index:
            return False
        self._start_next(wanted=True)
        return True

    def unshard_all(self, units: Sequence[Unit], what: str, *, experts_only: bool = False) -> None:
        """Start to make `units` present, on all ranks at this place of their programs (see `meet`). Collective."""
        if self._board is not None and any(unit.frees_memory for unit in units):
            self.sync(what, experts_only=experts_only)
        for unit in units:
            self.unshard_synced(unit)

    def unshard_synced(self, unit: Unit) -> None:
        """As `together`, of one unit, and all ranks have met."""
        if unit.frees_memory and self._board is not None:
            unit.join_unshard()
            unit.unsharded_for_peers = False
        else:
            unit.unshard()

    # reductions

    def gradient_complete(self, number: int) -> None:
        """The gradient of a unit is complete here: reduce it now, or when it is its turn."""
        if self._board is None:
            self.start_reduction(number)
            return
        self._resume_after_sync()
        self._finish_begin()
        code = _code(number, _Operation.REDUCE)
        self._record(code)
        if self._agreed or self._phase is None:
            self._join_reductions_before(code)
            self.advance()
        else:  # nothing is known yet
            self._agreement_round(_Message.REQUEST, code, "the reduction of a gradient")

    def reduce_remaining(self, numbers: Sequence[int], is_left: Callable[[int], bool]) -> None:
        """A backward that reduces ended: join what is left of the list, then have reduced what still is left here."""
        self._finish_begin()
        self._join_remaining()
        for number in numbers:
            if not is_left(number):
                continue
            if self._board is None:
                self.start_reduction(number)
                continue
            code = _code(number, _Operation.REDUCE)
            self._record(code)
            self._agreement_round(_Message.REQUEST, code, "the reduction of a gradient")

    def advance(self) -> None:
        """Start what is next in order as far as it costs nothing: gradients that are complete, gathers of what is
        present."""
        while self._position < len(self._agreed):
            code = self._agreed[self._position]
            unit = _unit_of(code)
            if unit is None and not self.is_gradient_ready(_number(code)):
                return
            if unit is not None and self._units[unit].shard_state is not ShardState.UNSHARDED:
                return
            self._start_next()

    def enqueue(self, pending: Pending) -> Pending:
        """What was just started, to be finished after all that was before."""
        if self._board is None:
            return pending
        one = OrderedPending(self, pending)
        self._in_flight.append(one)
        return one

    # inside

    def _resume_after_sync(self) -> None:
        """What comes in a forward (or backward) after a meeting in the midst of it is a window of its own."""
        if self._interrupted_kind:
            self.begin_phase(self._interrupted_kind, reduces=True)

    def _record(self, code: int) -> None:
        if self._phase is not None:
            self._recorded.append(code)

    def _without_unsharded(self, known: tuple[int, ...]) -> tuple[int, ...]:
        """Of what was needed before, all but the gathers that what is present now makes unnecessary."""
        here = {unit.index for unit in self._units if unit.frees_memory and unit.shard_state is not ShardState.SHARDED}
        if not here:
            return known
        missing = []
        for code in known:
            unit = _unit_of(code)
            if unit is not None and unit in here:
                here.discard(unit)
            else:
                missing.append(code)
        return tuple(missing)

    def _position_of(self, unit: Unit) -> int | None:
        for at in range(self._position, len(self._agreed)):
            if _unit_of(self._agreed[at]) == unit.index:
                return at
        return None

    def _join_reductions_before(self, code: int) -> None:
        """Join the reductions that lie between here and `code`: as it seems this rank has nothing of them in this
        window, and until it joined, peers would wait and it would keep back all that comes after."""
        for at in range(self._position, len(self._agreed)):
            if self._agreed[at] == code:
                while self._position < at:
                    self._start_next()
                return
            if _unit_of(self._agreed[at]) is not None:
                return

    def _join_remaining(self) -> None:
        while self._position < len(self._agreed):
            self._start_next()

    def _start_next(self, *, wanted: bool = False) -> None:
        code = self._agreed[self._position]
        self._position += 1
        self._start(code, wanted=wanted)

    def _start(self, code: int, *, wanted: bool = False) -> None:
        number = _unit_of(code)
        if number is None:
            self.start_reduction(_number(code))
            return
        unit = self._units[number]
        released = unit.shard_state is ShardState.SHARDED
        unit.join_unshard(backward=code % len(_Operation) == _Operation.REGATHER)
        if released:
            unit.unsharded_for_peers = True
            if not wanted:
                self._gathered_for_peers.append(unit)
                self._reshard_gathered_for_peers(1)

    def _reshard_gathered_for_peers(self, keep: int) -> None:
        while len(self._gathered_for_peers) > keep:
            self.reshard_unused(self._gathered_for_peers.popleft())

    def _agreement_round(self, message: _Message, value: int, what: str, expected: tuple[int, ...] = ()) -> bool:
        """Say where this rank is, hear where the others are, join what they ask for; whether this rank may go on."""
        assert self._board is not None
        self._join_remaining()
        self._finish_all()
        return self._act_on_posts(self._exchange_posts(message, value, what, expected), message, value, expected)

    def _act_on_posts(self, posts: list[list[int]], message: _Message, value: int, expected: tuple[int, ...]) -> bool:
        said = [post[0] for post in posts]
        if _Message.SHARE_FAILURES in said and any(post[3] for post in posts):
            self.raise_failure()
        wanted = dict.fromkeys(post[1] for post in posts if post[0] == _Message.REQUEST)
        for code in wanted:
            self._start(code, wanted=message is _Message.REQUEST and code == value)
        if message is _Message.REQUEST or message is _Message.SHARE_FAILURES:
            return True
        if wanted or _Message.SHARE_FAILURES in said:
            return False
        if _Message.BEGIN_PHASE in said:
            self._adopt_sequence(posts, expected)
            return message is _Message.BEGIN_PHASE
        if any(post[1] != value for post in posts):
            places = ", ".join(f"rank {rank} is at {SYNC_POINTS[post[1]]}" for rank, post in enumerate(posts))
            raise CommunicationError(
                f"ranks wait for each other in different places, and would for ever: {places}; all ranks have to call "
                "the same of these, in the same order"
            )
        return True

    def _exchange_posts(self, message: _Message, value: int, what: str, expected: tuple[int, ...]) -> list[list[int]]:
        assert self._board is not None
        if self.skips_agreement:
            return [[message, value, len(expected), 0]]
        return self._wait_for(
            self._board.post([message, value, len(expected), int(self.has_local_failure())], what), what
        )

    def _wait_for(self, posted: Posted, what: str) -> list[list[int]]:
        self.waiting_for = what
        with WaitScope(f"agreed order: {what}"):
            posts = posted.wait()
        self.waiting_for = ""
        return posts

    def _adopt_sequence(self, posts: list[list[int]], expected: tuple[int, ...]) -> None:
        assert self._board is not None
        if any(post[:2] != posts[0][:2] for post in posts):
            longest = max(post[2] for post in posts)
            padded = [*expected, *[0] * (longest - len(expected))]
            with WaitScope("agreed order: what the others expect"):
                told = self._board.exchange(padded, "what the others expect") if longest else [[] for _ in posts]
            expected = merge_sequences(tuple(tuple(one[: post[2]]) for one, post in zip(told, posts, strict=True)))
        self._agreed, self._position = hoist_gathers(expected) if self._hoist_gathers else expected, 0

    def _finish_all(self) -> None:
        while self._in_flight:
            self._finish_first()

    def finish_to(self, one: OrderedPending) -> None:
        """Finish all that was started up to this."""
        while not one.done and self._in_flight:
            self._finish_first()

    def poll_to(self, one: OrderedPending) -> None:
        """Finish what needs no waiting of all that was started up to this."""
        while not one.done and self._in_flight and self._in_flight[0].inner.poll():
            self._in_flight.popleft().done = True

    def _finish_first(self) -> None:
        first = self._in_flight.popleft()
        first.done = True
        first.inner.wait()


@dataclass(frozen=True)
class _PendingBegin:
    """The begin of a window that this rank has told."""

    expected: tuple[int, ...]
    what: str
    mine: list[int]
    posted: Posted | None  # None where nobody is asked


class OrderedPending:
    """A collective under way that is finished after those before it."""

    def __init__(self, scheduler: CollectiveScheduler, inner: Pending) -> None:
        self._scheduler, self.inner, self.done = scheduler, inner, False

    def poll(self) -> bool:
        self._scheduler.poll_to(self)
        return self.done

    def wait(self) -> None:
        self._scheduler.finish_to(self)


def _code(number: int, operation: _Operation) -> int:
    return number * len(_Operation) + operation


def _number(code: int) -> int:
    return code // len(_Operation)


def _unit_of(code: int) -> int | None:
    """Index of the unit that `code` gathers; None if it is a reduction."""
    return None if code % len(_Operation) == _Operation.REDUCE else code // len(_Operation)


@lru_cache(maxsize=256)
def merge_sequences(lists: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    """Lists laid into one another: what several have in the same order comes once, and between that each rank's own in
    turns, so that ranks that run different modules run them at the same time."""
    result: tuple[int, ...] = ()
    for other in lists:
        result = _merge_two(result, other)
    return result


def _merge_two(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    if a == b or not b:
        return a
    result: list[int] = []
    start = begin = 0
    for at, code in enumerate(b):
        try:
            found = a.index(code, start)
        except ValueError:
            continue
        result += [*_interleave(a[start:found], b[begin:at]), code]
        start, begin = found + 1, at + 1
    return tuple(result + _interleave(a[start:], b[begin:]))


def _interleave(a: Sequence[int], b: Sequence[int]) -> list[int]:
    placed = [((at + 0.5) / len(one), which, code) for which, one in enumerate((a, b)) for at, code in enumerate(one)]
    return [code for _, _, code in sorted(placed, key=lambda entry: entry[:2])]


@lru_cache(maxsize=256)
def hoist_gathers(codes: tuple[int, ...]) -> tuple[int, ...]:
    """The list with every gather one ahead: before the reductions that lie between it and the gather before."""
    result: list[int] = []
    held: list[int] = []  # reductions
    gathers: list[int] = []  # that follow them
    for code in codes:
        if _unit_of(code) is None:
            if gathers:
                result += [*gathers, *held]
                held, gathers = [], []
            held.append(code)
        else:
            gathers.append(code)
    return tuple([*result, *gathers, *held])
