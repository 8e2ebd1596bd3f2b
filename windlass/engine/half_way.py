"""Keeps ranks that compute a sample together from going on at different places after one of them raised.

[Note: half a forward] Ranks along tp, sp and ep (and the stages beside them) exchange tensors inside a module's
forward and backward. If one raises there and its script catches the error, its next collective would meet one of the
forward that the others are still in: of equal shapes, without an error, and with wrong numbers. So that rank waits, at
its next call of the engine, until the others have said that they failed in the same call (as on an input that all have
and none can use), and goes on only then. They say it in the store at which all ranks met, since their groups may be in
use. If they did not fail, all ranks wait at different places, which the watchdog proves and reports.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from windlass.base.activity import activity
from windlass.base.errors import CommunicationError
from windlass.comm.mesh import Mesh
from windlass.comm.notes import Notes

_COUPLED = ("tp", "sp", "ep")
_PATIENCE = 60.0  # seconds, where no watchdog looks


class HalfWay:
    """Of one engine.

    Args:
        mesh: says which ranks compute together.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._rank = mesh.world.ranks[mesh.world.index]
        together = mesh.grid.along(self._rank, "pp", *_COUPLED) if mesh.grid.size(*_COUPLED) > 1 else ()
        self._peers = [rank for rank in together if rank != self._rank]
        if self._peers:
            self._notes = Notes.numbered("half way", self._rank)
        self._turn = 0
        self._error = ""

    @contextmanager
    def part(self, what: str) -> Iterator[None]:
        """Around a call in which these ranks exchange tensors.

        Raises:
            CommunicationError: as `rejoin`.
        """
        if not self._peers:
            yield
            return
        self.rejoin()
        self._turn += 1
        try:
            yield
        except Exception as error:
            self._error = f"its {what} raised {type(error).__name__}: {error}"
            activity.left = self._error
            self._notes.leave(f"{self._turn} {self._rank}", self._error)
            raise

    def rejoin(self) -> None:
        """If the last call raised here, wait until it raised on the other ranks too.

        Raises:
            CommunicationError: it did not, and no watchdog ends the run.
        """
        if not self._error:
            return
        keys = {f"{self._turn} {peer}": peer for peer in self._peers}
        patience = None if activity.watched else _PATIENCE
        missing = self._notes.await_all(keys, "other ranks that fail in the same call", patience)
        if missing:
            raise CommunicationError(
                f"rank {self._rank} can't go on: {self._error}, which the script caught, and rank {keys[missing]} did "
                "not fail there, so that they are at different places of one forward or backward; start the run again "
                "from its last checkpoint"
            )
        self._error = activity.left = ""
