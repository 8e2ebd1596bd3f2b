"""Tests that ranks of one host listen only on its loopback interface, for four launchers."""

from __future__ import annotations

import ipaddress
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ports import free_port

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

SCRIPT = """
import json, os, sys
import torch.distributed as dist

from tests.process.listening_sockets import listening

if "torch" in sys.argv:
    dist.init_process_group("gloo")
else:
    import windlass
    windlass.init_distributed()
dist.new_group(list(range(dist.get_world_size())))
dist.barrier()
found = [None] * dist.get_world_size()
dist.all_gather_object(found, listening(os.getpid()))
if dist.get_rank() == 0:
    print("LISTENING " + json.dumps(found))
dist.destroy_process_group()
"""


def outward() -> list[str]:
    """Return a command prefix that runs a program under a host name with an external address, as on most hosts.

    The prefix is empty if the host name cannot be set here.
    """
    named = subprocess.run(["hostname", "-I"], capture_output=True, text=True)
    address = next(iter(named.stdout.split()), None)
    spaces = ["unshare", "--user", "--map-root-user", "--uts"]
    tried = shutil.which("unshare") and subprocess.run([*spaces, "hostname", address or ""], capture_output=True)
    if not address or not tried or tried.returncode:
        return []  # keep the host's name
    return [*spaces, "sh", "-c", f'hostname {address}; exec "$@"', "sh"]


def addresses(output: str) -> list[str]:
    text = next(line for line in output.splitlines() if "LISTENING " in line)
    return [item for rank in json.loads(text.partition("LISTENING ")[2]) for item in rank]


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def run(commands: list[list[str]], environments: list[dict[str, str]]) -> str:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("GLOO_", "MASTER_"))}
    env |= {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            [*outward(), *command], env={**env, **more}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for command, more in zip(commands, environments, strict=True)
    ]
    try:
        text = [process.communicate(timeout=120)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert all(process.returncode == 0 for process in started), "\n".join(text)
    return "\n".join(text)


@LINUX
@pytest.mark.parametrize(
    "starter",
    ["windlass", *(pytest.param(name, marks=pytest.mark.slow) for name in ("slurm", "torchrun", "deepspeed"))],
)
def test_ranks_of_one_host_listen_at_loopback(starter: str, script: Path) -> None:
    python = sys.executable
    port = free_port()
    commands = {
        "windlass": [[python, "-m", "windlass", "run", "--nproc", "2", str(script), "torch"]],
        "torchrun": [[python, "-m", "torch.distributed.run", "--nproc_per_node", "2", str(script)]],
        "deepspeed": [
            [python, "-c", "from windlass.compat.console_commands import deepspeed; deepspeed()", "--num_gpus", "2",
             "--master_port", str(port), str(script)]
        ],
        "slurm": [[python, str(script)]] * 2,
    }[starter]  # fmt: skip
    environments = [
        {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_STEP_NUM_TASKS": "2",
         "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_ID": "1", "SLURM_JOB_ID": "77", "MASTER_PORT": str(port)}
        if starter == "slurm" else {}
        for rank in range(len(commands))
    ]  # fmt: skip
    result = addresses(run(commands, environments))
    assert result and all(ipaddress.ip_address(item.split()[0]).is_loopback for item in result), result
    keeps_store = starter in ("deepspeed", "slurm")
    assert (f"127.0.0.1 {port}" in result) == keeps_store
