"""Options of an inference engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch

from windlass.base.errors import ConfigError
from windlass.inference.scheduler import POLICIES, Policy
from windlass.inference.vllm_options import translate_vllm_options
from windlass.kernels.weight_format import list_weight_formats

KvDtype = Literal["auto", "fp32", "bf16", "int8"]
WeightsTier = Literal["device", "host", "disk"]
_WEIGHTS_TIERS = ("device", "host", "disk")
_ACTIVATIONS = ("auto", "float", "bf16", "int8")

_KV_DTYPES: dict[str, torch.dtype | None] = {
    "auto": None,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "int8": torch.int8,
}

_STREAMED_SEQUENCES = 256
"""Default of `max_sequences` for weights on a disk, or `max_tokens_per_step` if that is less. It is large because the
sequences of a step share one read of the weights."""


@dataclass(frozen=True)
class SpeculativeOptions:
    """Options of speculative decoding.

    Attributes:
        method: `ngram` looks for the last tokens earlier in the sequence, and proposes the tokens that followed them
            (prompt lookup); `draft` lets a smaller model of the same vocabulary propose its likeliest tokens.
        num_tokens: largest number of drafts for each sequence and step.
        max_ngram, min_ngram: largest and smallest number of last tokens that `ngram` looks for, the largest first.
        model: directory of the draft model, or a module; None for `ngram`.

    Raises:
        ConfigError: a value is out of range, or `model` does not fit `method`.
    """

    method: Literal["ngram", "draft"] = "ngram"
    num_tokens: int = 4
    max_ngram: int = 4
    min_ngram: int = 1
    model: Any = None

    def __post_init__(self) -> None:
        if self.method not in ("ngram", "draft"):
            raise ConfigError(f'speculative.method is {self.method!r}; write "ngram" or "draft"')
        if (self.model is None) == (self.method == "draft"):
            raise ConfigError(
                f"speculative.method is {self.method!r} and speculative.model is {self.model!r:.80}; give a model "
                'with the method "draft", and none with "ngram"'
            )
        _check_positive("speculative.num_tokens", self.num_tokens)
        _check_positive("speculative.min_ngram", self.min_ngram)
        if self.max_ngram < self.min_ngram:
            raise ConfigError(f"speculative.max_ngram is {self.max_ngram}; write at least min_ngram ({self.min_ngram})")


@dataclass(frozen=True)
class EngineOptions:
    """Options of an engine. vLLM's names of the same options are accepted by `from_arguments`.

    Attributes:
        max_tokens_per_step: largest number of tokens of a forward. With the policies `prefill-first` and `orca`, a
            prompt may have more.
        max_sequences: largest number of sequences that run at the same time.
        fit_batch: for weights in a file, lower `max_sequences` to about the number of sequences whose next tokens take
            as long to compute as the weights take to read, if the time of steps is measured at load (see
            `check_at_load`). `from_arguments` sets True if `weights_tier` is `disk` and `max_sequences` is left out.
        max_model_len: largest number of tokens of a sequence, prompt and answer; None: what the model's configuration
            and the KV cache allow.
        kv_cache_tokens: tokens that the KV cache holds; None: as many as a part of the free memory allows, at most
            those of `max_sequences` sequences of the maximum length.
        host_engines: number of engines that share the host's memory, e.g. replicas of a server. On the CPU each takes
            its part of the free memory for its KV cache.
        block_size: tokens of a KV block, a multiple of 16.
        kv_dtype: dtype of the KV cache; `auto`: that of the model.
        prefix_caching: share the keys and values of equal prefixes.
        policy: see `SchedulerLimits`.
        max_gap_ms: limit of the predicted time between two tokens of a running answer; prompts are computed within
            this limit. None: no limit.
        max_wait_seconds: limit of the wait for the first token: a request that would wait longer runs before all
            others.
        enforce_max_wait: refuse a request if, by the predicted times, any request would then wait longer than
            `max_wait_seconds`; end a request with an error if it has waited so long and has not begun.
        max_queued: largest number of waiting requests, and of waiting embeddings; further ones are refused. None: no
            limit.
        swap_bytes: bytes of host memory for the blocks of preempted sequences; blocks that do not fit are computed
            again.
        swap_directory: directory for the blocks that do not fit into `swap_bytes`; None: no directory.
        speculative: speculative decoding; None: off.
        lora: directories of LoRA adapters of peft, by name.
        seed: seed from which requests without a seed get different seeds; None: a random one.
        deterministic: tokens and log-probabilities of a request have the same bits in any batch and for any split of
            its prompt. None: only if weights are packed, since then it costs nothing. True packs a copy of the weights
            of a live module too. Experts in stacked matrices are not covered.
        weights: format of packed weights, for a model that is loaded: `fp32`, `bf16`, `int8`, `int4_g128`, ...; None:
            the format of the model. Formats below 8 bits lose much accuracy unless the model was prepared for them;
            see `docs/compression.md`.
        activations: inputs of packed layers: `float`; `int8`, rounded with a scale for each token and 128 features,
            for integer weights; `bf16`, for bf16 weights; or `auto`: `int8` for weights below 8 bits, and for 8-bit
            weights of a W8A8 model, else `float`.
        weights_tier: `device`: weights in memory; `disk`: in a file, read ahead of each layer by direct I/O, for models
            larger than memory; `host`: in the same file, mapped, so that all processes of a host share its pages.
        weights_directory: directory of that file; None: `windlass-weights` in the model's directory.
        weights_buffer_bytes: bytes of memory through which `disk` reads weights; None: three times the weights of the
            largest matrix product, or a quarter of all weights if that is more; the quarter is limited to 64 MiB plus
            the weights of the largest product.
        check_at_load: compare the first logits with those of the plain model, and measure the time of steps. False:
            the time is measured only if `max_gap_ms`, `enforce_max_wait`, `swap_bytes` or `swap_directory` needs it;
            without measured times, no step is kept short to meet the service levels of requests.
        tp: number of ranks along the tensor-parallel axis.
        ep: number of ranks along the expert axis; each holds a part of the experts.
        pp: number of ranks along the pipeline axis; each holds some layers.
        cuda_graphs: record decode steps of a loaded model on one CUDA device, and replay them.
        gpu_memory_utilization: fraction of a CUDA device's memory for weights and KV cache.

    Raises:
        ConfigError: a value is out of range, or options contradict each other.
    """

    max_tokens_per_step: int = 512
    max_sequences: int = 64
    fit_batch: bool = False
    max_model_len: int | None = None
    kv_cache_tokens: int | None = None
    host_engines: int = 1
    block_size: int = 16
    kv_dtype: KvDtype = "auto"
    prefix_caching: bool = True
    policy: Policy = "splitfuse"
    max_gap_ms: float | None = None
    max_wait_seconds: float = 30.0
    enforce_max_wait: bool = False
    max_queued: int | None = None
    swap_bytes: int = 0
    swap_directory: str | Path | None = None
    speculative: SpeculativeOptions | None = None
    lora: Mapping[str, str | Path] | None = None
    seed: int | None = None
    deterministic: bool | None = None
    weights: str | None = None
    activations: str = "auto"
    weights_tier: WeightsTier = "device"
    weights_directory: str | Path | None = None
    weights_buffer_bytes: int | None = None
    check_at_load: bool = True
    tp: int = 1
    ep: int = 1
    pp: int = 1
    cuda_graphs: bool = True
    gpu_memory_utilization: float = 0.9

    def __post_init__(self) -> None:
        for name in ("max_tokens_per_step", "max_sequences", "host_engines", "block_size", "tp", "ep", "pp"):
            _check_positive(name, getattr(self, name))
        for name in ("max_model_len", "kv_cache_tokens", "max_queued", "weights_buffer_bytes"):
            if getattr(self, name) is not None:
                _check_positive(name, getattr(self, name))
        if self.policy not in POLICIES:
            raise ConfigError(f"policy is {self.policy!r}; write one of {', '.join(POLICIES)}")
        if self.kv_dtype not in _KV_DTYPES:
            raise ConfigError(f"kv_dtype is {self.kv_dtype!r}; write one of {', '.join(_KV_DTYPES)}")
        if self.weights is not None and self.weights not in list_weight_formats():
            raise ConfigError(f"weights is {self.weights!r}; write one of {', '.join(list_weight_formats())}")
        if self.activations not in _ACTIVATIONS:
            raise ConfigError(f"activations is {self.activations!r}; write one of {', '.join(_ACTIVATIONS)}")
        if self.block_size % 16:
            raise ConfigError(f"block_size is {self.block_size}; write a multiple of 16")
        if self.max_gap_ms is not None and not 0 < self.max_gap_ms < 1e9:
            raise ConfigError(f"max_gap_ms is {self.max_gap_ms}; write a number of milliseconds above 0 and below 1e9")
        if not 0 < self.max_wait_seconds < 1e9:
            raise ConfigError(f"max_wait_seconds is {self.max_wait_seconds}; write a number above 0 and below 1e9")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(
                f"gpu_memory_utilization is {self.gpu_memory_utilization}; write a number above 0 and up to 1"
            )
        if self.lora and self.pp > 1:
            raise ConfigError(
                f"lora is set and pp is {self.pp}, but adapters are not served over pp; merge the adapter, or use tp"
            )
        self._check_weights_tier()
        if self.swap_bytes < 0:
            raise ConfigError(f"swap_bytes is {self.swap_bytes}; write 0 or more")
        if self.max_sequences > self.max_tokens_per_step:
            raise ConfigError(
                f"max_sequences is {self.max_sequences}, more than max_tokens_per_step ({self.max_tokens_per_step}), "
                "so that not every sequence could get its token in a step; raise max_tokens_per_step or lower "
                "max_sequences"
            )

    def _check_weights_tier(self) -> None:
        tier = self.weights_tier
        if tier not in _WEIGHTS_TIERS:
            raise ConfigError(f"weights_tier is {tier!r}; write one of {', '.join(_WEIGHTS_TIERS)}")
        if tier == "device":
            for name in ("weights_directory", "weights_buffer_bytes"):
                if getattr(self, name) is not None:
                    raise ConfigError(
                        f"{name} is {getattr(self, name)!r} without weights_tier; set weights_tier to 'disk'"
                    )
        elif tier == "host" and self.weights_buffer_bytes is not None:
            raise ConfigError(
                f"weights_buffer_bytes is {self.weights_buffer_bytes} with weights_tier 'host', which maps the file "
                "without a buffer; leave it out, or set weights_tier to 'disk'"
            )
        elif self.num_ranks > 1:
            raise ConfigError(
                f"weights_tier is {tier!r}, and tp x ep x pp is {self.num_ranks}; streamed weights need one rank"
            )
        elif self.activations in ("bf16", "int8"):
            raise ConfigError(
                f"activations is {self.activations!r} with weights_tier {tier!r}; streamed weights take 'float' and "
                "'auto'"
            )

    @property
    def measures_steps(self) -> bool:
        """True if the time of steps is measured at load, for `check_at_load` or for an option that needs the time."""
        if self.check_at_load or self.max_gap_ms is not None or self.enforce_max_wait:
            return True
        return self.swap_bytes > 0 or bool(self.swap_directory)

    @property
    def streams_weights(self) -> bool:
        """True if weights stay in a weight file, mapped or read for each use."""
        return self.weights_tier != "device"

    @classmethod
    def from_arguments(cls, **arguments: Any) -> EngineOptions:
        """Return options from keyword arguments with windlass's or vLLM's names. `speculative` may be a dict.

        Raises:
            ConfigError: a name is not known, a value is out of range, or options contradict each other.
        """
        known = {field.name for field in fields(cls)}
        values = translate_vllm_options(arguments)
        unknown = next((name for name in values if name not in known), None)
        if unknown is not None:
            raise ConfigError(f"an inference engine has no option {unknown!r}; it has {', '.join(sorted(known))}")
        if values.get("weights_tier") == "disk" and "max_sequences" not in values:
            values["max_sequences"] = min(_STREAMED_SEQUENCES, values.get("max_tokens_per_step", _STREAMED_SEQUENCES))
            values.setdefault("fit_batch", True)
        speculative = values.get("speculative")
        if isinstance(speculative, Mapping):
            try:
                values["speculative"] = SpeculativeOptions(**speculative)
            except TypeError as error:
                raise ConfigError(
                    f"speculative: {error}; write the keys method, num_tokens, max_ngram, min_ngram and model"
                ) from error
        return cls(**values)

    @property
    def num_ranks(self) -> int:
        """Number of ranks that hold one model."""
        return self.tp * self.ep * self.pp

    @property
    def kv_torch_dtype(self) -> torch.dtype | None:
        """Dtype of the KV cache; None: that of the model."""
        return _KV_DTYPES[self.kv_dtype]

    def replace(self, **changes: Any) -> EngineOptions:
        """Return a copy with other values."""
        return replace(self, **changes)


def _check_positive(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name} is {value!r}; write a positive integer")
