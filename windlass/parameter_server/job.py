"""Start of a parameter server job: each process becomes a server, a replica or a worker, by its environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

from torch import nn

from windlass.base.errors import CommunicationError, ConfigError
from windlass.comm.addresses import is_loopback
from windlass.comm.loopback import bind_gloo_to_loopback
from windlass.parameter_server.job_rendezvous import JobRendezvous
from windlass.parameter_server.model_layout import layout_of
from windlass.parameter_server.server_shard import MakeOptimizer
from windlass.parameter_server.settings import ParameterServerSettings
from windlass.parameter_server.shard_process import ShardProcess
from windlass.parameter_server.worker import ParameterServerWorker

SERVERS = "WINDLASS_SERVERS"
"""Environment variable with the number of servers, which are the first ranks. `windlass run --servers` sets it."""
REPLICAS = "WINDLASS_REPLICAS"
"""Environment variable with the number of replicas of each server; replicas are the ranks after the servers. `windlass
run --replicas` sets it."""
JOINS = "WINDLASS_JOINS"
"""Environment variable that makes a worker join a running job, with any value that is not empty."""

_used_stores: set[tuple[str, int]] = set()  # address and port of the stores in which this process has started a job


@dataclass(frozen=True)
class ParameterServerRole:
    """Role of this process.

    Attributes:
        is_server: True for a process of a shard (server or replica), False for a worker.
        index: number of the shard or of the worker; -1: a worker that joins a running job.
        servers, workers: number of servers, and of workers at the start of the job.
        address, port: address and port of the job's store.
        replica: number of the process among the processes of its shard; process 0 begins as the server.
        replicas: number of replicas of each server.
    """

    is_server: bool
    index: int
    servers: int
    workers: int
    address: str
    port: int
    replica: int = 0
    replicas: int = 0


def role_of(environ: Mapping[str, str]) -> ParameterServerRole:
    """Return the role of this process, from the variables of `windlass run --servers S --workers W`.

    Raises:
        CommunicationError: variables are missing or contradict each other.
    """
    names = (SERVERS, "RANK", "WORLD_SIZE", "MASTER_PORT")
    try:
        servers, rank, world, port = (int(environ[name]) for name in names)
        replicas = int(environ.get(REPLICAS, "0"))
    except (KeyError, ValueError):
        raise CommunicationError(
            f"parameter server: the environment has no numbers in {', '.join(names)}; start the script with "
            "`windlass run --servers S --workers W script.py`"
        ) from None
    processes = servers * (1 + replicas)
    if not 0 < servers <= processes < world:
        raise CommunicationError(
            f"parameter server: {SERVERS} = {servers} and {REPLICAS} = {replicas} of {world} ranks; at least one "
            "server and one worker are needed"
        )
    joins = bool(environ.get(JOINS))
    is_server = rank < processes and not joins
    return ParameterServerRole(
        is_server,
        -1 if joins else rank % servers if is_server else rank - processes,
        servers,
        world - processes,
        environ.get("MASTER_ADDR", "127.0.0.1"),
        port,
        replica=rank // servers if is_server else 0,
        replicas=replicas,
    )


def start(
    model: nn.Module, make_optimizer: MakeOptimizer, settings: ParameterServerSettings | None = None
) -> ParameterServerWorker | None:
    """Run this process as a server or replica of the job until all workers have left, or start a worker.

    Args:
        model: model with the same modules on all processes. Its initial values are those of server 0; on workers,
            `pull` writes them.
        make_optimizer: function that builds an optimizer with an elementwise rule from a list of flat parameters, on
            servers. If the model has an `nn.Embedding(sparse=True)`, the optimizer must accept sparse gradients (SGD,
            Adagrad; SparseAdam only if all gradients are sparse).
        settings: settings of the job, equal on all processes; None: the defaults.

    Returns:
        The worker, connected with all servers; None on a server or replica, after all workers have left.

    Raises:
        CommunicationError: the environment is incomplete, a process did not connect in time, or this process has
            started a job of this run before.
        ConfigError: `backup_workers` leaves no worker, a worker joins a synchronous run, or the optimizer's rule is not
            elementwise.
        ModelError: the model has no trainable parameter, or one that is complex or not contiguous.
        CheckpointError: a snapshot is damaged, of another job, or missing for some servers.
    """
    settings = settings or ParameterServerSettings()
    role = role_of(os.environ)
    settings.check_workers(role.workers)
    if role.index < 0 and settings.mode == "synchronous":
        raise ConfigError(
            f"parameter server: {JOINS} is set, and a synchronous update is the mean over the workers that began the "
            "run; take mode asynchronous or bounded, or start all workers with the run"
        )
    if (role.address, role.port) in _used_stores:
        raise CommunicationError(
            f"parameter server: `start` was called before in this process, and the store at {role.address}:{role.port} "
            "has the entries of that job; call it once, and start a second job by a second `windlass run`"
        )
    if is_loopback(role.address):
        bind_gloo_to_loopback()
    own_store = (
        role.is_server and role.index == role.replica == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    )
    connect = timedelta(seconds=settings.connect_seconds)
    rendezvous = JobRendezvous(role.address, role.port, serve=own_store, connect=connect)
    _used_stores.add((role.address, role.port))
    layout = layout_of(model, role.servers)
    if role.is_server:
        process = ShardProcess(
            layout, role.index, role.replica, role.replicas, role.workers, settings, make_optimizer, rendezvous
        )
        process.run()
        if own_store:
            rendezvous.await_end(role.servers)
        return None
    index = role.index if role.index >= 0 else rendezvous.next_worker(role.workers)
    return ParameterServerWorker(layout, index, settings, rendezvous)
