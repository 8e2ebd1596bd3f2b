"""Bootstrap: creates the default process group from the environment that a launcher sets."""

from __future__ import annotations

import atexit
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.rendezvous import rendezvous

from windlass.base.compute_device import local_device
from windlass.base.errors import CommunicationError
from windlass.base.log import logger
from windlass.comm.addresses import is_loopback
from windlass.comm.group_creation import init_default_group
from windlass.comm.loopback import bind_gloo_to_loopback, loopback_store
from windlass.comm.mpi_backend import mpi_rank_environment, register_mpi, store_over_mpi
from windlass.comm.peer_owners import require_own_peers
from windlass.comm.rank_environment import HERE, RankEnvironment, half, rank_environment

DEFAULT_TIMEOUT = timedelta(minutes=30)
DEFAULT_PORT = 29500
_STORE_CONNECTION = "made for the rendezvous store"
_ENVIRONMENT = ("", "env://")  # values of `init_method` for a rendezvous at MASTER_ADDR
_GROUP_NUMBER = "windlass default group"
_last_numbers: dict[tuple[str, int], str] = {}  # by address and port of a launcher's store, see `_launcher_store`


def default_timeout(otherwise: timedelta = DEFAULT_TIMEOUT) -> timedelta:
    """Return the time-out of collectives: `DEEPSPEED_TIMEOUT`, in minutes, if it is set, else `otherwise`.

    Raises:
        CommunicationError: `DEEPSPEED_TIMEOUT` is not a positive number below 1e6.
    """
    text = os.environ.get("DEEPSPEED_TIMEOUT", "")
    if not text:
        return otherwise
    try:
        minutes = float(text)
    except ValueError:
        minutes = 0.0
    if not 0 < minutes < 1e6:
        raise CommunicationError(
            f"DEEPSPEED_TIMEOUT = {text!r} is not a number of minutes; set a positive number, or unset it"
        )
    return timedelta(minutes=minutes)


