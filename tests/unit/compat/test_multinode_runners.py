"""Tests of the pdsh, MPI and Slurm command lines that scripts build."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from windlass.compat import multinode_runners as mn
from windlass.compat.deepspeed_command import parse_args
from windlass.launch.hostfile import encode_world_info

POOL = {"worker-0": 2, "worker-1": 2}
SLOTS = {"worker-0": [0, 1], "worker-1": [0, 1]}


def _runner(kind: Any, *flags: str) -> Any:
    args = parse_args([*flags, "train.py", "--name", "two words"])
    info = encode_world_info(POOL)
    return kind(args, info) if kind is mn.PDSHRunner else kind(args, info, POOL)


def test_pdsh_starts_one_agent_on_each_host() -> None:
    environment: dict[str, str] = {}
    runner = _runner(mn.PDSHRunner, "--ssh_port", "2222", "--master_addr", "worker-0")
    runner.add_export("NAME", "a (b)")
    command, kill, same = runner.get_cmd(environment, POOL)
    assert same is environment
    assert environment == {"PDSH_RCMD_TYPE": "ssh", "PDSH_SSH_ARGS_APPEND": "-p 2222"}
    assert command[:7] == ["pdsh", "-S", "-f", "1024", "-w", "worker-0,worker-1", 'export NAME="a (b)"; ']
    assert "--node_rank=%n" in command and "--master_addr=worker-0" in command
    assert command[-3:] == ["train.py", "--name", '"two words"']
    assert kill[:6] == command[:6] and kill[6] == "pkill -f " and "deepspeed.launcher.launch" in kill[7]


@pytest.mark.parametrize("flag", ["-mca", "--mca"])
def test_openmpi_uses_the_given_interface(flag: str) -> None:
    plain = _runner(mn.OpenMPIRunner).get_cmd({}, POOL)
    assert plain[:3] == ["mpirun", "-n", "4"] and "eth0" in plain
    assert plain[-6:] == ["UCX_TLS=tcp", sys.executable, "-u", "train.py", "--name", "two words"]
    named = _runner(mn.OpenMPIRunner, "--launcher_args", f"{flag} btl_tcp_if_include eth1").get_cmd({}, POOL)
    assert "eth0" not in named and "eth1" in named


def test_hydra_sets_the_variables_of_ranks() -> None:
    command = _runner(mn.MPICHRunner).get_cmd({}, POOL)
    assert command[:5] == ["mpirun", "-n", "4", "-ppn", "2"]
    assert command[command.index("WORLD_SIZE") + 1] == "4" and command[command.index("-hosts") + 1] == ",".join(POOL)
    command = _runner(mn.IMPIRunner).get_cmd({}, POOL)
    assert command.count("-n") == 4 and command.count(":") == 3
    assert [command[at + 1] for at, word in enumerate(command) if word == "LOCAL_RANK"] == ["0", "1", "0", "1"]


def test_slurm_counts_the_remaining_slots() -> None:
    runner = _runner(mn.SlurmRunner, "--include", "worker-1", "--num_gpus", "1")
    command = runner.get_cmd({}, {"worker-1": [0]})
    assert command[:3] == ["srun", "-n", "1"]
    assert command[command.index("--nodelist") + 1] == "worker-1" and "--gpus-per-node" in command
    assert _runner(mn.SlurmRunner).get_cmd({}, SLOTS)[2] == _runner(mn.SlurmRunner).get_cmd({}, POOL)[2] == "4"
    with pytest.raises(ValueError, match="cannot choose slots"):
        runner.get_cmd({}, {"worker-0": [1]})
    with pytest.raises(ValueError, match="same number of slots"):
        runner.get_cmd({}, {"worker-0": [0, 1], "worker-1": [0]})


def test_mvapich_writes_its_hostfile() -> None:
    runner = _runner(mn.MVAPICHRunner)
    hosts = Path(runner.get_cmd({}, POOL)[6])
    try:
        assert hosts.read_text().split() == list(POOL)
    finally:
        hosts.unlink()


@pytest.mark.parametrize("kind", [mn.OpenMPIRunner, mn.MPICHRunner, mn.IMPIRunner, mn.MVAPICHRunner])
def test_mpi_refuses_unsupported_selections(kind: Any) -> None:
    with pytest.raises(ValueError, match="--include"):
        _runner(kind, "--include", "worker-1")
    with pytest.raises(ValueError, match="--num_gpus"):
        _runner(kind, "--num_gpus", "1")
