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

from windlass.base.activity import During
from windlass.base.errors import CommunicationError
from windlass.base.pending import Pending
from windlass.comm.board import Board, Posted
from windlass.zero.unit import Presence, Unit

FORWARD, EVALUATION, BACKWARD = "forward", "forward without gradients", "backward"
MEETINGS = (
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
_NONE = -1


class _Says(IntEnum):
    WANTS = 0  # a collective, now
    BEGINS = 1  # a window, with a hash of the list that it expects
    MEETS = 2  # at a meeting point
    LOOKS = 3  # whether all is well with everybody


class _Does(IntEnum):
    GATHER = 0
    REGATHER = 1  # in a backward, from nearer ranks where these have a second copy
    REDUCE = 2


class Order:
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
        trusts: ranks are taken to agree and nobody asks, which is what bench/agreement.py compares with.
    """

    def __init__(self, units: list[Unit], *, hoists: bool) -> None:
        self._units, self._hoists = units, hoists
        self._board: Board | None = None
        self._gathers = False
        self._met = False  # since the last step or window
        self.contribute: Callable[[int], None] = lambda number: None
        self.ready: Callable[[int], bool] = lambda number: False
        self.drop: Callable[[Unit], None] = lambda unit: None
        self.bad: Callable[[], bool] = lambda: False
        self.told: Callable[[], None] = lambda: None
        self.doing = ""
        self.paused = False
        self.trusts = False
        self._list: tuple[int, ...] = ()  # what all ranks are bound to start
        self._at = 0  # how far this one has come
        self._open: tuple[str, int] | None = None  # the window of this rank
        self._begun: _Begun | None = None  # its begin, told and not heard yet
        self._cut_short = ""  # the kind of one that a meeting ended, of which there may be more
        self._needs: list[int] = []  # in it, so far
        self._known: dict[tuple[str, int], tuple[int, ...]] = {}
        self._counts: Counter[str] = Counter()
        self._flying: deque[Ordered] = deque()
        self._joined: deque[Unit] = deque()

    def agree_on(self, board: Board) -> None:
        """From now on there are peers."""
        self._board = board
        for unit in self._units:
            if unit.frees:
                unit.in_order, self._gathers = self.follow, True

    @property
    def alone(self) -> bool:
        """There is nobody to agree with."""
        return self._board is None

    # windows

    def begin(self, kind: str, *, reduces: bool) -> None:
        """A forward or backward of this rank begins. Collective over windows and meetings of all ranks.

        Args:
            reduces: gradients of it are reduced.
        """
        self._met = False
        if self._board is None or self.paused or not (self._gathers or reduces):
            return
        self.end()
        self._cut_short = ""
        number = min(self._counts[kind], 1 if kind == EVALUATION else _REMEMBERED)
        self._counts[kind] += 1
        known = self._known.get((kind, number), self._known.get((kind, _NONE), ()))
        expected, what = self._missing(known), f"the begin of a {kind}"
        self._open = (kind, number)
        mine = [_Says.BEGINS, hash(expected) >> 1, len(expected), int(self.bad())]
        self._begun = _Begun(expected, what, mine, None if self.trusts else self._board.post(mine, what))

    def _hear(self) -> None:
        """Wait for the others' begin of a window, if this rank's own was only told so far."""
        if (begun := self._begun) is None:
            return
        self._begun = None
        self._finish()
        posts = [begun.mine] if begun.posted is None else self._wait_for(begun.posted, begun.what)
        value = begun.mine[1]
        if not self._heard(posts, _Says.BEGINS, value, begun.expected):
            while not self._round(_Says.BEGINS, value, begun.what, begun.expected):
                pass

    def end(self, *kinds: str) -> None:
        """The window that is open (if it is one of `kinds`) ends: join what is left of the list."""
        if self._cut_short in kinds:
            self._cut_short = ""
        if self._open is None or (kinds and self._open[0] not in kinds):
            return
        self._hear()
        self._drain()
        self._release_joined(0)
        kind, _ = self._open
        self._known[self._open] = self._known[kind, _NONE] = tuple(self._needs)
        self._open, self._needs = None, []

    def meet(self, what: str, *, apart: bool = False) -> None:
        """Wait, and serve the others, until all ranks are at the same of `MEETINGS`. Collective.

        Args:
            apart: what comes next needs only ranks that hold the same experts, and others may have none of it to do:
                nothing happens if all have met since the last step or window.

        Raises:
            CommunicationError: they are all at some, but not at the same.
        """
        if self._board is None or (apart and self._met):
            return
        self._cut_short = self._open[0] if self._open is not None else self._cut_short
        self.end()
        while not self._round(_Says.MEETS, MEETINGS.index(what), what):
            self._drain()  # of a window of others
        self._met = True

    def new_step(self) -> None:
        """A step was made: windows are counted anew."""
        self._counts.clear()
        self._met = False

    def look(self) -> None:
        """Have all ranks hear if one of them failed. Collective, as a part of a forward."""
        if self._board is not None:
            self._hear()
            self._drain()
            self._round(_Says.LOOKS, 0, "news of a failure in a forward")

    # gathers

    def gather(self, unit: Unit, *, backward: bool) -> None:
        """Start to make `unit` present: it is needed now."""
        if not unit.frees or self._board is None:
            unit.gather(backward=backward)
            return
        self._go_on_after_meeting()
        code = _code(unit.index, _Does.REGATHER if backward else _Does.GATHER)
        if unit.presence is Presence.RELEASED or unit.brought:
            self._need(code)
        if unit.presence is Presence.RELEASED:
            self._hear()
            at = self._find(unit)
            while at is not None and self._at <= at:
                self._next(wanted=self._at == at)
            if at is None:
                self._drain()
            if unit.presence is Presence.RELEASED:
                self._round(_Says.WANTS, code, f"a gather of {unit.names[0]!r}")
        unit.brought = False
        self.go_on()

    def ahead(self, unit: Unit, *, backward: bool) -> bool:
        """Start to gather a unit that is needed soon, if that is next in order; whether it was."""
        if self._board is None:
            unit.gather(backward=backward)
            return True
        if self._begun is not None and (self._begun.posted is None or self._begun.posted.poll()):
            self._hear()
        if self._at >= len(self._list) or _unit_of(self._list[self._at]) != unit.index:
            return False
        self._next(wanted=True)
        return True

    def together(self, units: Sequence[Unit], what: str, *, apart: bool = False) -> None:
        """Start to make `units` present, on all ranks at this place of their programs (see `meet`). Collective."""
        if self._board is not None and any(unit.frees for unit in units):
            self.meet(what, apart=apart)
        for unit in units:
            self.gather_now(unit)

    def gather_now(self, unit: Unit) -> None:
        """As `together`, of one unit, and all ranks have met."""
        if unit.frees and self._board is not None:
            unit.join()
            unit.brought = False
        else:
            unit.gather()

    # reductions

    def complete(self, number: int) -> None:
        """The gradient of a unit is complete here: reduce it now, or when it is its turn."""
        if self._board is None:
            self.contribute(number)
            return
        self._go_on_after_meeting()
        self._hear()
        code = _code(number, _Does.REDUCE)
        self._need(code)
        if self._list or self._open is None:
            self._skip_to(code)
            self.go_on()
        else:  # nothing is known yet
            self._round(_Says.WANTS, code, "the reduction of a gradient")

    def rest(self, numbers: Sequence[int], left: Callable[[int], bool]) -> None:
        """A backward that reduces ended: join what is left of the list, then have reduced what still is left here."""
        self._hear()
        self._drain()
        for number in numbers:
            if not left(number):
                continue
            if self._board is None:
                self.contribute(number)
                continue
            code = _code(number, _Does.REDUCE)
            self._need(code)
            self._round(_Says.WANTS, code, "the reduction of a gradient")

    def go_on(self) -> None:
        """Start what is next in order as far as it costs nothing: gradients that are complete, gathers of what is
        present."""
        while self._at < len(self._list):
            code = self._list[self._at]
            unit = _unit_of(code)
            if unit is None and not self.ready(_number(code)):
                return
            if unit is not None and self._units[unit].presence is not Presence.PRESENT:
                return
            self._next()

    def follow(self, pending: Pending) -> Pending:
        """What was just started, to be finished after all that was before."""
        if self._board is None:
            return pending
        one = Ordered(self, pending)
        self._flying.append(one)
        return one

    # inside

    def _go_on_after_meeting(self) -> None:
        """What comes in a forward (or backward) after a meeting in the midst of it is a window of its own."""
        if self._cut_short:
            self.begin(self._cut_short, reduces=True)

    def _need(self, code: int) -> None:
        if self._open is not None:
            self._needs.append(code)

    def _missing(self, known: tuple[int, ...]) -> tuple[int, ...]:
        """Of what was needed before, all but the gathers that what is present now makes unnecessary."""
        here = {unit.index for unit in self._units if unit.frees and unit.presence is not Presence.RELEASED}
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

    def _find(self, unit: Unit) -> int | None:
        for at in range(self._at, len(self._list)):
            if _unit_of(self._list[at]) == unit.index:
                return at
        return None

    def _skip_to(self, code: int) -> None:
        """Join the reductions that lie between here and `code`: as it seems this rank has nothing of them in this
        window, and until it joined, peers would wait and it would keep back all that comes after."""
        for at in range(self._at, len(self._list)):
            if self._list[at] == code:
                while self._at < at:
                    self._next()
                return
            if _unit_of(self._list[at]) is not None:
                return

    def _drain(self) -> None:
        while self._at < len(self._list):
            self._next()

    def _next(self, *, wanted: bool = False) -> None:
        code = self._list[self._at]
        self._at += 1
        self._start(code, wanted=wanted)

    def _start(self, code: int, *, wanted: bool = False) -> None:
        number = _unit_of(code)
        if number is None:
            self.contribute(_number(code))
            return
        unit = self._units[number]
        released = unit.presence is Presence.RELEASED
        unit.join(backward=code % len(_Does) == _Does.REGATHER)
        if released:
            unit.brought = True
            if not wanted:
                self._joined.append(unit)
                self._release_joined(1)

    def _release_joined(self, keep: int) -> None:
        while len(self._joined) > keep:
            self.drop(self._joined.popleft())

    def _round(self, says: _Says, value: int, what: str, expected: tuple[int, ...] = ()) -> bool:
        """Say where this rank is, hear where the others are, join what they ask for; whether this rank may go on."""
        assert self._board is not None
        self._drain()
        self._finish()
        return self._heard(self._ask(says, value, what, expected), says, value, expected)

    def _heard(self, posts: list[list[int]], says: _Says, value: int, expected: tuple[int, ...]) -> bool:
        said = [post[0] for post in posts]
        if _Says.LOOKS in said and any(post[3] for post in posts):
            self.told()
        wanted = dict.fromkeys(post[1] for post in posts if post[0] == _Says.WANTS)
        for code in wanted:
            self._start(code, wanted=says is _Says.WANTS and code == value)
        if says is _Says.WANTS or says is _Says.LOOKS:
            return True
        if wanted or _Says.LOOKS in said:
            return False
        if _Says.BEGINS in said:
            self._bind(posts, expected)
            return says is _Says.BEGINS
        if any(post[1] != value for post in posts):
            places = ", ".join(f"rank {rank} is at {MEETINGS[post[1]]}" for rank, post in enumerate(posts))
            raise CommunicationError(
                f"ranks wait for each other in different places, and would for ever: {places}; all ranks have to call "
                "the same of these, in the same order"
            )
        return True

    def _ask(self, says: _Says, value: int, what: str, expected: tuple[int, ...]) -> list[list[int]]:
        assert self._board is not None
        if self.trusts:
            return [[says, value, len(expected), 0]]
        return self._wait_for(self._board.post([says, value, len(expected), int(self.bad())], what), what)

    def _wait_for(self, posted: Posted, what: str) -> list[list[int]]:
        self.doing = what
        with During(f"agreed order: {what}"):
            posts = posted.wait()
        self.doing = ""
        return posts

    def _bind(self, posts: list[list[int]], expected: tuple[int, ...]) -> None:
        assert self._board is not None
        if any(post[:2] != posts[0][:2] for post in posts):
            longest = max(post[2] for post in posts)
            padded = [*expected, *[0] * (longest - len(expected))]
            with During("agreed order: what the others expect"):
                told = self._board.exchange(padded, "what the others expect") if longest else [[] for _ in posts]
            expected = merged(tuple(tuple(one[: post[2]]) for one, post in zip(told, posts, strict=True)))
        self._list, self._at = hoisted(expected) if self._hoists else expected, 0

    def _finish(self) -> None:
        while self._flying:
            self._finish_first()

    def finish_to(self, one: Ordered) -> None:
        """Finish all that was started up to this."""
        while not one.done and self._flying:
            self._finish_first()

    def poll_to(self, one: Ordered) -> None:
        """Finish what needs no waiting of all that was started up to this."""
        while not one.done and self._flying and self._flying[0].inner.poll():
            self._flying.popleft().done = True

    def _finish_first(self) -> None:
        first = self._flying.popleft()
        first.done = True
        first.inner.wait()


@dataclass(frozen=True)
class _Begun:
    """The begin of a window that this rank has told."""

    expected: tuple[int, ...]
    what: str
    mine: list[int]
    posted: Posted | None  # None where nobody is asked


class Ordered:
    """A collective under way that is finished after those before it."""

    def __init__(self, order: Order, inner: Pending) -> None:
        self._order, self.inner, self.done = order, inner, False

    def poll(self) -> bool:
        self._order.poll_to(self)
        return self.done

    def wait(self) -> None:
        self._order.finish_to(self)


def _code(number: int, does: _Does) -> int:
    return number * len(_Does) + does


def _number(code: int) -> int:
    return code // len(_Does)


def _unit_of(code: int) -> int | None:
    """Index of the unit that `code` gathers; None if it is a reduction."""
    return None if code % len(_Does) == _Does.REDUCE else code // len(_Does)


@lru_cache(maxsize=256)
def merged(lists: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    """Lists laid into one another: what several have in the same order comes once, and between that each rank's own in
    turns, so that ranks that run different modules run them at the same time."""
    result: tuple[int, ...] = ()
    for other in lists:
        result = _merged(result, other)
    return result


def _merged(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    if a == b or not b:
        return a
    result: list[int] = []
    start = begin = 0
    for at, code in enumerate(b):
        try:
            found = a.index(code, start)
        except ValueError:
            continue
        result += [*_in_turns(a[start:found], b[begin:at]), code]
        start, begin = found + 1, at + 1
    return tuple(result + _in_turns(a[start:], b[begin:]))


def _in_turns(a: Sequence[int], b: Sequence[int]) -> list[int]:
    placed = [((at + 0.5) / len(one), which, code) for which, one in enumerate((a, b)) for at, code in enumerate(one)]
    return [code for _, _, code in sorted(placed, key=lambda entry: entry[:2])]


@lru_cache(maxsize=256)
def hoisted(codes: tuple[int, ...]) -> tuple[int, ...]:
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
