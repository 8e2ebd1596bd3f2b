"""Method `generate` of transformers, computed by an inference engine."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from windlass.base.errors import ModelError, RequestError
from windlass.base.log import logger
from windlass.inference.llm import LLM
from windlass.inference.sampling_params import MAX_CANDIDATES, SamplingParams

_TRANSLATED = frozenset(
    {
        "do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "num_return_sequences",
        "max_length", "max_new_tokens", "min_length", "min_new_tokens", "eos_token_id", "pad_token_id", "bos_token_id",
        "use_cache", "cache_implementation", "transformers_version", "_from_model_config", "output_attentions",
        "output_hidden_states",
    }
)  # fmt: skip
"""Generation settings that an engine follows, or that do not change its tokens."""

_DEFAULT_NEW_TOKENS = 20  # transformers' default if neither max_new_tokens nor max_length is set
_DEFAULT_TOP_K = 50  # transformers' default if neither the call nor the model's settings have top_k


def generate_by_engine(
    find_llm: Callable[[], LLM],
    module: Any,
    input_ids: torch.Tensor | None,
    attention_mask: torch.Tensor | None,
    **settings: Any,
) -> torch.Tensor | None:
    """Generate as `module.generate(input_ids, ...)` of transformers does, with continuous batching.

    Args:
        find_llm: function that returns the engine; not called if the result is None.
        input_ids: int64 `[batch, tokens]`, padded on any side where `attention_mask` is 0.
        settings: arguments of transformers' `generate`: fields of its GenerationConfig, or `generation_config`. Seeds
            come from torch's global CPU generator.

    Returns:
        int64 `[batch * num_return_sequences, tokens + generated]`: the input, then the answers, padded on the right.
        None: the engine lacks a setting, e.g. beams, a streamer or a logits processor, or there are no rows of token
        ids.

    Raises:
        RequestError: a prompt is empty, an answer has no room, a setting is out of range, or several answers to one
            prompt would be equal because the search is greedy.
        ModelError: the engine cannot compute an answer, e.g. because logits are not finite.
    """
    config = _generation_config(module, settings)
    if config is None or input_ids is None or input_ids.dim() != 2 or input_ids.shape[0] == 0:
        return None
    llm = find_llm()
    mask = _infer_mask(input_ids, config) if attention_mask is None else attention_mask
    prompts = [ids[row.bool()].tolist() for ids, row in zip(input_ids.cpu(), mask.cpu(), strict=True)]
    longest = max((len(prompt) for prompt in prompts), default=0)
    if any(not prompt for prompt in prompts):
        raise RequestError("a row of input_ids has no token whose attention_mask is 1; give at least one")
    size = getattr(module.config.get_text_config(), "vocab_size", None) or math.inf
    # Ids outside the vocabulary are dropped: scripts pass -1 as eos_token_id so that no token ends an answer.
    ends = [token for token in _as_list(config.eos_token_id) if 0 <= token < size]
    params = _make_params(config, input_ids.shape[1], longest, llm.max_model_len, ends)
    count = config.num_return_sequences or 1
    if params.is_greedy and count > 1:
        raise RequestError(
            f"num_return_sequences is {count}, and the answers of a greedy search would be equal; set do_sample=True "
            "with top_k above 1, or num_return_sequences=1",
            parameter="num_return_sequences",
        )
    logger.debug("generate %d answers to %d prompts of up to %d tokens", count, len(prompts), longest)
    # an engine runs all answers of a request together, so more answers than fit become several requests
    parts = _split(count, min(llm.engine.options.max_sequences, MAX_CANDIDATES))
    seeds = torch.randint(1 << 62, (len(prompts) * len(parts),)).tolist()
    each = [
        params if params.is_greedy else params.replace(n=size, seed=seed)
        for size, seed in zip(parts * len(prompts), seeds, strict=True)
    ]
    outputs = llm.generate([prompt for prompt in prompts for _ in parts], each)
    for output in outputs:
        if output.error is not None:
            raise (RequestError if output.is_request_error else ModelError)(output.error)
    answers = [answer.token_ids for output in outputs for answer in output.outputs]
    return _pad(input_ids, answers, count, _pad_token(config))


def _split(count: int, most: int) -> list[int]:
    """Return numbers of at most `most` with the sum `count`."""
    return [min(most, count - start) for start in range(0, count, most)]


def _generation_config(module: Any, settings: dict[str, Any]) -> Any:
    """Return the merged generation settings; None if the engine lacks one of them."""
    given, own = settings.pop("generation_config", None), getattr(module, "generation_config", None)
    base = given if given is not None else own
    if base is None:
        from transformers import GenerationConfig

        base = GenerationConfig()
    config = copy.deepcopy(base)
    if given is not None and own is not None:
        # as in transformers, the model's settings fill fields that are None in the argument, such as the end tokens
        for name, value in own.to_dict().items():
            if getattr(config, name, None) is None:
                setattr(config, name, value)
    if config.top_k is None:
        # set the default before `settings` applies: as in transformers, an argument of None draws from all tokens
        config.top_k = _DEFAULT_TOP_K
    unused = config.update(**settings)
    if any(value is not None for name, value in unused.items() if name != "synced_gpus"):
        return None
    changed = {name for name, value in config.to_diff_dict().items() if value is not None and value is not False}
    harmless = {"num_beams"} if config.num_beams in (None, 1) else set()
    return None if changed - _TRANSLATED - harmless else config


class _TransformersParams(SamplingParams):
    """Parameters with the rules of transformers' `generate`: its `eos_token_id`s replace those of the model, whose own
    may be drawn at any time; and the mass of `top_p` includes the tokens that `min_p` excludes.
    """

    __slots__ = ()
    min_tokens_bans_eos = False
    min_p_is_last = True


def _make_params(config: Any, width: int, longest: int, window: int, ends: list[int]) -> SamplingParams:
    """Return the sampling parameters of generation settings.

    Args:
        width: number of tokens in a row of the input, padding included.
        longest: number of tokens of the longest prompt.
        window: number of tokens that the engine takes, prompt and answer together.
        ends: tokens of the vocabulary that end an answer.

    Raises:
        RequestError: the answers have no room, or a setting is out of range.
    """
    new = config.max_new_tokens
    if new is None and config.max_length == type(config)().max_length:
        new = max(min(_DEFAULT_NEW_TOKENS, window - longest), 1)  # at most the rest of the window, as in transformers
    elif new is None:
        new = config.max_length - width
        if new < 1:
            raise RequestError(
                f"max_length is {config.max_length}, which leaves no room for answers after {width} tokens of "
                "input_ids; give max_new_tokens"
            )
    if longest < window < longest + new:
        given = "max_length" if config.max_new_tokens is None else "max_new_tokens"
        raise RequestError(
            f"{given} is {getattr(config, given)}, and a prompt has {longest} tokens; the engine takes {window} "
            f"together (max_model_len, at most kv_cache_tokens). Lower {given}, or raise the engine's limit",
            parameter=given,
        )
    least = config.min_new_tokens
    if least is None:
        least = max((config.min_length or 0) - width, 0)
    draws = bool(config.do_sample)
    return _TransformersParams(
        temperature=_or(config.temperature, 1.0) if draws else 0.0,
        top_k=_or(config.top_k, 0) if draws else 0,
        top_p=_or(config.top_p, 1.0) if draws else 1.0,
        min_p=_or(config.min_p, 0.0) if draws else 0.0,
        repetition_penalty=_or(config.repetition_penalty, 1.0),
        max_tokens=new,
        min_tokens=min(least, new),
        ignore_eos=True,
        stop_token_ids=ends,
        detokenize=False,
    )


def _infer_mask(input_ids: torch.Tensor, config: Any) -> torch.Tensor:
    """Return the attention mask of an input that has none: as in transformers, 0 at padding tokens unless the padding
    token may also end an answer.
    """
    if config.pad_token_id is None or config.pad_token_id in _as_list(config.eos_token_id):
        return torch.ones_like(input_ids)
    return input_ids.ne(config.pad_token_id)


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _as_list(tokens: Any) -> list[int]:
    if tokens is None:
        return []
    if isinstance(tokens, torch.Tensor):
        tokens = tokens.tolist()
    return [int(token) for token in tokens] if isinstance(tokens, Sequence) else [int(tokens)]


def _pad_token(config: Any) -> int:
    ends = _as_list(config.eos_token_id)
    return int(config.pad_token_id) if config.pad_token_id is not None else (ends[0] if ends else 0)


def _pad(input_ids: torch.Tensor, answers: Sequence[Sequence[int]], each: int, pad: int) -> torch.Tensor:
    longest = max(len(answer) for answer in answers)
    padded = torch.full((len(answers), longest), pad, dtype=input_ids.dtype)
    for row, answer in enumerate(answers):
        padded[row, : len(answer)] = torch.tensor(answer, dtype=input_ids.dtype)
    return torch.cat([input_ids.repeat_interleave(each, dim=0), padded.to(input_ids.device)], dim=1)
