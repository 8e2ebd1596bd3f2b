"""Fuzz test of resuming: an engine loads saved values, stays unchanged, or refuses to train until the next load."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist.harness import run_ranks
from tests.fuzz.checkpoints import index_text, one_of
from tests.fuzz.mutations import BYTES, LONG, SECONDS, SEED, fuzz, other_values
from windlass.base.errors import CheckpointError, StorageError


def resume_over_and_over(seconds: float, seed: int, long: bool, folder: str, found: str) -> None:
    """Save checkpoints of an engine, and load damaged and forged copies into the engine."""
    import windlass
    from tests.fuzz import mutations

    mutations.SECONDS, mutations.SEED, mutations.LONG = seconds, seed, long  # the values of the parent process
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    config = {
        "train_micro_batch_size_per_gpu": 3,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 9}},
        "zero_optimization": {"stage": 2},
    }
    engine = windlass.initialize(model=model, config=config)[0]

    def step() -> None:
        engine.backward(engine(torch.ones(3, 6)).square().mean())
        engine.step()

    def values() -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in engine.full_state_dict().items()}

    step()
    engine.save_checkpoint(folder, tag="seed")
    seeds = values()
    step()
    engine.save_checkpoint(folder, tag="t")
    saved = values()
    files = sorted(path for path in Path(folder, "t").iterdir() if path.is_file())
    goods = {path: path.read_bytes() for path in files}
    index = Path(folder, "t", "checkpoint.json")
    known = one_of({"seed": list(seeds.values()), "t": list(saved.values())})

    def make(draw: random.Random) -> tuple[int, bytes]:
        for path, good in goods.items():
            path.write_bytes(good)
        if draw.randrange(2):
            path, case = index, index_text(other_values(draw, json.loads(goods[index])))
        else:
            path = draw.choice(files)
            case = draw.choice(BYTES)(draw, goods[path])
        path.write_bytes(case)
        return sum(map(len, goods.values())) + len(case), case

    def resume() -> dict[str, torch.Tensor]:
        before = values()
        try:
            engine.load_checkpoint(folder, tag="t")
            loaded = values()
        except CheckpointError as error:
            loaded = {}
            if "State of the model" in str(error):
                with pytest.raises(StorageError, match="a checkpoint was loaded in part"):
                    step()
            else:
                assert all(torch.equal(value, before[name]) for name, value in values().items()), "values changed"
                step()
        engine.load_checkpoint(folder, tag="seed")
        assert all(torch.equal(value, seeds[name]) for name, value in values().items()), "the seed is not restored"
        return loaded

    try:
        fuzz(0.1, make, {"resume": resume}, known, Path(found))
    except pytest.fail.Exception as error:  # not an Exception, so the harness would not return it
        raise AssertionError(str(error)) from None
    finally:
        engine.destroy()


def test_resuming_an_engine(tmp_path: Path) -> None:
    arguments: tuple[Any, ...] = (SECONDS, SEED, LONG, str(tmp_path / "run"), str(tmp_path.parent / "resume.case"))
    run_ranks(resume_over_and_over, 1, *arguments, timeout=600.0 + SECONDS)
