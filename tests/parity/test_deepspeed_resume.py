"""Law: training continues from DeepSpeed's own checkpoints of each stage as it does in DeepSpeed. Needs DeepSpeed."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.deepspeed_training_run import SAVED_AT, STEPS
from tests.dist.harness import run_ranks
from tests.dist.test_deepspeed_resume import CLIENT, engine_for, steps
from tests.ports import free_port

pytestmark = [
    pytest.mark.peer,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed"),
]
ROOT = Path(__file__).resolve().parents[2]


def make(out: Path, stage: int, precision: str, ranks: int) -> None:
    """Train and save in DeepSpeed on `ranks` ranks."""
    run_deepspeed("tests.deepspeed_training_run", out, stage, precision, ranks)


def run_deepspeed(module: str, out: Path, stage: int, precision: str, ranks: int) -> None:
    """Run a module on `ranks` ranks, as DeepSpeed's own launcher would."""
    shared = {
        **os.environ,
        "DS_ACCELERATOR": "cpu",
        "PYTHONPATH": str(ROOT),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "LOCAL_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
    }
    command = [sys.executable, "-m", module, str(out), str(stage), precision]
    logs = [out / f"log_{rank}" for rank in range(ranks)]
    started = []
    for rank, log in enumerate(logs):
        own = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        with log.open("w") as file:
            started.append(subprocess.Popen(command, env=own, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT))
    until = time.monotonic() + 200
    try:
        while any(process.poll() is None for process in started):
            assert not any(process.poll() for process in started) and time.monotonic() < until
            time.sleep(0.1)
        assert not any(process.returncode for process in started)
    except AssertionError as error:
        error.add_note("\n".join(log.read_text()[-2000:] for log in logs))
        raise
    finally:
        for process in started:
            process.kill()
            process.wait()


def load_and_continue(folder: str, stage: int, precision: str) -> dict[str, object]:
    """Load DeepSpeed's checkpoint, and continue training."""
    engine = engine_for(stage, precision, 50)
    path, client = engine.load_checkpoint(folder)
    counts = (engine.global_steps, engine.global_samples)
    losses = steps(engine, SAVED_AT, STEPS)
    engine.destroy()
    return {"path": path, "client": client, "counts": counts, "losses": losses, "rank": dist.get_rank()}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("stage", "precision", "here"),
    [(0, "fp32", 3), (1, "fp32", 2), (2, "fp32", 3), (3, "fp32", 1), (1, "bf16", 3), (2, "bf16", 0), (3, "bf16", 3)],
)
def test_run_of_deepspeed_resumes_in_windlass(
    stage: int, precision: str, here: int, ranks: int, tmp_path: Path
) -> None:
    make(tmp_path, stage, precision, ranks)
    bound = 1e-5 if precision == "fp32" else 2e-2
    for rank, actual in enumerate(run_ranks(load_and_continue, ranks, str(tmp_path), here, precision)):
        expected = json.loads((tmp_path / f"losses_{rank}.json").read_text())
        assert actual["counts"] == (SAVED_AT, SAVED_AT * 2 * ranks)
        assert actual["client"]["words"] == CLIENT["words"] and torch.equal(actual["client"]["t"], CLIENT["t"])
        assert actual["losses"] == pytest.approx(expected, rel=bound), (actual["losses"], expected)
