"""`deepspeed.init_inference` and its engine."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from windlass.base.compute_device import local_device
from windlass.base.errors import ConfigError
from windlass.base.log import logger
from windlass.compat.inference_checkpoint import load_inference_checkpoint
from windlass.compress.weight_quantization import is_requested, quantize_weights
from windlass.config.compression_section import WeightQuantization
from windlass.config.config_refusals import find_section_refusals
from windlass.config.config_source import read_source
from windlass.config.inference_section import InitInference
from windlass.inference.engine_options import EngineOptions
from windlass.inference.inference_model import InferenceModel
from windlass.inference.model_loading import find_max_length, parse_dtype


def default_inference_config() -> dict[str, Any]:
    """Return all keys of `init_inference` with their defaults."""
    return InitInference().model_dump()


class InferenceEngine(InferenceModel):
    """Engine of `deepspeed.init_inference`: the model's forward, and `generate` with transformers' arguments."""

    def __init__(self, model: nn.Module, config: InitInference) -> None:
        self._config = config
        wanted = config.quant.weight
        section = WeightQuantization(
            enabled=wanted.enabled,
            quantized_initialization=wanted.quantized_initialization,
            post_init_quant=wanted.post_init_quant,
        )
        if is_requested(section) and _tp_size(config) * _ep_size(config) > 1:
            raise ConfigError("init_inference: quant.weight packs weights, which tp and ep do not shard; set both to 1")
        dtype, weights = _parse_dtype(config.dtype)
        if config.checkpoint is not None:
            unexpected = load_inference_checkpoint(model, config.checkpoint, config.base_dir, dtype)
            if unexpected:
                logger.warning(
                    "init_inference: tensors of the checkpoint that the model lacks are ignored: %s", unexpected
                )
        quantize_weights(model, section)
        options: dict[str, Any] = {"weights": weights} if weights else {}
        if "max_tokens" in config.model_fields_set and hasattr(model, "config"):
            options["max_model_len"] = min(config.max_tokens, find_max_length(model) or config.max_tokens)
        super().__init__(model, EngineOptions(tp=_tp_size(config), ep=_ep_size(config), **options), dtype)
        self.mp_world_size = _tp_size(config)
        self._times: list[float] | None = None

    def destroy(self) -> None:
        """Free the KV cache."""
        self.close()

    def profile_model_time(self, use_cuda_events: bool = True) -> None:
        """Record the time of each call of `forward` and `generate` from now on, for `model_times`.

        Args:
            use_cuda_events: not used; the host's clock measures a call until the device has finished.
        """
        self._times = []

    def model_times(self) -> list[float]:
        """Return the seconds of each call since the last call of this method.

        Raises:
            ConfigError: `profile_model_time` was not called.
        """
        if self._times is None:
            raise ConfigError("model_times: no times are recorded; call profile_model_time() first")
        found, self._times = self._times, []
        return found

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """See `InferenceModel.forward`."""
        with self._timed():
            return super().forward(*args, **kwargs)

    def generate(self, *args: Any, **settings: Any) -> Any:
        """See `InferenceModel.generate`."""
        with self._timed():
            return super().generate(*args, **settings)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        if self._times is not None:
            if local_device().type != "cpu":
                torch.accelerator.synchronize()
            self._times.append(time.perf_counter() - began)


def init_inference(model: nn.Module, config: Any = None, **kwargs: Any) -> InferenceEngine:
    """Prepare a model for inference, with DeepSpeed's keys.

    Args:
        model: module, changed in place. Its parameters may be on the meta device, if `checkpoint` has their values.
        config: dict, path of a JSON file, or `DeepSpeedInferenceConfig`.
        kwargs: the same keys; a key that `config` has too must have the same value.

    Raises:
        ConfigError: a key is unknown, invalid, refused or has two different values, or `config` is not a dict or file.
        ModelError: the model cannot be sharded, or the checkpoint does not fit it.
        CheckpointError: `checkpoint` is a directory without a complete checkpoint.
    """
    given = _read(config)
    both = sorted(name for name in given.keys() & kwargs.keys() if given[name] != kwargs[name])
    if both:
        raise ConfigError(f"config and the arguments of init_inference differ in {', '.join(both)}; give each key once")
    return InferenceEngine(model, make_inference_config({**given, **kwargs}))


def make_inference_config(given: dict[str, Any]) -> InitInference:
    """Return the checked keys of `init_inference`.

    Raises:
        ConfigError: a key is unknown, invalid or refused.
    """
    values = {
        key: value.model_dump(exclude_unset=True) if hasattr(value, "model_dump") else value
        for key, value in given.items()
    }
    try:
        section = InitInference(**values)
    except ValueError as error:
        raise ConfigError(f"init_inference: {error}") from error
    refusals = find_section_refusals(section)
    if refusals:
        raise ConfigError("\n".join(f"init_inference: {one.path} = {one.value!r}: {one.reason}" for one in refusals))
    return section


def _read(config: Any) -> dict[str, Any]:
    if config is None:
        return {}
    if isinstance(config, InitInference):
        return {name: getattr(config, name) for name in config.model_fields_set}
    if isinstance(config, (str, Path)):
        found: Any = json.loads(str(config)) if str(config).lstrip().startswith("{") else read_source(config).data
    else:
        found = config
    if not isinstance(found, dict):
        raise ConfigError(f"config is a {type(config).__name__}; give init_inference a dict or a JSON file")
    return dict(found)


def _parse_dtype(name: str) -> tuple[torch.dtype, str | None]:
    """Return the dtype of the parameters, and the format of packed weights; None: weights are not packed."""
    short = name.removeprefix("torch.")
    if short == "int8":
        return torch.float32 if local_device().type == "cpu" else torch.float16, "int8"
    dtype = parse_dtype(short) or torch.float16
    if dtype == torch.float16 and local_device().type == "cpu":
        return torch.float32, None  # the CPU has no fast arithmetic in float16
    return dtype, None


def _tp_size(config: InitInference) -> int:
    return max(config.tp.tp_size, config.mp_size) if config.tp.enabled else 1


def _ep_size(config: InitInference) -> int:
    section = config.moe
    if isinstance(section, bool):
        return config.ep_size if section else 1
    return max(section.ep_size, config.ep_size) if section.enabled else 1
