"""Function that runs a client's script over ranks as users do, with windlass in the place of `deepspeed`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from windlass.compat.stand_in_path import stand_in_environment

SCRIPTS = Path(__file__).parent / "scripts"
ROOT = Path(__file__).parents[2]


def start(script: str | Path, *arguments: object, ranks: int = 1, stands_in: bool = True, seconds: float = 300) -> str:
    """Run a script over `ranks` ranks (0: by Python, without launcher) and return its output.

    Raises:
        AssertionError: the script failed. The message holds the end of its output.
    """
    python = [sys.executable] if ranks == 0 else [sys.executable, "-m", "windlass", "run", "--nproc", str(ranks)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), env.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    if stands_in:
        env |= stand_in_environment(env)
    command = [*python, str(SCRIPTS / script), *map(str, arguments)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=seconds)
    said = done.stdout + done.stderr
    assert done.returncode == 0, f"{' '.join(command)} ended with {done.returncode}:\n{said[-6000:]}"
    return said
