"""Collective scheduler: all ranks start the collectives of a model in one order, even if they run different modules.

[Note: agreed order] All ranks must start the gathers over a wire transport or through shared-memory windows, and all
reductions, in one order. Ranks may run different modules (e.g. an expert chosen per rank, or a tower that has no input
in a batch), or different numbers of micro-batches. So only this module starts the collectives of forwards and
backwards.

*Phases.* Each forward and each backward is a phase. Each rank records, in program order, which units it gathered and
which it reduced in each phase. The rank expects the same list in the same phase of the next step. At the start of a
phase the ranks exchange a hash of their lists, and continue with local work until the hashes arrive. If all hashes are
equal, all ranks start the collectives of the list in its order, and exchange nothing more in this phase unless a rank
needs another collective. If the hashes differ, the ranks exchange the lists themselves and all follow the merged list.
A rank that skips a unit of the list still joins the unit's collective, when it needs a later unit or when its phase
ends: it gathers and reshards the unit, or it reduces zeros.

*Agreement rounds.* A rank that needs a collective that is not on the rest of the list first joins the rest of the list,
then requests the collective in an agreement round. In a round every rank sends a request, the start of a phase, a sync
point (e.g. a step), or a request to share failures, and all ranks join every requested collective, in rank order. A
rank that begins a phase repeats rounds until each other rank begins a phase or is at a sync point. A rank at a sync
point repeats rounds until all ranks are at the same one, and joins the phases of other ranks meanwhile. Ranks wait for
peers only in rounds and in collectives that all ranks start. So a rank waits forever only if another rank never
arrives.

*Experts.* Ranks along `ep` hold different experts, and may hold different numbers of them. An access to an expert's
parameters needs only the ranks that hold the same expert. All ranks sync at the first such access after a step or the
start of a phase, to ensure that no rank is inside a phase. Later accesses do not sync.

*Call depth.* Only public methods start collectives. The methods that choose the collectives are generators, which yield
the codes of collectives (see `_code`): a generator has no frame on the stack while its caller starts a collective. So
the stack between a hook and its collective is equally deep whether an agreement round or the agreed list requires the
collective (tests/dist/test_call_depth.py).

*Completion order.* A rank that waits for a collective first finishes all collectives that it started earlier. So no
rank waits for a later collective while a peer waits for this rank in an earlier one.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from functools import lru_cache

from windlass.base.collective_activity import WaitScope
from windlass.base.errors import CommunicationError
from windlass.comm.agreement_board import AgreementBoard, Posted
from windlass.zero.core.completion_order import CompletionOrder
from windlass.zero.core.unit import ShardState, Unit

FORWARD, EVALUATION, BACKWARD = "forward", "forward without gradients", "backward"


class SyncPoint(Enum):
    """Calls that all ranks make in the same order; values are their descriptions in errors and hang reports."""

    STEP = "a step"
    DELAYED_UPDATE_END = "the end of a delayed update"
    GRADIENT_READ = "the reading of a gradient"
    STATE_READ = "the reading of parameters or states"
    STATE_CHANGE = "a change of parameters or states"
    FULL_GATHER = "an all-gather of full parameters"
    CHECKPOINT = "a checkpoint"
    BUFFER_BROADCAST = "the broadcast of buffers"
    SCHEDULE_END = "the end of a pipeline schedule"
    DESTROY = "destroy"


_SYNC_POINTS = tuple(SyncPoint)
_REMEMBERED = 64  # number of phases per step and kind that have separate lists; later phases share one list
_LATEST = -1


class _Message(IntEnum):
    REQUEST = 0  # a collective that this rank needs now
    BEGIN_PHASE = 1  # the start of a phase, with a hash of the expected list
    SYNC = 2  # arrival at a sync point
    SHARE_FAILURES = 3  # exchange of failures in a forward


class _Operation(IntEnum):
    GATHER = 0
    REGATHER = 1  # all-gather in a backward, from the secondary shards of nearby ranks if these are up to date
    REDUCE = 2


@dataclass(frozen=True)
class SchedulerCallbacks:
    """Callables of the model's other parts that the scheduler calls.

    Attributes:
        start_reduction: Starts the reduction of the trainable unit with this number, with this rank's gradient or
            zeros.
        is_gradient_ready: Returns True if this rank's gradient of the trainable unit with this number is complete and
            not reduced yet, and the running backward reduces.
        reshard_unused: Reshards a unit that was gathered for peers, unless this rank uses it now or soon.
        has_local_failure: Returns nonzero if this rank has a failure that all ranks must raise.
        raise_failure: Raises an error with the failures of all ranks, on all ranks. Collective.
    """

    start_reduction: Callable[[int], None]
    is_gradient_ready: Callable[[int], bool]
    reshard_unused: Callable[[Unit], None]
    has_local_failure: Callable[[], float]
    raise_failure: Callable[[], None]


class CollectiveScheduler:
    """Scheduler of the collectives of one model. Without peers, each collective starts when it is needed.

    Args:
        units: All units of the model.
        completion: Order in which collectives in flight finish.
        callbacks: Callables of the reducer, the runtime and the disk's health.
        hoist_gathers: Start gathers before the reductions that directly precede them in the list.

    Attributes:
        paused: True while all units stay unsharded on every rank, so that forwards need no agreement.
        skips_agreement: Assume that all ranks agree and exchange nothing. Used by bench/collective_agreement.py as a
            baseline.
    """

    def __init__(
        self, units: list[Unit], completion: CompletionOrder, callbacks: SchedulerCallbacks, *, hoist_gathers: bool
    ) -> None:
        self._units, self._completion, self._callbacks = units, completion, callbacks
        self._hoist_gathers = hoist_gathers
        self._board: AgreementBoard | None = None
        self._has_gathers = False
        self._synced_since_step = False  # all ranks synced since the last step or phase
        self.paused = False
        self.skips_agreement = False
        self._agreed: tuple[int, ...] = ()  # collectives that all ranks start, in order
        self._position = 0  # index in `_agreed` of the next collective to start
        self._phase: tuple[str, int] | None = None  # open phase of this rank: kind, number in the step
        self._pending_begin: _PendingBegin | None = None  # announced start of the phase, until the replies are read
        self._interrupted_kind = ""  # kind of the phase that a sync point closed and that may resume
        self._recorded: list[int] = []  # collectives of the open phase that this rank needed so far
        self._previous: dict[tuple[str, int], _RecordedPhase] = {}
        self._begun_unsharded: frozenset[int] = frozenset()  # units that were unsharded at the open phase's beginning
        self._counts: Counter[str] = Counter()
        self._gathered_for_peers: deque[Unit] = deque()

    def use_board(self, board: AgreementBoard) -> None:
        """Exchange messages through `board` to reach agreement with the peers."""
        # With peers, collectives must also finish in the agreed order.
        self._board, self._completion.is_active = board, True
        self._has_gathers = any(unit.frees_memory for unit in self._units)

    @property
    def is_single_rank(self) -> bool:
        """True if there are no peers to agree with."""
        return self._board is None

    # phases

    def begin_phase(self, kind: str, *, reduces: bool) -> None:
        """Begin a forward or backward on this rank. Each other rank must begin one too, or reach a sync point.

        Args:
            kind: `FORWARD`, `EVALUATION` or `BACKWARD`.
            reduces: This phase reduces gradients.
        """
        self._synced_since_step = False
        # Without gathers and reductions the phase starts no collective, so there is nothing to agree on.
        if self._board is None or self.paused or not (self._has_gathers or reduces):
            return
        self.end_phase()
        self._interrupted_kind = ""
        # Evaluations may have thousands of similar forwards: all but the first share one list of collectives.
        number = min(self._counts[kind], 1 if kind == EVALUATION else _REMEMBERED)
        self._counts[kind] += 1
        known = self._previous.get((kind, number), self._previous.get((kind, _LATEST), _NOTHING))
        self._begun_unsharded = frozenset(
            unit.index for unit in self._units if unit.frees_memory and unit.shard_state is not ShardState.SHARDED
        )
        expected, what = known.without_first_gathers(self._begun_unsharded), f"the start of a {kind}"
        self._phase = (kind, number)
        # The board exchanges signed 64-bit integers; the shifted hash has 63 bits.
        local = [_Message.BEGIN_PHASE, hash(expected) >> 1, len(expected), int(self._callbacks.has_local_failure())]
        # Only post here. The replies are read when they are first needed, to overlap the exchange with compute.
        self._pending_begin = _PendingBegin(
            expected, what, local, None if self.skips_agreement else self._board.post(local, what)
        )

    def _finish_begin(self) -> Iterable[int]:
        """Wait for the peers' posts if this rank has announced the start of a phase and not yet read the replies.

        Return the collectives that peers request until the start is agreed, for the caller to start.
        """
        if (begun := self._pending_begin) is None:
            return ()
        self._pending_begin = None
        # Peers may need the collectives in flight to reach the start of their own phase, so finish them before waiting.
        self._completion.finish_all()
        posts = [begun.mine] if begun.posted is None else self._wait_for(begun.posted, begun.what)
        return self._agree(_Message.BEGIN_PHASE, begun.mine[1], begun.what, begun.expected, posts)

    def end_phase(self, *kinds: str) -> None:
        """End the open phase if it is one of `kinds` (default: any), after joining the rest of the agreed list."""
        if self._interrupted_kind in kinds:
            self._interrupted_kind = ""
        if self._phase is None or (kinds and self._phase[0] not in kinds):
            return
        for code in self._begun_and_remaining():
            self._start(code)
        self._reshard_gathered_for_peers(0)
        kind, _ = self._phase
        # Store the list also as the latest of its kind, for phases that have no list of their own yet.
        recorded = _RecordedPhase(tuple(self._recorded), self._begun_unsharded)
        self._previous[self._phase] = self._previous[kind, _LATEST] = recorded
        self._phase, self._recorded = None, []

    def sync(self, point: SyncPoint, *, experts_only: bool = False) -> None:
        """Wait until all ranks reach the same sync point. Collective.

        Meanwhile this rank joins the collectives of other ranks.

        Args:
            experts_only: The next operation needs only ranks that hold the same experts. Do nothing if all ranks have
                synced since the last step and the start of the last phase.

        Raises:
            CommunicationError: all ranks are at sync points, but not at the same sync point.
        """
        if self._board is None or (experts_only and self._synced_since_step):
            return
        # The caller may continue with the same forward or backward after the sync point; see `_resume_after_sync`.
        self._interrupted_kind = self._phase[0] if self._phase is not None else self._interrupted_kind
        self.end_phase()
        for code in self._agree(_Message.SYNC, _SYNC_POINTS.index(point), point.value):
            self._start(code)
        self._synced_since_step = True

    def new_step(self) -> None:
        """Count phases from zero again, after a step."""
        self._counts.clear()
        self._synced_since_step = False

    def share_failures(self) -> None:
        """Call `raise_failure` if any rank has a failure. Collective, part of a forward. Without peers, do nothing."""
        if self._board is not None:
            for code in self._begun_and_remaining():
                self._start(code)
            for code in self._agree(_Message.SHARE_FAILURES, 0, "the exchange of failures in a forward"):
                self._start(code)

    # all-gathers

    def unshard(self, unit: Unit, *, backward: bool) -> None:
        """Start to unshard `unit`, which is needed now."""
        # Units that keep their memory are gathered without a collective, so their order is free.
        if not unit.frees_memory or self._board is None:
            unit.unshard(backward=backward)
            return
        self._resume_after_sync()
        code = _code(unit.index, _Operation.REGATHER if backward else _Operation.GATHER)
        # This rank needs the unit even if peers caused its gather, so it expects the gather in the next step too.
        if unit.shard_state is ShardState.SHARDED or unit.unsharded_for_peers:
            self._record(code)
        if unit.shard_state is ShardState.SHARDED:
            for joined in self._finish_begin():
                self._start(joined)
            # Start all collectives of the list up to this unit's gather, or the full list if this gather is not on it.
            for joined in self._next_codes(self._position_of(unit)):
                self._start(joined, wanted=_unit_of(joined) == unit.index)
            if unit.shard_state is ShardState.SHARDED:
                # The list has no gather of this unit: request it from all ranks.
                for joined in self._agree(_Message.REQUEST, code, f"the all-gather of {unit.names[0]!r}"):
                    self._start(joined, wanted=joined == code)
        unit.unsharded_for_peers = False
        for joined in self._free_codes():
            self._start(joined)

    def prefetch(self, unit: Unit, *, backward: bool) -> bool:
        """Start to gather `unit` ahead of its use, if its gather is next in order. Return True if it was started."""
        if self._board is None:
            unit.unshard(backward=backward)
            return True
        # Prefetching must not block: adopt the agreed list only if the replies have already arrived.
        if self._pending_begin is not None and (
            self._pending_begin.posted is None or self._pending_begin.posted.poll()
        ):
            for code in self._finish_begin():
                self._start(code)
        if self._position >= len(self._agreed) or _unit_of(self._agreed[self._position]) != unit.index:
            return False
        self._position += 1
        self._start(self._agreed[self._position - 1], wanted=True)
        return True

    def unshard_all(self, units: Sequence[Unit], point: SyncPoint, *, experts_only: bool = False) -> None:
        """Start to unshard `units` after all ranks have reached the sync point `point` (see `sync`). Collective."""
        if self._board is not None and any(unit.frees_memory for unit in units):
            self.sync(point, experts_only=experts_only)
        for unit in units:
            self.unshard_synced(unit)

    def unshard_synced(self, unit: Unit) -> None:
        """Start to unshard one unit. The caller ensures that all ranks have synced."""
        if unit.frees_memory and self._board is not None:
            unit.join_unshard()
            unit.unsharded_for_peers = False
        else:
            unit.unshard()

    # reductions

    def gradient_complete(self, number: int) -> None:
        """Reduce the complete gradient of trainable unit `number`, now or at its place in the agreed order.

        A reduction that is not on the list starts at the end of the backward.
        """
        if self._board is None:
            self._callbacks.start_reduction(number)
            return
        self._resume_after_sync()
        for joined in self._finish_begin():
            self._start(joined)
        code = _code(number, _Operation.REDUCE)
        self._record(code)
        for joined in (
            self._codes_of_complete(code)
            if self._agreed or self._phase is None
            # No list is known yet, e.g. in the first step.
            else self._agree(_Message.REQUEST, code, "the reduction of a gradient")
        ):
            self._start(joined)

    def reduce_remaining(self, numbers: Sequence[int], is_left: Callable[[int], bool]) -> None:
        """Start the remaining reductions of a backward.

        Join the rest of the list, then request the reductions that are left on this rank.

        Args:
            numbers: Numbers of the trainable units.
            is_left: Returns True if this rank has an unreduced gradient of the trainable unit with this number.
        """
        for joined in self._begun_and_remaining():
            self._start(joined)
        for number in numbers:
            if not is_left(number):
                continue
            if self._board is None:
                self._callbacks.start_reduction(number)
                continue
            code = _code(number, _Operation.REDUCE)
            self._record(code)
            for joined in self._agree(_Message.REQUEST, code, "the reduction of a gradient"):
                self._start(joined)

    def advance(self) -> None:
        """Start the next collectives of the agreed list that this rank can join early (see `_free_codes`)."""
        for code in self._free_codes():
            self._start(code)

    # internals

    def _resume_after_sync(self) -> None:
        """Begin a new phase if a sync point ended the phase of a forward or backward that is still running."""
        if self._interrupted_kind:
            self.begin_phase(self._interrupted_kind, reduces=True)

    def _record(self, code: int) -> None:
        if self._phase is not None:
            self._recorded.append(code)

    def _position_of(self, unit: Unit) -> int | None:
        for at in range(self._position, len(self._agreed)):
            if _unit_of(self._agreed[at]) == unit.index:
                return at
        return None

    # codes of collectives to start, in order; see "Call depth" in [Note: agreed order]

    def _next_codes(self, last: int | None = None) -> Iterator[int]:
        """Yield the rest of the agreed list, or its part up to and including the position `last`."""
        while self._position < (len(self._agreed) if last is None else last + 1):
            self._position += 1
            yield self._agreed[self._position - 1]

    def _begun_and_remaining(self) -> Iterator[int]:
        """Yield the collectives that peers request until the phase's start is agreed, then the rest of the list."""
        yield from self._finish_begin()
        yield from self._next_codes()

    def _free_codes(self) -> Iterator[int]:
        """Yield the next collectives of the agreed list, up to the first one that this rank cannot join early.

        It can join reductions of complete gradients, and gathers of units that are unsharded on this rank.
        """
        while self._position < len(self._agreed):
            code = self._agreed[self._position]
            unit = _unit_of(code)
            if unit is None and not self._callbacks.is_gradient_ready(_number(code)):
                return
            # A gather of a sharded unit would allocate memory before it is needed.
            if unit is not None and self._units[unit].shard_state is not ShardState.UNSHARDED:
                return
            # Two gathers of one unit in a row serve two blocks: the first block reshards the unit before the second one
            # needs it. Here the unit is still unsharded for the first, so the second gather would start too early.
            if unit is not None and self._position and _unit_of(self._agreed[self._position - 1]) == unit:
                return
            self._position += 1
            yield code

    def _codes_of_complete(self, code: int) -> Iterator[int]:
        """Yield the reductions before `code` in the rest of the list, if no gather precedes it, then `_free_codes`.

        This rank appears to have no gradients for the reductions before `code` in this phase. Until this rank joins
        them, its peers wait, and all its later collectives are held back.
        """
        for at in range(self._position, len(self._agreed)):
            if self._agreed[at] == code:
                yield from self._next_codes(at - 1)
                break
            if _unit_of(self._agreed[at]) is not None:
                break
        yield from self._free_codes()

    def _agree(
        self,
        message: _Message,
        value: int,
        what: str,
        expected: tuple[int, ...] = (),
        posts: list[list[int]] | None = None,
    ) -> Iterator[int]:
        """Exchange messages with all ranks, in rounds until this rank may continue.

        Args:
            posts: Posts of the first round, if they are exchanged already; None: exchange them.

        Yields:
            The codes of the rest of the list, and of the requested collectives. A rank with a request, or one that
            shares failures, takes part in one round.
        """
        assert self._board is not None
        while True:
            if posts is None:
                # All ranks have to start and finish the same collectives before they block in the round.
                yield from self._next_codes()
                self._completion.finish_all()
                mine = [message, value, len(expected), int(self._callbacks.has_local_failure())]
                posts = [mine] if self.skips_agreement else self._wait_for(self._board.post(mine, what), what)
            messages = [post[0] for post in posts]
            if _Message.SHARE_FAILURES in messages and any(post[3] for post in posts):
                self._callbacks.raise_failure()
            # `dict.fromkeys` removes duplicate requests and keeps rank order, so all ranks join in the same order.
            requested = dict.fromkeys(post[1] for post in posts if post[0] == _Message.REQUEST)
            yield from requested
            if message is _Message.REQUEST or message is _Message.SHARE_FAILURES:
                return
            # A rank that requests a collective or shares failures is not yet at the start of a phase or at a sync
            # point: the round is then repeated.
            if not requested and _Message.SHARE_FAILURES not in messages:
                if _Message.BEGIN_PHASE not in messages:
                    _require_one_sync_point(posts)
                    return
                self._adopt_sequence(posts, expected)
                if message is _Message.BEGIN_PHASE:
                    return
                # At a sync point, join the phases of other ranks first and then repeat the round.
            posts = None

    # internals

    def _start(self, code: int, *, wanted: bool = False) -> None:
        """Start a collective of the agreed list, or one that a rank requested in a round.

        Args:
            wanted: This rank needs the unit now or soon.
        """
        number = _unit_of(code)
        if number is None:
            self._callbacks.start_reduction(_number(code))
            return
        unit = self._units[number]
        was_sharded = unit.shard_state is ShardState.SHARDED
        unit.join_unshard(backward=code % len(_Operation) == _Operation.REGATHER)
        # Other ranks need this unit, but this rank may not: keep at most one such unit unsharded after its collective,
        # to bound memory.
        if was_sharded:
            unit.unsharded_for_peers = True
            if not wanted:
                self._gathered_for_peers.append(unit)
                self._reshard_gathered_for_peers(1)

    def _reshard_gathered_for_peers(self, keep: int) -> None:
        while len(self._gathered_for_peers) > keep:
            self._callbacks.reshard_unused(self._gathered_for_peers.popleft())

    def _wait_for(self, posted: Posted, what: str) -> list[list[int]]:
        with WaitScope(f"agreed order: {what}"):
            return posted.wait()

    def _adopt_sequence(self, posts: list[list[int]], expected: tuple[int, ...]) -> None:
        assert self._board is not None
        if any(post[:2] != posts[0][:2] for post in posts):
            longest = max(post[2] for post in posts)
            # The exchanged messages must have one length on all ranks.
            padded = [*expected, *[0] * (longest - len(expected))]
            with WaitScope("agreed order: the sequences of peers"):
                lists = self._board.exchange(padded, "the sequences of peers") if longest else [[] for _ in posts]
            expected = merge_sequences(tuple(tuple(one[: post[2]]) for one, post in zip(lists, posts, strict=True)))
        self._agreed, self._position = hoist_gathers(expected) if self._hoist_gathers else expected, 0


