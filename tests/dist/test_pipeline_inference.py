"""Law: an engine with several pipeline stages generates what the plain model does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.causal_models import VOCABULARY, build
from tests.causal_models import model_of as make_model
from tests.dist.harness import run_ranks
from tests.dist.quick_rows import in_shares
from tests.inference.greedy_reference import answer_arrivals, assert_greedy, make_prompts
from windlass.base.errors import ConfigError, ModelError, PeerError

SMALL = {"max_tokens_per_step": 16, "max_sequences": 6, "kv_cache_tokens": 96, "max_model_len": 80}
ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]


def model_of(name: str, seed: int = 0) -> Any:
    if name == "qwen2":  # has biases of queries, keys and values
        torch.manual_seed(seed)
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "vocab_size": VOCABULARY}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 96}
        return make_model("Qwen2ForCausalLM", **sizes, **heads).eval()
    if name == "gpt2":
        return build(name, seed, n_positions=96).eval()
    changes: dict[str, Any] = {"max_position_embeddings": 96}
    if name == "gemma3":
        changes |= {"num_hidden_layers": 4, "layer_types": ALTERNATING, "sliding_window": 8}
    return build(name, seed, **changes).eval()


def generate_at_random_times(
    names: list[str], axes: dict[str, int], options: dict[str, Any], requests: int
) -> list[Any]:
    """Return, on rank 0, for each model the greedy answers to requests of mixed lengths, and three counters.

    Requests arrive while others run, and ranks start from different weights. The counters are preemptions, hits of the
    prefix cache, and steps that were started while another step was not finished.
    """
    import random

    from windlass import LLM, SamplingParams

    found = []
    for name in names:
        with LLM(model_of(name, seed=dist.get_rank()), **axes, **{**SMALL, **options}) as llm:
            if dist.get_rank():
                llm.engine.serve()
                continue
            runner, overlaps, r = llm.engine.runner, 0, random.Random(name)
            start = runner.start

            def counting(batch: Any, runner: Any = runner, start: Any = start) -> None:
                nonlocal overlaps
                overlaps += bool(runner._started)
                start(batch)

            runner.start = counting
            params = SamplingParams(temperature=0, ignore_eos=True, logprobs=0)
            prompts = make_prompts(requests, VOCABULARY, 40, shared=18)
            outputs = answer_arrivals(llm.engine, prompts, params, lambda _, r=r: r.randrange(2))
            stats = llm.stats()
            found.append((outputs, stats.num_preemptions, stats.prefix_cache_hits, overlaps))
    return found


def assert_law(
    names: list[str], axes: dict[str, int], options: dict[str, Any] | None = None, requests: int = 24
) -> None:
    ranks = axes.get("pp", 1) * axes.get("tp", 1) * axes.get("ep", 1)
    results = run_ranks(generate_at_random_times, ranks, names, axes, options or {}, requests, timeout=400)
    assert len(results[0]) == len(names)
    for name, (outputs, preempted, hits, overlaps) in zip(names, results[0], strict=True):
        assert hits > 0 and overlaps > 0, (name, hits, overlaps)
        assert preempted > 0 or options, name
        assert_greedy(model_of(name), outputs)


@in_shares
def test_two_stages_generate_what_the_plain_model_does(every: bool) -> None:
    if every:  # `make test` has llama in the next test and in `test_options_over_two_stages`
        assert_law(["llama"], {"pp": 2}, requests=40)
    assert_law(["gemma3", "mixtral", *(["gpt2", "qwen2"] if every else [])], {"pp": 2})


@pytest.mark.slow  # Other tests cover each axis on two ranks.
def test_matrices_and_layers_over_four_ranks() -> None:
    assert_law(["llama"], {"pp": 2, "tp": 2})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "axes"),
    [("gemma3", {"pp": 3}), ("gemma3", {"pp": 4}), ("mixtral", {"pp": 2, "ep": 2}), ("qwen2", {"pp": 2, "tp": 2})],
)
def test_more_stages_and_axes(name: str, axes: dict[str, int]) -> None:
    assert_law([name], axes)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"swap_bytes": 1 << 24}, marks=pytest.mark.slow),
        {"speculative": {"method": "ngram"}},
        pytest.param({"policy": "prefill-first"}, marks=pytest.mark.slow),
    ],
)
def test_options_over_two_stages(options: dict[str, Any]) -> None:
    assert_law(["llama"], {"pp": 2}, options)


def load_stages(directory: str, weights: str | None) -> tuple[list[Any], list[str], int]:
    from windlass import LLM, SamplingParams

    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0)
    with LLM(directory, pp=2, weights=weights, skip_tokenizer_init=True, **SMALL) as llm:
        outputs = llm.generate(make_prompts(6, VOCABULARY, 40), params)
        model = llm.engine.runner.model if dist.get_rank() else llm.engine.runner.local_runner.model
        return outputs, [name for name, _ in model.named_parameters()], len(llm.engine.runner.save_blocks([0]))


@pytest.mark.parametrize(
    ("name", "weights", "tolerance"), [("mixtral", None, 1e-4), ("gpt2", None, 1e-4), ("llama", "int8", 0.3)]
)
def test_each_rank_reads_its_stage_alone(tmp_path: Path, name: str, weights: str | None, tolerance: float) -> None:
    model = model_of(name)
    model.save_pretrained(tmp_path)
    (first, head, _), (second, bottom, _) = run_ranks(load_stages, 2, str(tmp_path), weights, timeout=240)
    assert [one.outputs[0].token_ids for one in first] == [one.outputs[0].token_ids for one in second]
    assert_greedy(model, first, tolerance)
    layers = "transformer.h" if name == "gpt2" else "model.layers"
    assert not any(name.startswith(f"{layers}.0.") for name in head)
    assert not any(name.startswith(f"{layers}.1.") for name in bottom)
    assert any(name.startswith(f"{layers}.1.") for name in head)


def call_prepared_model() -> Any:
    import windlass

    model = windlass.init_inference(model_of("llama", seed=dist.get_rank()), pp=2, **SMALL)
    ids = torch.randint(3, VOCABULARY, (3, 7), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    with pytest.raises(ConfigError, match="num_beams"):
        model.generate(ids, attention_mask=mask, num_beams=2, max_new_tokens=3)
    answers = model.generate(ids, attention_mask=mask, max_new_tokens=9, do_sample=False)
    output = model(ids, attention_mask=mask, labels=ids)
    return output.logits, output.loss, answers


def test_a_prepared_model_computes_and_generates() -> None:
    found = run_ranks(call_prepared_model, 2)
    model = model_of("llama")
    ids = torch.randint(3, VOCABULARY, (3, 7), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(ids, labels=ids)
    answers = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=9, do_sample=False)
    for logits, loss, tokens in found:
        torch.testing.assert_close(logits, expected.logits)
        torch.testing.assert_close(loss, expected.loss)
        assert torch.equal(tokens, answers)


def refused_models() -> list[str]:
    from windlass import LLM

    texts = []
    for name in ("bloom", "llama"):
        with pytest.raises((ModelError, PeerError)) as error:
            layers = {"num_hidden_layers": 1} if name == "llama" else {}
            LLM(build(name, **layers), pp=2, **{**SMALL, "max_model_len": 32})
        texts.append(str(error.value))
    return texts


def test_models_that_cannot_be_split_are_refused() -> None:
    for own_cache, too_few in run_ranks(refused_models, 2):
        assert "cannot be served over pp, which needs a paged KV cache" in own_cache
        assert "can't be split into stages" in too_few
