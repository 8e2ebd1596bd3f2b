"""Tests of `windlass run` and `deepspeed` as programs: output, cores, nodes that are started separately, MPI."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.dist.mpi_ranks import mpiexec
from tests.ports import free_port

ROOT = Path(__file__).parents[2]
RUN = [sys.executable, "-m", "windlass", "run"]
DEEPSPEED = [sys.executable, "-m", "windlass.compat.deepspeed_command"]
_OF_OTHERS = ("SLURM_", "OMPI_", "PMI", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "OMP_", "CUDA_VISIBLE")

TELLS = """
import json, os, sys, time
from pathlib import Path
names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_SIZE CROSS_RANK CROSS_SIZE MASTER_ADDR MASTER_PORT OMP_NUM_THREADS".split()
report = {"arguments": sys.argv[1:], "cores": sorted(os.sched_getaffinity(0))}
report |= {name: os.environ.get(name) for name in [*names, "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RUN_ID"]}
Path(f"tells.{os.environ['RANK']}").write_text(json.dumps(report))
print("said by", os.environ["RANK"])
print("whispered by", os.environ["RANK"], file=sys.stderr)
Path(f"done.{os.environ['RANK']}").touch()
if "fail" in sys.argv and os.environ["RANK"] == "1":
    while not Path("done.0").exists():  # a failure would end it before it has printed everything
        time.sleep(0.01)
    sys.exit(9)
