"""Rendezvous of servers, replicas and workers in the job's store. Processes may end, and others may join."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from windlass.base.errors import CommunicationError
from windlass.comm.pair_link import LinkClosedError, PairLink
from windlass.comm.polling_store import PollingStore

_PAUSE = 0.02
_RETIRED, _LOST = "retired", "lost"
_LAST_ANSWERS = 0.5  # seconds for which the store still answers, so that other processes read that the run has ended


@dataclass(frozen=True)
class ServerAddress:
    """Address of the process that serves a shard.

    Attributes:
        server: number of the shard.
        generation: 1 for the first process that serves the shard in this run, 2 for the second, and so on.
        replica: number of the process among the processes of the shard; process 0 begins as the server.
    """

    server: int
    generation: int
    host: str
    pid: int
    replica: int = 0

    def __str__(self) -> str:
        return f"server {self.server} (process {self.pid} on {self.host})"


@dataclass(frozen=True)
class ShardRecord:
    """Entry of a shard in the store.

    [Note: serving process of a shard] An entry is replaced by compare-and-set, so only by a process that has read its
    current value. A replica may take a shard over only while the entry lists it as complete. The server removes a
    replica from the entry before it answers a request that the replica has not received. So only one process at a time
    can make updates, even if an unresponsive process still runs.

    Attributes:
        address: the server; None: the shard has had no server yet.
        replicas: numbers of the replicas that have all updates. Each of them may take over.
    """

    address: ServerAddress | None = None
    replicas: frozenset[int] = frozenset()

    @property
    def generation(self) -> int:
        """Generation of the server; 0 before the first server."""
        return self.address.generation if self.address is not None else 0

    def to_text(self) -> str:
        """Return the text of the entry in the store; empty if there was no server yet."""
        if self.address is None:
            return ""
        one = self.address
        return f"{one.generation} {one.pid} {one.replica} {','.join(map(str, sorted(self.replicas)))} {one.host}"

    @classmethod
    def from_text(cls, server: int, text: str) -> ShardRecord:
        """Return the entry from its text in the store."""
        generation, pid, replica, replicas, host = text.split(" ", 4)
        address = ServerAddress(server, int(generation), host, int(pid), int(replica))
        return cls(address, frozenset(int(one) for one in replicas.split(",") if one))


class StoreLostError(CommunicationError):
    """Error for a job whose store does not answer: the process that served it has ended."""


class _JobStore:
    """The job's entries in a store of torch, whose errors become `StoreLostError`.

    Args:
        store: store of torch.
        where: address and port of the store, for the error.
    """

    def __init__(self, store: Any, where: str) -> None:
        self._store, self._where = store, where

    def check(self, key: str) -> bool:
        """Return True if an entry exists."""
        return bool(self._ask(lambda: self._store.check([key])))

    def get(self, key: str) -> str:
        """Return the text of an entry that exists."""
        return str(self._ask(lambda: self._store.get(key)).decode())

    def set(self, key: str, text: str) -> None:
        """Write an entry."""
        self._ask(lambda: self._store.set(key, text))

    def add(self, key: str, value: int) -> int:
        """Add to a counter, and return its new value."""
        return int(self._ask(lambda: self._store.add(key, value)))

    def compare_set(self, key: str, before: str, after: str) -> str:
        """Replace an entry if its text is `before`, and return its text."""
        return str(self._ask(lambda: self._store.compare_set(key, before, after)).decode())

    def _ask(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except RuntimeError as error:  # torch's error for a store that has ended
            cause = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise StoreLostError(
                f"parameter server: the job's store at {self._where} does not answer: {cause}; the process that serves "
                "it (server 0, or the launcher) has ended: see its output, and start the run again"
            ) from error


class JobRendezvous:
    """Connection of this process to the store, and through it to other processes.

    Args:
        address, port: address and port of the store.
        serve: True if this process serves the store.
        connect: longest wait for another process.

    Attributes:
        where: address and port of the store.
    """

    def __init__(self, address: str, port: int, *, serve: bool, connect: timedelta) -> None:
        self._connect, self.where = connect, f"{address}:{port}"
        self._tcp = _open(address, port, serve=serve, connect=connect)
        self._store = _JobStore(PrefixStore("windlass parameter server", self._tcp), self.where)
        self._links = PollingStore(self._tcp, connect)

    def has_store(self, seconds: float) -> bool:
        """Return True if the store answers within `seconds`. torch's `check` itself has no time limit."""
        answered = threading.Event()

        def ask() -> None:
            try:
                self._tcp.check(["any"])
            except RuntimeError:  # torch's error for a store that has ended
                return
            answered.set()

        threading.Thread(target=ask, name="windlass-store", daemon=True).start()
        return answered.wait(seconds)

    def record(self, server: int) -> ShardRecord:
        """Return the entry of a shard."""
        key = f"shard {server}"
        if not self._store.check(key):
            return ShardRecord()
        return ShardRecord.from_text(server, self._store.get(key))

    def _replace(self, server: int, before: ShardRecord, after: ShardRecord) -> bool:
        """Replace the entry of a shard if it still equals `before`. Return False if another process has changed it."""
        text = after.to_text()
        return self._store.compare_set(f"shard {server}", before.to_text(), text) == text

    def register_server(self, server: int, replica: int = 0) -> ServerAddress:
        """Register this process as the server of a shard, in place of an earlier one that has ended."""
        while True:
            before = self.record(server)
            here = ServerAddress(server, before.generation + 1, socket.gethostname(), os.getpid(), replica)
            if self._replace(server, before, ShardRecord(here)):
                return here

    def take_over(self, lost: ServerAddress, replica: int) -> ServerAddress | None:
        """Register this replica as the server in place of `lost`, the server that it followed.

        Returns:
            The new address; None if another process has taken the shard over, or the server continued without this
            replica.
        """
        while True:
            before = self.record(lost.server)
            if before.address != lost or replica not in before.replicas:
                return None
            here = ServerAddress(lost.server, lost.generation + 1, socket.gethostname(), os.getpid(), replica)
            if self._replace(lost.server, before, ShardRecord(here)):
                return here

    def set_replicas(self, here: ServerAddress, replicas: frozenset[int]) -> bool:
        """Set the complete replicas of a server. Returns False if another process has replaced the server."""
        while True:
            before = self.record(here.server)
            if before.address != here:
                return False
            if self._replace(here.server, before, ShardRecord(here, replicas)):
                return True

    def remove_replica(self, server: int, replica: int) -> None:
        """Remove an ended replica from the entry of its shard."""
        before = self.record(server)
        while replica in before.replicas:
            if self._replace(server, before, ShardRecord(before.address, before.replicas - {replica})):
                return
            before = self.record(server)

    def record_restored(self, here: ServerAddress, version: int) -> None:
        """Record that a server continues from a snapshot of `version`: later updates of the lost server are lost."""
        self._store.set(f"restored {here.server} {here.generation}", str(version))

    def restored_version(self, before: ServerAddress, now: ServerAddress) -> int | None:
        """Return the lowest version from which a server later than `before`, up to `now`, continued; None if none lost
        updates."""
        keys = [f"restored {now.server} {one}" for one in range(before.generation + 1, now.generation + 1)]
        return min((int(self._store.get(key)) for key in keys if self._store.check(key)), default=None)

    def find_server(self, server: int, after: int, seconds: float) -> ServerAddress | None:
        """Return the newest server of a shard, of a later generation than `after`; None if no such server is
        registered in time."""
        until = time.monotonic() + seconds
        while True:
            address = self.record(server).address
            if address is not None and address.generation > after:
                return address
            if time.monotonic() > until:
                return None
            time.sleep(_PAUSE)

    def call_server(self, address: ServerAddress, wait: timedelta | None = None) -> PairLink:
        """Connect with a server, as a worker or a replica.

        Args:
            wait: longest wait for the server's answer; None: `connect` of the constructor.

        Raises:
            LinkClosedError: the server was replaced before it answered, has ended, or does not answer in time; or the
                store has ended.
        """
        try:
            ticket = self._store.add(f"tickets {address.server} {address.generation}", 1)
        except StoreLostError as error:
            raise LinkClosedError(f"the job's store at {self.where} does not answer") from error
        name = f"{address.server}.{address.generation}.{ticket}"

        def is_over() -> bool:
            return self.record(address.server).generation > address.generation or self.is_over(address.server)

        wait = self._connect if wait is None else wait
        store = PollingStore(self._tcp, wait, is_over)
        return PairLink(store, name, first=False, peer=str(address), connect=wait)

    def end(self, server: int) -> None:
        """Record that the run has ended for a shard."""
        self._store.set(f"over {server}", "")

    def await_end(self, servers: int) -> None:
        """Wait, at most `connect`, until the run has ended for all shards: this process serves the store of all
        servers."""
        until = time.monotonic() + self._connect.total_seconds()
        while time.monotonic() < until and not all(self.is_over(server) for server in range(servers)):
            time.sleep(_PAUSE)
        time.sleep(_LAST_ANSWERS)

    def is_over(self, server: int) -> bool:
        """Return True if the run has ended for a shard."""
        return self._store.check(f"over {server}")

    def count_calls(self, here: ServerAddress) -> int:
        """Return the number of calls to this server so far, from workers and replicas."""
        return self._store.add(f"tickets {here.server} {here.generation}", 0)

    def answer_call(self, here: ServerAddress, ticket: int) -> PairLink:
        """Connect with the caller of call number `ticket`, a worker or a replica, as the server."""
        name = f"{here.server}.{here.generation}.{ticket}"
        return PairLink(self._links, name, first=True, peer=f"the worker of call {ticket}", connect=self._connect)

    def link_servers(self, server: int, *, first: bool) -> PairLink:
        """Connect server 0 with server `server` at the start of a run. `first` is True on server 0."""
        peer = f"server {server if first else 0}"
        name = f"start {server}"
        return PairLink(self._links, name, first=first, peer=peer, connect=self._connect, is_retried=False)

    def post(self, key: str, text: str = "") -> None:
        """Write an entry of the store."""
        self._store.set(key, text)

    def read(self, key: str, what: str) -> str:
        """Wait for an entry that `post` writes, and return its text. `what` is the process that writes it.

        Raises:
            CommunicationError: the entry is not written in time.
        """
        until = time.monotonic() + self._connect.total_seconds()
        while not self._store.check(key):
            if time.monotonic() > until:
                raise CommunicationError(
                    f"parameter server: {what} has not started within {self._connect.total_seconds():.0f} s; see its "
                    "output, or raise connect_seconds"
                )
            time.sleep(_PAUSE)
        return self._store.get(key)

    def leave(self, worker: int, *, retires: bool) -> None:
        """Record that a worker has left: by `close` (`retires`), or because it was lost."""
        if retires or not self.has_left(worker):
            self._store.set(f"left {worker}", _RETIRED if retires else _LOST)

    def has_left(self, worker: int, *, retired: bool = False) -> bool:
        """Return True if a worker has left.

        Args:
            retired: count only workers that have left by `close`.
        """
        return self._departure(worker) in ((_RETIRED,) if retired else (_RETIRED, _LOST))

    def come_back(self, worker: int) -> None:
        """Record that a worker that was lost has connected again."""
        if self._departure(worker) == _LOST:
            self._store.set(f"left {worker}", "")

    def _departure(self, worker: int) -> str:
        key = f"left {worker}"
        return self._store.get(key) if self._store.check(key) else ""

    def count_start(self, worker: int) -> int:
        """Count a start of a worker, and return the number of processes that have had its number."""
        return self._store.add(f"starts {worker}", 1)

    def count_joined(self) -> int:
        """Return the number of workers that have joined the run."""
        return self._store.add("joined", 0)

    def next_worker(self, workers: int) -> int:
        """Count a worker that joins a run, which began with `workers` workers, and return its number."""
        return workers + self._store.add("joined", 1) - 1


def _open(address: str, port: int, *, serve: bool, connect: timedelta) -> Any:
    try:
        return TCPStore(address, port, is_master=serve, timeout=connect, wait_for_workers=False, multi_tenant=serve)
    except RuntimeError as error:  # torch's error for every failure to connect
        raise CommunicationError(
            f"parameter server: no store at {address}:{port}: {str(error).splitlines()[0]}; check MASTER_ADDR and "
            "MASTER_PORT"
        ) from error