@dataclass(frozen=True)
class _RecordedPhase:
    """Collectives of a phase.

    Attributes:
        codes: Codes of the collectives, in order.
        begun_unsharded: Indices of the units that were unsharded when the phase began.
    """

    codes: tuple[int, ...] = ()
    begun_unsharded: frozenset[int] = frozenset()

    def without_first_gathers(self, unsharded: frozenset[int]) -> tuple[int, ...]:
        """Return the codes without the first gather of each unit that is in `unsharded` when the new phase begins.

        If a unit was also unsharded when the recorded phase began, its first gather is not in the record: all its
        recorded gathers are later ones, and stay.
        """
        saved = set(unsharded - self.begun_unsharded)
        found = []
        for code in self.codes:
            unit = _unit_of(code)
            if unit is not None and unit in saved:
                saved.discard(unit)
            else:
                found.append(code)
        return tuple(found)


_NOTHING = _RecordedPhase()


@dataclass(frozen=True)
class _PendingBegin:
    """Start of a phase that this rank has announced, before it has read the replies."""

    expected: tuple[int, ...]
    what: str
    mine: list[int]
    posted: Posted | None  # None if agreement is skipped


def _require_one_sync_point(posts: list[list[int]]) -> None:
    if any(post[1] != posts[0][1] for post in posts):
        places = ", ".join(f"rank {rank} is at {_SYNC_POINTS[post[1]].value}" for rank, post in enumerate(posts))
        raise CommunicationError(
            f"ranks wait for each other in different calls and would wait forever: {places}; all ranks must make "
            "the same calls in the same order"
        )


