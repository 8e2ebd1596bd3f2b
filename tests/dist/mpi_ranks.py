"""Ranks that MPI connects: the warm workers of the harness, which join a job of MPICH's process manager.

`mpiexec -pmi-port` starts a shell for each rank, which prints its environment variables and waits. The workers, which
have already imported torch, take these variables and connect to the process manager in place of the shells.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.dist.harness import Pool

_SHELL = 'echo "$PMI_ID $PMI_PORT"; read line'


def mpiexec() -> str:
    """Return MPICH's `mpiexec` of this environment. The test skips if there is none."""
    pytest.importorskip("mpi4py")
    beside = Path(sys.executable).with_name("mpiexec")
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if found is None or "HYDRA" not in subprocess.run([found, "--version"], capture_output=True, text=True).stdout:
        pytest.skip("MPICH is not installed")
    return found


class MpiWorld:
    """World of ranks, connected by MPI as long as this object lives. Jobs run in it one after the other."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._manager = subprocess.Popen(
            [mpiexec(), "-pmi-port", "-n", str(world), "sh", "-c", _SHELL],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._manager.stdout is not None
        port = ""
        for _ in range(world):
            line = self._manager.stdout.readline()
            found = re.fullmatch(r"\d+ (\S+:\d+)\n", line)
            assert found, line
            port = found[1]
        self._port = port
        self._pool = Pool(world)

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 60.0, **env: str) -> list[Any]:
        """Run `function(*args)` on every rank with the back end mpi. Return the results by rank."""
        return self._pool.run(
            _as_mpi_rank, self.world, function, args, env={"PMI_PORT": self._port, **env}, timeout=timeout
        )

    def close(self) -> None:
        self._manager.kill()
        self._manager.wait()
        for pipe in (self._manager.stdin, self._manager.stdout):
            assert pipe is not None
            pipe.close()
        self._pool.end()


def _as_mpi_rank(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    import torch.distributed as dist

    import windlass

    timeout = dist.distributed_c10d._get_default_timeout("gloo")
    dist.destroy_process_group()  # the group that the harness made
    os.environ["PMI_ID"] = os.environ["RANK"]  # read by MPI at its start, in the first job
    windlass.init_distributed("mpi", timeout=timeout)
    return function(*args)
