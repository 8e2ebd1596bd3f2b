"""`mii.pipeline`: prompts in, responses out."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from windlass.base.errors import ConfigError
from windlass.inference.llm import LLM
from windlass.inference.outputs import CompletionOutput, RequestOutput
from windlass.inference.sampling_params import SamplingParams

_IGNORED = frozenset(
    {"device_rank", "torch_dist_port", "profile_model_time", "task", "sync_debug", "use_legacy_post_processor"}
)  # settings of MII's processes


@dataclass
class MiiResponse:
    """Answer to one prompt.

    Attributes:
        generated_text: text of the answer, behind the prompt's with `return_full_text`.
        prompt_length: tokens of the prompt.
        generated_length: tokens of the answer.
        finish_reason: `"stop"` or `"length"`; None while the answer streams.
    """

    generated_text: str
    prompt_length: int
    generated_length: int
    finish_reason: str | None

    def __str__(self) -> str:
        return self.generated_text


def pipeline(
    model_name_or_path: str | Path | nn.Module = "",
    *,
    tensor_parallel: int | None = None,
    tokenizer: Any = None,
    max_length: int | None = None,
    all_rank_output: bool = False,
    quantization_mode: str | None = None,
    trust_remote_code: bool = False,
    model_config: dict[str, Any] | None = None,
    **options: Any,
) -> MiiPipeline:
    """Load a model for calls in this process. With several ranks all of them make the same calls.

    Args:
        model_name_or_path: directory, name on the hub, or a module.
        tensor_parallel: ranks; None: all that were launched.
        max_length: tokens of a prompt and its answer; None: the model's window.
        all_rank_output: all ranks return the responses; else the others than the first return an empty list.
        model_config: the same settings as a dict.
        options: options of `windlass.LLM`.

    Raises:
        ConfigError: a setting is not known or not supported.
        ModelError: the model cannot be loaded.
    """
    if model_config:
        known = {
            "tensor_parallel": tensor_parallel,
            "tokenizer": tokenizer,
            "max_length": max_length,
            "all_rank_output": all_rank_output or None,
            "quantization_mode": quantization_mode,
        }
        given = {name: value for name, value in known.items() if value is not None}
        return pipeline(model_name_or_path or model_config.get("model_name_or_path", ""), **{**model_config, **given})
    options.pop("model_name_or_path", None)
    return MiiPipeline(
        LLM(
            model_name_or_path,
            tokenizer=tokenizer,
            trust_remote_code=trust_remote_code,
            **engine_arguments(tensor_parallel, max_length, quantization_mode, options),
        ),
        all_rank_output=all_rank_output,
    )


def engine_arguments(
    tensor_parallel: int | None, max_length: int | None, quantization_mode: str | None, options: dict[str, Any]
) -> dict[str, Any]:
    """Return the options of the engine."""
    if quantization_mode is not None:
        raise ConfigError(f"quantization_mode is {quantization_mode!r}, a format of GPUs; pass weights='int8' instead")
    tp = int(os.environ.get("WORLD_SIZE", "1")) if tensor_parallel is None else tensor_parallel
    kept = {name: value for name, value in options.items() if name not in _IGNORED}
    return {"tp": tp, "max_model_len": max_length, **kept}


class MiiPipeline:
    """Model with MII's call: `pipe(prompts, max_new_tokens=...)` returns a list of responses."""

    def __init__(self, llm: LLM, *, all_rank_output: bool = False) -> None:
        self._llm, self._all_rank_output = llm, all_rank_output

    @property
    def tokenizer(self) -> Any:
        """Tokenizer of transformers."""
        return self._llm.tokenizer

    def __call__(self, prompts: str | Sequence[str], **settings: Any) -> list[MiiResponse]:
        """Generate one response for each prompt; see `make_sampling_params` for the settings."""
        listed = [prompts] if isinstance(prompts, str) else list(prompts)
        full = bool(settings.pop("return_full_text", False))
        outputs = self._llm.generate(listed, make_sampling_params(self.tokenizer, listed, **settings))
        if not self._all_rank_output and int(os.environ.get("RANK", "0")) > 0:
            return []
        return [make_response(output, output.outputs[0], full=full) for output in outputs]

    def destroy(self) -> None:
        """Free the KV cache."""
        self._llm.close()


def make_sampling_params(
    tokenizer: Any,
    prompts: Sequence[str],
    *,
    max_length: int | None = None,
    max_new_tokens: int | None = None,
    min_new_tokens: int = 0,
    ignore_eos: bool = False,
    do_sample: bool = True,
    top_p: float = 0.9,
    top_k: int | None = None,
    temperature: float | None = None,
    stop: str | Sequence[str] | None = None,
    seed: int | None = None,
) -> list[SamplingParams]:
    """Return the sampling parameters of each prompt, from MII's settings with MII's defaults.

    `max_length`, 1024 by default, counts the prompt too and holds where `max_new_tokens` is None.
    """
    found = []
    for prompt in prompts:
        room = max_new_tokens
        if room is None:
            room = max((max_length or 1024) - len(tokenizer(prompt).input_ids), 1)
        found.append(
            SamplingParams(
                temperature=(1.0 if temperature is None else temperature) if do_sample else 0.0,
                top_p=top_p if do_sample else 1.0,
                top_k=top_k or 0,
                max_tokens=room,
                min_tokens=min(min_new_tokens, room),
                ignore_eos=ignore_eos,
                stop=stop or None,
                seed=seed,
            )
        )
    return found


def make_response(output: RequestOutput, answer: CompletionOutput, *, full: bool = False) -> MiiResponse:
    """Return MII's response of an output."""
    text = f"{output.prompt or ''}{answer.text}" if full else answer.text
    return MiiResponse(text, len(output.prompt_token_ids), len(answer.token_ids), answer.finish_reason)
