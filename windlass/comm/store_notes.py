"""Notes between ranks: short texts in the rendezvous store, independent of the state of the process groups."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import _get_default_store

from windlass.base.collective_activity import WaitScope

_PAUSE = 0.05


class StoreNotes:
    """Notes that some ranks exchange for one purpose.

    Args:
        purpose: Name of the purpose, equal on all of these ranks and used for nothing else.
    """

    def __init__(self, purpose: str) -> None:
        self._purpose = purpose

    @classmethod
    def numbered(cls, purpose: str, rank: int) -> StoreNotes:
        """Return new notes for this purpose: the n-th calls of all ranks return the same notes.

        So the ranks must call this equally often.

        Args:
            rank: Global rank of the caller, whose calls are counted.
        """
        number = _get_default_store().add(f"windlass {purpose} of {rank}", 1)
        return cls(f"{purpose} {number}")

    def post(self, key: str, text: str) -> None:
        """Write a note under `key`, without waiting for other ranks."""
        self._store().set(key, text)

    def read(self, key: str) -> str:
        """Return the note under `key`, which must exist."""
        return str(self._store().get(key).decode())

    def wait_for_keys(self, keys: Iterable[str], what: str, seconds: float | None = None) -> str:
        """Wait until there is a note under each of `keys`.

        Args:
            what: Description of the wait, for reports of hangs.
            seconds: Time-out; None: wait forever.

        Returns:
            The first key without a note at the time-out; empty if all notes are there.
        """
        store, until = self._store(), None if seconds is None else time.monotonic() + seconds
        with WaitScope(what):
            for key in keys:
                while not store.check([key]):
                    if until is not None and time.monotonic() > until:
                        return key
                    time.sleep(_PAUSE)
        return ""

    def _store(self) -> Any:
        return PrefixStore(f"windlass {self._purpose}", _get_default_store())
