"""Tests that processes with only MPI's or Slurm's variables form a process group."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.ports import free_port

SCRIPT = """
import os, torch
from windlass.compat import collectives as comm
comm.init_distributed(distributed_port={port}, verbose=False)
mine = torch.tensor([comm.get_rank() + 1])
comm.all_reduce(mine, comm.ReduceOp.PROD)
assert comm.get_local_rank() == int(os.environ["LOCAL_RANK"])
print("met", comm.get_rank(), comm.get_world_size(), os.environ["LOCAL_RANK"], mine.item(), flush=True)
comm.barrier()
"""
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL", "MASTER", "OMPI", "PMI", "SLURM", "MPI", "CROSS", "GROUP", "TORCHELASTIC")


def open_mpi(rank: int) -> dict[str, str]:
    values = {"RANK": rank, "SIZE": 2, "LOCAL_RANK": rank, "LOCAL_SIZE": 2}
    return {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in values.items()}


def slurm(rank: int) -> dict[str, str]:
    values = {"PROCID": rank, "NTASKS": 2, "LOCALID": rank, "STEP_NODELIST": "localhost", "JOB_ID": os.getpid()}
    return {f"SLURM_{name}": str(value) for name, value in values.items()}


def pods(rank: int) -> dict[str, str]:
    """Return an environment without local rank, which is computed after all ranks have met."""
    return {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}


@pytest.mark.parametrize("variables", [open_mpi, slurm, pods])
def test_two_processes_rendezvous(variables: Callable[[int], dict[str, str]]) -> None:
    port = free_port() if variables is not slurm else 29500  # Slurm's port is computed from the job id
    plain = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT.format(port=port)],
            env={**plain, "OMP_NUM_THREADS": "1", **variables(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for rank, process in enumerate(ranks):
            output, errors = process.communicate(timeout=120)
            assert process.returncode == 0, errors
            assert f"met {rank} 2 {rank} 2" in output
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
