"""Law: greedy tokens and log-probabilities are the plain model's, for each family and each combination of options.

The slow rows are all combinations. The quick rows have one combination for each family, drawn with its name as seed.
"""

from __future__ import annotations

import copy
import random
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.causal_models import CAUSAL, VOCABULARY, build_longer, model_of
from tests.inference.greedy_reference import answer_arrivals, assert_greedy, make_prompts
from tests.inference.peft_adapters import assert_adapters, write_adapter
from tests.inference.test_greedy_laws import OWN_CACHE, WINDOWED, TiedTwice
from windlass.inference.llm import LLM
from windlass.inference.llm_engine import LLMEngine
from windlass.inference.outputs import RequestOutput
from windlass.inference.own_cache_runner import OwnCacheModelRunner
from windlass.inference.paged_runner import PagedModelRunner
from windlass.inference.sampling_params import SamplingParams

# peft 0.21 uses a name that transformers deprecates
pytestmark = [pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")]

GREEDY = SamplingParams(temperature=0, ignore_eos=True, logprobs=0)

_SIZE = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 96, "pad_token_id": 0}
_OTHERS: dict[str, dict[str, Any]] = {
    "Qwen2ForCausalLM": {},
    "MistralForCausalLM": {"sliding_window": 7, "head_dim": 8},
    "PhiForCausalLM": {"partial_rotary_factor": 0.5},
}
_IN_TABLE = ("llama", "qwen3", "gemma2", "gemma3", "gpt2", "gpt_neox", "opt", "falcon", "bloom", "mixtral", "qwen2_moe")
FAMILIES = (*_IN_TABLE, *_OTHERS, "TiedTwice")
_TARGETS = {"gpt2": ["c_attn"], "bloom": ["dense"], "TiedTwice": ["qkv", "out"]}
_TARGETS |= dict.fromkeys(["gpt_neox", "falcon"], ["query_key_value"])


def family(name: str) -> Any:
    if name in CAUSAL:
        return build_longer(name, **WINDOWED.get(name, {}))
    torch.manual_seed(0)
    model = TiedTwice() if name == "TiedTwice" else model_of(name, **{**_SIZE, **_HEADS, **_OTHERS[name]})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.eval()


@dataclass(frozen=True)
class Options:
    """Combination of options. In each one, the KV cache holds only some of the requests."""

    policy: str
    max_tokens_per_step: int
    prefix_caching: bool
    speculation: str | None
    has_adapters: bool


POLICIES = ("splitfuse", "prefill-first", "orca")
BUDGETS = (1, 7, 64)
REST = tuple(product((True, False), (None, "ngram", "draft"), (False, True)))


def write_adapters(model: Any, name: str, folder: Path) -> dict[str, Path]:
    config: dict[str, Any] = {
        "target_modules": _TARGETS.get(name, ["q_proj", "v_proj"]),
        "fan_in_fan_out": name == "gpt2",
    }
    # TiedTwice has no norms: larger adapters make logits of 12,000, whose rounding in fp32 exceeds the tolerance.
    config["std"] = 0.2 if name == "TiedTwice" else 0.5
    return {one: write_adapter(model, folder / one, rank, r=rank, **config) for one, rank in (("two", 2), ("three", 3))}


def answer(
    name: str, model: Any, directories: dict[str, Path], options: Options, count: int, seed: int, **axes: int
) -> list[RequestOutput]:
    """Answer `count` requests that arrive at random times. With several ranks, only rank 0 returns answers."""
    r = random.Random(seed)
    prompts = make_prompts(count, VOCABULARY, 30, seed, shared=18)
    given: dict[str, Any] = asdict(options)
    adapters = [None, *directories] if given.pop("has_adapters") else [None]
    speculation = given.pop("speculation")
    if speculation is not None:
        draft = {"method": "draft", "model": copy.deepcopy(model)} if speculation == "draft" else {"method": "ngram"}
        given["speculative"] = {**draft, "num_tokens": 3}
    sizes = {"max_sequences": min(options.max_tokens_per_step, 6), "kv_cache_tokens": 80, "max_model_len": 80}
    with LLM(model, **given, **sizes, **axes, lora=directories, check_at_load=False) as llm:
        if not isinstance(llm.engine, LLMEngine):
            llm.engine.serve()
            return []
        runner = getattr(llm.engine.runner, "local_runner", llm.engine.runner)
        is_paged = isinstance(runner, PagedModelRunner)
        assert is_paged != (name in OWN_CACHE) and isinstance(runner, PagedModelRunner | OwnCacheModelRunner)
        names = [r.choice(adapters) for _ in prompts[len(adapters) :]] + adapters
        more = [{"lora_name": name, "priority": r.randrange(2)} for name in names]
        params = [GREEDY.replace(max_tokens=r.randrange(8, 31)) for _ in prompts]
        outputs = answer_arrivals(llm.engine, prompts, params, lambda _: r.choice([0, 0, 1, 4]), more)
        stats = llm.stats()
    assert (stats.prefix_cache_hits > 0) == (options.prefix_caching and is_paged)
    if options.max_tokens_per_step > 1:  # with 1, each step computes one token of one request
        assert (stats.draft_tokens > 0) == (speculation is not None and is_paged)
        assert stats.num_preemptions > 0
    return outputs


def compare(model: Any, directories: dict[str, Path], options: Options, outputs: list[RequestOutput]) -> None:
    """Compare all answers with those of the plain model, or of peft's models."""
    if options.has_adapters:
        assert_adapters(model, outputs, directories)
    else:
        assert_greedy(model, outputs)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_with_one_combination_of_options(name: str, tmp_path: Path) -> None:
    r = random.Random(name)
    options = Options(r.choice(POLICIES), r.choice(BUDGETS), *r.choice(REST))
    model = family(name)
    directories = write_adapters(model, name, tmp_path) if options.has_adapters else {}
    compare(model, directories, options, answer(name, model, directories, options, 14, seed=0))


@pytest.mark.slow
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", FAMILIES)
def test_families_with_every_combination_of_options(name: str, policy: str, budget: int, tmp_path: Path) -> None:
    """Each combination answers forty requests."""
    model = family(name)
    directories = write_adapters(model, name, tmp_path)
    failed = {}
    for seed, rest in enumerate(REST):
        options = Options(policy, budget, *rest)
        try:
            compare(model, directories, options, answer(name, model, directories, options, 40, seed))
        except AssertionError as error:
            failed[options] = str(error)
    assert not failed
