"""Tests of the exact command lines of other launchers, and of a rank that one of them started."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from windlass.comm.rank_environment import RankEnvironment
from windlass.launch import external_rank
from windlass.launch.external_rank import decode_plan, encode_plan, external_rank_environment, torchrun_environment
from windlass.launch.launch_errors import LaunchError
from windlass.launch.launch_plan import LaunchPlan
from windlass.launch.launcher_backends import LauncherOptions, build_launcher_command
from windlass.launch.program import Program
from windlass.launch.rank_placement import Host

PLAN = LaunchPlan(
    Program(("it's a script.py", "$HOME", "a b"), passes_local_rank=True),
    (Host("a", (0, 1)), Host("b", (0, 1))),
    env={"NCCL_DEBUG": "INFO", "SECRET": "pass word"},
    cwd="/some where",
    master_addr="a",
    master_port=29500,
    run_id="run",
)
UNEQUAL = replace(PLAN, hosts=(Host("a", (0, 1)), Host("b", (0,))))
RANK = [sys.executable, "-u", "-m", "windlass.launch.external_rank", encode_plan(replace(PLAN, env={}))]


@pytest.mark.parametrize(
    ("launcher", "words", "more"),
    [
        (
            "openmpi",
            "mpirun -n 4 --host a:2,b:2 --map-by slot --bind-to none --mca x 1 -x NCCL_DEBUG -x SECRET",
            {},
        ),
        ("mpich", "mpirun -n 4 -hosts a:2,b:2 --mca x 1 -genvlist NCCL_DEBUG,SECRET", {}),
        ("impi", "mpirun -n 4 -ppn 2 -hosts a,b --mca x 1 -genvlist NCCL_DEBUG,SECRET", {"I_MPI_PIN": "0"}),
        (
            "mvapich",
            "mpirun -np 4 -ppn 2 -hosts a,b --mca x 1 -genvlist MV2_CUDA_USE_NAIVE,MV2_DEBUG_SHOW_BACKTRACE,"
            "MV2_ENABLE_AFFINITY,MV2_INTER_ALLGATHER_TUNING,MV2_SMP_USE_CMA,MV2_SUPPORT_DL,MV2_USE_CUDA,NCCL_DEBUG,SECRET",
            {
                **{"MV2_SMP_USE_CMA": "0", "MV2_DEBUG_SHOW_BACKTRACE": "1", "MV2_USE_CUDA": "1", "MV2_SUPPORT_DL": "1"},
                **{"MV2_ENABLE_AFFINITY": "0", "MV2_INTER_ALLGATHER_TUNING": "5", "MV2_CUDA_USE_NAIVE": "0"},
            },
        ),
        (
            "slurm",
            "srun -N 2 -n 4 --ntasks-per-node=2 --nodelist=a,b --distribution=block --kill-on-bad-exit=1 --export=ALL "
            "--mca x 1",
            {},
        ),
    ],
)
def test_command_lines(launcher: str, words: str, more: dict[str, str]) -> None:
    result = build_launcher_command(launcher, PLAN, LauncherOptions("--mca x '1'"))
    assert result.argv == [*words.split(), *RANK]
    assert result.env == {**PLAN.env, **more}
    results = str(decode_plan(result.argv[-1])) + " ".join(result.argv)
    assert "pass word" not in results, "who lists processes would see it"


def test_the_command_line_of_pdsh(tmp_path: Path) -> None:
    result = build_launcher_command(
        "pdsh", PLAN, LauncherOptions("-l me", 2222, "/v env/activate", agent_pythonpath="/100%", pdsh_ssh_args="-F c")
    )
    assert result.argv[:-1] == ["pdsh", "-S", "-b", "-f", "1024", "-w", "a,b", "-l", "me"]
    assert result.env == {"PDSH_RCMD_TYPE": "ssh", "PDSH_SSH_ARGS_APPEND": "-F c -p 2222"}
    text = result.argv[-1].replace("%n", "1").replace("%%", "%")  # pdsh replaces these
    inner = subprocess.run(["sh", "-c", f"{text.replace('exec sh -c', 'printf %s')}"], capture_output=True, text=True)
    agent = f"exec {sys.executable} -u -P -m windlass.launch.pdsh_agent 1 {encode_plan(PLAN)}"
    place = "cd '/some where' && "
    assert inner.stdout == f"{place}. '/v env/activate' && {place}export PYTHONPATH=/100% && {agent}"


def test_unsupported_options_are_refused_by_backends() -> None:
    for launcher in ("impi", "mvapich", "slurm"):
        with pytest.raises(
            LaunchError, match=f"--launcher {launcher} needs equally many slots on every host, and there are a 2"
        ):
            build_launcher_command(launcher, UNEQUAL, LauncherOptions())
    assert "a:2,b:1" in build_launcher_command("mpich", UNEQUAL, LauncherOptions()).argv
    with pytest.raises(LaunchError, match="--launcher slurm cannot choose slots 1,3 of b; leave out whole hosts"):
        build_launcher_command("slurm", replace(PLAN, hosts=(Host("a", (0, 1)), Host("b", (1, 3)))), LauncherOptions())
    with pytest.raises(LaunchError, match="--ssh_port and --venv_script do not apply to --launcher mpich"):
        build_launcher_command("mpich", PLAN, LauncherOptions(ssh_port=1))
    with pytest.raises(LaunchError, match="is not a host name"):
        build_launcher_command("openmpi", replace(PLAN, hosts=(Host("-x", (0,)),)), LauncherOptions())
    with pytest.raises(LaunchError, match='--launcher_args "\'": No closing quotation'):
        build_launcher_command("openmpi", PLAN, LauncherOptions("'"))
    assert "--gpus-per-node=2" in build_launcher_command("slurm", PLAN, LauncherOptions(num_gpus=2)).argv


def test_plan_round_trips() -> None:
    plan = replace(
        PLAN, hosts=(Host("a", (0, "GPU-1")),), bind_cores_to_rank=True, bind_core_list="1-3", signals=("SIGUSR1",)
    )
    assert decode_plan(encode_plan(plan)) == plan


SLURM = {
    **{"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "5", "SLURM_PROCID": "4", "SLURM_LOCALID": "1"},
    **{"SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "3,2", "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_JOB_ID": "77"},
}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        ({"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}, ("the environment", 1, 4, 1, None)),
        ({"RANK": "1", "WORLD_SIZE": "4"}, None),
        (
            {
                **{"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"},
                **{"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
            },
            ("Open MPI", 3, 4, 1, 2),
        ),
        (
            {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"},
            ("MPI (PMI)", 2, 4, 0, 2),
        ),
        (SLURM, ("Slurm", 4, 5, 1, 2)),
        ({**SLURM, "WORLD_SIZE": "9"}, ("Slurm", 4, 5, 1, 2)),
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, None),
        ({name: value for name, value in SLURM.items() if "STEP" not in name}, None),  # a batch script, outside a step
    ],
)
def test_rank_environment_of_other_launchers(environ: Mapping[str, str], expected: tuple[object, ...] | None) -> None:
    place = external_rank_environment(environ)
    actual = place and (place.source, place.rank, place.world, place.local_rank, place.local_world)
    assert actual == expected


def test_missing_slurm_variables_are_named() -> None:
    result = external_rank_environment(SLURM)
    assert result is not None
    assert torchrun_environment(result) == {
        **{"RANK": "4", "WORLD_SIZE": "5", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
        **{"MASTER_ADDR": "n1", "MASTER_PORT": "15077"},
    }
    given = external_rank_environment({**SLURM, "MASTER_ADDR": "x"})
    assert given is not None and torchrun_environment(given)["MASTER_ADDR"] == "x"
    assert torchrun_environment(RankEnvironment("Open MPI", 1, 2, 1, 2))["MASTER_ADDR"] == "127.0.0.1"
    with pytest.raises(LaunchError, match="Open MPI started rank 1 of 4 on several hosts, and MASTER_ADDR is not set"):
        torchrun_environment(RankEnvironment("Open MPI", 1, 4, 1, 2))


def test_plan_of_one_slurm_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process of a one-task Slurm step becomes a rank of the plan; `windlass run` there would start ranks."""
    plan = replace(PLAN, hosts=(Host("a", (0,)),), cwd=None)
    became: list[list[str]] = []
    for name in [name for name in os.environ if name.startswith(("SLURM_", "OMPI_", "PMI", "MV2_"))]:
        monkeypatch.delenv(name)
    for name, value in {**SLURM, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(external_rank, "_exec_command", lambda command, environment: became.append(command))
    external_rank.main(encode_plan(plan))
    assert became == [plan.program.argv_for_rank(0)]
