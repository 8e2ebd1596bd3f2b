"""Tests that with zero.Init no rank ever holds more of a model than its part and the tensors in transfer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.dist.harness import run_ranks
from tests.dist.parallel_runs import build
from tests.dist.test_sharded_init import fresh_ranks

CONFIG = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2}


def large(directory: str) -> None:
    """Save a Llama of 20 million parameters without a dominant tensor."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=2000, hidden_size=512, intermediate_size=1400, num_hidden_layers=6, num_attention_heads=8
    )
    LlamaForCausalLM(config).save_pretrained(directory)


def peak(directory: str, small: str, axes: dict[str, int]) -> dict[str, float]:
    """Load a model, create an engine, and return the peak rise of proportional memory and sizes to compare, in MB."""
    from transformers import AutoModelForCausalLM

    import windlass
    from windlass.cli.benches.memory_sampler import MemorySampler

    config = {**CONFIG, "parallel": axes}
    windlass.initialize(model=windlass.from_pretrained(AutoModelForCausalLM, small), config=config)[0].destroy()
    torch.distributed.barrier()
    watch = MemorySampler(torch.device("cpu"))
    model = windlass.from_pretrained(AutoModelForCausalLM, directory)
    sizes = [p.numel() * 4 for p in model.parameters()]
    engine = windlass.initialize(model=model, config=config)[0]
    rise = watch.stop()
    part = sum(p.numel() * 4 for p in engine.module.parameters())
    unit = max(unit.layout.padded for unit in engine._sharded.units) * 4
    engine.destroy()
    return {"peak": rise / 1e6, "model": sum(sizes) / 1e6, "part": part / 1e6, "more": 2 * (max(sizes) + unit) / 1e6}


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="proportional memory is Linux's")
@pytest.mark.parametrize("axes", [{"tp": 2}, pytest.param({"pp": 2}, marks=pytest.mark.slow)], ids=str)
def test_memory_grows_by_one_part(tmp_path: Path, axes: dict[str, int]) -> None:
    large(str(tmp_path / "large"))
    build("llama", tied=False).save_pretrained(tmp_path / "small")  # type: ignore[operator]
    arguments = (str(tmp_path / "large"), str(tmp_path / "small"), axes)
    for seen in fresh_ranks(peak, 2, *arguments, transport="gloo"):
        assert 0.9 * seen["part"] < seen["peak"] <= seen["part"] + seen["more"] < seen["model"], seen


def refused() -> dict[str, Any]:
    """Return the errors of models that cannot be sharded, and True if the first one still has its weights."""
    import windlass

    with windlass.zero.Init():
        plain = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))
        model = build("llama", tied=False)
    expected = windlass.zero.full_param(plain[0].weight)
    text = {}
    kinds: dict[str, tuple[nn.Module, dict[str, Any]]] = {
        "no plan": (plain, {"parallel": {"ep": 2}}),
        "time": (model, {"parallel": {"pp": 2}, "pipeline": {"partition": "time"}}),
    }
    for name, (item, more) in kinds.items():
        try:
            windlass.initialize(model=item, config={**CONFIG, **more})
        except windlass.WindlassError as error:
            text[name] = str(error)
    engine = windlass.initialize(model=plain, config={**CONFIG, "zero_optimization": {"stage": 3}})[0]
    same = torch.equal(windlass.zero.full_param(plain[0].weight), expected)
    engine.destroy()
    layers = [windlass.LayerSpec(nn.Linear, 6, 6 - number) for number in range(2)]
    with windlass.zero.Init():
        row = windlass.PipelineModule(layers, num_stages=2, loss_fn=nn.MSELoss())
    try:
        windlass.initialize(model=row, config={**CONFIG, "parallel": {"pp": 2}})
    except windlass.WindlassError as error:
        text["row"] = str(error)
    with torch.device("meta"):
        nowhere = build("llama", tied=False)
    try:
        windlass.initialize(model=nowhere, config={**CONFIG, "parallel": {"tp": 2}})
    except windlass.WindlassError as error:
        text["meta"] = str(error)
    return {"said": text, "same": same}


def test_refused_model_is_unchanged() -> None:
    for seen in run_ranks(refused, 2):
        assert seen["same"]
        assert "no experts" in seen["said"]["no plan"]
        assert "balance by 'parameters'" in seen["said"]["time"]
        assert "build different parts along pp; build it without zero.Init" in seen["said"]["row"]
        assert "with windlass.zero.Init()" in seen["said"]["meta"]
