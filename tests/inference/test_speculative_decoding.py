"""Law: drafts change no token, greedy or sampled, for any proposer and any schedule."""

from __future__ import annotations

import functools
import logging
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.causal_models import VOCABULARY, build
from tests.inference.greedy_reference import assert_greedy, make_prompts
from windlass.base.errors import ModelError, StorageError
from windlass.inference import engine_factory
from windlass.inference.llm import LLM
from windlass.inference.model_loading import load_model
from windlass.inference.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=0)


def model_of(seed: int = 0, **changes: Any) -> Any:
    return build("llama", seed, **{"max_position_embeddings": 96, **changes}).eval()


def proposer(name: str) -> dict[str, Any]:
    if name == "ngram":
        return {"num_tokens": 4}
    tokens, model = {
        "same": (3, model_of),
        "other": (2, lambda: model_of(5, num_hidden_layers=1)),
        "short": (3, lambda: model_of(max_position_embeddings=20)),
        "own cache": (2, lambda: build("bloom").eval()),
    }[name]
    return {"method": "draft", "num_tokens": tokens, "model": model()}


def tokens_of(outputs: Any) -> list[list[int]]:
    return [answer.token_ids for output in outputs for answer in output.outputs]


def generate_all(speculative: dict[str, Any] | None, cache: int) -> tuple[Any, Any, Any]:
    """Return greedy and sampled tokens, and statistics after the greedy requests and after all."""
    model = model_of()
    prompts = make_prompts(8, VOCABULARY, 30, shared=18)
    sampled = [SamplingParams(seed=n, max_tokens=16, temperature=0.7, top_p=0.9, n=1 + n % 2) for n in range(8)]
    longest = GREEDY.replace(max_tokens=None)
    options = {"kv_cache_tokens": cache, "max_model_len": 80, "max_tokens_per_step": 24, "max_sequences": 6}
    with LLM(model, check_at_load=False, speculative=speculative, **options) as llm:
        greedy = llm.generate(prompts, GREEDY)
        after_greedy = llm.stats()
        tokens = tokens_of(greedy), tokens_of(llm.generate(prompts, sampled))
        greedy += llm.generate(prompts[:2], longest)
        stats = llm.stats()
    assert_greedy(model, greedy)
    assert stats.kv_cache_usage == 0
    assert (stats.num_preemptions > 0) == (cache == 112)
    return tokens, after_greedy, stats


@functools.cache
def tokens_without_drafts(cache: int) -> Any:
    return generate_all(None, cache)[0]


PROPOSERS = ("ngram", "same", "other", "short", "own cache")


@pytest.mark.parametrize(
    ("name", "cache"),
    [
        *((name, 112) for name in PROPOSERS),
        (PROPOSERS[0], 2048),
        *(pytest.param(name, 2048, marks=pytest.mark.slow) for name in PROPOSERS[1:]),
    ],
)
def test_drafts_change_no_token(name: str, cache: int) -> None:
    """Covers preemption in a small cache, shared prefixes, and answers up to the maximum length."""
    tokens, after_greedy, stats = generate_all(proposer(name), cache)
    assert tokens == tokens_without_drafts(cache)
    assert stats.draft_tokens > 0
    if name == "same":
        assert after_greedy.accepted_draft_tokens > 0.9 * after_greedy.draft_tokens


def test_the_draft_model_computes_each_token_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft model's cache stays between steps, so only accepted tokens and drafts are computed."""
    model = model_of()
    speculative = {"method": "draft", "num_tokens": 3, "model": model_of()}
    with LLM(model, check_at_load=False, speculative=speculative) as llm:
        proposer = llm.engine._proposer
        run, computed = proposer._runner.run, 0

        def counted(batch: Any) -> torch.Tensor:
            nonlocal computed
            computed += batch.num_tokens
            return run(batch)

        monkeypatch.setattr(proposer._runner, "run", counted)
        llm.generate([list(range(3, 35))], GREEDY.replace(max_tokens=60))
        assert computed < 32 + 60 * 1.5
        assert not proposer._states


