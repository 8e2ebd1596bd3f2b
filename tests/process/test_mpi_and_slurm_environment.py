"""Test that processes with the variables of Open MPI, of Slurm or of pods alone form a process group."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from tests.ports import free_port

SCRIPT = """
import os, torch
from windlass.compat import collectives as comm
comm.init_distributed(distributed_port={port}, verbose=False)
mine = torch.tensor([comm.get_rank() + 1])
comm.all_reduce(mine, comm.ReduceOp.PROD)
assert comm.get_local_rank() == int(os.environ["LOCAL_RANK"])
met = (comm.get_rank(), comm.get_world_size(), os.environ["LOCAL_RANK"], mine.item())
os.write(1, " ".join(map(str, (kind, "met", *met, "\\n"))).encode())  # one write, since ranks share the output
comm.barrier()
"""
# Program that runs each script with its variables in a forked child.
FORKS = """
import json, os, sys, traceback
import torch, torch.distributed
from windlass.compat import collectives
ranks = json.load(sys.stdin)
children = []
for kind, variables, script in ranks:
    child = os.fork()
    if child == 0:
        os.environ.update(variables)
        code = 1
        try:
            exec(script, {"kind": kind})
            code = 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    children.append(child)
codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
sys.exit(any(codes))
"""
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL", "MASTER", "OMPI", "PMI", "SLURM", "MPI", "CROSS", "GROUP", "TORCHELASTIC")


def open_mpi(rank: int) -> dict[str, str]:
    values = {"RANK": rank, "SIZE": 2, "LOCAL_RANK": rank, "LOCAL_SIZE": 2}
    return {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in values.items()}


def slurm(rank: int) -> dict[str, str]:
    values = {"PROCID": rank, "NTASKS": 2, "LOCALID": rank, "STEP_NODELIST": "localhost", "JOB_ID": os.getpid()}
    return {f"SLURM_{name}": str(value) for name, value in values.items()}


def pods(rank: int) -> dict[str, str]:
    """Return an environment without a local rank: the ranks compute it once all have connected."""
    return {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}


def test_two_processes_rendezvous() -> None:
    """All six ranks are forked from a process that has imported torch, which takes seconds."""
    kinds = (open_mpi, slurm, pods)
    # Slurm's port is computed from the job id
    ports = [29500 if kind is slurm else free_port() for kind in kinds]
    ranks = [
        (kind.__name__, kind(rank), SCRIPT.format(port=port))
        for kind, port in zip(kinds, ports, strict=True)
        for rank in range(2)
    ]
    plain = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    done = subprocess.run(
        [sys.executable, "-c", FORKS],
        input=json.dumps(ranks),
        env={**plain, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    met = sorted(line for line in done.stdout.splitlines() if "met" in line)
    assert met == sorted(f"{kind.__name__} met {rank} 2 {rank} 2 " for kind in kinds for rank in range(2))