def init_distributed(
    backend: str | None = None,
    timeout: timedelta | None = None,
    *,
    port: int | None = None,
    report_after: float | None = None,
    discover: bool = True,
    init_method: str | None = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Create the default process group, unless it exists.

    Rank and world size come from the environment of the launcher (`comm/rank_environment`): torchrun, DeepSpeed's
    launcher, Open MPI, MVAPICH, MPICH, Intel MPI, Slurm. Azure ML and SageMaker provide the address of rank 0. Without
    a launcher, or if the launcher started only one process, the group contains this process alone and, without a URL
    `init_method`, opens no socket. If a launcher started several processes, they form one group, or this function
    raises. For several processes it sets `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `MASTER_ADDR` and `MASTER_PORT`; with a
    URL `init_method`, only the first three, or only `LOCAL_RANK` if the URL contains rank and world size.

    Args:
        backend: Torch's name of the backend, or `mpi`, which windlass provides over mpi4py. Default: gloo for CPU
            tensors and, with CUDA, nccl for CUDA tensors.
        timeout: Time after which a collective fails if a peer does not join; None: `default_timeout()`.
        port: Value of `MASTER_PORT` if the environment has none.
        report_after: Seconds after which missing ranks are logged; None: never.
        discover: If False, only `RANK` and related variables are used, not those of other launchers.
        init_method: A torch URL for the rendezvous of the ranks.
        rank, world_size: Override the environment if both are given.

    Raises:
        CommunicationError: the environment is incomplete or invalid, the rendezvous failed, or a connection leads to a
            process of another user; for `mpi`, also: mpi4py is missing, MPI's thread level is too low, or the ranks
            belong to different MPI jobs.
    """
    if dist.is_initialized():
        return
    timeout = timeout if timeout is not None else default_timeout()
    if backend is None:
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    over_mpi = backend == "mpi"
    if over_mpi:
        backend = register_mpi()
    place = _rank_environment(discover, init_method, rank, world_size, over_mpi=over_mpi)
    if torch.cuda.is_available() and (place is None or place.local_rank is not None):
        torch.cuda.set_device(local_device())
    if place is None or place.one_host or is_loopback(urlsplit(init_method or "").hostname):
        bind_gloo_to_loopback()
    if init_method is not None and init_method not in _ENVIRONMENT:
        _rendezvous_at(init_method, place, backend, timeout)
    elif place is None or place.world == 1:  # one process needs no rendezvous, hence no port
        if place is None:
            _warn_of_an_allocation()
        init_default_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)
    elif over_mpi and place.port is None and port in (None, DEFAULT_PORT):
        _rendezvous_by_mpi(place, backend, timeout)
    else:
        _rendezvous(_with_master(place, port), backend, timeout, report_after)
    atexit.register(end_distributed)
    if not os.environ.get("LOCAL_RANK") and dist.get_world_size() > 1:
        _learn_local_rank()


def discover(port: int = DEFAULT_PORT) -> None:
    """Set `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `MASTER_ADDR` and `MASTER_PORT` from the launcher's variables.

    Without a launcher, the values are those of a single process. If the launcher of several processes gives no local
    rank, `LOCAL_RANK` stays unset until `init_distributed` finds it: with 0, all ranks of a host would use one GPU.

    Args:
        port: Value of `MASTER_PORT` if the environment has none.

    Raises:
        CommunicationError: the environment is incomplete or invalid, or the address of rank 0 cannot be determined.
    """
    place = _rank_environment(True, None, -1, -1) or RankEnvironment("nobody", 0, 1, 0)
    os.environ.update(RANK=str(place.rank), WORLD_SIZE=str(place.world))
    if place.world == 1 and not os.environ.get("LOCAL_RANK"):
        os.environ["LOCAL_RANK"] = "0"
    if place.world == 1 and place.master is None:
        place = replace(place, master=HERE)
    _with_master(place, port)


def _rank_environment(
    discover: bool, init_method: str | None, rank: int, world_size: int, *, over_mpi: bool = False
) -> RankEnvironment | None:
    """Return the rank environment of this process, after writing it to the environment variables of torchrun.

    None if there is no launcher, or if the URL `init_method` contains rank and world size.
    """
    if rank >= 0 and world_size > 0:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
    elif init_method is not None and init_method not in _ENVIRONMENT and "?" in init_method:
        return None  # the URL contains rank and world size
    place = rank_environment(os.environ, others=discover)
    if over_mpi:
        place = mpi_rank_environment(place)
    if place is None:
        return None
    if place.warning:
        logger.warning("%s", place.warning)
    os.environ.update(RANK=str(place.rank), WORLD_SIZE=str(place.world))
    if place.local_rank is not None:
        os.environ["LOCAL_RANK"] = str(place.local_rank)
    if place.local_world is not None:
        os.environ["LOCAL_WORLD_SIZE"] = str(place.local_world)
    if place.source == "Azure ML":
        # The docker bridge of Azure ML containers does not reach other nodes.
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "^docker0,lo")
    return place


def _with_master(place: RankEnvironment, port: int | None) -> RankEnvironment:
    """Return `place` with the address and port of rank 0, after setting `MASTER_ADDR` and `MASTER_PORT`.

    The address comes from MPI if the environment does not have it.
    """
    if place.source == "the environment":
        missing = [] if place.master is not None else ["MASTER_ADDR"]
        if place.port is None and port is None:
            missing.append("MASTER_PORT")
        if missing:
            raise CommunicationError(half(missing))
    if place.master is None:
        place = replace(place, master=_master_by_mpi(place))
    # A port derived from Slurm's job id is only a default: an explicit argument overrides it.
    reckoned = place.source == "Slurm" and "MASTER_PORT" not in os.environ
    if place.port is None or (reckoned and port not in (None, DEFAULT_PORT)):
        place = replace(place, port=port or DEFAULT_PORT)
    if place.one_host and not _agent_keeps_store():
        place = replace(place, master=HERE)  # rank 0 listens at the loopback address, whatever `MASTER_ADDR` was
    os.environ.update(MASTER_ADDR=str(place.master), MASTER_PORT=str(place.port))
    return place


def _agent_keeps_store() -> bool:
    """Return True if the launcher serves the rendezvous store (torchrun, `windlass run`)."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _master_by_mpi(place: RankEnvironment) -> str:
    """Return rank 0's address, which rank 0 broadcasts over MPI."""
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise CommunicationError(
            f"{place.source} started {place.world} ranks on several hosts and gives no address of rank 0: set "
            "MASTER_ADDR to its host on every rank (mpirun -x MASTER_ADDR=host, srun --export=ALL,MASTER_ADDR=host), "
            f"or install mpi4py; its import failed: {error}"
        ) from error
    world = MPI.COMM_WORLD
    if (world.Get_rank(), world.Get_size()) != (place.rank, place.world):
        raise CommunicationError(
            f"{place.source} sets rank {place.rank} of {place.world}, mpi4py reports {world.Get_rank()} of "
            f"{world.Get_size()}: mpi4py was built for another MPI; set MASTER_ADDR instead"
        )
    return str(world.bcast(_own_address() if place.rank == 0 else None, root=0))


def _own_address() -> str:
    """Return the IPv4 address of this host's outgoing interface, else the host name. No packet is sent for this."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("10.255.255.255", 1))
            return str(probe.getsockname()[0])
        except OSError:  # no IPv4 route
            return socket.gethostname()


def _rendezvous(place: RankEnvironment, backend: str, timeout: timedelta, report_after: float | None) -> None:
    store: Any
    try:
        with _report_missing_ranks(report_after):
            if place.one_host and not _agent_keeps_store():
                with require_own_peers(_STORE_CONNECTION):
                    store = loopback_store(str(place.master), int(place.port or 0), place.rank, place.world, timeout)
                init_default_group(backend, store=store, rank=place.rank, world_size=place.world, timeout=timeout)
            elif _agent_keeps_store():
                with require_own_peers(_STORE_CONNECTION):
                    store = _launcher_store((str(place.master), int(place.port or 0)), timeout)
                init_default_group(backend, store=store, rank=place.rank, world_size=place.world, timeout=timeout)
            else:
                init_default_group(backend, timeout=timeout)
    except CommunicationError:
        raise
    except (RuntimeError, ValueError) as error:  # torch.distributed raises different classes for different failures
        first = str(error).strip().splitlines()[0]
        fix = "check RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT on every rank, and that rank 0 can be reached there"
        if "EADDRINUSE" in first:
            fix = "another process listens there: give each job a MASTER_PORT of its own"
        raise CommunicationError(
            f"rank {place.rank} of {place.world} could not connect to the others at {place.master}:{place.port}: "
            f"{first}; {fix}"
        ) from error


def _launcher_store(where: tuple[str, int], timeout: timedelta) -> PrefixStore:
    """Return the launcher's store, below a prefix under which this process has written nothing yet.

    Ranks find each other by addresses in the store. A default group that is created again, after a failure or after
    `destroy_process_group`, would find the addresses of closed sockets there, because the launcher keeps the store. So
    the store has a number, and a rank that has used the current number counts it up.
    """
    store: Any = next(rendezvous("env://", timeout=timeout))[0]
    store.set_timeout(timeout)
    last = _last_numbers.get(where)
    if last is not None:
        store.compare_set(_GROUP_NUMBER, last, str(int(last or 0) + 1))  # no effect if another rank has done so
    number = _last_numbers[where] = store.get(_GROUP_NUMBER).decode() if store.check([_GROUP_NUMBER]) else ""
    return PrefixStore(f"default_pg{number}", store)


def _rendezvous_by_mpi(place: RankEnvironment, backend: str, timeout: timedelta) -> None:
    """Create the default group with a store whose address MPI broadcasts, so that no port needs to be configured."""
    with require_own_peers(_STORE_CONNECTION):
        store, address, port = store_over_mpi(place, place.master or _own_address(), timeout)
    os.environ.update(MASTER_ADDR=address, MASTER_PORT=str(port))
    init_default_group(backend, store=store, rank=place.rank, world_size=place.world, timeout=timeout)


def _rendezvous_at(url: str, place: RankEnvironment | None, backend: str, timeout: timedelta) -> None:
    rank, world = (-1, -1) if place is None else (place.rank, place.world)
    try:
        init_default_group(backend, init_method=url, rank=rank, world_size=world, timeout=timeout)
    except CommunicationError:
        raise
    except (RuntimeError, ValueError) as error:  # torch.distributed raises different classes for different failures
        raise CommunicationError(
            f"the ranks could not connect at init_method = {url!r} (rank {rank} of {world}; -1: not given): "
            f"{str(error).strip().splitlines()[0]}; check the URL, and rank and world_size or RANK and WORLD_SIZE"
        ) from error


def _learn_local_rank() -> None:
    """Set `LOCAL_RANK` to the number of lower ranks on this host, found in the rendezvous store; select the GPU."""
    store = PrefixStore("windlass hosts", _get_default_store())
    rank = dist.get_rank()
    store.set(str(rank), host_name())
    before = [store.get(str(other)).decode() for other in range(rank)]
    os.environ["LOCAL_RANK"] = str(before.count(host_name()))
    if torch.cuda.is_available():
        torch.cuda.set_device(local_device())


def host_name() -> str:
    """Return an identifier of this host: its name and boot id, because containers of several hosts can share a name."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # not Linux
        boot = ""
    return f"{socket.gethostname()} {boot}"


@contextmanager
def _report_missing_ranks(seconds: float | None) -> Iterator[None]:
    if seconds is None or int(os.environ["WORLD_SIZE"]) == 1:
        yield
        return
    met = threading.Event()
    threading.Thread(target=_wait_for_all_ranks, args=(seconds, met), name="windlass-arrivals", daemon=True).start()
    try:
        yield
    finally:
        met.set()


def _wait_for_all_ranks(seconds: float, met: threading.Event) -> None:
    """Register this rank in the store. If the rendezvous takes too long, log the ranks that have not registered."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    missing = [0]  # if the store cannot be reached: rank 0 usually serves it
    try:
        store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=seconds), wait_for_workers=False)
        arrivals = PrefixStore(f"windlass arrivals {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        arrivals.set(str(rank), "")
        if met.wait(seconds):
            return
        missing = [other for other in range(world) if not arrivals.check([str(other)])]
        if rank != min(set(range(world)) - set(missing)):
            return  # only one rank logs
    except (RuntimeError, ValueError):  # torch raises different classes for the failures of a store
        if met.is_set():
            return
    if missing:
        logger.error(
            "rank %d has waited in initialize for %.0f s; missing ranks: %s (of %d); see their output",
            rank,
            seconds,
            ", ".join(map(str, missing)),
            world,
        )
    else:
        logger.error(
            "rank %d has waited in initialize for %.0f s: all %d ranks have started, but cannot connect to each other; "
            "check the network",
            rank,
            seconds,
            world,
        )


def _warn_of_an_allocation() -> None:
    """Warn if the Slurm allocation has several tasks, but srun did not start this process.

    The process trains alone, perhaps by mistake.
    """
    tasks = os.environ.get("SLURM_NTASKS", "1")
    if tasks not in ("", "0", "1"):
        logger.warning(
            "SLURM_NTASKS is %s, but srun did not start this process: it trains alone; start it with srun or "
            "`windlass run`",
            tasks,
        )


def end_distributed() -> None:
    """Destroy the default group, if there is one.

    A gloo group that exists at interpreter shutdown occasionally aborts the process.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
