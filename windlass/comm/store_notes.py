"""Notes that ranks leave for each other in the store at which they met, whatever their groups are at."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import _get_default_store

from windlass.base.collective_activity import WaitScope

_PAUSE = 0.05


class StoreNotes:
    """Of some ranks for one purpose.

    Args:
        purpose: the same on all of them, and no other's.
    """

    def __init__(self, purpose: str) -> None:
        self._purpose = purpose

    @classmethod
    def numbered(cls, purpose: str, rank: int) -> StoreNotes:
        """The next ones of that purpose on `rank`; all ranks ask for as many."""
        number = _get_default_store().add(f"windlass {purpose} of {rank}", 1)
        return cls(f"{purpose} {number}")

    def post(self, key: str, text: str) -> None:
        """Leave a note; nobody waits."""
        self._store().set(key, text)

    def wait_for_keys(self, keys: Iterable[str], what: str, seconds: float | None = None) -> str:
        """Wait until there is a note under each of `keys`.

        Args:
            what: is waited for, in words.
            seconds: how long at most.

        Returns:
            The first key that there is no note under when the time is over; empty if all are there.
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
