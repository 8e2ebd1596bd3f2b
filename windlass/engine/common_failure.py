"""Tells all ranks when one of them raises in what they do together, so that none waits for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from windlass.base.activity import During
from windlass.base.errors import PeerError
from windlass.comm.board import WireBoard
from windlass.comm.groups import Group

_FINE, _ENDED, _FAILED = range(3)


class PeerMemoryError(PeerError, torch.OutOfMemoryError):
    """A `PeerError` because a rank ran out of memory, so that a script that catches that does so on every rank."""


class CommonFailure:
    """Exchanges between all ranks whether the part of each succeeded.

    Args:
        world: all ranks.
        name: this rank, as messages name it.
    """

    def __init__(self, world: Group, name: str) -> None:
        self._world, self._name = world, name
        self._board = WireBoard(world)

    def run(self, make: Callable[[], Any], what: str, then: str) -> Any:
        """Return `make()` if it succeeds on every rank. Collective.

        Args:
            what: this rank does, in words.
            then: what a failure means for the model.

        Raises:
            StopIteration: `make` raised it on all ranks.
            PeerError: it raised on another rank; on this one what it raised.
        """
        made, error = None, None
        try:
            made = make()
        except Exception as raised:
            error = raised
        self.check(error, what, then)
        return made

    def failed(self, error: Exception | None, what: str) -> bool:
        """Whether any rank has an error. Collective."""
        return any(self._states(error, what))

    def check(self, error: Exception | None, what: str, then: str) -> None:
        """Raise if any rank has an error. Collective.

        Args:
            error: of this rank; it is raised here.
            what: this rank did, in words.
            then: what a failure means for the model.

        Raises:
            StopIteration: that is the error on all ranks.
            PeerError: another rank has one.
        """
        states = self._states(error, what)
        if not any(states):
            return
        if min(states) == max(states) == _ENDED:
            assert error is not None
            raise error
        self.tell(error, what, then)

    def tell(self, error: Exception | None, what: str, then: str) -> None:
        """As `check`, where it is known that some rank has an error. Collective."""
        memory = isinstance(error, torch.OutOfMemoryError)
        mine = (f"{self._name}: {what} raised {type(error).__name__}: {error}" if error is not None else "", memory)
        told = [mine] * self._world.size
        if self._world.size > 1:
            with During("the words of ranks that failed"):
                dist.all_gather_object(told, mine, group=self._world.process_group)
        if error is not None and not isinstance(error, StopIteration):
            error.add_note(f"windlass: {mine[0]}; {then}")
            raise error
        said = "; ".join(words for words, _ in told if words)
        kind = PeerMemoryError if all(out for words, out in told if words) else PeerError
        raise kind(f"{said}. {then[:1].upper()}{then[1:]}") from error

    def _states(self, error: Exception | None, what: str) -> list[int]:
        mine = _FINE if error is None else _ENDED if isinstance(error, StopIteration) else _FAILED
        if self._world.size == 1:
            return [mine]
        with During(f"all ranks after {what}"):
            return [state for (state,) in self._board.exchange([mine], what)]
