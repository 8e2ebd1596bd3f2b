"""Start of a parameter server job: each process becomes a server or a worker, by its place in the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

from torch import nn

from windlass.base.errors import CommunicationError
from windlass.comm.addresses import is_loopback
from windlass.comm.loopback import bind_gloo_to_loopback
from windlass.parameter_server.meeting import Meeting
from windlass.parameter_server.model_layout import layout_of
from windlass.parameter_server.server import ParameterServer
from windlass.parameter_server.server_shard import MakeOptimizer
from windlass.parameter_server.settings import ParameterServerSettings
from windlass.parameter_server.worker import ParameterServerWorker

SERVERS = "WINDLASS_SERVERS"
"""Variable with the number of servers: the ranks from 0 on. `windlass run --servers` sets it."""
JOINS = "WINDLASS_JOINS"
"""Variable of a worker that joins a running job, with any value."""


@dataclass(frozen=True)
class ParameterServerRole:
    """Role of this process. `index` is the number of the server or of the worker; -1: the worker joins a run."""

    is_server: bool
    index: int
    servers: int
    workers: int
    address: str
    port: int


def role_of(environ: Mapping[str, str]) -> ParameterServerRole:
    """Return the role of this process, from the variables of `windlass run --servers S --workers W`.

    Raises:
        CommunicationError: variables are missing or contradict each other.
    """
    names = (SERVERS, "RANK", "WORLD_SIZE", "MASTER_PORT")
    try:
        servers, rank, world, port = (int(environ[name]) for name in names)
    except (KeyError, ValueError):
        raise CommunicationError(
            f"parameter server: the environment has no numbers in {', '.join(names)}; start the script with "
            "`windlass run --servers S --workers W script.py`"
        ) from None
    if not 0 < servers < world:
        raise CommunicationError(
            f"parameter server: {SERVERS} = {servers} of {world} ranks; at least one server and one worker are needed"
        )
    joins = bool(environ.get(JOINS))
    index = -1 if joins else rank if rank < servers else rank - servers
    return ParameterServerRole(
        rank < servers and not joins, index, servers, world - servers, environ.get("MASTER_ADDR", "127.0.0.1"), port
    )


def start(
    model: nn.Module, make_optimizer: MakeOptimizer, settings: ParameterServerSettings | None = None
) -> ParameterServerWorker | None:
    """Become a server or a worker of the job.

    A server serves until all workers have left; then this returns None. A worker gets its handle at once.

    Args:
        model: the same modules on all processes. The values are those of server 0; on workers, `pull` writes them.
        make_optimizer: builds an optimizer with an elementwise rule from a list of flat parameters, on servers. For
            `nn.Embedding(sparse=True)` it must take sparse gradients (SGD, SparseAdam, Adagrad).
        settings: the same on all processes.

    Raises:
        CommunicationError: the environment is incomplete, or a process did not come.
        ConfigError: `backup_workers` leaves no worker.
    """
    settings = settings or ParameterServerSettings()
    role = role_of(os.environ)
    settings.check_workers(role.workers)
    if is_loopback(role.address):
        bind_gloo_to_loopback()
    own_store = role.is_server and role.index == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    connect = timedelta(seconds=settings.connect_seconds)
    meeting = Meeting(role.address, role.port, serve=own_store, connect=connect)
    layout = layout_of(model, role.servers)
    if role.is_server:
        ParameterServer(layout, role.index, role.workers, settings, make_optimizer, meeting).serve()
        return None
    index = role.index if role.index >= 0 else meeting.next_worker(role.workers)
    return ParameterServerWorker(layout, index, settings, meeting)
