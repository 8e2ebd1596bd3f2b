"""Tests of failed loads into a running engine, which continues unchanged or refuses to train until a load succeeds."""

from __future__ import annotations

import json
import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.dist.equivalence_runs import ADAMW, Setting, ds_config, specimen, start, whole_params
from tests.dist.harness import run_ranks
from tests.dist.test_disk_failure import attempt
from tests.models import Place
from tests.oracle import Recipe


def step(subject: Any, engine: Any, number: int) -> None:
    subject.train(engine, subject.batch(Place(number, 0, dist.get_rank())), engine.backward)
    engine.step()


def damage(path: Path, how: str) -> None:
    """Flip the last bit of the last parameter in every data file, or truncate these files, or damage the index."""
    if dist.get_rank() == 0:
        for file in path.glob("checkpoint.json" if how == "index" else "*.safetensors"):
            raw = bytearray(file.read_bytes())
            at = _end_of_parameters(raw) if how == "flipped" else len(raw)
            raw[at - 1] ^= 1
            file.write_bytes(raw[:-1] if how == "short" else raw)
    dist.barrier()


def _end_of_parameters(raw: bytearray) -> int:
    begin = 8 + int.from_bytes(raw[:8], "little")
    entries: dict[str, Any] = json.loads(raw[8:begin])
    return begin + max(entry["data_offsets"][1] for name, entry in entries.items() if name.startswith("param/"))


def copied(path: Path, other: str) -> Path:
    if dist.get_rank() == 0:
        shutil.copytree(path, path.with_name(other))
    dist.barrier()
    return path.with_name(other)


def run(name: str, stage: int, folder: str) -> dict[str, Any]:
    """Return the errors of damaged loads and of later calls, and whether training equals a run without such loads."""
    import windlass

    subject, root = specimen(name), Path(folder)
    engine = start(subject, ds_config(Recipe(optimizer="AdamW", optimizer_params=ADAMW), Setting(stage=stage)))
    step(subject, engine, 0)
    engine.save_checkpoint(folder, tag="good")
    step(subject, engine, 1)
    straight = whole_params(engine.module)
    engine.save_checkpoint(folder, tag="later")
    for how in ("short", "index", "flipped"):
        damage(copied(root / "later", how), how)
    engine.load_checkpoint(folder, tag="good")
    before = whole_params(engine.module)
    texts: dict[str, Any] = {}
    texts["short"] = attempt(lambda: engine.load_checkpoint(folder, tag="short"))
    texts["index"] = attempt(lambda: engine.load_checkpoint(folder, tag="index"))
    texts["unchanged"] = all(torch.equal(value, before[key]) for key, value in whole_params(engine.module).items())
    step(subject, engine, 1)
    texts["trains on"] = all(torch.equal(value, straight[key]) for key, value in whole_params(engine.module).items())
    batch = subject.batch(Place(1, 0, dist.get_rank()))
    trained = next(p for p in engine.module.parameters() if p.requires_grad)
    texts["flipped"] = attempt(lambda: engine.load_checkpoint(folder, tag="flipped"))
    texts["forward"] = attempt(lambda: subject.train(engine, batch, engine.backward))
    texts["step"] = attempt(engine.step)
    texts["full_param"] = attempt(lambda: windlass.zero.full_param(trained))
    texts["save"] = attempt(lambda: engine.save_checkpoint(folder, tag="mixed"))
    texts["a part"] = attempt(lambda: engine.load_checkpoint(folder, tag="good", load_module_only=True))
    texts["good"] = attempt(lambda: engine.load_checkpoint(folder, tag="good"))
    step(subject, engine, 1)
    texts["continues"] = all(torch.equal(value, straight[key]) for key, value in whole_params(engine.module).items())
    engine.destroy()
    texts["files"] = sorted(os.listdir(folder))
    return texts


@pytest.mark.parametrize(("name", "stage", "ranks"), [("tied", 0, 1), ("tied", 1, 2), ("tied", 3, 2), ("lora", 2, 2)])
def test_engine_is_unchanged_or_refuses_to_train(
    name: str, stage: int, ranks: int, transport: str, tmp_path: Path
) -> None:
    """Damage that is found before anything is overwritten leaves the engine unchanged. Damage that is found later
    makes the engine refuse to train, to save and to be read, until an undamaged checkpoint is loaded."""
    for texts in run_ranks(run, ranks, name, stage, str(tmp_path / "saved"), transport=transport):
        for how in ("short", "index"):
            assert texts[how].startswith("CheckpointError: ") and "State of the model" not in texts[how], texts[how]
        assert texts["unchanged"] and texts["trains on"]
        assert texts["flipped"].startswith("CheckpointError: ") and "crc32" in texts["flipped"]
        assert "load the last checkpoint" in texts["flipped"]
        for call in ("forward", "step", "full_param", "a part", "save"):
            kind = "CheckpointError: " if call == "save" else "StorageError: "
            assert texts[call].startswith(kind), (call, texts[call])
            assert "a checkpoint was loaded in part" in texts[call], (call, texts[call])
        assert texts["good"] == "" and texts["continues"]
        assert "mixed" not in texts["files"]


def trained_alone(stage: int, folder: str) -> list[str]:
    """Return the errors of a damaged load, and of the load of a checkpoint that excludes frozen parameters, where the
    model has none."""
    subject, root = specimen("tied"), Path(folder)
    engine = start(subject, ds_config(Recipe(optimizer="AdamW", optimizer_params=ADAMW), Setting(stage=stage)))
    step(subject, engine, 0)
    engine.save_checkpoint(folder, tag="good", exclude_frozen_parameters=True)
    before = whole_params(engine.module)
    step(subject, engine, 1)
    engine.save_checkpoint(folder, tag="flipped")
    damage(root / "flipped", "flipped")
    errors = [attempt(partial(engine.load_checkpoint, folder, tag=tag)) for tag in ("flipped", "good")]
    if not errors[1]:
        errors += [name for name, value in whole_params(engine.module).items() if not torch.equal(value, before[name])]
        step(subject, engine, 1)
    engine.destroy()
    return errors


@pytest.mark.parametrize("stage", [1, 3])
def test_a_complete_checkpoint_without_frozen_parameters_repairs_a_failed_load(stage: int, tmp_path: Path) -> None:
    for errors in run_ranks(trained_alone, 2, stage, str(tmp_path / "saved")):
        assert "crc32" in errors[0] and errors[1:] == [""], errors