def test_sampled_tokens_follow_the_distribution_of_the_model() -> None:
    """Chi-square test of the first three tokens over 1,000 seeds. A part of the drafts is accepted."""
    model, draws, kept = model_of(), 1000, 3
    prompt = [5, 6, 7]
    speculative = {"method": "draft", "num_tokens": 3, "model": model_of()}  # drafts the likeliest tokens only
    params = [SamplingParams(seed=seed, max_tokens=4, top_k=kept, ignore_eos=True) for seed in range(draws)]
    options = {"max_sequences": 128, "max_tokens_per_step": 1024, "kv_cache_tokens": 4096}
    with LLM(model, check_at_load=False, speculative=speculative, **options) as llm:
        tokens = tokens_of(llm.generate([prompt] * draws, params))
        stats = llm.stats()
    assert 0.2 < stats.accepted_draft_tokens / stats.draft_tokens < 0.8
    assert stats.draft_tokens > 1.5 * draws

    expected = {(): 1.0}
    for _ in range(3):
        longer = {}
        for found, chance in expected.items():
            likely = model(torch.tensor([[*prompt, *found]])).logits[0, -1].double().topk(kept)
            for token, part in zip(likely.indices.tolist(), likely.values.softmax(-1).tolist(), strict=True):
                longer[*found, token] = chance * part
        expected = longer
    counts = Counter(tuple(answer[:3]) for answer in tokens)
    assert counts.keys() <= expected.keys()
    statistic = sum((counts[cell] - draws * chance) ** 2 / (draws * chance) for cell, chance in expected.items())
    assert min(expected.values()) * draws >= 5
    degrees = kept**3 - 1
    assert statistic < degrees + 5 * math.sqrt(2 * degrees)


def test_an_error_of_the_draft_model_stops_drafts_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = model_of()
    speculative = {"method": "draft", "num_tokens": 2, "model": model_of()}
    with LLM(model, check_at_load=False, speculative=speculative) as llm:

        def fail(batch: Any) -> torch.Tensor:
            raise RuntimeError("the draft model's device is gone")

        monkeypatch.setattr(llm.engine._proposer._runner, "run", fail)
        monkeypatch.setattr(logging.getLogger("windlass"), "propagate", True)
        outputs = llm.generate(make_prompts(4, VOCABULARY), GREEDY)
        assert llm.stats().draft_tokens == 0
    assert_greedy(model, outputs)
    assert "speculative decoding was stopped" in caplog.text
    assert "device is gone" in caplog.text


def test_a_draft_model_of_another_vocabulary_is_refused() -> None:
    model, other = model_of(), model_of(vocab_size=43)
    attention = model.config._attn_implementation
    with pytest.raises(ModelError, match="vocabulary of 43 tokens and the model one of 41"):
        LLM(model, check_at_load=False, speculative={"method": "draft", "model": other})
    assert model.config._attn_implementation == other.config._attn_implementation == attention


def test_a_directory_for_blocks_that_cannot_be_used_leaves_the_models_as_they_were(tmp_path: Path) -> None:
    model, draft = model_of(), model_of()
    attention = model.config._attn_implementation
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="swap_directory"):
        LLM(model, speculative={"method": "draft", "model": draft}, swap_directory=tmp_path / "file")
    assert model.config._attn_implementation == draft.config._attn_implementation == attention


def test_a_model_on_its_own_cache_leaves_the_draft_model_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    draft = model_of()
    attention = draft.config._attn_implementation
    monkeypatch.setattr(logging.getLogger("windlass"), "propagate", True)
    with LLM(build("bloom").eval(), check_at_load=False, speculative={"method": "draft", "model": draft}):
        assert draft.config._attn_implementation == attention
    assert "runs without drafts" in caplog.text


def test_a_draft_model_from_a_directory_is_loaded_like_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_of().save_pretrained(tmp_path)
    calls: list[dict[str, Any]] = []

    def loaded(path: Path, **arguments: Any) -> Any:
        calls.append(arguments)
        return load_model(path, **arguments)

    monkeypatch.setattr(engine_factory, "load_model", loaded)
    options = {"skip_tokenizer_init": True, "check_at_load": False, "trust_remote_code": True, "dtype": "bf16"}
    with LLM(tmp_path, device="cpu", speculative={"method": "draft", "model": tmp_path}, **options):
        pass
    for call in calls:
        assert torch.device(call["device"]).type == "cpu" and call["dtype"] == "bf16" and call["trust_remote_code"]
    assert len(calls) == 2


def test_a_draft_model_from_a_directory_runs_recorded_steps(tmp_path: Path) -> None:
    model_of().save_pretrained(tmp_path)
    with LLM(tmp_path, skip_tokenizer_init=True, speculative={"method": "draft", "model": tmp_path}) as llm:
        assert llm.engine._proposer._runner.program is not None
        outputs = llm.generate(make_prompts(8, VOCABULARY, 30, shared=18), GREEDY)
        stats = llm.stats()
    assert_greedy(model_of(), outputs)
    assert stats.accepted_draft_tokens > 0.9 * stats.draft_tokens > 0


def test_a_draft_model_of_another_dtype_serves_a_deterministic_model() -> None:
    prompts = make_prompts(3, VOCABULARY, 12, shared=4)
    drafts = {"method": "draft", "num_tokens": 2, "model": model_of(5, num_hidden_layers=1).double()}
    model = model_of()
    with LLM(model, deterministic=True, check_at_load=False, speculative=drafts, max_model_len=64) as llm:
        outputs = llm.generate(prompts, GREEDY)
    assert_greedy(model, outputs)
