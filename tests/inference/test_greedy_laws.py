"""Law: greedy tokens are those of the plain model, for any batch and any schedule."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.causal_models import CAUSAL, VOCABULARY, build, build_longer, model_of
from tests.inference.greedy_reference import answer_arrivals, assert_greedy, make_prompts
from tests.inference.text_models import byte_level_tokenizer
from windlass.attention import attention
from windlass.attention.attention_mask import AttentionMask
from windlass.attention.mask_pattern import ChunkedMask, MaskBand
from windlass.base.errors import ConfigError, ModelError
from windlass.base.model_updates import note_update
from windlass.inference import engine_factory
from windlass.inference.llm import LLM
from windlass.inference.own_cache_runner import OwnCacheModelRunner
from windlass.inference.paged_backend import PagedAttention
from windlass.inference.paged_runner import PagedModelRunner
from windlass.inference.sampling_params import SamplingParams
from windlass.inference.scheduler import ServiceLevel
from windlass.inference.step_cost import StepCost
from windlass.storage.process_directory import process_start_time

OWN_CACHE = {"bloom", "mpt", "falcon", "gptj", "gpt_neo", "qwen3_next"}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)
# Windows that are shorter than most sequences, in some layers only.
WINDOWED: dict[str, dict[str, Any]] = {
    "gemma2": {"sliding_window": 7},
    "gemma3": {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]},
    "gpt_oss": {"sliding_window": 7},
}


@pytest.mark.parametrize("name", CAUSAL)
def test_families_generate_what_the_plain_model_does(name: str) -> None:
    model = build_longer(name, **WINDOWED.get(name, {}))
    with LLM(model, max_tokens_per_step=16, max_sequences=6, kv_cache_tokens=320, max_model_len=32) as llm:
        outputs = llm.generate(make_prompts(10, VOCABULARY), GREEDY)
        kind = OwnCacheModelRunner if name in OWN_CACHE else PagedModelRunner
        assert isinstance(llm.engine.runner, kind)
    assert_greedy(model, outputs)


RECURRENT = {
    "MambaForCausalLM": {"state_size": 4, "time_step_rank": 4},
    "FalconMambaForCausalLM": {"state_size": 4, "time_step_rank": 4},
    "Mamba2ForCausalLM": {"state_size": 4, "num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 8},
    "RwkvForCausalLM": {"attention_hidden_size": 32, "intermediate_size": 48},
    "JambaForCausalLM": {
        **{"intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "use_mamba_kernels": False},
        **{"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
        **{"num_experts": 2, "mamba_d_state": 4, "mamba_dt_rank": 4},
    },
    "BambaForCausalLM": {  # a forward without position ids begins at 0; by default it returns the last token's logits
        **{"intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "attn_layer_indices": [1]},
        **{"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 4, "mamba_chunk_size": 8},
    },
}


def recurrent(kind: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    size = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2}
    return model_of(kind, **{**size, **RECURRENT[kind], **changes}).eval()


@pytest.mark.parametrize("kind", RECURRENT)
def test_recurrent_families_generate_what_the_plain_model_does(kind: str) -> None:
    model = recurrent(kind)
    with LLM(model, max_tokens_per_step=16, max_sequences=6, kv_cache_tokens=320, max_model_len=32) as llm:
        outputs = llm.generate(make_prompts(10, VOCABULARY), GREEDY)
        assert isinstance(llm.engine.runner, OwnCacheModelRunner) and llm.engine.runner.keeps_cache
    assert_greedy(model, outputs)


@pytest.mark.parametrize("kind", ["Mamba2ForCausalLM", "JambaForCausalLM", "BambaForCausalLM", "RwkvForCausalLM"])
def test_recurrent_families_serve_mixed_requests(kind: str) -> None:
    """Requests with different parameters run together and are preempted; one is cancelled."""
    tokenizer = byte_level_tokenizer()
    model = recurrent(kind, vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    prompts = [prompt + [5, 6, 7] for prompt in make_prompts(10, len(tokenizer))]
    wanted = [
        *(GREEDY.replace(max_tokens=30), GREEDY.replace(n=2, temperature=1.0, seed=1), GREEDY.replace(max_tokens=1)),
        *(GREEDY.replace(prompt_logprobs=0), GREEDY.replace(max_tokens=25, stop=["e", "o", " "])),
        *(GREEDY.replace(n=3, temperature=0.7, seed=5, prompt_logprobs=0, max_tokens=20), GREEDY.replace(max_tokens=9)),
        *(GREEDY.replace(max_tokens=20), GREEDY.replace(max_tokens=25, stop_token_ids=list(range(50, 150)))),
        GREEDY.replace(max_tokens=20),
    ]
    sizes = {"max_tokens_per_step": 16, "max_sequences": 6, "kv_cache_tokens": 96, "max_model_len": 64}
    with LLM(model, tokenizer=tokenizer, **sizes) as llm:
        assert isinstance(llm.engine.runner, OwnCacheModelRunner)
        outputs: dict[str, Any] = {}
        for number, (prompt, params) in enumerate(zip(prompts, wanted, strict=True)):
            llm.engine.add_request(str(number), prompt, params, priority=number % 2)
            outputs.update((output.request_id, output) for output in llm.engine.step())
            if number == 8:
                assert llm.engine.cancel("7").outputs[0].finish_reason == "abort"
        outputs.update((output.request_id, output) for output in finish(llm))
        stats = llm.stats()
    assert stats.kv_cache_usage == 0 and stats.num_preemptions > 0
    assert sorted(outputs) == list("012345689")
    assert_greedy(model, [outputs[name] for name in "0234689"])
    ends = [outputs[name].outputs[0].finish_reason for name in "0489"]
    assert set(ends) <= {"length", "stop"} and ends[0] == ends[3] == "length"
    for name in "15":
        answers = outputs[name].outputs
        assert len(answers) == wanted[int(name)].n == len({tuple(answer.token_ids) for answer in answers})
        for answer in answers:
            assert_logprobs(model, outputs[name].prompt_token_ids, answer.token_ids, answer.logprobs)
    for name in "35":
        (first, *rest), entries = outputs[name].prompt_token_ids, outputs[name].prompt_logprobs[1:]
        assert_logprobs(model, [first], rest, entries)


@torch.no_grad()
def assert_logprobs(model: Any, before: list[int], tokens: list[int], entries: Any) -> None:
    """Check the log-probabilities of `tokens` after the tokens `before`."""
    logits = model(torch.tensor([[*before, *tokens][:-1]]), use_cache=False).logits[0, len(before) - 1 :]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
    found = torch.tensor([entry[token].logprob for entry, token in zip(entries, tokens, strict=True)])
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


PAGED: dict[str, dict[str, Any]] = {
    # the scale of queries depends on the position, which layers without rotary embeddings take from their cache
    "Llama4ForCausalLM": {
        **{"config": "Llama4TextConfig", "head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1},
        **{"intermediate_size_mlp": 24, "no_rope_layer_interval": 2, "floor_scale": 4, "attn_scale": 1.0},
        "attention_chunk_size": 8,
    },
    "RobertaForCausalLM": {"is_decoder": True, "num_key_value_heads": None},  # positions start after pad_token_id
    "CamembertForCausalLM": {"is_decoder": True, "pad_token_id": 5, "num_key_value_heads": None},
    # rotary frequencies that change once a sequence is longer than a limit
    "Phi3ForCausalLM": {
        "rope_parameters": {
            **{"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 40},
            **{"short_factor": [1.0] * 4, "long_factor": [2.0] * 4},
        },
    },
    "LlamaForCausalLM": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}},
    # A class for recurrent layers, here with attention layers only.
    "GraniteMoeHybridForCausalLM": {
        **{"layer_types": ["full_attention"] * 2, "num_local_experts": 2, "shared_intermediate_size": 24},
        **{"mamba_n_heads": 8, "mamba_d_head": 8},
    },
}


@pytest.mark.parametrize("kind", PAGED)
def test_families_with_unusual_positions_or_layers_run_paged(kind: str) -> None:
    size = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 96, "pad_token_id": 0}
    values = {**size, **heads, **PAGED[kind]}
    torch.manual_seed(0)
    model = model_of(kind, values.pop("config", None), **values).eval()
    padding = model.config.pad_token_id
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
        if model.lm_head.bias is not None:
            model.lm_head.bias[padding] = -100.0  # RoBERTa's positions do not count padding
    prompts = [[token for token in prompt if token != padding] or [3] for prompt in make_prompts(10, VOCABULARY)]
    with LLM(model, max_tokens_per_step=16, max_sequences=6, kv_cache_tokens=320, max_model_len=40) as llm:
        outputs = llm.generate(prompts, GREEDY)
        assert isinstance(llm.engine.runner, PagedModelRunner)
    assert_greedy(model, outputs)


def test_prompts_have_logprobs_where_a_model_asks_for_its_last_logits() -> None:
    model, prompt = recurrent("BambaForCausalLM"), [3, 4, 5, 6, 7]
    with LLM(model, kv_cache_tokens=64, max_model_len=32) as llm:
        (output,) = llm.generate([prompt], GREEDY.replace(prompt_logprobs=0))
    assert_logprobs(model, prompt[:1], prompt[1:], output.prompt_logprobs[1:])


@pytest.mark.parametrize("checked", [True, False])
def test_a_model_with_the_state_of_one_batch_in_its_layers_is_computed_again(checked: bool) -> None:
    size = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 1, "block_types": ["recurrent", "attention"]}
    torch.manual_seed(0)
    model = model_of("RecurrentGemmaForCausalLM", **size, **heads, attention_window_size=8, pad_token_id=0).eval()
    with LLM(model, max_sequences=6, kv_cache_tokens=320, max_model_len=32, check_at_load=checked) as llm:
        outputs = llm.generate(make_prompts(6, VOCABULARY), GREEDY)
        assert not llm.engine.runner.keeps_cache
    assert_greedy(model, outputs)


def test_models_without_a_maximum_take_any_length() -> None:
    with LLM(recurrent("MambaForCausalLM"), max_sequences=1, kv_cache_tokens=8192, max_model_len=8192) as llm:
        assert llm.max_model_len == 8192


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_a_scaled_rotation_takes_the_length_that_it_is_scaled_to(kind: str) -> None:
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0}
    if kind == "yarn":
        rope["original_max_position_embeddings"] = 16
    model = build("llama", max_position_embeddings=16, rope_parameters=rope).eval()
    prompts = make_prompts(6, 41, longest=30)
    with LLM(model, max_tokens_per_step=16, max_sequences=4, kv_cache_tokens=256) as llm:
        assert llm.max_model_len == 16
    with LLM(model, max_tokens_per_step=16, max_sequences=4, kv_cache_tokens=256, max_model_len=64) as llm:
        for output in llm.generate(prompts, GREEDY.replace(max_tokens=30)):
            ids = torch.tensor([output.prompt_token_ids])
            found = model.generate(ids, max_new_tokens=30, do_sample=False, eos_token_id=None, use_cache=True)
            assert output.outputs[0].token_ids == found[0, ids.shape[1] :].tolist()
    with pytest.raises(ConfigError, match="attends to 64 tokens"):
        LLM(model, max_model_len=65)
    rope["rope_type"] = "dynamic"  # frequencies depend on earlier sequences, so requests would depend on each other
    with pytest.raises(ConfigError, match="attends to 16 tokens"):
        LLM(build("llama", max_position_embeddings=16, rope_parameters=rope), max_model_len=64)


def test_a_paged_step_that_raises_at_load_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(runner: Any, batch: Any) -> Any:
        raise IndexError("index 11 is out of bounds")

    monkeypatch.setattr(PagedModelRunner, "_run_modules", broken)
    model = build_longer("llama")
    with caplog.at_level("WARNING"), LLM(model, max_sequences=4, kv_cache_tokens=320, max_model_len=32) as llm:
        outputs = llm.generate(make_prompts(4, VOCABULARY), GREEDY)
        assert isinstance(llm.engine.runner, OwnCacheModelRunner)
    assert_greedy(model, outputs)
    assert "its forward raised IndexError: index 11 is out of bounds" in caplog.text


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"kv_cache_tokens": 48, "max_model_len": 32}, r"has 3 blocks of 16 tokens, and the comparison needs 4"),
        ({"max_model_len": 16}, "max_model_len is 16, and the comparison needs 19 tokens"),
        ({"kv_cache_tokens": 64, "max_model_len": 32}, None),
    ],
)
def test_a_check_without_room_is_in_the_log(
    limits: dict[str, int], reason: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without the check, a wrong paged step is used."""
    run = PagedModelRunner.run
    monkeypatch.setattr(PagedModelRunner, "run", lambda runner, batch: run(runner, batch) + 1.0)
    with caplog.at_level("WARNING"), LLM(build_longer("llama"), max_sequences=4, **limits) as llm:
        assert isinstance(llm.engine.runner, OwnCacheModelRunner if reason is None else PagedModelRunner)
    found = [one.getMessage() for one in caplog.records if "are not compared" in one.getMessage()]
    assert len(found) == (reason is not None) and all(re.search(str(reason), one) for one in found)


