"""Translation of the options of vLLM's `LLM` to windlass's options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from windlass.base.errors import ConfigError

_NAMES = {
    "max_num_batched_tokens": "max_tokens_per_step",
    "max_num_seqs": "max_sequences",
    "enable_prefix_caching": "prefix_caching",
    "tensor_parallel_size": "tp",
    "pipeline_parallel_size": "pp",
}
"""vLLM's names of options that have another name here; both are accepted."""

_KV_DTYPES = {"bfloat16": "bf16", "float32": "fp32"}
_SPECULATIVE = {
    "num_speculative_tokens": "num_tokens",
    "prompt_lookup_max": "max_ngram",
    "prompt_lookup_min": "min_ngram",
}

_EITHER = (True, False)
_HARMLESS: dict[str, tuple[tuple[Any, ...] | None, str]] = {
    "tokenizer_mode": (("auto", "hf", "fast"), "pass the tokenizer itself as tokenizer="),
    "revision": ((), "download it with huggingface_hub.snapshot_download and pass the directory"),
    "tokenizer_revision": ((), "download it with huggingface_hub.snapshot_download and pass tokenizer=DIRECTORY"),
    "code_revision": ((), "download it with huggingface_hub.snapshot_download and pass the directory"),
    "download_dir": ((), "set HF_HOME instead"),
    "hf_token": ((), "set HF_TOKEN instead"),
    "hf_overrides": (({},), "edit config.json of the directory, or pass a module"),
    "load_format": (("auto", "safetensors", "hf", "pt"), "weights are read from safetensors or PyTorch's files"),
    "model_impl": (("auto", "transformers"), "models run as transformers has them"),
    "quantization": ((), "pass weights='int8' or another format of docs/compression.md"),
    "generation_config": (("vllm",), "pass SamplingParams with its values"),
    "override_generation_config": (({},), "pass SamplingParams with its values"),
    "logprobs_mode": (("raw_logprobs",), "logprobs are those before penalties, temperature and masks"),
    "logits_processors": (([],), "windlass runs no processors of logits; use the fields of SamplingParams"),
    "task": (("auto", "generate", "embed", "embedding"), "an LLM generates and embeds"),
    "runner": (("auto", "generate", "pooling"), "an LLM generates and embeds"),
    "convert": (("auto", "none", "embed"), "an LLM generates and embeds"),
    "max_logprobs": ((*range(65),), "SamplingParams takes up to 64"),
    "enable_lora": (_EITHER, ""),
    "max_loras": (None, ""),
    "max_lora_rank": (None, ""),
    "max_cpu_loras": (None, ""),
    "disable_log_stats": (_EITHER, ""),
    "disable_custom_all_reduce": (_EITHER, ""),
    "disable_cascade_attn": (_EITHER, ""),
    "distributed_executor_backend": (("mp", "uni", "external_launcher"), "start the script with windlass run"),
    "data_parallel_size": ((1,), "start one process for each part of the prompts, or windlass serve --replicas"),
    "enable_expert_parallel": ((False,), "pass ep=, the ranks along the expert axis"),
    "cpu_offload_gb": ((0,), "pass weights_tier='host' or 'disk'"),
    "max_seq_len_to_capture": (None, ""),
    "compilation_config": (None, ""),
    "scheduling_policy": (("fcfs", "priority"), "requests have a priority each"),
    "async_scheduling": (_EITHER, ""),
    "use_v2_block_manager": (_EITHER, ""),
    "guided_decoding_backend": (None, ""),
    "structured_outputs_config": (None, ""),
    "limit_mm_per_prompt": (({},), "windlass serves only text"),
    "mm_processor_kwargs": (({},), "windlass serves only text"),
    "enable_prompt_embeds": ((False,), "pass texts or token ids"),
    "enable_sleep_mode": ((False,), "use close, and build another LLM later"),
    "disable_sliding_window": ((False,), "pass max_model_len, up to the window"),
    "attention_backend": (None, ""),
    "optimization_level": (None, ""),
    "long_prefill_token_threshold": ((0,), "prompts share each step by max-min fairness"),
    "worker_cls": (("auto",), "windlass has workers of its own"),
    "worker_extension_cls": (("",), "windlass has workers of its own"),
    "num_gpu_blocks_override": ((), "pass kv_cache_tokens"),
    "kv_cache_memory_bytes": ((), "pass kv_cache_tokens"),
}
"""vLLM's options without an effect here: the accepted values (None: all), and the advice for other values."""


def translate_vllm_options(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return options under windlass's names, without vLLM's options that are None or have no effect here.

    Raises:
        ConfigError: an option is given by two names, or has a value that windlass does not support.
    """
    found: dict[str, Any] = {}
    given_as: dict[str, str] = {}  # {windlass's name: name in `arguments`}
    for name, value in arguments.items():
        if name in _HARMLESS:
            _check_harmless(name, value)
            continue
        if value is None and (name in _NAMES or name in _CONVERTED):
            continue  # None selects the default
        own, convert = _CONVERTED.get(name, (_NAMES.get(name, name), None))
        try:
            converted = value if convert is None else convert(value)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{name} is {value!r}: {error}") from error
        if converted is _ABSENT:
            continue
        if own in found:
            raise ConfigError(f"the options {given_as[own]!r} and {name!r} are the same; give one of them")
        found[own], given_as[own] = converted, name
    return found


def _check_harmless(name: str, value: Any) -> None:
    accepted, advice = _HARMLESS[name]
    if value is not None and accepted is not None and value not in accepted:
        raise ConfigError(f"{name} is {value!r}, which windlass does not support: {advice}")


_ABSENT = object()


def _speculative(value: Any) -> Any:
    """Return the value of windlass's `speculative` for a vLLM `speculative_config`."""
    if not isinstance(value, Mapping):
        return value
    options = {_SPECULATIVE.get(name, name): option for name, option in value.items() if option is not None}
    method = options.get("method", "draft" if "model" in options else "ngram")
    options["method"] = {"draft_model": "draft", "[ngram]": "ngram"}.get(method, method)
    return options


_CONVERTED: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "enforce_eager": ("cuda_graphs", lambda eager: not eager),
    "swap_space": ("swap_bytes", lambda gib: int(float(gib) * 2**30)),
    "kv_cache_dtype": ("kv_dtype", lambda dtype: _KV_DTYPES.get(dtype, dtype)),
    "enable_chunked_prefill": ("policy", lambda chunked: "prefill-first" if chunked is False else _ABSENT),
    "speculative_config": ("speculative", _speculative),
}
"""vLLM's options whose values windlass writes differently: windlass's name, and the conversion of the value."""
