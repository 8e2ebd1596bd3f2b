"""From a launcher's environment to a process group."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, TCPStore  # type: ignore[attr-defined]

from windlass.base.device import local_device
from windlass.base.errors import CommunicationError
from windlass.base.log import logger

DEFAULT_TIMEOUT = timedelta(minutes=30)
# How MPI and Slurm tell the processes that they start how many there are.
_COUNTS_OF_OTHERS = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")


def init_distributed(
    backend: str | None = None,
    timeout: timedelta = DEFAULT_TIMEOUT,
    *,
    port: int | None = None,
    report_after: float | None = None,
) -> None:
    """Start the default process group unless there is one.

    Reads `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `MASTER_ADDR` and `MASTER_PORT` as torchrun sets them. Without them the
    group is this process alone, through no socket at all.

    Args:
        backend: torch's name; by default gloo for CPU tensors and, where CUDA is there, nccl for its tensors.
        timeout: after which a collective that a peer never joined fails.
        port: used for `MASTER_PORT` when the environment has none.
        report_after: seconds after which it is said who has not come; None: never.

    Raises:
        CommunicationError: the environment is half there, or the ranks could not meet.
    """
    if dist.is_initialized():
        return
    if backend is None:
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(local_device())
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        _warn_of_other_launchers()
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)
        atexit.register(_end)
        return
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR") if name not in os.environ]
    if "MASTER_PORT" not in os.environ and port is not None:
        os.environ["MASTER_PORT"] = str(port)
    if "MASTER_PORT" not in os.environ:
        missing.append("MASTER_PORT")
    if missing:
        raise CommunicationError(
            f"the environment names some ranks but not all it takes: {', '.join(missing)} is missing; "
            "start the script with `windlass run --nproc N script.py` or torchrun"
        )
    try:
        with _saying_who_is_missing(report_after):
            dist.init_process_group(backend, timeout=timeout)
    except (RuntimeError, ValueError) as error:  # torch.distributed has kinds of its own for every way to fail
        place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise CommunicationError(
            f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} could not meet the others at {place}: "
            f"{str(error).strip().splitlines()[0]}; check RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT on every rank, "
            "and that rank 0 can be reached there"
        ) from error
    atexit.register(_end)


@contextmanager
def _saying_who_is_missing(seconds: float | None) -> Iterator[None]:
    if seconds is None or int(os.environ["WORLD_SIZE"]) == 1:
        yield
        return
    met = threading.Event()
    threading.Thread(target=_await_all, args=(seconds, met), name="windlass-arrivals", daemon=True).start()
    try:
        yield
    finally:
        met.set()


def _await_all(seconds: float, met: threading.Event) -> None:
    """Leave word that this rank is here; if the ranks do not meet in time, say who left none."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    missing = [0]  # who keeps the store, as a rule
    try:
        store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=seconds), wait_for_workers=False)
        arrivals = PrefixStore(f"windlass arrivals {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        arrivals.set(str(rank), "")
        if met.wait(seconds):
            return
        missing = [other for other in range(world) if not arrivals.check([str(other)])]
        if rank != min(set(range(world)) - set(missing)):
            return  # one says it
    except (RuntimeError, ValueError):  # torch has kinds of its own for every way in which a store fails
        if met.is_set():
            return
    who = ", ".join(map(str, missing)) or "nobody, and yet they do not meet: look at the network"
    logger.error(
        "rank %d waits in initialize for %.0f s now; not there yet: %s (of %d ranks)", rank, seconds, who, world
    )


def _warn_of_other_launchers() -> None:
    """Processes that another launcher started would each train alone, which nobody notices by the loss."""
    for name in _COUNTS_OF_OTHERS:
        if os.environ.get(name, "1") not in ("", "0", "1"):
            logger.warning(
                "%s is %s, but RANK and WORLD_SIZE are not set: this process trains alone. Have each host start "
                "its ranks with torchrun, or set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT",
                name,
                os.environ[name],
            )
            return


def _end() -> None:
    """At exit: a gloo group that is still there when the interpreter goes aborts the process now and then."""
    if dist.is_initialized():
        dist.destroy_process_group()