@pytest.mark.parametrize("wrong", ["raises", "forgets"])
def test_a_cache_that_fails_at_load_is_not_used(
    wrong: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = recurrent("MambaForCausalLM")
    forward = OwnCacheModelRunner._forward_with_cache

    def broken(runner: Any, state: Any, ids: Any, **others: Any) -> Any:
        if wrong == "raises":
            raise ValueError("no such cache")
        found = forward(runner, state, ids, **others)
        state.model_kwargs["cache_params"].reset()
        return found

    monkeypatch.setattr(OwnCacheModelRunner, "_forward_with_cache", broken)
    with caplog.at_level("WARNING"), LLM(model, max_sequences=6, kv_cache_tokens=320, max_model_len=32) as llm:
        outputs = llm.generate(make_prompts(6, VOCABULARY), GREEDY)
        assert not llm.engine.runner.keeps_cache
    assert_greedy(model, outputs)
    assert ("no such cache" if wrong == "raises" else "its first logits differ") in caplog.text


def test_a_model_that_is_not_causal_generates_as_its_own_generate_does() -> None:
    """The tokens of CPM-Ant's prompt attend to each other, so forwards with and without a cache differ."""
    torch.manual_seed(0)
    size = {"vocab_size": VOCABULARY, "hidden_size": 32, "dim_head": 8, "num_attention_heads": 4, "dim_ff": 48}
    model = model_of("CpmAntForCausalLM", **size, num_hidden_layers=2, prompt_length=4).eval()
    prompts = make_prompts(4, VOCABULARY)
    with LLM(model, max_sequences=6, kv_cache_tokens=320, max_model_len=48) as llm:
        outputs = llm.generate(prompts, GREEDY)
        assert llm.engine.runner.keeps_cache
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = torch.tensor([prompt])
        settings = {"do_sample": False, "max_new_tokens": 8, "eos_token_id": None, "use_cache": True}
        wanted = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
        assert output.outputs[0].token_ids == wanted[0, len(prompt) :].tolist()


def _schedules() -> Iterator[Any]:
    """Yield all products of model, budget and policy. Each policy with each budget is quick for one of the models."""
    rows = product(
        enumerate(["llama", "gemma3"]), enumerate([1, 7, 64]), enumerate(["splitfuse", "prefill-first", "orca"])
    )
    for (i, name), (j, budget), (k, policy) in rows:
        yield pytest.param(name, budget, policy, marks=[pytest.mark.slow] if (i + j + k) % 2 else [])


@pytest.mark.parametrize(("name", "budget", "policy"), list(_schedules()))
def test_greedy_tokens_for_each_policy_and_budget(name: str, policy: str, budget: int) -> None:
    """Requests of mixed lengths arrive during a run whose cache holds only some of them."""
    model = build_longer(name, **WINDOWED.get(name, {}))
    prompts = make_prompts(24, VOCABULARY, 40, shared=18)
    options = {"max_tokens_per_step": budget, "max_sequences": min(budget, 6), "policy": policy}
    with LLM(model, **options, kv_cache_tokens=112, max_model_len=96, check_at_load=False) as llm:
        outputs = answer_arrivals(llm.engine, prompts, GREEDY)
        stats = llm.stats()
    assert stats.prefix_cache_hits > 0
    if budget > 1:
        assert stats.num_preemptions > 0
    assert_greedy(model, outputs)


def count_moves(llm: LLM) -> Counter[str]:
    """Return counters of the calls that save and restore blocks of preempted sequences."""
    runner, counts = llm.engine.runner, Counter()
    save, restore = runner.save_blocks, runner.restore_blocks

    def saved(blocks: Any) -> Any:
        counts["saved"] += 1
        return save(blocks)

    def restored(blocks: Any, content: Any) -> None:
        counts["restored"] += 1
        restore(blocks, content)

    runner.save_blocks, runner.restore_blocks = saved, restored
    return counts


@pytest.mark.parametrize("changes", [{"prefix_caching": False}, {"block_size": 32}, {"swap_bytes": 1 << 20}])
def test_options_change_no_token(changes: dict[str, Any]) -> None:
    model = build_longer("llama")
    with LLM(model, max_tokens_per_step=32, max_sequences=8, kv_cache_tokens=128, **changes) as llm:
        moves = count_moves(llm)
        outputs = llm.generate(make_prompts(16, VOCABULARY, 30, shared=18), GREEDY.replace(max_tokens=20))
        stats = llm.stats()
    assert stats.num_preemptions > 0
    assert (moves["saved"] > 0) == (moves["restored"] > 0) == ("swap_bytes" in changes)
    assert stats.kv_cache_usage == 0
    assert_greedy(model, outputs)


@pytest.mark.parametrize(("dtype", "tolerance"), [("bf16", 0.02), ("int8", 0.05)])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_narrow_cache_changes_log_probabilities_by_its_rounding_alone(
    name: str, dtype: str, tolerance: float
) -> None:
    """Prompt chunks and decodes read rounded keys and values, also from shared blocks and from moved blocks."""
    model = build_longer(name, **WINDOWED.get(name, {}))
    prompts = make_prompts(12, VOCABULARY, 40, shared=18)
    wanted = GREEDY.replace(prompt_logprobs=0, max_tokens=16)
    options = {"max_tokens_per_step": 16, "max_sequences": 6, "kv_cache_tokens": 160, "swap_bytes": 1 << 20}
    found: dict[str, Any] = {}
    for cache in ("fp32", dtype):
        with LLM(model, **options, kv_dtype=cache) as llm:
            assert isinstance(llm.engine.runner, PagedModelRunner)
            outputs = llm.generate(prompts, wanted)
            found[cache] = llm.engine.runner.block_nbytes, outputs
    assert_greedy(model, found[dtype][1], tolerance)
    assert found[dtype][0] < 0.6 * found["fp32"][0]
    values = [
        torch.tensor(
            [
                entry[token].logprob
                for one in outputs
                for entry, token in zip(one.prompt_logprobs[1:], one.prompt_token_ids[1:], strict=True)
            ]
        )
        for _, outputs in found.values()
    ]
    assert 0 < (values[0] - values[1]).abs().max() < tolerance


@pytest.mark.parametrize("error", [ConfigError, MemoryError])
def test_a_cache_that_cannot_be_allocated_leaves_the_model_as_it_was(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any, **options: Any) -> Any:
        raise error("no memory")

    model = build_longer("llama")
    attention = model.config._attn_implementation
    monkeypatch.setattr(PagedModelRunner, "_cache_tensors", fail)
    if error is ConfigError:
        with pytest.raises(ConfigError, match="no memory"):
            LLM(model, check_at_load=False)
    else:  # the model's own cache is tried instead
        with LLM(model, max_sequences=4, check_at_load=False) as llm:
            assert isinstance(llm.engine.runner, OwnCacheModelRunner)
            assert_greedy(model, llm.generate(make_prompts(4, VOCABULARY), GREEDY))
    assert model.config._attn_implementation == attention


@pytest.mark.parametrize("option", [None, "max_gap_ms", "swap_bytes", "swap_directory"])
def test_options_that_need_the_time_of_steps_work_without_a_check(
    option: str | None, tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    given = {"max_gap_ms": {"max_gap_ms": 50.0}, "swap_bytes": {"swap_bytes": 4096}}
    given["swap_directory"] = {"swap_directory": tmp_path}
    options = {} if option is None else given[option]
    with LLM(build_longer("llama"), max_tokens_per_step=32, max_sequences=8, check_at_load=False, **options) as llm:
        assert (llm.engine.cost.step_seconds(1, 0) > 0) == (option is not None)
        with caplog.at_level("WARNING"):
            for name in "ab":
                llm.engine.add_request(name, [3, 4], GREEDY, level=ServiceLevel(1.0, 5.0))
        warnings = [record for record in caplog.records if "service levels" in record.getMessage()]
        assert len(warnings) == (option is None)


def finish(llm: LLM) -> list[Any]:
    """Run the engine until all requests have ended. Return the outputs in the order in which requests end."""
    outputs = []
    while llm.engine.has_requests():
        outputs += llm.engine.step()
    return outputs


def test_answers_that_share_blocks_are_preempted_for_a_higher_priority() -> None:
    """All answers share the blocks of the prompt, so preempting one answer does not free these blocks."""
    model = build_longer("llama")
    low = SamplingParams(n=3, temperature=1.0, seed=3, max_tokens=14, ignore_eos=True)
    prompts = [[3 + place * step % 37 for place in range(size)] for size, step in ((64, 7), (90, 11))]
    with LLM(model, max_tokens_per_step=64, max_sequences=4, kv_cache_tokens=128, check_at_load=False) as llm:
        llm.engine.add_request("low", prompts[0], low, priority=1)
        for _ in range(4):
            llm.engine.step()
        llm.engine.add_request("high", prompts[1], GREEDY.replace(max_tokens=4))
        outputs = finish(llm)
    assert [output.request_id for output in outputs] == ["high", "low"]
    assert outputs[1].metrics.num_preemptions >= 3
    assert_greedy(model, outputs[:1])


def test_no_preemption_that_would_not_admit_the_request() -> None:
    model = build_longer("llama")
    prompts = [[3 + place * step % 37 for place in range(size)] for size, step in ((34, 7), (54, 11), (90, 11))]
    with LLM(model, max_tokens_per_step=64, max_sequences=4, kv_cache_tokens=144, check_at_load=False) as llm:
        llm.engine.add_request("first", prompts[0], GREEDY.replace(max_tokens=12))
        llm.engine.add_request("low", prompts[1], GREEDY.replace(max_tokens=10), priority=1)
        for _ in range(3):
            llm.engine.step()
        llm.engine.add_request("sharing", prompts[2], GREEDY.replace(max_tokens=4))
        outputs = finish(llm)
    assert [output.metrics.num_preemptions for output in outputs] == [0, 0, 0]
    assert_greedy(model, outputs)


@pytest.fixture
def slow_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the measured cost of steps: each step takes longer than moving any blocks."""
    monkeypatch.setattr(engine_factory, "measure_step_cost", lambda *arguments, **options: StepCost(100.0))


@pytest.mark.parametrize("seconds", [100.0, 1e-9])
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_preempted_blocks_are_moved_if_computing_again_takes_longer(
    tier: str, seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_factory, "measure_step_cost", lambda *arguments, **options: StepCost(seconds))
    model = build_longer("llama")
    changes = {"swap_bytes": 1 << 24} if tier == "host" else {"swap_directory": tmp_path}
    with LLM(model, max_tokens_per_step=32, max_sequences=8, kv_cache_tokens=128, **changes) as llm:
        moves = count_moves(llm)
        outputs = llm.generate(make_prompts(16, VOCABULARY, 30), GREEDY.replace(max_tokens=20))
        assert llm.stats().num_preemptions > 0
    assert (moves["saved"] > 0) == (moves["restored"] > 0) == (seconds == 100.0)
    assert_greedy(model, outputs)
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("slow_steps")
def test_a_preempted_request_whose_blocks_are_saved_can_be_cancelled() -> None:
    model = build_longer("llama")
    prompts = make_prompts(6, VOCABULARY, 30)
    with LLM(model, max_tokens_per_step=32, max_sequences=8, kv_cache_tokens=128, swap_bytes=1 << 24) as llm:
        engine = llm.engine
        for number, prompt in enumerate(prompts):
            engine.add_request(str(number), prompt, GREEDY.replace(max_tokens=30))
        outputs, cancelled = [], 0
        while engine.has_requests():
            outputs += engine.step()
            for sequence in list(engine._table.waiting.values()):
                if sequence.saved is not None and cancelled < 2:
                    assert engine.cancel(sequence.request.request_id).outputs[0].finish_reason == "abort"
                    cancelled += 1
        assert cancelled and llm.stats().kv_cache_usage == 0
        assert engine._table._saved._host_left == 1 << 24
    assert len(outputs) == len(prompts) - cancelled
    assert_greedy(model, outputs)


@pytest.mark.usefixtures("slow_steps")
def test_blocks_that_cannot_be_read_back_are_computed_again(tmp_path: Any) -> None:
    model = build_longer("llama")
    with LLM(model, max_tokens_per_step=32, max_sequences=8, kv_cache_tokens=128, swap_directory=tmp_path) as llm:
        read, lost = llm.engine._table._saved.read, 0

        def without_file(sequence: Any) -> Any:
            nonlocal lost
            path = llm.engine._table._saved._files[sequence.sequence_id]
            lost += 1
            path.unlink() if lost % 2 else path.write_bytes(path.read_bytes()[:-8])
            return read(sequence)

        llm.engine._table._saved.read = without_file
        outputs = llm.generate(make_prompts(16, VOCABULARY, 30), GREEDY.replace(max_tokens=20))
        assert llm.stats().kv_cache_usage == 0
    assert lost > 1
    assert_greedy(model, outputs)


def test_blocks_that_a_killed_process_left_are_removed(tmp_path: Path) -> None:
    model = build_longer("llama")
    with LLM(model, swap_directory=tmp_path, check_at_load=False):
        (ours,) = tmp_path.iterdir()
        assert ours.stat().st_mode & 0o077 == 0
    assert not ours.exists()
    # a directory of an earlier process with the same process id
    left = tmp_path / ours.name.replace(f"-{process_start_time(os.getpid())}-", "-1-")
    left.mkdir()
    with LLM(model, swap_directory=tmp_path, check_at_load=False):
        assert not left.exists()


def test_greedy_tokens_are_those_of_transformers_generate() -> None:
    model = build_longer("llama")
    prompts = make_prompts(6, VOCABULARY)
    with LLM(model, max_tokens_per_step=16, max_sequences=4) as llm:
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12))
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = torch.tensor([prompt])
        wanted = model.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0, use_cache=True)
        assert output.outputs[0].token_ids == wanted[0, len(prompt) :].tolist()
        assert output.outputs[0].finish_reason == ("stop" if output.outputs[0].token_ids[-1] == 2 else "length")


class TiedTwice(nn.Module):
    """User-defined model: one layer used twice, tied weights, attention from the registry."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.place = nn.Embedding(96, 16)
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor | None = None) -> torch.Tensor:
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1])[None]
        x = self.embed(input_ids) + self.place(position_ids)
        for _ in range(2):
            q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
            x = x + self.out(attention(q, k, v, is_causal=True, module=self).transpose(1, 2).flatten(2))
        return x @ self.embed.weight.T


