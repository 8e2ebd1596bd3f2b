"""Rendezvous of servers and workers, which may come and go, in the job's store."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from windlass.base.errors import CommunicationError
from windlass.comm.pair_link import PairLink
from windlass.comm.polling_store import PollingStore

_PAUSE = 0.02


@dataclass(frozen=True)
class ServerAddress:
    """Process that serves a shard now. `generation` counts the processes that have served it in this run."""

    server: int
    generation: int
    host: str
    pid: int

    def __str__(self) -> str:
        return f"server {self.server} (process {self.pid} on {self.host})"


class Meeting:
    """Connections of this process with the store, and with other processes by way of it.

    Args:
        address, port: those of the store.
        serve: this process serves the store.
        connect: longest wait for another process.
    """

    def __init__(self, address: str, port: int, *, serve: bool, connect: timedelta) -> None:
        self._connect = connect
        self._tcp = _open(address, port, serve=serve, connect=connect)
        self._store = PrefixStore("windlass parameter server", self._tcp)
        self._links = PollingStore(self._tcp, connect)

    def register_server(self, server: int) -> ServerAddress:
        """Register this process as the server of a shard, in place of an earlier one."""
        here = ServerAddress(server, self._store.add(f"generations {server}", 1), socket.gethostname(), os.getpid())
        self._store.set(f"server {server} {here.generation}", f"{here.host} {here.pid}")
        return here

    def find_server(self, server: int, after: int, seconds: float) -> ServerAddress | None:
        """Return the newest server of a shard, of a later generation than `after`; None if none comes in time."""
        until = time.monotonic() + seconds
        while True:
            generation = self._generation(server)
            if generation > after and self._store.check([f"server {server} {generation}"]):
                host, pid = self._store.get(f"server {server} {generation}").decode().rsplit(" ", 1)
                return ServerAddress(server, generation, host, int(pid))
            if time.monotonic() > until:
                return None
            time.sleep(_PAUSE)

    def call_server(self, address: ServerAddress, worker: int) -> PairLink:
        """Connect with a server, as a worker.

        Raises:
            LinkClosedError: the server was replaced before it answered, or does not answer in time.
        """
        ticket = self._store.add(f"tickets {address.server} {address.generation}", 1)
        name = f"{address.server}.{address.generation}.{ticket}"
        self._store.set(f"caller {name}", str(worker))
        store = PollingStore(self._tcp, self._connect, lambda: self._generation(address.server) > address.generation)
        return PairLink(store, name, first=False, peer=str(address), connect=self._connect)

    def _generation(self, server: int) -> int:
        return int(self._store.add(f"generations {server}", 0))

    def count_calls(self, here: ServerAddress) -> int:
        """Return the number of workers' calls of this server so far."""
        return int(self._store.add(f"tickets {here.server} {here.generation}", 0))

    def answer_call(self, here: ServerAddress, ticket: int) -> PairLink:
        """Connect with the worker of a call, as the server."""
        name = f"{here.server}.{here.generation}.{ticket}"
        return PairLink(self._links, name, first=True, peer=f"the worker of call {ticket}", connect=self._connect)

    def link_servers(self, server: int, *, first: bool) -> PairLink:
        """Connect server 0 (`first`) with another server at the start of a run."""
        peer = f"server {server if first else 0}"
        return PairLink(self._links, f"start {server}", first=first, peer=peer, connect=self._connect)

    def post(self, key: str, text: str = "") -> None:
        """Write a note."""
        self._store.set(key, text)

    def read(self, key: str, what: str) -> str:
        """Return a note, after waiting for it.

        Raises:
            CommunicationError: it is not written in time.
        """
        until = time.monotonic() + self._connect.total_seconds()
        while not self._store.check([key]):
            if time.monotonic() > until:
                raise CommunicationError(
                    f"parameter server: {what} has not started within {self._connect.total_seconds():.0f} s; see its "
                    "output, or raise connect_seconds"
                )
            time.sleep(_PAUSE)
        return str(self._store.get(key).decode())

    def has(self, key: str) -> bool:
        """Return True if there is such a note."""
        return bool(self._store.check([key]))

    def next_worker(self, workers: int) -> int:
        """Return the number of a worker that joins a run of `workers` workers."""
        return workers + int(self._store.add("joined", 1)) - 1


def _open(address: str, port: int, *, serve: bool, connect: timedelta) -> Any:
    try:
        return TCPStore(address, port, is_master=serve, timeout=connect, wait_for_workers=False, multi_tenant=serve)
    except RuntimeError as error:  # torch raises it for every failure to connect
        raise CommunicationError(
            f"parameter server: no store at {address}:{port}: {str(error).splitlines()[0]}; check MASTER_ADDR and "
            "MASTER_PORT"
        ) from error
