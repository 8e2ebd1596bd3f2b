"""Functions that run a client's script over ranks, with windlass as `deepspeed`."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.compat.forked_ranks import ForkingServer
from windlass.compat.stand_in_path import stand_in_environment

SCRIPTS = Path(__file__).parent / "scripts"
ROOT = Path(__file__).parents[2]
_servers: dict[bool, ForkingServer] = {}


def start(script: str | Path, *arguments: object, ranks: int = 1, stands_in: bool = True, seconds: float = 300) -> str:
    """Run a script over `ranks` ranks (0: without a launcher's variables) and return its output.

    Ranks are forked from a process that has imported the clients; `launch` starts them as users do.

    Raises:
        AssertionError: the script failed. The message holds the end of its output.
    """
    if stands_in not in _servers:
        _servers[stands_in] = ForkingServer(_environment(stands_in))
    succeeded, said = _servers[stands_in].run(SCRIPTS / script, arguments, ranks, seconds)
    assert succeeded, f"{script} {' '.join(map(str, arguments))} on {ranks} ranks failed:\n{said[-6000:]}"
    return said


def launch(script: str | Path, *arguments: object, ranks: int = 1, stands_in: bool = True, seconds: float = 300) -> str:
    """Run a script like `start`, but by `windlass run`, as users do (0 ranks: by Python, without launcher).

    Raises:
        AssertionError: the script failed. The message holds the end of its output.
    """
    python = [sys.executable] if ranks == 0 else [sys.executable, "-m", "windlass", "run", "--nproc", str(ranks)]
    command = [*python, str(SCRIPTS / script), *map(str, arguments)]
    done = subprocess.run(command, env=_environment(stands_in), capture_output=True, text=True, timeout=seconds)
    said = done.stdout + done.stderr
    assert done.returncode == 0, f"{' '.join(command)} ended with {done.returncode}:\n{said[-6000:]}"
    return said


def _environment(stands_in: bool) -> dict[str, str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), env.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return env | stand_in_environment(env) if stands_in else env


def require_package(name: str) -> None:
    """Skip the calling module if a client is not installed, without importing it, which takes seconds."""
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed", allow_module_level=True)
