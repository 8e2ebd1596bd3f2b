"""Where ranks leave their records for each other: keys of their own in the store at which they met."""

from __future__ import annotations

import os
from collections.abc import Iterable
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import _get_default_store

from windlass.base.log import logger
from windlass.watchdog.record import Record

_PATIENCE = timedelta(seconds=10)
_boards = 0  # as many on every rank: a process group after another gets keys of its own


class BoardLost(Exception):
    """The store does not answer any more: the process that kept it is gone."""


class Board:
    """A connection of its own, so that no wait of the main thread's holds it up.

    One rank writes its record once a tick. A bell tells the others, who read one counter a tick, that somebody is in
    trouble; only then records are read.
    """

    def __init__(self, origin: Any, store: Any, rank: int) -> None:
        self._origin, self._store, self._rank = origin, store, rank  # the origin may be the server: it lives as long

    @classmethod
    def open(cls) -> Board | None:
        """A board for the ranks of the default group; None where they did not meet at a TCP store, or it
        takes no more connections."""
        global _boards
        origin = store = cast(Any, _get_default_store())
        while isinstance(store, PrefixStore):
            store = store.underlying_store
        if not isinstance(store, TCPStore):
            return None
        _boards += 1
        try:
            own = TCPStore(store.host, store.port, is_master=False, timeout=_PATIENCE, wait_for_workers=False)
        except RuntimeError as error:
            logger.error("no watchdog: no second connection to %s:%d (%s)", store.host, store.port, error)
            return None
        again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun keeps the store when it starts ranks again
        return cls(origin, PrefixStore(f"windlass watchdog {again}.{_boards}", own), dist.get_rank())

    def stands(self) -> bool:
        """Whether the group whose ranks meet here is still the default one."""
        try:
            return dist.is_initialized() and _get_default_store() is self._origin
        except ValueError:  # destroyed in between
            return False

    def write(self, record: Record) -> None:
        """Leave this rank's record."""
        self._call("set", f"rank {self._rank}", record.to_text())

    def read(self, ranks: Iterable[int]) -> dict[int, Record]:
        """The records of those of `ranks` that wrote one."""
        keys = [(rank, f"rank {rank}") for rank in ranks]
        if not self._call("check", [key for _, key in keys]):
            keys = [(rank, key) for rank, key in keys if self._call("check", [key])]
        if not keys:
            return {}
        texts = self._call("multi_get", [key for _, key in keys])
        return {rank: Record.from_text(text.decode()) for (rank, _), text in zip(keys, texts, strict=True)}

    def bell(self, *, ring: bool) -> int:
        """How often any rank rang."""
        return int(self._call("add", "bell", int(ring)))

    def decide(self, headline: str) -> None:
        """Tell all ranks to end, and why."""
        self._call("set", "decision", headline)

    def decision(self) -> str:
        """What `decide` said, or nothing."""
        return self._call("get", "decision").decode() if self._call("check", ["decision"]) else ""

    def leave(self) -> int:
        """Say that this rank needs the board no longer; returns how many have said so. Once a rank."""
        return int(self._call("add", "left", 1))

    def left(self) -> int:
        """How many ranks need the board no longer."""
        return int(self._call("add", "left", 0))

    def _call(self, name: str, *arguments: Any) -> Any:
        try:
            return getattr(self._store, name)(*arguments)
        except (RuntimeError, ValueError) as error:  # torch has kinds of its own for every way in which a store fails
            raise BoardLost(str(error)) from error
