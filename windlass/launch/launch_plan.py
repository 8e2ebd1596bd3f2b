"""All that a launch was told: what to run, where, and how; the same words for this machine and for others."""

from __future__ import annotations

import getpass
import os
import socket
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from windlass.launch.program import Program
from windlass.launch.rank_placement import Host, RankPlacement, place_ranks

FORWARDED_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")


@dataclass(frozen=True)
class LaunchPlan:
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
    node_rank: int = 0
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None
    master_addr: str | None = None
    master_port: int | None = None
    use_agent_store: bool = True
    use_devices: bool = False
    virtual_local_rank: bool = False
    bind_cores_to_rank: bool = False
    bind_core_list: str | None = None
    role: str = "default"
    run_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    restarts: int = 0
    max_restarts: int = 0
    monitor_interval_s: float = 0.1
    grace_s: float = 30
    signals: tuple[str, ...] = FORWARDED_SIGNALS

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return sum(len(host.slots) for host in self.hosts)

    def rank_placements(self, node: int) -> list[RankPlacement]:
        """Those of one host."""
        return place_ranks(self.hosts)[node]

    def to_json(self) -> dict[str, Any]:
        """What `from_json` reads."""
        return {**asdict(self), "program": self.program.to_json(), "env": dict(self.env)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> LaunchPlan:
        """The plan that `as_json` described."""
        hosts = tuple(Host(host["name"], tuple(host["slots"])) for host in data["hosts"])
        program = Program.from_json(data["program"])
        return cls(**{**data, "program": program, "hosts": hosts, "signals": tuple(data["signals"])})

    def with_hosts(self, hosts: tuple[Host, ...], restarts: int) -> LaunchPlan:
        """The same, started again on these hosts."""
        return replace(self, hosts=hosts, restarts=restarts)


def is_local_host(name: str) -> bool:
    """Whether a host's name or address is one of this machine's."""
    if name in ("localhost", "127.0.0.1", "::1", socket.gethostname(), os.uname().nodename):
        return True
    user, _, host = name.rpartition("@")
    if user and user != _user_name():
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


def _user_name() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user that no file knows
        return ""
