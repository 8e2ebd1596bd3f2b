"""Tests of vLLM's names of options: translated, without effect, or refused."""

from __future__ import annotations

from typing import Any

import pytest

from windlass.base.errors import ConfigError
from windlass.inference.engine_options import EngineOptions


def test_options_of_a_script_for_vllm_become_windlasss() -> None:
    options = EngineOptions.from_arguments(
        max_num_seqs=4,
        max_num_batched_tokens=64,
        enable_prefix_caching=False,
        kv_cache_dtype="bfloat16",
        enforce_eager=True,
        swap_space=0.5,
        enable_chunked_prefill=False,
        speculative_config={"model": "draft", "num_speculative_tokens": 3},
        quantization=None,
        tokenizer_mode="auto",
        enable_lora=True,
        max_lora_rank=64,
        disable_log_stats=True,
        cpu_offload_gb=0,
        max_logprobs=20,
        override_generation_config={},
        enable_sleep_mode=False,
        logprobs_mode="raw_logprobs",
        worker_extension_cls="",
    )
    assert (options.max_sequences, options.max_tokens_per_step, options.prefix_caching) == (4, 64, False)
    assert (options.kv_dtype, options.cuda_graphs, options.swap_bytes) == ("bf16", False, 1 << 29)
    assert options.policy == "prefill-first"
    assert options.speculative is not None
    assert (options.speculative.method, options.speculative.num_tokens) == ("draft", 3)
    lookup = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 5, "prompt_lookup_min": 2}
    found = EngineOptions.from_arguments(speculative_config=lookup, enable_chunked_prefill=True)
    assert found.policy == "splitfuse" and found.speculative is not None
    assert (found.speculative.num_tokens, found.speculative.max_ngram, found.speculative.min_ngram) == (2, 5, 2)


def test_options_that_are_none_have_the_default() -> None:
    names = ("max_num_seqs", "max_num_batched_tokens", "swap_space", "kv_cache_dtype", "enforce_eager")
    assert EngineOptions.from_arguments(**dict.fromkeys(names)) == EngineOptions.from_arguments()
    assert EngineOptions.from_arguments(max_sequences=4, max_num_seqs=None).max_sequences == 4


@pytest.mark.parametrize(
    ("given", "advice"),
    [
        ({"quantization": "awq"}, "weights='int8'"),
        ({"revision": "main"}, "snapshot_download"),
        ({"cpu_offload_gb": 4}, "weights_tier='host'"),
        ({"max_logprobs": 100}, "up to 64"),
        ({"data_parallel_size": 2}, "--replicas"),
        ({"logprobs_mode": "processed_logprobs"}, "before penalties"),
        ({"enable_sleep_mode": True}, "use close"),
        ({"enable_expert_parallel": True}, "ep="),
        ({"max_num_seqs": 4, "max_sequences": 4}, "'max_num_seqs' and 'max_sequences' are the same"),
        ({"max_sequences": 4, "max_num_seqs": 4}, "'max_sequences' and 'max_num_seqs' are the same"),
        ({"swap_space": "x"}, "swap_space is 'x': could not convert"),
        ({"no_such_option": 1}, "no option 'no_such_option'"),
    ],
)
def test_values_that_windlass_lacks_are_refused(given: dict[str, Any], advice: str) -> None:
    with pytest.raises(ConfigError, match=advice):
        EngineOptions.from_arguments(**given)


def test_an_option_without_effect_is_no_duplicate() -> None:
    options = EngineOptions.from_arguments(policy="splitfuse", enable_chunked_prefill=True)
    assert options.policy == "splitfuse"
    with pytest.raises(ConfigError, match="'policy' and 'enable_chunked_prefill' are the same"):
        EngineOptions.from_arguments(policy="splitfuse", enable_chunked_prefill=False)