def test_modules_of_users_are_paged_if_they_take_positions() -> None:
    torch.manual_seed(0)
    model = TiedTwice().eval()
    with LLM(model, max_tokens_per_step=16, max_sequences=4, max_model_len=40) as llm:
        assert isinstance(llm.engine.runner, PagedModelRunner)
        outputs = llm.generate(make_prompts(8, VOCABULARY), GREEDY)
    assert_greedy(model, outputs)


class SometimesDeeper(TiedTwice):
    """User-defined model whose third layer runs only if a prompt contains token 17."""

    def __init__(self) -> None:
        super().__init__()
        self.third = TiedTwice()

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor | None = None) -> torch.Tensor:
        extra = self.third(input_ids, position_ids) if (input_ids == 17).any() else 0
        return super().forward(input_ids, position_ids) + extra


def test_a_layer_that_did_not_run_at_load_gets_no_cache_later() -> None:
    """The check at load chooses a runner without paged cache. Unchecked, the step that needs the cache raises."""
    model = SometimesDeeper()
    with LLM(model, max_model_len=64, kv_cache_tokens=256) as llm:
        assert_greedy(model, llm.generate([[3, 4, 5], [3, 17, 5]], GREEDY))
    with LLM(model, max_model_len=64, kv_cache_tokens=256, check_at_load=False) as llm:
        assert_greedy(model, llm.generate([[3, 4, 5]], GREEDY))
        with pytest.raises(ModelError, match="TiedTwice has no KV cache: it did not run"):
            llm.generate([[3, 17, 5]], GREEDY)


