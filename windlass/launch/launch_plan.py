"""Plan of a launch: program, hosts and options, in one form for this machine and for others."""

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
    """Plan of a launch. `hosts` are in the order of ranks; `node_rank` is the index of the host whose ranks start here.

    Args:
        env: variables that override those that ranks inherit on their host.
        master_addr, master_port: rendezvous address and port; None: an address of the first host, and a free port.
        use_agent_store: a separate process runs the rendezvous store, as under torchrun; else rank 0 runs it.
        use_devices: `slots` select devices; else ranks see this process's devices, without those of lost slots.
        virtual_local_rank: only the rank's own device is visible to each rank, as device 0.
        bind_cores_to_rank, bind_core_list: bind each rank to an equal share of the host's cores, or of the listed ones.
        servers: number of parameter servers with their replicas, which are the first ranks; 0: no parameter servers.
        restarts, max_restarts: number of restarts so far, and the maximum.
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
    servers: int = 0
    run_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    restarts: int = 0
    max_restarts: int = 0
    monitor_interval_s: float = 0.1
    grace_s: float = 30
    signals: tuple[str, ...] = FORWARDED_SIGNALS

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return sum(len(host.slots) for host in self.hosts)

    @property
    def workers(self) -> range:
        """Ranks that are workers of parameter servers; empty if there are no servers."""
        return range(self.servers, self.world_size) if self.servers else range(0)

    def rank_placements(self, node: int) -> list[RankPlacement]:
        """Return the placements of the ranks of one host."""
        return place_ranks(self.hosts)[node]

    def to_json(self) -> dict[str, Any]:
        """Return the plan as plain data for `from_json`."""
        return {**asdict(self), "program": self.program.to_json(), "env": dict(self.env)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> LaunchPlan:
        """Create the plan from the result of `to_json`."""
        hosts = tuple(Host(host["name"], tuple(host["slots"])) for host in data["hosts"])
        program = Program.from_json(data["program"])
        return cls(**{**data, "program": program, "hosts": hosts, "signals": tuple(data["signals"])})

    def with_hosts(self, hosts: tuple[Host, ...], restarts: int) -> LaunchPlan:
        """Return the plan for a restart on the given hosts.

        `master_addr` is an address of the first host, and is dropped with it: ranks then connect at the new first host.
        """
        is_first_left = hosts[0].name == self.hosts[0].name
        return replace(self, hosts=hosts, restarts=restarts, master_addr=self.master_addr if is_first_left else None)


def is_local_host(name: str) -> bool:
    """Return True if a host's name or address belongs to this machine."""
    if name in ("localhost", "127.0.0.1", "::1", socket.gethostname(), os.uname().nodename):
        return True
    user, _, host = name.rpartition("@")
    if user and user != _user_name():
        return False  # ranks of another user, which need a login even on this machine
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, _, _, address in found:
        with socket.socket(family, kind) as probe:
            try:
                probe.bind((address[0], 0, *address[2:]))  # bind succeeds only for an address of this machine
            except OSError:
                continue
            return True
    return False


def _user_name() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without an entry in the password file
        return ""
