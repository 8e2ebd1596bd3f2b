"""Propagation of errors: if one rank raises in a collective action, all ranks raise, so that no rank waits for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from windlass.base.collective_activity import WaitScope
from windlass.base.errors import PeerError
from windlass.comm.agreement_board import WireBoard
from windlass.comm.rank_group import RankGroup

_SUCCEEDED, _EXHAUSTED, _FAILED = range(3)


class PeerMemoryError(PeerError, torch.OutOfMemoryError):
    """`PeerError` raised because all failed ranks ran out of memory.

    A script that catches OutOfMemoryError thus catches the failure on every rank.
    """


class CollectiveErrorCheck:
    """Exchange between all ranks of the success or failure of each rank's part.

    Args:
        world: all ranks.
        rank_name: name of this rank in messages.
    """

    def __init__(self, world: RankGroup, rank_name: str) -> None:
        self._world, self._rank_name = world, rank_name
        self._board = WireBoard(world)

    def run(self, function: Callable[[], Any], action: str, consequence: str) -> Any:
        """Return `function()` if it succeeds on every rank. Collective.

        Args:
            action: description of what this rank does, for messages.
            consequence: description of the model's state after a failure.

        Raises:
            StopIteration: `function` raised it on all ranks.
            PeerError: `function` raised on another rank. On the failing rank its own error is raised.
        """
        result, error = None, None
        try:
            result = function()
        except Exception as raised:
            error = raised
        self.raise_if_any_failed(error, action, consequence)
        return result

    def any_failed(self, error: Exception | None, action: str) -> bool:
        """Return True if any rank has an error. Collective."""
        return any(self._exchange_outcomes(error, action))

    def raise_if_any_failed(self, error: Exception | None, action: str, consequence: str) -> None:
        """Raise if any rank has an error. Collective.

        Args:
            error: this rank's error, which is raised on this rank; None: this rank has succeeded.
            action: description of what this rank did, for messages.
            consequence: description of the model's state after a failure.

        Raises:
            StopIteration: all ranks have a StopIteration.
            PeerError: another rank has an error.
        """
        states = self._exchange_outcomes(error, action)
        if not any(states):
            return
        if min(states) == max(states) == _EXHAUSTED:
            assert error is not None
            raise error
        self.raise_on_all_ranks(error, action, consequence)

    def raise_on_all_ranks(self, error: Exception | None, action: str, consequence: str) -> None:
        """Raise as `raise_if_any_failed` does. For callers that know that some rank has an error. Collective."""
        memory = isinstance(error, torch.OutOfMemoryError)
        local = (
            f"{self._rank_name}: {action} raised {type(error).__name__}: {error}" if error is not None else "",
            memory,
        )
        messages = [local]
        if self._world.size > 1:
            with WaitScope("the error messages of failed ranks"):
                messages = self._world.all_gather_object(local)
        if error is not None and not isinstance(error, StopIteration):
            error.add_note(f"windlass: {local[0]}; {consequence}")
            raise error
        failures = "; ".join(words for words, _ in messages if words)
        kind = PeerMemoryError if all(out for words, out in messages if words) else PeerError
        raise kind(f"{failures}. {consequence[:1].upper()}{consequence[1:]}") from error

    def _exchange_outcomes(self, error: Exception | None, action: str) -> list[int]:
        local = _SUCCEEDED if error is None else _EXHAUSTED if isinstance(error, StopIteration) else _FAILED
        if self._world.size == 1:
            return [local]
        with WaitScope(f"all ranks after {action}"):
            return [state for (state,) in self._board.exchange([local], action)]
