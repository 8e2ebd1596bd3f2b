"""Laws of inference on one CUDA GPU: recorded steps, the paged cache, and draws on the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.causal_models import VOCABULARY, build
from tests.inference.greedy_reference import assert_greedy, make_prompts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
SMALL = {"max_tokens_per_step": 32, "max_sequences": 6, "kv_cache_tokens": 320, "max_model_len": 96}


def saved(name: str, directory: Path) -> Any:
    """Return a model of this name on the CPU, after saving its weights in `directory`."""
    key = "n_positions" if name == "gpt2" else "max_position_embeddings"
    changes: dict[str, Any] = {key: 96, **({"sliding_window": 8} if name == "gemma3" else {})}
    model = build(name, **changes).eval()
    model.save_pretrained(directory)
    return model


@pytest.fixture(autouse=True)
def _precise() -> Any:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "gemma3", "gpt2", "mixtral"])
def test_greedy_tokens_are_those_of_the_plain_model(name: str, graphs: bool, tmp_path: Path) -> None:
    from windlass import LLM, SamplingParams

    model = saved(name, tmp_path)
    with LLM(str(tmp_path), device="cuda", skip_tokenizer_init=True, cuda_graphs=graphs, **SMALL) as llm:
        params = [SamplingParams(temperature=0, max_tokens=4 + n % 20, ignore_eos=True) for n in range(40)]
        outputs = llm.generate(make_prompts(40, VOCABULARY, 40, shared=18), params)
        stats = llm.stats()
        recorded = llm.engine.runner.graphs
    assert stats.kv_cache_usage == 0
    assert stats.num_preemptions > 0 and stats.prefix_cache_hits > 0
    assert (recorded is not None) == graphs
    assert_greedy(model, outputs, 1e-3)


@pytest.mark.parametrize("kv_dtype", ["bf16", "int8"])
def test_narrow_caches_stay_close(kv_dtype: str, tmp_path: Path) -> None:
    from windlass import LLM, SamplingParams

    model = saved("llama", tmp_path)
    with LLM(str(tmp_path), device="cuda", skip_tokenizer_init=True, kv_dtype=kv_dtype, **SMALL) as llm:
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        assert_greedy(model, llm.generate(make_prompts(8, VOCABULARY, 20), params), 0.3)


def test_a_decode_step_does_not_wait_for_the_device(tmp_path: Path) -> None:
    """Run recorded decode steps in a mode that raises if the host synchronizes. Waiting for an event is allowed."""
    from windlass import LLM, SamplingParams

    saved("llama", tmp_path)
    with LLM(str(tmp_path), device="cuda", skip_tokenizer_init=True, **SMALL) as llm:
        engine = llm.engine
        params = SamplingParams(temperature=0.7, top_k=5, top_p=0.9, max_tokens=40, ignore_eos=True, seed=1)
        for number in range(4):
            engine.add_request(str(number), [3 + number] * 5, params)
        for _ in range(12):  # compute the prompts, and record the decode step
            engine.step()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(8):
                engine.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert engine._started, "no step is queued ahead"


def test_draws_on_the_device_have_the_distribution() -> None:
    """Chi-square of 20,000 draws against the probabilities of temperature, top-k, top-p and min-p."""
    from windlass import SamplingParams
    from windlass.inference.token_draw import draw_together

    logits = torch.linspace(-3, 3, VOCABULARY)
    count = 20_000
    generator = torch.Generator().manual_seed(0)
    for settings in ({}, {"top_k": 7}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 12, "top_p": 0.9}):
        params = SamplingParams(temperature=0.9, **settings)
        uniforms = torch.rand(count, generator=generator, dtype=torch.float64).tolist()
        drawn = draw_together(logits.cuda().expand(count, -1), [params] * count, uniforms)
        weights = ((logits - logits.max()) / 0.9).exp().double()
        if params.top_k > 0:
            weights[weights < weights.topk(params.top_k).values[-1]] = 0
        weights[weights < params.min_p] = 0
        if params.top_p < 1:
            ordered, ids = weights.sort(descending=True)
            weights[ids[ordered.cumsum(0) - ordered >= params.top_p * ordered.sum()]] = 0
        expected = weights / weights.sum() * count
        seen = torch.bincount(drawn.cpu(), minlength=VOCABULARY).double()
        assert (seen[expected == 0] == 0).all()
        kept = expected > 0
        statistic = ((seen - expected)[kept] ** 2 / expected[kept]).sum().item()
        assert statistic < int(kept.sum()) + 6 * (2 * int(kept.sum())) ** 0.5