@pytest.mark.parametrize(
    ("least", "reason"), [(None, "not causal"), (-1, "not causal"), (1, "excludes the query's own")]
)
def test_masks_without_a_paged_kernel_are_refused_with_their_reason(least: int | None, reason: str) -> None:
    for band in (MaskBand(least, None), ChunkedMask(4, band=MaskBand(least, None))):
        with pytest.raises(ModelError, match=reason):
            PagedAttention().make_mask(AttentionMask(1, 4, 4, band))


class NoPositions(nn.Module):
    """User-defined recurrent model that takes no positions and keeps no cache."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.mix = nn.GRU(16, 16, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mix(self.embed(x))[0] @ self.embed.weight.T


def test_modules_without_a_cache_are_computed_again() -> None:
    torch.manual_seed(0)
    model = NoPositions().eval()
    with LLM(model, max_tokens_per_step=16, max_sequences=4, max_model_len=40) as llm:
        assert "computed again" in llm.engine.runner.description
        outputs = llm.generate(make_prompts(8, VOCABULARY), GREEDY)
    assert_greedy(model, outputs)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_request_has_the_same_bits_in_any_company(name: str) -> None:
    """A request has equal tokens and logprobs alone, in a batch, and for every split of its prompt."""
    model = build_longer(name, **WINDOWED.get(name, {}))
    prompts = make_prompts(12, VOCABULARY, 40)
    params = GREEDY.replace(logprobs=3, max_tokens=16)
    found = []
    for budget, sequences in ((64, 12), (5, 5), (64, 1)):
        with LLM(model, max_tokens_per_step=budget, max_sequences=sequences, deterministic=True) as llm:
            outputs = llm.generate(prompts, params)
        found.append([(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs])
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_the_same_bits_are_refused_for_weights_without_native_products(dtype: torch.dtype) -> None:
    with pytest.raises(ConfigError, match=rf"deterministic is True, .*q_proj\.weight is {dtype}.*float32 or bfloat16"):
        LLM(build("llama").to(dtype), deterministic=True)


def test_weights_that_change_in_place_are_packed_again() -> None:
    model, other = build_longer("llama"), build_longer("llama", seed=1)
    prompts = make_prompts(4, VOCABULARY, 40)
    params = GREEDY.replace(logprobs=3, max_tokens=8)

    def answers(llm: LLM) -> list[Any]:
        return [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in llm.generate(prompts, params)]

    with LLM(model, deterministic=True) as llm:
        found = [answers(llm)]
        for source, told in ((other, False), (build_longer("llama"), True)):
            for parameter, value in zip(model.parameters(), source.parameters(), strict=True):
                parameter.data.copy_(value)
            if told:
                note_update(model)
            else:
                llm.reset_prefix_cache()
            found.append(answers(llm))
    with LLM(other, deterministic=True) as llm:
        assert found[1] == answers(llm) != found[0]
    assert found[2] == found[0]


@pytest.mark.parametrize("policy", ["orca", "prefill-first"])
def test_whole_prompts_have_the_bits_of_their_parts(policy: str, tmp_path: Any) -> None:
    """A step of whole prompts may have more tokens than a recorded step."""
    build("llama", vocab_size=401, max_position_embeddings=128).save_pretrained(tmp_path)
    prompts = make_prompts(10, 401, 80, seed=1)
    params = GREEDY.replace(logprobs=3, max_tokens=12)
    found = []
    for budget, used in ((64, "splitfuse"), (20, policy)):
        options = {"max_tokens_per_step": budget, "max_sequences": 8, "policy": used}
        with LLM(tmp_path, skip_tokenizer_init=True, **options) as llm:
            outputs = llm.generate(prompts, params)
        found.append([(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs])
    assert found[0] == found[1]


def test_training_on_a_served_module_is_untouched() -> None:
    model = build("llama", max_position_embeddings=96)
    ids = torch.tensor([make_prompts(1, VOCABULARY, 20)[0] * 2])
    wanted = model(ids, labels=ids).loss
    wanted.backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    with LLM(model, max_tokens_per_step=16, max_sequences=4) as llm:
        llm.generate([[3, 4, 5]], GREEDY)
        model.train()
        loss = model(ids, labels=ids).loss
        loss.backward()
        torch.testing.assert_close(loss, wanted)
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            torch.testing.assert_close(parameter.grad, gradient)
        model.eval()
        outputs = llm.generate([[3, 4, 5]], GREEDY)
    assert_greedy(model, outputs)


@pytest.mark.parametrize("uses_pages", [True, False])
def test_a_module_in_training_mode_generates_as_in_evaluation_and_keeps_its_mode(uses_pages: bool) -> None:
    model = build_longer("gpt2", resid_pdrop=0.5, embd_pdrop=0.5)
    model.train()
    model.transformer.h[0].eval()
    if not uses_pages:
        model._is_stateful = True
    with LLM(model, max_tokens_per_step=16, max_sequences=4) as llm:
        assert ("paged" in llm.engine.runner.description) == uses_pages
        assert model.training and not model.transformer.h[0].training
        outputs = llm.generate(make_prompts(3, VOCABULARY), GREEDY)
        assert model.training and not model.transformer.h[0].training
    assert_greedy(model.eval(), outputs)


def test_engines_of_one_module_do_not_depend_on_one_another() -> None:
    model = build_longer("llama")
    prompts = make_prompts(3, VOCABULARY)
    before = model.config._attn_implementation
    first, second = (LLM(model, max_tokens_per_step=16, max_sequences=4, check_at_load=False) for _ in range(2))
    assert_greedy(model, first.generate(prompts, GREEDY))
    first.close()
    assert_greedy(model, second.generate(prompts, GREEDY))
    model.set_attn_implementation("eager")
    assert_greedy(model, second.generate([prompt[:-1] for prompt in prompts], GREEDY))
    second.close()
    assert model.config._attn_implementation in (before, "eager")


def test_changed_weights_are_served_after_the_prefix_cache_is_cleared() -> None:
    model = build_longer("llama")
    prompt = list(range(3, 40))
    with LLM(model, max_tokens_per_step=64, max_sequences=4) as llm:
        llm.generate([prompt], GREEDY)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5)
        llm.reset_prefix_cache()
        outputs = llm.generate([prompt], GREEDY)
    assert_greedy(model, outputs)


def test_requests_that_run_while_the_weights_change_leave_no_old_keys_and_values() -> None:
    model, prompt = build_longer("llama"), list(range(3, 23))
    with LLM(model, max_tokens_per_step=64, max_sequences=4, swap_bytes=2**20) as llm:
        llm.engine.add_request("running", prompt, GREEDY.replace(max_tokens=40))
        for _ in range(6):
            llm.engine.step()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.3)
        llm.reset_prefix_cache()
        (running,) = finish(llm)
        tokens = prompt + running.outputs[0].token_ids
        known = len(prompt) + 6  # tokens of the old weights
        running.prompt_token_ids, running.outputs[0].token_ids = tokens[:known], tokens[known:]
        running.outputs[0].logprobs = (running.outputs[0].logprobs or [])[6:]
        llm.generate([tokens[:20]], GREEDY)
        (later,) = llm.generate([tokens[:52]], GREEDY)
        assert later.num_cached_tokens == 48
    assert_greedy(model, [running, later])
