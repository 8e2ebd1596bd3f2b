"""Tests of a save to a full disk, or above the limit of file sizes: the error names file, bytes and fix.

Earlier checkpoints stay usable, and training continues.
"""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.dist.equivalence_runs import ADAMW, Setting, ds_config, specimen, start, whole_params
from tests.dist.harness import run_ranks
from tests.dist.test_disk_failure import attempt
from tests.models import Place
from tests.oracle import Recipe


def fill(folder: str, free: int) -> None:
    """Fill the disk except for `free` bytes."""
    if dist.get_rank() == 0:
        at = os.statvfs(folder)
        Path(folder, "filler").write_bytes(bytes(at.f_bavail * at.f_frsize - free))
    dist.barrier()


def saves(folder: str, obstacle: str) -> dict[str, Any]:
    """Return the errors of saves under the obstacle, the files left, and whether training equals a run without it."""
    subject = specimen("tied")
    config = ds_config(Recipe(optimizer="AdamW", optimizer_params=ADAMW), Setting(stage=2))

    def step(engine: Any, number: int) -> None:
        subject.train(engine, subject.batch(Place(number, 0, dist.get_rank())), engine.backward)
        engine.step()

    text: dict[str, Any] = {}
    engine = start(subject, config)
    step(engine, 0)
    engine.save_checkpoint(folder, tag="first")
    step(engine, 1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if obstacle == "limit":
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, limits[1]))
    else:
        fill(folder, 4096)

    def save(blocking: bool) -> None:
        engine.save_checkpoint(folder, tag="bad", blocking=blocking)
        engine.finish_checkpoint()

    text["blocking"] = attempt(lambda: save(True))
    text["asynchronous"] = attempt(lambda: save(False))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    dist.barrier()  # rank 0 has removed the incomplete files
    text["left"] = sorted(os.listdir(folder))
    text["latest"] = Path(folder, "latest").read_text().strip()
    dist.barrier()
    if dist.get_rank() == 0:
        Path(folder, "filler").unlink(missing_ok=True)
    dist.barrier()
    step(engine, 2)
    expected = whole_params(engine.module)
    engine.load_checkpoint(folder, tag="first")
    step(engine, 1)
    engine.save_checkpoint(folder, tag="good")
    step(engine, 2)
    text["same"] = all(torch.equal(value, expected[name]) for name, value in whole_params(engine.module).items())
    engine.destroy()
    return text


def hold(folder: Path, obstacle: str, *words: str) -> None:
    for text in run_ranks(saves, 2, str(folder), obstacle):
        for way in ("blocking", "asynchronous"):
            assert text[way].startswith("CheckpointError: "), (way, text)
            for word in (str(folder), "bytes", "earlier checkpoints are unchanged", *words):
                assert word in text[way], (way, word, text[way])
        assert [name for name in text["left"] if name != "filler" and not name.endswith(".py")] == ["first", "latest"]
        assert text["latest"] == "first" and text["same"], text


def test_full_disk(small_disk: Path) -> None:
    hold(small_disk, "full", "it needs", "are free", "Free some space")


def test_limit_of_file_sizes(tmp_path: Path) -> None:
    hold(tmp_path / "saved", "limit", "File too large", "ulimit -f", ".safetensors")
