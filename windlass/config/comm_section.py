"""The `comm` and `comms_logger` sections: transport of the collectives, and their log."""

from __future__ import annotations

from typing import Literal

from windlass.config.config_section import ConfigSection, Names
from windlass.config.key_status import honoured


class CommConfig(ConfigSection):
    """Process groups, and the transport of windlass's own collectives."""

    backend: Literal["auto", "gloo", "nccl", "mpi"] = honoured("auto", windlass_only=True)
    """Back end of the process groups, if the script has not initialized torch.distributed. auto: gloo for CPU tensors,
    nccl for GPU tensors; mpi: the cluster's MPI, through mpi4py, for ranks that mpirun or srun started."""
    transport: Literal["auto", "shm", "gloo", "nccl", "mpi"] = honoured("auto", windlass_only=True)
    """Transport of windlass's own collectives. shm: shared memory between CPU ranks of one host; gloo, nccl: process
    groups of torch; mpi: needs `backend: mpi`; auto: the fastest transport that works on all ranks. The environment
    variable WINDLASS_TRANSPORT overrides the key."""


class CommsLoggerConfig(ConfigSection):
    """Log of the collectives that a script calls through `deepspeed.comm` or `windlass.compat.collectives`, and of the
    bytes that the engines move. `log_summary()` prints the log."""

    enabled: bool = honoured(False)
    """Record collectives. If false, nothing is recorded, whatever the values of the other keys."""
    prof_all: bool = honoured(True)
    """Record every collective; false: only those in `prof_ops` and calls with `prof=True`."""
    prof_ops: Names = honoured(list)
    """Names of the collectives, or `log_name` values of the calls, to record if prof_all is false."""
    verbose: bool = honoured(False)
    """Log a line for each recorded collective when it ends."""
    debug: bool = honoured(False)
    """Keep separate records for the functions that call a collective."""