"""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="binds ranks to cores")


@pytest.fixture
def program(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    (tmp_path / "script.py").write_text(TELLS)

    def call(*words: str, environ: dict[str, str] | None = None, **options: int) -> subprocess.CompletedProcess[str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(_OF_OTHERS)}
        env = {**inherited, "PYTHONPATH": str(ROOT), **(environ or {})}
        return subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, env=env, timeout=120)

    return call


def read_records(folder: Path) -> list[dict[str, object]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("tells.*"))]


def test_output_is_labelled_and_filed(program: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path) -> None:
    done = program(*RUN, "-n", "2", "--log-dir", "logs", "--watch", "script.py", "fail")
    assert done.returncode == 9
    assert sorted(done.stdout.splitlines()) == ["[rank 0] said by 0", "[rank 1] said by 1"]
    lines = done.stderr.splitlines()
    assert {"[rank 0] whispered by 0", "[rank 1] whispered by 1"} <= set(lines)
    assert lines[-3:] == [
        "the last lines of rank 1:",
        "  whispered by 1",
        "windlass run: rank 1 ended with exit code 9",
    ]
    assert any(re.search(r"s: localhost rank 1 pid \d+ exit code 9 - \| whispered by 1", line) for line in lines)
    for rank in (0, 1):
        text = (tmp_path / "logs" / f"rank{rank}.log").read_text()
        assert sorted(text.splitlines()) == [f"said by {rank}", f"whispered by {rank}"]
    plain = program(*RUN, "-n", "2", "--no-labels", "script.py")
    assert sorted(plain.stdout) == sorted("said by 0\nsaid by 1\n") and plain.returncode == 0


def test_the_deepspeed_command(program: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path) -> None:
    port = str(free_port())
    words = ["--num_gpus", "2", "--master_port", port, "--enable_each_rank_log", "logs", "--save_pid"]
    done = program(*DEEPSPEED, *words, "script.py", "fail", "--local", "x")
    assert done.returncode == 9 and done.stdout == ""
    assert "no hostfile at /job/hostfile: only this machine is used" in done.stderr
    result = read_records(tmp_path)
    assert [entry["arguments"] for entry in result] == [
        [f"--local_rank={rank}", "fail", "--local", "x"] for rank in (0, 1)
    ]
    for rank, item in enumerate(result):
        assert (item["RANK"], item["LOCAL_RANK"], item["WORLD_SIZE"], item["LOCAL_SIZE"]) == (
            *[str(rank)] * 2,
            "2",
            "2",
        )
        assert (item["CROSS_RANK"], item["CROSS_SIZE"], item["MASTER_ADDR"]) == ("0", "1", "127.0.0.1")
        assert item["MASTER_PORT"] == port and item["TORCHELASTIC_USE_AGENT_STORE"] is None
    names = sorted(path.name for path in (tmp_path / "logs").iterdir())
    assert [re.sub(r"^\d{14}_", "TIME_", name) for name in names] == ["TIME_rank0.log", "TIME_rank1.log"]
    alone = program(*DEEPSPEED, "--no_local_rank", "--master_port", port, "script.py")
    assert alone.returncode == 0 and alone.stdout == "said by 0\n", "output of DeepSpeed has no labels"
    assert read_records(tmp_path)[0]["arguments"] == []
    refused = program(*DEEPSPEED, "--autotuning", "run", "script.py")
    assert refused.returncode == 1 and refused.stderr.splitlines()[-1].startswith(
        "deepspeed: the program has no configuration among its arguments"
    )


def test_the_table_on_a_terminal(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import os, sys; print('[a] line'); sys.exit(3 * (os.environ['RANK'] == '1'))")
    ours, theirs = pty.openpty()
    words = [*RUN, "-n", "2", "--watch", str(tmp_path / "script.py")]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "100"}
    done = subprocess.Popen(words, stdout=theirs, stderr=theirs, env=env)
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # raised once the other side of the terminal is closed
        while data := os.read(ours, 1 << 16):
            shown += data
    os.close(ours)
    assert done.wait() == 3
    text = shown.decode()
    assert re.search(r"localhost │ 1 +│ \d+ +│ exit code 3 │ - +│ \[a\] line +│", text), text
    assert "[rank 1] [a] line" in text, text


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core cannot be shared out")
def test_ranks_bind_themselves_to_cores(
    program: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    first, second = sorted(os.sched_getaffinity(0))[:2]
    words = ["-n", "2", "--bind_cores_to_rank", "--bind_core_list", f"{second},{first}"]
    assert program(*RUN, *words, "script.py", environ={"OMP_NUM_THREADS": "7"}).returncode == 0
    assert [(item["cores"], item["OMP_NUM_THREADS"]) for item in read_records(tmp_path)] == [
        ([second], "1"),
        ([first], "1"),
    ]
    done = program(*RUN, "-n", "99", "--bind_cores_to_rank", "script.py")
    assert done.returncode == 1 and "--bind_cores_to_rank: " in done.stderr and "cores for 99 ranks" in done.stderr


def test_a_program_and_a_path(program: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path) -> None:
    done = program(*RUN, "--no-python", "sh", "-c", 'echo "$RANK of $WORLD_SIZE: $0 $1"', "a  b", "--nproc")
    assert (done.stdout, done.returncode) == ("0 of 1: a  b --nproc\n", 0)
    assert program(*RUN, "--no-python", "no-such-program").returncode == 127
    done = program(*RUN, "--run-path", str(tmp_path / "script.py"), "x")
    assert done.stdout == "said by 0\n" and read_records(tmp_path)[0]["arguments"] == ["x"]


def test_nested_launcher_starts_no_ranks(
    program: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """Under srun and torchrun the launcher starts no further ranks, unless a flag gives their number."""
    slurm = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "1"}
    slurm |= {"SLURM_JOB_ID": "5", "SLURM_STEP_NODELIST": "n[7-8]", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
    assert program(*RUN, "script.py", environ=slurm).stdout == "said by 1\n"
    item = read_records(tmp_path)[0]
    assert (item["RANK"], item["WORLD_SIZE"], item["MASTER_ADDR"], item["MASTER_PORT"]) == ("1", "2", "n7", "15005")
    torchrun = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "3", "MASTER_ADDR": "m", "MASTER_PORT": "9"}
    assert program(*DEEPSPEED, "script.py", environ=torchrun).stdout == "said by 3\n"
    assert read_records(tmp_path)[1]["arguments"] == ["--local_rank=3"]
    started = program(*RUN, "-n", "2", "script.py", environ=torchrun).stdout.splitlines()
    assert sorted(started) == ["[rank 0] said by 0", "[rank 1] said by 1"]


MEETS = """
import os, sys
import torch, torch.distributed as dist
dist.init_process_group("gloo")
ranks = torch.tensor(float(dist.get_rank() + 1))
dist.all_reduce(ranks)
dist.destroy_process_group()
# In one write, so that the lines of ranks that share a pipe stay whole: print() writes the line's end by itself if
# PYTHONUNBUFFERED is set.
sys.stdout.write(f"{os.environ['RANK']} {os.environ['LOCAL_RANK']} {ranks.item()}\\n")
"""


def _both(tmp_path: Path, *flags: str) -> list[str]:
    """Start two nodes of two ranks on this machine, each by its own command. Return the printed lines, sorted."""
    (tmp_path / "meets.py").write_text(MEETS)
    env = {name: value for name, value in os.environ.items() if not name.startswith(_OF_OTHERS)}
    words = [*RUN, "--nnodes", "2", "--nproc-per-node", "2", *flags]
    nodes = [
        subprocess.Popen(
            [*words, *(["--node-rank", str(node)] if "--rdzv-backend" not in flags else []), "meets.py"],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            text=True,
            env={**env, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )
        for node in (0, 1)
    ]
    outputs = [node.communicate(timeout=240)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outputs
    return sorted(line.rpartition("] ")[2] for output in outputs for line in output.splitlines())


@pytest.mark.slow
def test_separately_started_nodes_rendezvous(tmp_path: Path) -> None:
    expected = [f"{rank} {rank % 2} 10.0" for rank in range(4)]
    assert _both(tmp_path, "--master-addr", "127.0.0.1", "--master-port", str(free_port())) == expected
    endpoint = f"127.0.0.1:{free_port()}"
    assert _both(tmp_path, "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", "x") == expected


# fake srun: starts the tasks of a step on this host with the variables of Slurm
SRUN = """#!{python}
import os, subprocess, sys
words = sys.argv[1:]
size = words[words.index("-n") + 1]
program = words[words.index({python!r}):]
step = {{"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": size, "SLURM_STEP_NUM_NODES": "1", "SLURM_NODEID": "0"}}
tasks = [
    subprocess.Popen(program, env={{**os.environ, **step, "SLURM_PROCID": str(task), "SLURM_LOCALID": str(task)}})
    for task in range(int(size))
]
sys.exit(max(task.wait() for task in tasks))
"""


@pytest.mark.slow
def test_slurm_starts_ranks(program: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path) -> None:
    """A fake srun starts the ranks, also for a single task, and each job uses its own port."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "srun").write_text(SRUN.format(python=sys.executable))
    (folder / "srun").chmod(0o755)
    job = {"SLURM_JOB_NODELIST": "localhost", "PATH": os.pathsep.join([str(folder), os.environ["PATH"]])}
    flags = ["--launcher", "slurm"]
    for number, tasks in (("7", 2), ("8", 1)):
        environ = {**job, "SLURM_JOB_ID": number, "SLURM_TASKS_PER_NODE": str(tasks), "NCCL_MINE": "a  b"}
        done = program(*RUN, *flags, "script.py", "a b", "$x", environ=environ)
        assert done.returncode == 0, done.stderr
        ranks = read_records(tmp_path)[:tasks]
        assert [item["RANK"] for item in ranks] == [str(rank) for rank in range(tasks)]
        assert {(item["WORLD_SIZE"], item["MASTER_PORT"]) for item in ranks} == {(str(tasks), f"1500{number}")}
        assert all(item["arguments"] == ["a b", "$x"] for item in ranks)
    environ = {**job, "SLURM_JOB_ID": "9", "SLURM_TASKS_PER_NODE": "2"}
    assert program(*RUN, *flags, "script.py", "fail", environ=environ).returncode == 9


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["openmpi", "mpich"])
def test_mpi_starts_ranks(
    launcher: str, program: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    if shutil.which("mpirun") is None:
        pytest.skip("mpirun is not installed")
    version = subprocess.run(["mpirun", "--version"], capture_output=True, text=True).stdout
    if ("Open MPI" in version) != (launcher == "openmpi"):
        pytest.skip(f"mpirun is not that of {launcher}")
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    (tmp_path / "meets.py").write_text(MEETS)
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "LOCAL_MEANING": "kept"}
    flags = ["--hostfile", "hosts", "--launcher", launcher, "--force_multi", "--master_port", str(free_port())]
    if launcher == "openmpi":
        flags += ["--launcher_args", "--oversubscribe"]
    done = program(*RUN, *flags, "meets.py", environ=root)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["0 0 3.0", "1 1 3.0"]
    done = program(*RUN, *flags, "script.py", "fail", "a b", environ=root)
    assert done.returncode == 9, done.stderr
    assert [item["arguments"] for item in read_records(tmp_path)] == [["fail", "a b"]] * 2