def _code(number: int, operation: _Operation) -> int:
    return number * len(_Operation) + operation


def _number(code: int) -> int:
    return code // len(_Operation)


def _unit_of(code: int) -> int | None:
    """Return the index of the unit that `code` gathers, or None if `code` is a reduction."""
    return None if code % len(_Operation) == _Operation.REDUCE else code // len(_Operation)


@lru_cache(maxsize=256)
def merge_sequences(lists: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    """Merge the ranks' lists into one.

    Collectives that several lists have in the same order occur once. Between them, the other collectives of the lists
    are interleaved, so that ranks that run different modules run them at the same time.
    """
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
            position = a.index(code, start)
        except ValueError:
            continue
        result += [*_interleave(a[start:position], b[begin:at]), code]
        start, begin = position + 1, at + 1
    return tuple(result + _interleave(a[start:], b[begin:]))


def _interleave(a: Sequence[int], b: Sequence[int]) -> list[int]:
    placed = [((at + 0.5) / len(one), which, code) for which, one in enumerate((a, b)) for at, code in enumerate(one)]
    return [code for _, _, code in sorted(placed, key=lambda entry: entry[:2])]


@lru_cache(maxsize=256)
def hoist_gathers(codes: tuple[int, ...]) -> tuple[int, ...]:
    """Move each run of gathers ahead of the run of reductions that directly precedes it."""
    result: list[int] = []
    held: list[int] = []  # reductions not yet placed
    gathers: list[int] = []  # gathers that follow the held reductions
    for code in codes:
        if _unit_of(code) is None:
            if gathers:
                result += [*gathers, *held]
                held, gathers = [], []
            held.append(code)
        else:
            gathers.append(code)
    return tuple([*result, *gathers, *held])
