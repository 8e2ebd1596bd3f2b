"""Tests that the section flops_profiler counts all operations of a step at every ZeRO stage, and changes no result."""

from __future__ import annotations

import itertools
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import windlass
from tests.causal_models import model_of
from tests.dist.harness import run_ranks
from windlass.base.log import logger
from windlass.observe.flop_report import number_to_string

WIDTH, HIDDEN, ROWS = 8, 16, 4
MICRO_BATCHES = 2


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, WIDTH)) for _ in range(2)
        )

    def forward(self, x: torch.Tensor, recompute: bool = False) -> torch.Tensor:
        for block in self.blocks:
            x = windlass.checkpointing.checkpoint(block, x) if recompute else x + block(x)
        return x.square().mean()


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def train(rank: int, section: dict[str, Any], stage: int, **call: Any) -> tuple[list[float], dict[str, Any], list[str]]:
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage},
        "steps_per_print": 1,
        "flops_profiler": section,
    }
    heard, level = Lines(), logger.level
    logger.addHandler(heard)
    logger.setLevel(logging.INFO)
    try:
        engine = windlass.initialize(model=Net(), config=config)[0]
        losses = []
        generator = torch.Generator().manual_seed(rank)
        for _ in range(4 * MICRO_BATCHES):
            loss = engine(torch.randn(ROWS, WIDTH, generator=generator), **call)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        weights = engine.full_state_dict()  # empty except on rank 0
        losses += weights["blocks.0.0.weight"].flatten().tolist() if rank == 0 else []
        report = engine.report()
        engine.destroy()
    finally:
        logger.removeHandler(heard)
        logger.setLevel(level)
    return losses, report, heard.lines


def run_stages(folder: str) -> None:
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    product = 2 * ROWS * WIDTH * HIDDEN
    for stage in range(4):
        plain, off, _ = train(rank, {}, stage)
        written = f"{folder}/{stage}/report.txt"
        counted, report, lines = train(rank, {"enabled": True, "peak_tflops": 1, "output_file": written}, stage)
        assert counted == plain and off["flops"] is None
        if rank:
            assert report["flops"] is None
            continue
        flops = report["flops"]
        assert flops["parameters"] == 2 * (2 * WIDTH * HIDDEN + WIDTH + HIDDEN)
        assert flops["forward"] == 4 * product and flops["recomputed"] == 0
        assert flops["backward"] == 8 * product - product  # the batch needs no gradient
        assert flops["modules"]["blocks.1.0"]["backward"] == 2 * product
        text = Path(written).read_text()
        assert "Profile Summary at step 1:" in text and "(blocks): ModuleList(" in text and "MFU" in text
        steps = [line for line in lines if line.startswith("step ")]
        assert len(steps) == 4 and ["MFU" in line for line in steps] == [False, False, True, True], steps
        assert "% of 1.0 TFLOPS (configuration)" in steps[-1]


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_every_stage_counts_in_full_and_changes_nothing(ranks: int, tmp_path: Path) -> None:
    run_ranks(run_stages, ranks, str(tmp_path))


def run_known_clock() -> None:
    """Train with a clock that advances by a quarter of a second at each reading."""
    ticks = itertools.count()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("windlass.engine.step_profiler.synchronized_time", lambda device: 0.25 * next(ticks))
        _, _, lines = train(0, {"enabled": True, "peak_tflops": 1e-6}, 2)
    # Two blocks of two linear layers: each layer has one product forward and two backward; the first layer has one.
    products = MICRO_BATCHES * (4 + 2 * 4 - 1)
    rate = products * 2 * ROWS * WIDTH * HIDDEN / 0.25
    found = [line for line in lines if line.startswith("step ") and "MFU" in line]
    expected = f"{rate / 1e3:.2f} KFLOPS, MFU {100 * rate / 1e6:.1f} % of 1.0 MFLOPS (configuration)"
    assert len(found) == 2 and all(expected in line for line in found), (expected, found)


def test_mfu_is_the_work_of_a_step_over_its_time_and_the_peak() -> None:
    run_ranks(run_known_clock, 1)