MPI_RANK = """
import sys
import torch, windlass
import torch.distributed as dist
windlass.init_distributed("mpi")
total = torch.ones(1) * (dist.get_rank() + 1)
dist.all_reduce(total)
sys.stdout.write(f"{dist.get_rank()} {total.item()} {dist.get_backend()}\\n")  # in one write, as above
sys.stdout.flush()
dist.barrier()
if "fail" in sys.argv:
    assert dist.get_rank() == 0, "rank 1 stops here"
    dist.barrier()
"""


def test_ranks_of_mpich_are_connected_by_mpi(
    program: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """Without a hostfile the ranks are on this machine. An exception on one rank ends the ranks that wait for it."""
    here = str(Path(mpiexec()).parent)
    (tmp_path / "rank.py").write_text(MPI_RANK)
    environ = {"PATH": os.pathsep.join([here, os.environ["PATH"]])}
    done = program(*RUN, "--launcher", "mpich", "--nproc", "2", "rank.py", "fail", environ=environ)
    assert done.returncode != 0
    assert sorted(done.stdout.splitlines()) == ["0 3.0 mpi4py", "1 3.0 mpi4py"], done.stderr
    assert "AssertionError: rank 1 stops here" in done.stderr


@pytest.mark.slow
def test_mpirun_alone_starts_ranks(program: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path) -> None:
    """Rank, world size and rendezvous address come from MPI. Ranks that mpirun has not started are refused."""
    (tmp_path / "rank.py").write_text(MPI_RANK)
    done = program(mpiexec(), "-n", "2", sys.executable, "rank.py")
    assert sorted(done.stdout.splitlines()) == ["0 3.0 mpi4py", "1 3.0 mpi4py"], done.stderr
    done = program(*RUN, "--nproc", "2", "rank.py")
    assert done.returncode != 0 and "the ranks do not belong to one MPI job; start them by mpirun" in done.stderr
