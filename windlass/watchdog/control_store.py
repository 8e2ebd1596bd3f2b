"""Exchange of heartbeats between ranks, under separate keys of the process group's store."""

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
_store_count = 0  # number of stores opened, equal on every rank: successive process groups use different keys


class ControlStoreLostError(Exception):
    """Error of a store that does not answer, because the process that serves it is gone."""


class ControlStore:
    """Separate connection to the process group's store, so that waits of the main thread do not block it.

    Each rank writes its heartbeat once per tick of its watchdog. A rank in trouble increments an alarm counter, which
    every rank reads once per tick. Heartbeats of other ranks, except the first heartbeat of rank 0, are read only after
    an alarm. Reads and writes raise `ControlStoreLostError` if the store does not answer.
    """

    def __init__(self, default_store: Any, store: Any, rank: int) -> None:
        self._default_store, self._store, self._rank = (
            default_store,
            store,
            rank,
        )  # this reference keeps the default store alive, because it may be the server

    @classmethod
    def open(cls) -> ControlStore | None:
        """Open a control store for the ranks of the default group.

        Return None if the group does not use a TCP store, or the store accepts no more connections.
        """
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
            logger.error(
                "the watchdog is off and hangs are not reported: a second connection to the store at %s:%d failed "
                "(%s); check the network",
                store.host,
                store.port,
                error,
            )
            return None
        again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun restarts keep the store: use new keys
        return cls(origin, PrefixStore(f"windlass watchdog {again}.{_store_count}", own), dist.get_rank())

    def is_current(self) -> bool:
        """Return True if the process group of this store is still the default one."""
        try:
            return dist.is_initialized() and _get_default_store() is self._default_store
        except ValueError:  # the group was destroyed in between
            return False

    def write_heartbeat(self, heartbeat: Heartbeat) -> None:
        """Write this rank's heartbeat."""
        self._store_call("set", f"rank {self._rank}", heartbeat.to_json())

    def read_heartbeats(self, ranks: Iterable[int]) -> dict[int, Heartbeat]:
        """Return the heartbeats of `ranks` that exist, by rank."""
        keys = [(rank, f"rank {rank}") for rank in ranks]
        if not self._store_call("check", [key for _, key in keys]):
            keys = [(rank, key) for rank, key in keys if self._store_call("check", [key])]
        if not keys:
            return {}
        texts = self._store_call("multi_get", [key for _, key in keys])
        return {rank: Heartbeat.from_json(text.decode()) for (rank, _), text in zip(keys, texts, strict=True)}

    def count_alarms(self, *, raise_alarm: bool) -> int:
        """Return the number of alarms so far. `raise_alarm` adds one."""
        return int(self._store_call("add", "bell", int(raise_alarm)))

    def post_decision(self, headline: str) -> None:
        """Write the decision to end all ranks, with its reason."""
        self._store_call("set", "decision", headline)

    def read_decision(self) -> str:
        """Return the decision that `post_decision` wrote, or ""."""
        return self._store_call("get", "decision").decode() if self._store_call("check", ["decision"]) else ""

    def check_out(self) -> int:
        """Record that this rank no longer needs the store. Return the number of such ranks. Called once per rank."""
        return int(self._store_call("add", "left", 1))

    def count_checked_out(self) -> int:
        """Return the number of ranks that no longer need the store."""
        return int(self._store_call("add", "left", 0))

    def _store_call(self, name: str, *arguments: Any) -> Any:
        try:
            return getattr(self._store, name)(*arguments)
        except (RuntimeError, ValueError) as error:  # torch raises various subclasses when a store fails
            raise ControlStoreLostError(str(error)) from error