def run_recomputation() -> None:
    product = 2 * ROWS * WIDTH * HIDDEN
    plain, _, _ = train(0, {}, 2, recompute=True)
    section = {"enabled": True, "profile_step": 0, "detailed": False, "recompute_fwd_factor": 1.0}
    counted, report, lines = train(0, section, 2, recompute=True)
    assert counted == plain
    assert (report["flops"]["forward"], report["flops"]["recomputed"]) == (4 * product, 2 * product)
    text = next(line for line in lines if "Profile Summary at step 0" in line)
    assert "ModuleList(" not in text and "(measured)" in text
    # recompute_fwd_factor, here 1 forward, replaces the counted recomputation
    (line,) = (line for line in text.splitlines() if line.startswith("recomputed flops per GPU:"))
    assert line.split(":")[1].strip() == number_to_string(4 * product)


def test_recomputation_is_counted_apart() -> None:
    run_ranks(run_recomputation, 1)


def run_stand_in() -> None:
    from windlass.compat.deepspeed_initialize import initialize

    for enabled in (False, True):
        config = {"train_batch_size": ROWS, "optimizer": {"type": "Adam"}, "flops_profiler": {"enabled": enabled}}
        engine = initialize(model=Net(), config=config)[0]
        for _ in range(2):
            engine.backward(engine(torch.ones(ROWS, WIDTH)))
            engine.step()
        assert engine.flops_profiler_enabled() == enabled
        if enabled:
            assert engine.flops_profiler is not None
            assert engine.flops_profiler.get_total_flops() == 4 * 2 * ROWS * WIDTH * HIDDEN
            assert engine.flops_profiler.get_total_params() == 560
        else:
            assert engine.flops_profiler is None
        engine.destroy()


def test_engine_of_the_stand_in_has_the_totals() -> None:
    run_ranks(run_stand_in, 1)


def count_llama(parallel: dict[str, int]) -> dict[str, Any] | None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 40}
    model = model_of("LlamaForCausalLM", num_attention_heads=4, num_key_value_heads=2, **sizes)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 1},
        "parallel": parallel,
        "flops_profiler": {"enabled": True, "profile_step": 0, "peak_tflops": 1},
    }
    engine = windlass.initialize(model=model, config=config)[0]
    ids = torch.randint(1, 40, (2, 16), generator=torch.Generator().manual_seed(0))
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.step()
    found: dict[str, Any] | None = engine.report()["flops"]
    engine.destroy()
    return found


def test_ranks_of_tensor_parallelism_share_the_work() -> None:
    (alone,) = run_ranks(count_llama, 1, {})
    both, other = run_ranks(count_llama, 2, {"tp": 2})
    assert other is None
    for phase in ("forward", "backward", "recomputed"):
        assert 2 * both[phase] == alone[phase] > 0, phase


def count_in_stages(schedule: str) -> tuple[int, int]:
    """Return the forward and backward operations of rank 0's stages for a micro-batch, and zeros on other ranks."""
    torch.manual_seed(0)
    model = model_of(
        *("LlamaForCausalLM",), vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=4,
        num_attention_heads=2, num_key_value_heads=2,
    )  # fmt: skip
    pipeline = {"schedule": schedule} | ({"virtual_stages": 2} if schedule == "interleaved" else {})
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "parallel": {"pp": 2},
        "pipeline": pipeline,
        "flops_profiler": {"enabled": True, "profile_step": 1, "detailed": False},
    }
    engine = windlass.initialize(model=model, config=config)[0]
    ids = torch.randint(32, (2, 8), generator=torch.Generator().manual_seed(0))
    for _ in range(3):
        engine.train_batch(iter([{"input_ids": ids, "labels": ids}] * MICRO_BATCHES))
    found = engine.report()["flops"]
    engine.destroy()
    return (found["forward"], found["backward"]) if found else (0, 0)


def test_an_interleaved_pipeline_counts_all_its_parts() -> None:
    """A rank runs one forward for each of its virtual stages, and a micro-batch goes through all of them."""
    plain, parts = (run_ranks(count_in_stages, 2, schedule) for schedule in ("1f1b", "interleaved"))
    assert plain == parts and all(sum(both) for both in plain[:1])
