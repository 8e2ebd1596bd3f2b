"""Tests that a run that loses a rank restarts on the others at its last checkpoint, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from windlass.launch.elastic_restart import run_with_restarts
from windlass.launch.exit_status import LaunchExitStatus
from windlass.launch.local_launch import start_local_ranks
from windlass.launch.start_ranks import LaunchError, plan_local_launch
from windlass.launch.supervisor import RankEvents

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads the processes in Linux's /proc")

LOSES_ONE = """
import os, signal, sys, time
from pathlib import Path
rank, size, restarts = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "WINDLASS_RESTARTS"))
Path(__file__).with_name(f"start{restarts}.{rank}of{size}").touch()
if restarts == 0 and rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if restarts == 1:
    sys.exit(5 * (rank == 0))
if restarts < 2:
    time.sleep(600)
"""


def start_elastic(entrypoint: list[str], nproc: int, max_restarts: int, min_nproc: int = 1) -> LaunchExitStatus:
    plan = replace(plan_local_launch(entrypoint, nproc), max_restarts=max_restarts)
    return run_with_restarts(plan, lambda plan: start_local_ranks(plan, RankEvents(None)), min_nproc)


def started(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("start*"))


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], list[str]]:
    def write(source: str) -> list[str]:
        path = tmp_path / "script.py"
        path.write_text(source)
        return [str(path)]

    return write


def test_killed_rank_is_dropped_and_the_others_restart(tmp_path: Path, script: Callable[[str], list[str]]) -> None:
    """One of three ranks is killed and not replaced. Then one of the others fails with an exit code; both restart."""
    assert start_elastic(script(LOSES_ONE), 3, max_restarts=2).exit_code == 0
    result = started(tmp_path)
    assert {"start0.1of3", "start1.0of2", "start2.0of2", "start2.1of2"} <= set(result), result
    assert not [name for name in result if name.startswith(("start1", "start2")) and not name.endswith("of2")]


def test_too_few_ranks_or_too_many_restarts_return_the_failure(
    tmp_path: Path, script: Callable[[str], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    reported: list[str] = []
    monkeypatch.setattr(
        "windlass.launch.elastic_restart.logger.warning", lambda text, *values: reported.append(text % values)
    )
    outcome = start_elastic(script(LOSES_ONE), 2, max_restarts=5, min_nproc=2)
    assert outcome.exit_code == 128 + signal.SIGKILL
    assert not [name for name in started(tmp_path) if name.startswith("start1")]
    assert len(reported) == 1 and reported[0].startswith("rank 1 was ended by SIGKILL")
    assert reported[0].endswith("; not restarted: 1 rank left, fewer than 2")
    with pytest.raises(LaunchError, match="--max-restarts -1"):
        start_elastic(script(LOSES_ONE), 2, max_restarts=-1)
    with pytest.raises(LaunchError, match="--min-nproc 3 with 2 ranks"):
        start_elastic(script(LOSES_ONE), 2, max_restarts=1, min_nproc=3)


# Batches depend on the step alone, so every layout trains on the same samples.
TRAINS = """
import json, os, signal, sys
from pathlib import Path
import torch, torch.distributed as dist, windlass
folder, stage, last = Path(sys.argv[1]), int(sys.argv[2]), 8
torch.manual_seed(3)
model = torch.nn.Sequential(torch.nn.Linear(6, 13), torch.nn.Tanh(), torch.nn.Linear(13, 1))
config = {
    "optimizer": {"type": "AdamW", "params": {"lr": 0.05}},
    "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    "elasticity": {"enabled": True, "max_train_batch_size": 12, "micro_batch_sizes": [1], "max_gpus": 12},
}
engine, *_ = windlass.initialize(model=model, config=config)
rank, size = dist.get_rank(), dist.get_world_size()
Path(folder, f"pid.{os.environ['WINDLASS_RESTARTS']}.{rank}").write_text(f"{os.getpid()} {os.environ['MASTER_PORT']}")
engine.load_checkpoint(str(folder / "checkpoints"))
while engine.global_steps < last:
    step = engine.global_steps
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(engine.train_batch_size(), 6, generator=generator)
    y = x.prod(dim=1, keepdim=True)
    mine, total = slice(rank, None, size), torch.zeros(())
    for a, b in zip(x[mine].split(engine.train_micro_batch_size_per_gpu()), y[mine].split(1)):
        loss = torch.nn.functional.mse_loss(engine(a), b)
        total += loss.detach() / engine.train_batch_size()
        engine.backward(loss)
        engine.step()
    dist.all_reduce(total)
    if rank == 0:
        with open(folder / "losses", "a") as file:
            file.write(json.dumps([size, step, total.item()]) + "\\n")
    if engine.global_steps == 3:
        engine.save_checkpoint(str(folder / "checkpoints"))
    if engine.global_steps == 5 and size == 3 and rank == 1 and "--well" not in sys.argv:
        os.kill(os.getpid(), signal.SIGKILL)
dist.barrier()
"""


def losses(folder: Path) -> list[tuple[int, int, float]]:
    return [tuple(json.loads(line)) for line in (folder / "losses").read_text().splitlines()]


def run(source: Path, folder: Path, nproc: int, stage: int, *words: str) -> None:
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "windlass", "run", "--nproc", str(nproc), "--max-restarts", "1", str(source)]
    subprocess.run([*command, str(folder), str(stage), *words], check=True, timeout=250)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_losses_equal_a_manually_resumed_run(tmp_path: Path, stage: int) -> None:
    """Losses continue as in a run resumed by hand.

    One of three ranks is killed two steps after a checkpoint. The others continue with 12 samples a step as before.
    """
    source = tmp_path / "train.py"
    source.write_text(TRAINS)
    shared = set(os.listdir("/dev/shm"))
    run(source, tmp_path / "killed", 3, stage)
    ended = time.monotonic()
    assert {path.name for path in (tmp_path / "killed").glob("pid.*")} == {
        *("pid.0.0", "pid.0.1", "pid.0.2", "pid.1.0", "pid.1.1")
    }
    for path in (tmp_path / "killed").glob("pid.*"):
        pid, port = map(int, path.read_text().split())
        while os.path.exists(f"/proc/{pid}") and str(source) in Path(f"/proc/{pid}/cmdline").read_text():
            assert time.monotonic() - ended < 60, f"{path.name} is still there"
            time.sleep(0.1)
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", port)) != 0, f"port {port} is still served"
        # other processes use /dev/shm too: only names with `windlass`, the process id or the port count
        names = set(os.listdir("/dev/shm")) - shared
        assert not [name for name in names if "windlass" in name or str(pid) in name or str(port) in name]

    by_hand = tmp_path / "by hand"
    by_hand.mkdir()
    shutil.copytree(tmp_path / "killed" / "checkpoints", by_hand / "checkpoints")
    run(source, by_hand, 2, stage)
    full = tmp_path / "whole"
    run(source, full, 3, stage, "--well")

    actual = losses(tmp_path / "killed")
    assert [(size, step) for size, step, _ in actual[-5:]] == [(2, step) for step in range(3, 8)]
    assert actual[-5:] == losses(by_hand), "it is not the run that it would have been by hand"
    expected = dict((step, loss) for _, step, loss in losses(full))
    for _, step, loss in actual:
        assert loss == pytest.approx(expected[step], rel=1e-5), step
