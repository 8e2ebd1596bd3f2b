"""Settings of a parameter server job."""

from __future__ import annotations

import os
import threading
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from windlass.base.errors import ConfigError

Mode = Literal["synchronous", "asynchronous", "bounded"]
MODES = ("synchronous", "asynchronous", "bounded")


@dataclass(frozen=True)
class ParameterServerSettings:
    """Settings, equal on all servers and workers.

    Args:
        mode: `synchronous`: an update is the mean of one gradient of each worker, as in data-parallel training;
            `asynchronous`: each gradient is an update, at once; `bounded`: as asynchronous, but no worker is more than
            `staleness` steps ahead of the slowest one.
        staleness: largest lead of a worker, in steps, for `bounded`.
        backup_workers: number of workers for which a synchronous update does not wait: the slowest workers of each
            step. Their gradients are dropped.
        max_age: with `asynchronous` and `bounded`, the largest number of updates between the pull and the push of a
            gradient. Older gradients are refused. None: no limit.
        snapshot: folder in which each server stores its parameters and states; None: no snapshots.
        snapshot_every: number of updates between two snapshots, and so the most updates that are lost with a server
            without replica.
        connect_seconds: longest wait for other processes to connect, at the start and after a server was replaced.
            After this time pulls no longer wait for workers that did not connect. A server also ends if no worker has
            been connected with it for this time, e.g. because all workers were killed.
        reconnect_seconds: longest wait of a worker for the process that replaces a lost server, and of a server for the
            answer of a replica.
        heartbeat_seconds: longest time without a heartbeat of a server. After this time workers and replicas treat the
            server as lost, as if it had ended. A server sends heartbeats while it waits for other processes.

    Raises:
        ConfigError: a value is of a wrong type or out of range, or has no effect in the mode.
    """

    mode: Mode = "synchronous"
    staleness: int = 0
    backup_workers: int = 0
    max_age: int | None = None
    snapshot: str | Path | None = None
    snapshot_every: int = 100
    connect_seconds: float = 300.0
    reconnect_seconds: float = 60.0
    heartbeat_seconds: float = 30.0

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ConfigError(f"parameter server: mode = {self.mode!r} does not exist; use one of {', '.join(MODES)}")
        self._check_numbers()
        if self.staleness and self.mode != "bounded":
            raise ConfigError(
                f"parameter server: staleness = {self.staleness} is for mode = 'bounded', and the mode is {self.mode!r}"
            )
        if self.backup_workers and self.mode != "synchronous":
            raise ConfigError(
                f"parameter server: backup_workers = {self.backup_workers} is for mode = 'synchronous', and the mode "
                f"is {self.mode!r}"
            )
        if self.max_age is not None and self.mode == "synchronous":
            raise ConfigError(
                f"parameter server: max_age = {self.max_age} needs a mode other than synchronous, which drops late "
                "gradients itself"
            )

    def _check_numbers(self) -> None:
        """Raise ConfigError for a value of a wrong type or out of range."""
        for name, least in (("staleness", 0), ("backup_workers", 0), ("max_age", 0), ("snapshot_every", 1)):
            value = getattr(self, name)
            if value is None and name == "max_age":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"parameter server: {name} = {value!r}; use a whole number, {least} or more")
        for name in ("connect_seconds", "reconnect_seconds", "heartbeat_seconds"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < threading.TIMEOUT_MAX:
                raise ConfigError(f"parameter server: {name} = {value!r}; use a number of seconds above 0")
        if self.snapshot is not None and not isinstance(self.snapshot, str | os.PathLike):
            raise ConfigError(f"parameter server: snapshot = {self.snapshot!r}; use the path of a folder, or None")

    @property
    def fingerprint(self) -> int:
        """Checksum of the settings that must be equal on servers and workers."""
        shared = (self.mode, self.staleness, self.backup_workers, self.max_age, float(self.heartbeat_seconds))
        return zlib.crc32(repr(shared).encode())

    def check_workers(self, workers: int) -> None:
        """Raise ConfigError unless a synchronous update waits for at least one of `workers` workers."""
        if self.backup_workers >= workers:
            raise ConfigError(
                f"parameter server: backup_workers = {self.backup_workers} of {workers} workers leave none whose "
                f"gradients count; use at most {workers - 1}"
            )
