"""Tests of a script error on one rank between engine calls that ranks along tp, sp or ep make together.

The other ranks raise, and no collective is matched with a collective of another call.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.dist.harness import run_ranks
from tests.dist.parallel_runs import MODELS, VOCABULARY
from windlass.base.errors import WindlassError

FAULTY = 1


def _start(axis: str, stage: int) -> Any:
    import windlass

    torch.manual_seed(3)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "parallel": {axis: 2},
    }
    return windlass.initialize(model=MODELS["mixtral" if axis == "ep" else "llama"](tied=False), config=config)[0]


def _batch(step: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids}


def _loop(engine: Any, steps: list[int], faults: dict[int, str], plain: bool) -> list[str]:
    """Return the raised errors. In a step of `faults`, rank 1 raises before the named call and skips later calls."""
    text = []
    for step in steps:
        fails = faults.get(step, "") if dist.get_rank() == FAULTY else ""
        try:
            loss = engine(**_batch(step)).loss
            if fails == "backward":
                raise ValueError("no such label")
            loss.backward() if plain else engine.backward(loss)
            if fails == "step":
                raise ValueError("no such metric")
            engine.step()
        except (WindlassError, ValueError) as error:
            text.append(f"{step}: {type(error).__name__}: {error}")
    return text


def _survive(axis: str, stage: int, plain: bool) -> tuple[list[str], bool]:
    engine = _start(axis, stage)
    text = _loop(engine, [0, 1, 2, 3], {1: "backward"}, plain)
    results = {name: value.clone() for name, value in engine.full_state_dict().items()}
    engine.destroy()
    spared = _start(axis, stage)
    assert not _loop(spared, [0, 2, 3], {}, plain)
    expected = spared.full_state_dict()
    same = all(torch.equal(value, expected[name]) for name, value in results.items())
    spared.destroy()
    return text, same


@pytest.mark.parametrize(
    ("axis", "stage", "plain"),
    [("tp", 0, False), ("tp", 3, True), ("sp", 1, True), ("sp", 3, False), ("ep", 2, False), ("ep", 3, True)],
)
def test_failed_loss_on_one_rank_drops_the_batch_on_all(axis: str, stage: int, plain: bool) -> None:
    for rank, (text, same) in enumerate(run_ranks(_survive, 2, axis, stage, plain)):
        assert same and len(text) == 1, (rank, text)
        if rank == FAULTY:
            assert text == ["1: ValueError: no such label"]
        else:
            assert text[0].startswith(f"1: CallLeftOutError: rank {FAULTY} skipped the backward of forward 2"), text
            assert f"along {axis}" in text[0] and "continue with the next one" in text[0]


def _no_step(axis: str) -> list[str]:
    engine = _start(axis, 1)
    return _loop(engine, [0, 1, 2], {1: "step"}, False)


def test_step_skipped_by_one_rank_raises_on_the_others() -> None:
    results = run_ranks(_no_step, 2, "tp")
    assert results[FAULTY] == ["1: ValueError: no such metric"]
    assert (
        len(results[0]) == 1
        and "skipped the step of forward 2 and continued with the forward of forward 3" in results[0][0]
    )
