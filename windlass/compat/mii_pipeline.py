"""`mii.pipeline`: a model that generates responses to prompts in this process."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn

from windlass.base.errors import ConfigError, ModelError, RequestError
from windlass.config.config_refusals import find_section_refusals
from windlass.config.inference_section import RaggedInference
from windlass.inference.llm import LLM
from windlass.inference.outputs import CompletionOutput, RequestOutput
from windlass.inference.sampling_params import SamplingParams

_IGNORED = frozenset(
    {"device_rank", "torch_dist_port", "profile_model_time", "task", "sync_debug", "use_legacy_post_processor"}
    | {"zmq_port_number", "replica_configs", "device_map"}
)  # settings of MII that have no effect here

_GENERATION = (
    "max_length", "max_new_tokens", "min_new_tokens", "ignore_eos", "do_sample", "top_p", "top_k", "temperature",
    "stop", "seed",
)  # fmt: skip


_BLOCK_TOKENS = 64  # DeepSpeed's KV block for attention heads of more than 64 features


@dataclass
class MiiResponse:
    """Answer to one prompt. Prints as its text.

    Attributes:
        generated_text: text of the answer; with `return_full_text`, the prompt and the answer.
        prompt_length: number of tokens of the prompt.
        generated_length: number of tokens of the answer.
        finish_reason: `"stop"` or `"length"`; None while the answer streams.
    """

    generated_text: str
    prompt_length: int
    generated_length: int
    finish_reason: str | None

    def __str__(self) -> str:
        return self.generated_text

    def __repr__(self) -> str:
        return self.generated_text

    def to_msg_dict(self) -> dict[str, Any]:
        """Return the attributes as a dict."""
        return asdict(self)


def pipeline(
    model_name_or_path: str | Path | nn.Module = "",
    model_config: Mapping[str, Any] | None = None,
    *,
    all_rank_output: bool = False,
    **settings: Any,
) -> MiiPipeline:
    """Load a model for calls in this process. With several ranks, all of them must make the same calls.

    Args:
        model_name_or_path: directory, name on the hub, or a module.
        model_config: dict with some of the settings that `settings` lists.
        all_rank_output: all ranks return the responses; else every rank but the first returns an empty list.
        settings: `tensor_parallel` (ranks; None: all that were launched), `tokenizer`, `max_length` (tokens of a prompt
            and its answer; None: the model's window), `inference_engine_config` (a `RaggedInferenceEngineConfig`),
            `quantization_mode`, `trust_remote_code`, and options of `windlass.LLM`.

    Raises:
        ConfigError: a setting is not known or not supported, or differs from that of `model_config`.
        ModelError: the model cannot be loaded.
    """
    settings = merge_settings("model_config", model_config, settings)
    model = take_model(model_name_or_path, settings)
    use_engine_config(settings)
    tokenizer = settings.pop("tokenizer", None)
    trust = bool(settings.pop("trust_remote_code", False))
    llm = LLM(model, tokenizer=tokenizer, trust_remote_code=trust, **engine_arguments(settings))
    return MiiPipeline(llm, all_rank_output=all_rank_output)


def merge_settings(name: str, given: Mapping[str, Any] | None, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a dict argument `name` and those that were given as keywords.

    Raises:
        ConfigError: a setting was given twice with different values, or the argument is not a dict.
    """
    if given is not None and not isinstance(given, Mapping):
        raise ConfigError(f"{name} is {given!r}; give a dict")
    merged = dict(given or {})
    for key, value in settings.items():
        if key in merged and merged[key] != value:
            raise ConfigError(f"{key} is {value!r}, and {merged[key]!r} in {name}; give it once")
        merged[key] = value
    return merged


def take_model(model: str | Path | nn.Module, settings: dict[str, Any]) -> str | Path | nn.Module:
    """Remove `model_name_or_path` from the settings, and return the model.

    Raises:
        ConfigError: no model is given, or two different ones are given.
    """
    other = settings.pop("model_name_or_path", None)
    if isinstance(model, nn.Module):
        if other and other is not model:
            raise ConfigError(
                f"model_name_or_path is {str(other)!r} in the settings, and a {type(model).__name__} was given; give "
                "one of them"
            )
        return model
    if model and other and str(model) != str(other):
        raise ConfigError(f"model_name_or_path is {str(model)!r}, and {str(other)!r} in model_config; give it once")
    found = model or other
    if not found:
        raise ConfigError("model_name_or_path is empty; give a directory, a name on the hub, or a module")
    return found if isinstance(found, nn.Module) else str(found)


def use_engine_config(settings: dict[str, Any]) -> None:
    """Replace `inference_engine_config` in the settings by the options of the engine that it describes.

    Raises:
        ConfigError: a key of the engine configuration is unknown, is refused, or differs from a setting.
    """
    for name, value in _ragged_arguments(settings.pop("inference_engine_config", None)).items():
        if settings.setdefault(name, value) not in (value, None):
            raise ConfigError(f"{name} is {settings[name]!r}, and {value!r} in inference_engine_config; give it once")
        settings[name] = value


def engine_arguments(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of `windlass.LLM` that are equivalent to MII's settings.

    Raises:
        ConfigError: a setting is not supported.
    """
    kept = {name: value for name, value in settings.items() if name not in _IGNORED}
    mode = kept.pop("quantization_mode", None)
    if mode is not None:
        raise ConfigError(f"quantization_mode is {mode!r}, a format of GPUs; pass weights='int8' instead")
    tp, length = kept.pop("tensor_parallel", None), kept.pop("max_length", None)
    if tp is None:
        tp = int(os.environ.get("WORLD_SIZE", "1"))
    return {"tp": tp, "max_model_len": length, **kept}


def _ragged_arguments(given: Any) -> dict[str, Any]:
    """Return the settings in a `RaggedInferenceEngineConfig` or its dict.

    Raises:
        ConfigError: a key is unknown or refused.
    """
    if not given:
        return {}
    try:
        section = given if isinstance(given, RaggedInference) else RaggedInference.model_validate(given)
    except ValueError as error:
        raise ConfigError(f"inference_engine_config: {error}") from error
    refusals = find_section_refusals(section)
    if refusals:
        raise ConfigError(
            "\n".join(f"inference_engine_config: {one.path} = {one.value!r}: {one.reason}" for one in refusals)
        )
    manager, found = section.manager, {}
    if "max_ragged_batch_size" in manager.model_fields_set:
        found["max_tokens_per_step"] = manager.max_ragged_batch_size
    if "max_ragged_sequence_count" in manager.model_fields_set:
        found["max_sequences"] = manager.max_ragged_sequence_count
    if manager.memory_config.mode == "allocate":
        found["kv_cache_tokens"] = manager.memory_config.size * _BLOCK_TOKENS
    if section.tp.tp_size > 1:
        found["tensor_parallel"] = section.tp.tp_size
    return found


class MiiPipeline:
    """Model with MII's call: `pipe(prompts, max_new_tokens=...)` returns a list of responses."""

    def __init__(self, llm: LLM, *, all_rank_output: bool = False) -> None:
        self._llm, self._all_rank_output = llm, all_rank_output

    @property
    def tokenizer(self) -> Any:
        """Tokenizer of transformers."""
        return self._llm.tokenizer

    @property
    def is_rank_0(self) -> bool:
        """True on the first rank of the launcher, and without a launcher."""
        return int(os.environ.get("RANK", "0")) == 0

    def __call__(self, prompts: str | Sequence[str], **settings: Any) -> list[MiiResponse]:
        """Generate one response for each prompt; see `make_sampling_params` for the settings.

        Args:
            settings: also `return_full_text`: put the prompt before the answer.

        Raises:
            ConfigError: a setting is not known.
            RequestError: a prompt or a setting cannot be served.
        """
        listed = [prompts] if isinstance(prompts, str) else list(prompts)
        full = bool(settings.pop("return_full_text", False))
        params = make_sampling_params(self.tokenizer, listed, self._llm.max_model_len, **settings)
        outputs = self._llm.generate(listed, params)
        if not self._all_rank_output and not self.is_rank_0:
            return []
        return [make_response(output, output.outputs[0], full=full) for output in outputs]

    def destroy(self) -> None:
        """Free the KV cache."""
        self._llm.close()


def make_sampling_params(tokenizer: Any, prompts: Sequence[str], window: int, **settings: Any) -> list[SamplingParams]:
    """Return the sampling parameters of each prompt, from MII's settings with MII's defaults.

    Args:
        window: maximum number of tokens of a prompt and its answer if `max_length` is not set.
        settings: `max_new_tokens`, `max_length` (includes the prompt; the lower of these two limits applies),
            `min_new_tokens`, `ignore_eos`, `do_sample` (True), `top_p` (0.9), `top_k`, `temperature`, `stop`, `seed`.

    Raises:
        ConfigError: a setting is not known.
        RequestError: a prompt is not a text, or longer than `max_length`; or there is no tokenizer.
    """
    unknown = sorted(settings.keys() - set(_GENERATION))
    if unknown:
        raise ConfigError(f"generation has no setting {unknown[0]!r}; it has {', '.join(sorted(_GENERATION))}")
    wrong = next((prompt for prompt in prompts if not isinstance(prompt, str)), None)
    if wrong is not None:
        raise RequestError(f"a prompt is {wrong!r}; give a text, or a list of texts", parameter="prompt")
    if tokenizer is None:
        raise RequestError("the model has no tokenizer; pass tokenizer=", parameter="prompt")
    given = {name: value for name, value in settings.items() if value is not None}
    draws = given.get("do_sample", True)
    length = given.get("max_length", window)
    found = []
    for prompt in prompts:
        used = len(tokenizer(prompt).input_ids)
        if length <= used:
            raise RequestError(
                f"max_length is {length}, and a prompt has {used} tokens; write a larger number, which counts the "
                "prompt and its answer",
                parameter="max_length",
            )
        room = min(given.get("max_new_tokens", length), length - used)
        found.append(
            SamplingParams(
                temperature=given.get("temperature", 1.0) if draws else 0.0,
                top_p=given.get("top_p", 0.9) if draws else 1.0,
                top_k=given.get("top_k", 0),
                max_tokens=room,
                min_tokens=min(given.get("min_new_tokens", 0), room),
                ignore_eos=bool(given.get("ignore_eos", False)),
                stop=given.get("stop") or None,
                seed=given.get("seed"),
            )
        )
    return found


def make_response(output: RequestOutput, answer: CompletionOutput, *, full: bool = False) -> MiiResponse:
    """Return MII's response of an output.

    Raises:
        RequestError, ModelError: an error has ended the request.
    """
    if output.error is not None:
        raise (RequestError if output.is_request_error else ModelError)(output.error)
    text = f"{output.prompt or ''}{answer.text}" if full else answer.text
    return MiiResponse(text, len(output.prompt_token_ids), len(answer.token_ids), answer.finish_reason)
