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
from windlass.watchdog.heartbeat import Heartbeat

_STORE_TIMEOUT = timedelta(seconds=10)
_store_count = 0  # as many on every rank: a process group after another gets keys of its own


class ControlStoreLostError(Exception):
    """The store does not answer any more: the process that kept it is gone."""


class ControlStore:
    """A connection of its own, so that no wait of the main thread's holds it up.

    One rank writes its record once a tick. A bell tells the others, who read one counter a tick, that somebody is in
    trouble; only then records are read.
    """

    def __init__(self, default_store: Any, store: Any, rank: int) -> None:
        self._default_store, self._store, self._rank = (
            default_store,
            store,
            rank,
        )  # the origin may be the server: it lives as long

    @classmethod
    def open(cls) -> ControlStore | None:
        """A board for the ranks of the default group; None where they did not meet at a TCP store, or it
        takes no more connections."""
        global _store_count
        origin = store = cast(Any, _get_default_store())
        while isinstance(store, PrefixStore):
            store = store.underlying_store
        if not isinstance(store, TCPStore):
            return None
        _store_count += 1
        try:
            own = TCPStore(store.host, store.port, is_master=False, timeout=_STORE_TIMEOUT, wait_for_workers=False)
        except RuntimeError as error:
            logger.error("no watchdog: no second connection to %s:%d (%s)", store.host, store.port, error)
            return None
        again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun keeps the store when it starts ranks again
        return cls(origin, PrefixStore(f"windlass watchdog {again}.{_store_count}", own), dist.get_rank())

    def is_current(self) -> bool:
        """Whether the group whose ranks meet here is still the default one."""
        try:
            return dist.is_initialized() and _get_default_store() is self._default_store
        except ValueError:  # destroyed in between
            return False

    def write_heartbeat(self, heartbeat: Heartbeat) -> None:
        """Leave this rank's record."""
        self._store_call("set", f"rank {self._rank}", heartbeat.to_json())

    def read_heartbeats(self, ranks: Iterable[int]) -> dict[int, Heartbeat]:
        """The records of those of `ranks` that wrote one."""
        keys = [(rank, f"rank {rank}") for rank in ranks]
        if not self._store_call("check", [key for _, key in keys]):
            keys = [(rank, key) for rank, key in keys if self._store_call("check", [key])]
        if not keys:
            return {}
        texts = self._store_call("multi_get", [key for _, key in keys])
        return {rank: Heartbeat.from_json(text.decode()) for (rank, _), text in zip(keys, texts, strict=True)}

    def count_alarms(self, *, raise_alarm: bool) -> int:
        """How often any rank rang."""
        return int(self._store_call("add", "bell", int(raise_alarm)))

    def post_decision(self, headline: str) -> None:
        """Tell all ranks to end, and why."""
        self._store_call("set", "decision", headline)

    def read_decision(self) -> str:
        """What `decide` said, or nothing."""
        return self._store_call("get", "decision").decode() if self._store_call("check", ["decision"]) else ""

    def check_out(self) -> int:
        """Say that this rank needs the board no longer; returns how many have said so. Once a rank."""
        return int(self._store_call("add", "left", 1))

    def count_checked_out(self) -> int:
        """How many ranks need the board no longer."""
        return int(self._store_call("add", "left", 0))

    def _store_call(self, name: str, *arguments: Any) -> Any:
        try:
            return getattr(self._store, name)(*arguments)
        except (RuntimeError, ValueError) as error:  # torch has kinds of its own for every way in which a store fails
            raise ControlStoreLostError(str(error)) from error
