"""All that a launch was told: what to run, where, and how; the same words for this machine and for others."""

from __future__ import annotations

import getpass
import os
import socket
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from windlass.launch.place import Host, Place, places_of
from windlass.launch.program import Program

SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")


@dataclass(frozen=True)
class Plan:
    """A launch. `hosts` in the order of ranks; `node` says which of them this machine is, where it starts its own.

    Args:
        env: over what ranks inherit on their host.
        master_addr, master_port: where ranks meet; None: this host's, a free one.
        keep_store: the store at which ranks meet is kept beside them, as under torchrun; else by rank 0.
        use_devices: `slots` choose devices; else ranks see what this process sees.
        virtual_local_rank: each rank sees its own device alone, as its first.
        bind_cores, core_list: ranks are bound to an equal share of the host's cores, or of these.
        restarts, max_restarts: how often the run was started again, and may be.
    """

    program: Program
    hosts: tuple[Host, ...]
    node: int = 0
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None
    master_addr: str | None = None
    master_port: int | None = None
    keep_store: bool = True
    use_devices: bool = False
    virtual_local_rank: bool = False
    bind_cores: bool = False
    core_list: str | None = None
    role: str = "default"
    run_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    restarts: int = 0
    max_restarts: int = 0
    interval_s: float = 0.1
    grace_s: float = 30
    signals: tuple[str, ...] = SIGNALS

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return sum(len(host.slots) for host in self.hosts)

    def places(self, node: int) -> list[Place]:
        """Those of one host."""
        return places_of(self.hosts)[node]

    def as_json(self) -> dict[str, Any]:
        """What `from_json` reads."""
        return {**asdict(self), "program": self.program.as_json(), "env": dict(self.env)}

    @classmethod
    def from_json(cls, text: Mapping[str, Any]) -> Plan:
        """The plan that `as_json` described."""
        hosts = tuple(Host(host["name"], tuple(host["slots"])) for host in text["hosts"])
        program = Program.from_json(text["program"])
        return cls(**{**text, "program": program, "hosts": hosts, "signals": tuple(text["signals"])})

    def on(self, hosts: tuple[Host, ...], restarts: int) -> Plan:
        """The same, started again on these hosts."""
        return replace(self, hosts=hosts, restarts=restarts)


def is_this_machine(name: str) -> bool:
    """Whether a host's name or address is one of this machine's."""
    if name in ("localhost", "127.0.0.1", "::1", socket.gethostname(), os.uname().nodename):
        return True
    user, _, host = name.rpartition("@")
    if user and user != _own_name():
        return False  # somebody else's ranks
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, _, _, address in found:
        with socket.socket(family, kind) as probe:
            try:
                probe.bind((address[0], 0, *address[2:]))  # only an own address can be bound to
            except OSError:
                continue
            return True
    return False


def _own_name() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user that no file knows
        return ""
