"""Barrier for ranks that compute one sample together: after one of them raised, all stay at the same call.

[Note: incomplete forwards] Ranks along tp, sp and ep (and pipeline stages) exchange tensors inside a module's
forward and backward. Suppose that one rank raises there and its script catches the error. The rank's next collective
would then match a collective of the forward that the other ranks still run. If shapes are equal, there is no error, and
the results are wrong. So the failed rank waits, at its next call of the engine, until the other ranks have posted that
they failed in the same call too (e.g. because all got the same bad input). Failures are posted in the rendezvous store,
since the process groups may be in use. If the other ranks did not fail, all ranks wait at different places, which the
watchdog detects and reports.

[Note: a call left out] An error in the script itself, e.g. in its loss, makes one rank skip a call that the others
make. So each rank sends, at the start of a forward, a backward and a step, which call starts; no collective along an
axis starts before all ranks have sent the same call. Ranks whose call was skipped by another rank raise before they
compute any of it, and the rank that is ahead waits for them. Along ep, ranks compute different samples. A rank in a
forward may then need the other ranks to join its all-gathers, and a rank in a backward needs them to join its
reductions. So with sharded parameters no rank waits at the start of a backward or of a step: the rank that is ahead
raises, and the watchdog ends the others.
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
_PATIENCE = 60.0  # seconds to wait for the other ranks if no watchdog is running
_CALLS = ("forward", "backward", "step")  # in the order in which a micro-batch makes them


class CallLeftOutError(PeerError):
    """Error on a rank whose current call was skipped by another rank. Nothing of the call was computed."""


class FailedCallBarrier:
    """Barrier of one engine. Its construction is collective.

    Args:
        mesh: mesh of the model; its tp, sp and ep axes determine the ranks that compute together.
        gathers: True if forwards all-gather parameters over data-parallel ranks.
    """

    def __init__(self, mesh: Mesh, *, gathers: bool = False) -> None:
        self._rank = mesh.world.ranks[mesh.world.index]
        together = mesh.grid.along(self._rank, "pp", *_COUPLED_AXES) if mesh.grid.size(*_COUPLED_AXES) > 1 else ()
        self._peers = [rank for rank in together if rank != self._rank]
        if self._peers:
            self._notes = StoreNotes.numbered("half way", self._rank)
        # Pipeline stages run forwards and backwards in orders of their own; `CollectiveErrorCheck` handles their
        # failures.
        self._compares = bool(self._peers) and mesh.pp.size == 1
        # At the start of these calls, other ranks may still need this rank for a collective.
        served = ("step",) if mesh.ep.size > 1 else ()
        self._resumes = not (served and gathers)
        self._later = ("forward", *served) if self._resumes else _CALLS
        if self._compares:
            self._group = mesh.over(*_COUPLED_AXES)
            self._board = WireBoard(self._group)
        self._axes = ", ".join(name for name in _COUPLED_AXES if mesh.grid.size(name) > 1)
        self._posted: Posted | None = None
        self._registered = False
        self._call = (0, 0)  # forwards so far, and the index in `_CALLS` of the latest call
        self._call_number = (0, 0)  # forwards so far, and calls since the last forward
        self._error = ""

    @contextmanager
    def guard(self, call: str, *, together: bool = True) -> Iterator[None]:
        """Enclose a call in which the ranks of this barrier exchange tensors.

        Args:
            together: True if all ranks of this barrier make the call; False if a rank may make it alone.

        Raises:
            CommunicationError: as `wait_for_peers`.
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
        """Wait until the other ranks raised too, if the last call raised on this rank.

        Raises:
            CommunicationError: the other ranks did not raise, and no watchdog ends the run.
        """
        if not self._error:
            return
        keys = {self._key(peer): peer for peer in self._peers}
        patience = None if activity.is_watched else _PATIENCE
        missing = self._notes.wait_for_keys(keys, "other ranks that fail in the same call", patience)
        if missing:
            raise CommunicationError(
                f"rank {self._rank} cannot continue: {self._error}, which the script caught, and rank "
                f"{keys[missing]} did not fail there, so they are at different points of one forward or backward; "
                "start the run again from its last checkpoint"
            )
        self._error = activity.caught_error = ""

    def begin(self, what: str) -> None:
        """Send to the other ranks which of `_CALLS` begins here. Collective.

        A forward continues at once, and compares the calls before its first collective along an axis. With ep, this
        also holds for a step or, if forwards all-gather parameters, for every call.

        Raises:
            PeerError: another rank skipped this call. Nothing of it was computed.
            CommunicationError: this rank skipped a call, and cannot wait for the others.
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
            here = own()  # None if the engine was garbage-collected meanwhile
            if here is not None:
                here._registered = False
                here._compare()

        before_next_collective(check)

    def _post(self) -> None:
        self._posted = self._board.post(list(self._call), "the next call of the engine")

    def _compare(self) -> None:
        """Wait for the calls that the other ranks posted, and compare them with this rank's, unless already done."""
        while self._posted is not None:
            posted, self._posted = self._posted, None
            with WaitScope(f"the {_CALLS[self._call[1]]} of the other ranks along {self._axes}"):
                calls = [(forwards, call) for forwards, call in posted.wait()]
            ahead = max(calls)
            if min(calls) == ahead:
                return
            if self._call < ahead or not self._resumes:
                self._refuse(calls, ahead)
            self._post()  # ranks that are behind raise, and later post the same call as this rank

    def _refuse(self, calls: list[tuple[int, int]], ahead: tuple[int, int]) -> None:
        rank = self._group.ranks[calls.index(ahead)]
        left_out = min(calls)
        if left_out[1] == _CALLS.index("step"):
            then = "no step was made, and gradients are unchanged since the backward"
        elif self._resumes:
            then = "this batch is dropped on all of them; continue with the next one"
        else:
            then = "start the run again from its last checkpoint"
        text = (
            f"rank {rank} skipped the {_CALLS[left_out[1]]} of forward {left_out[0]} and continued with the "
            f"{_CALLS[ahead[1]]} of forward {ahead[0]}, as after an error that its script caught. Ranks along "
            f"{self._axes} make these calls together: {then}. Raise or catch such an error on every rank"
        )
        raise CallLeftOutError(text) if self._call < ahead else CommunicationError(text)

    def _key(self, rank: int) -> str:
        return f"{self._call_number} {rank}"
