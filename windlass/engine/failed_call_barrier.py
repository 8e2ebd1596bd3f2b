"""Keeps ranks that compute a sample together from going on at different places after one of them raised.

[Note: half a forward] Ranks along tp, sp and ep (and the stages beside them) exchange tensors inside a module's
forward and backward. If one raises there and its script catches the error, its next collective would meet one of the
forward that the others are still in: of equal shapes, without an error, and with wrong numbers. So that rank waits, at
its next call of the engine, until the others have said that they failed in the same call (as on an input that all have
and none can use), and goes on only then. They say it in the store at which all ranks met, since their groups may be in
use. If they did not fail, all ranks wait at different places, which the watchdog proves and reports.

[Note: a call left out] An error of the script's own, in its loss say, has one rank leave out a call that the others
make. So each tells the others, at the begin of a forward, a backward and a step, which call that is; no collective
along an axis starts before all have told the same. Those whose call was left out raise, with nothing of it computed,
and the rank that is ahead waits for them to come where it is. Along ep ranks compute different samples. Whoever is in
a forward there may need others to join its gathers, and in a backward its reductions; so with parameters that are
gathered nobody waits at the begin of a backward, and nobody at the begin of a step. Then the rank that is ahead raises,
and the watchdog ends the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from weakref import ref

from windlass.base.collective_activity import WaitScope, activity
from windlass.base.errors import CommunicationError, PeerError
from windlass.comm.agreement_board import Posted, WireBoard
from windlass.comm.mesh import Mesh
from windlass.comm.mesh_axis import before_next_collective
from windlass.comm.store_notes import StoreNotes

_COUPLED_AXES = ("tp", "sp", "ep")
_PATIENCE = 60.0  # seconds, where no watchdog looks
_CALLS = ("forward", "backward", "step")  # in the order in which a micro-batch makes them


class CallLeftOutError(PeerError):
    """Another rank left out the call that begins here; nothing of it was computed."""


class FailedCallBarrier:
    """Of one engine. Collective when it is made.

    Args:
        mesh: says which ranks compute together.
        gathers: forwards gather parameters over data ranks.
    """

    def __init__(self, mesh: Mesh, *, gathers: bool = False) -> None:
        self._rank = mesh.world.ranks[mesh.world.index]
        together = mesh.grid.along(self._rank, "pp", *_COUPLED_AXES) if mesh.grid.size(*_COUPLED_AXES) > 1 else ()
        self._peers = [rank for rank in together if rank != self._rank]
        if self._peers:
            self._notes = StoreNotes.numbered("half way", self._rank)
        # Stages of a pipeline make forwards and backwards in orders of their own; they are told by `CommonFailure`.
        self._compares = bool(self._peers) and mesh.pp.size == 1
        served = ("step",) if mesh.ep.size > 1 else ()  # calls at whose begin others may need this rank
        self._resumes = not (served and gathers)
        self._later = ("forward", *served) if self._resumes else _CALLS
        if self._compares:
            self._group = mesh.over(*_COUPLED_AXES)
            self._board = WireBoard(self._group)
        self._axes = ", ".join(name for name in _COUPLED_AXES if mesh.grid.size(name) > 1)
        self._posted: Posted | None = None
        self._registered = False
        self._call = (0, 0)  # forwards so far, and what came after the last one: a place in `_CALLS`
        self._call_number = (0, 0)  # forwards so far, and calls since then
        self._error = ""

    @contextmanager
    def guard(self, call: str, *, together: bool = True) -> Iterator[None]:
        """Around a call in which these ranks exchange tensors.

        Args:
            together: all of these ranks make this call; else one of them may make it alone.

        Raises:
            CommunicationError: as `rejoin`.
            PeerError: as `begin`.
        """
        if not self._peers:
            yield
            return
        self.wait_for_peers()
        forwards, calls = self._call_number
        self._call_number = (forwards + 1, 0) if call == "forward" and together else (forwards, calls + 1)
        try:
            if call == "forward" and together:
                self.begin(call)
            yield
        except CallLeftOutError:
            raise
        except Exception as error:
            self._error = f"its {call} raised {type(error).__name__}: {error}"
            activity.caught_error = self._error
            self._notes.post(self._key(self._rank), self._error)
            raise

    def wait_for_peers(self) -> None:
        """If the last call raised here, wait until it raised on the other ranks too.

        Raises:
            CommunicationError: it did not, and no watchdog ends the run.
        """
        if not self._error:
            return
        keys = {self._key(peer): peer for peer in self._peers}
        patience = None if activity.is_watched else _PATIENCE
        missing = self._notes.wait_for_keys(keys, "other ranks that fail in the same call", patience)
        if missing:
            raise CommunicationError(
                f"rank {self._rank} can't go on: {self._error}, which the script caught, and rank {keys[missing]} did "
                "not fail there, so that they are at different places of one forward or backward; start the run again "
                "from its last checkpoint"
            )
        self._error = activity.caught_error = ""

    def begin(self, what: str) -> None:
        """Tell the other ranks which of `_CALLS` begins here. Collective.

        A forward goes on at once, and compares before its first collective along an axis.

        Raises:
            PeerError: another rank left out this call, of which nothing was computed.
            CommunicationError: this rank left out one, and the others can't be told.
        """
        if not self._compares:
            return
        self._compare()
        forwards, _ = self._call
        self._call = (forwards + (what == "forward"), _CALLS.index(what))
        self._post()
        if what in self._later:
            self._compare_later()
        else:
            self._compare()

    def _compare_later(self) -> None:
        if self._registered:
            return
        self._registered, own = True, ref(self)

        def check() -> None:
            here = own()  # an engine may be dropped before that
            if here is not None:
                here._registered = False
                here._compare()

        before_next_collective(check)

    def _post(self) -> None:
        self._posted = self._board.post(list(self._call), "which call of the engine comes next")

    def _compare(self) -> None:
        """Wait for what the others told, if that was not done yet."""
        while self._posted is not None:
            posted, self._posted = self._posted, None
            with WaitScope(f"the {_CALLS[self._call[1]]} of the other ranks along {self._axes}"):
                calls = [(forwards, call) for forwards, call in posted.wait()]
            ahead = max(calls)
            if min(calls) == ahead:
                return
            if self._call < ahead or not self._resumes:
                self._refuse(calls, ahead)
            self._post()  # those behind raise, and come here

    def _refuse(self, calls: list[tuple[int, int]], ahead: tuple[int, int]) -> None:
        rank = self._group.ranks[calls.index(ahead)]
        left_out = min(calls)
        if left_out[1] == _CALLS.index("step"):
            then = "no step was made, and gradients are as the backward left them"
        elif self._resumes:
            then = "this batch is dropped on all of them, and the next one may follow"
        else:
            then = "start the run again from its last checkpoint"
        text = (
            f"rank {rank} left out the {_CALLS[left_out[1]]} of forward {left_out[0]} and went on to the "
            f"{_CALLS[ahead[1]]} of forward {ahead[0]}, as after an error that its script caught. Ranks along "
            f"{self._axes} make these calls together: {then}. Raise or catch such an error on every rank"
        )
        raise CallLeftOutError(text) if self._call < ahead else CommunicationError(text)

    def _key(self, rank: int) -> str:
        return f"{self._call_number} {rank}"
