"""Law: every class of transformers' MODEL_FOR_CAUSAL_LM_MAPPING generates what its plain forward does.

The sets below are the source of the table in docs/inference.md.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.inference.greedy_reference import assert_greedy, make_prompts
from tests.tiny_causal_configs import NOT_STANDALONE, make_tiny_model
from windlass.inference.llm import LLM
from windlass.inference.own_cache_runner import OwnCacheModelRunner
from windlass.inference.sampling_params import SamplingParams

pytestmark = pytest.mark.slow

PARTS = 12
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)

OWN_ATTENTION = {  # models with attention that bypasses transformers' AttentionInterface
    *("big_bird", "bloom", "codegen", "cpmant", "falcon", "got_ocr2", "gpt_neo", "gpt_neox_japanese", "gptj", "mpt"),
    *("megatron-bert", "mvp", "openai-gpt", "prophetnet", "reformer", "rembert", "roformer", "trocr", "xglm", "xlm"),
    "xlnet",
}
OWN_MASKS = {"doge", "git"}  # models with masks that depend on values, or are added outside of attention
WITHOUT_POSITIONS = {
    *("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart", "pegasus", "plbart"),
}
RECURRENT = {
    *("bailing_hybrid", "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "inkling2_text", "inkling_text"),
    *("jamba", "kimi_linear", "lfm2", "lfm2_moe", "lfm3", "mamba", "mamba2", "minimax", "nemotron_h", "olmo_hybrid"),
    *("qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "qwen4_exp", "qwen4_exp_text"),
    *("rwkv", "xlstm", "zamba", "zamba2", "zaya"),
}
INDEXED = {"axk2", "deepseek_v32", "deepseek_v4", "glm_moe_dsa", "hy_v4"}  # models that cache more than keys and values
RECOMPUTED = {"blt", "recurrent_gemma"}
OWN_CACHE = OWN_ATTENTION | OWN_MASKS | WITHOUT_POSITIONS | RECURRENT | INDEXED

# Models compared with their own `generate`: a forward without a cache is not causal, or differs from one with a cache.
AS_GENERATE = {"cpmant", "prophetnet", "reformer", "xlm", "xlnet", "zamba2"}


def _types() -> list[str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - set(NOT_STANDALONE))


def _avoid_padding(model: Any) -> None:
    """Make the padding token unlikely if the head has a bias: RoBERTa's positions do not count padding."""
    bias, padding = getattr(model.get_output_embeddings(), "bias", None), getattr(model.config, "pad_token_id", None)
    if bias is not None and isinstance(padding, int) and 0 <= padding < bias.shape[0]:
        with torch.no_grad():
            bias[padding] = -1e4


def _assert_as_generate(model: Any, outputs: list[Any]) -> None:
    for output in outputs:
        ids = torch.tensor([output.prompt_token_ids])
        settings = {"do_sample": False, "max_new_tokens": 8, "eos_token_id": None, "use_cache": True}
        found = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
        assert output.outputs[0].token_ids == found[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("part", range(PARTS))
def test_every_causal_class_generates_what_its_plain_forward_does(part: int) -> None:
    problems = {}
    for name in _types()[part::PARTS]:
        model = make_tiny_model(name)
        _avoid_padding(model)
        prompts = [[max(token, 5) for token in prompt] for prompt in make_prompts(8, 80, 30, shared=18)]
        with LLM(model, max_tokens_per_step=16, max_sequences=6, kv_cache_tokens=320, max_model_len=64) as llm:
            outputs = llm.generate(prompts, GREEDY)
            runner = llm.engine.runner
            kept = isinstance(runner, OwnCacheModelRunner)
            path = ("own cache" if runner.keeps_cache else "computed again") if kept else "paged"
        expected = "own cache" if name in OWN_CACHE else "computed again" if name in RECOMPUTED else "paged"
        try:
            assert path == expected, f"runs {path}, not {expected}"
            (_assert_as_generate if name in AS_GENERATE else assert_greedy)(model, outputs)
        except AssertionError as error:
            problems[name] = str(error).split("\n")[0]
    assert not problems
