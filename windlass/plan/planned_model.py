"""Models on the meta device, for plans and simulations: built from a directory, the name of a model in the hub's cache,
a configuration or a shape."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from windlass.base.errors import ModelError
from windlass.base.import_transformers import import_transformers
from windlass.base.log import logger
from windlass.base.remote_code import needs_remote_code, remote_code_refusal
from windlass.compress.pruned_config import apply_entries
from windlass.parallel.model_shape import ModelShape, parse_model_shape

SHAPES: dict[str, dict[str, int]] = {
    "125m": {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12},
    "1b": {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32},
    "3b": {"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 24},
    "7b": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32},
    "13b": {"hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40, "num_attention_heads": 40},
    "30b": {"hidden_size": 6656, "intermediate_size": 17920, "num_hidden_layers": 60, "num_attention_heads": 52},
    "70b": {
        **{"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
        "num_key_value_heads": 8,
    },
    "405b": {
        **{"hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128},
        "num_key_value_heads": 8,
    },
    "1t": {
        **{"hidden_size": 22528, "intermediate_size": 73216, "num_hidden_layers": 165, "num_attention_heads": 176},
        "num_key_value_heads": 16,
    },
}
"""Sizes of Llama models by name, with a vocabulary of 32,000. 1t is not a published model; it scales up the 405b."""


def build_from_shape(shape: str) -> nn.Module:
    """Build a Llama model on the meta device, of a size in `SHAPES` or of sizes such as `hidden=1024,layers=4,heads=8,
    vocabulary=32000`; with experts a Mixtral model.

    Raises:
        ModelError: there is no such shape.
        ConfigError: a size is missing or invalid.
    """
    transformers = import_transformers("models", quiet=True)
    if "=" in shape:
        config = _config_of_sizes(parse_model_shape(shape), shape, transformers)
        return build_on_meta(
            lambda: transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False), shape
        )
    sizes = SHAPES.get(shape.lower())
    if sizes is None:
        raise ModelError(
            f"--shape {shape!r} is unknown; give one of {', '.join(SHAPES)}, hidden=4096,layers=32,heads=32,"
            "vocabulary=32000, or a config.json as MODEL instead"
        )
    return build_on_meta(lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)), shape)


def _config_of_sizes(sizes: ModelShape, shape: str, transformers: Any) -> Any:
    if not sizes.gated:
        raise ModelError(
            f"--shape {shape!r} has gated=0, but a Llama's feed-forward network is gated; leave gated out, or give a "
            "config.json as MODEL instead"
        )
    values: dict[str, Any] = {
        "hidden_size": sizes.hidden,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.resolved_kv_heads,
        "head_dim": sizes.resolved_head_dim,
        "intermediate_size": sizes.intermediate or 4 * sizes.hidden,
        "vocab_size": sizes.vocabulary,
        "tie_word_embeddings": sizes.tied,
    }
    if not sizes.experts:
        return transformers.LlamaConfig(**values)
    experts = {"num_local_experts": sizes.experts, "num_experts_per_tok": sizes.top_k}
    return transformers.MixtralConfig(**values, **experts, output_router_logits=sizes.has_router_loss)


_IMAGE_SIDE = 224  # pixels of an image's side, for models that take images of any size, such as ResNet
_TASKS = ("CausalLM", "Seq2SeqLM", "MaskedLM", "ImageClassification")
"""Tasks of models that `build_from_name` builds, in search order; for an encoder-decoder, Seq2SeqLM comes first."""


def build_from_name(name: str, *, trust_remote_code: bool = False) -> nn.Module:
    """Build a model of transformers on the meta device: the class that `architectures` of its configuration names, or
    else the one for the first task of `_TASKS` that the configuration supports.

    Args:
        name: A directory with a config.json, the path of a config.json, or the name of a model in the hub's cache on
            this machine.
        trust_remote_code: Run Python files that come with the model.

    Raises:
        ModelError: there is no such model, it supports none of these tasks, it needs its own code, or its construction
            reads values of tensors.
    """
    transformers = import_transformers("models", quiet=True)
    path = Path(name)
    where: Any = path.parent if path.name == "config.json" and path.is_file() else path if path.exists() else name
    try:
        config = transformers.AutoConfig.from_pretrained(
            where, local_files_only=True, trust_remote_code=trust_remote_code
        )
    except Exception as error:  # the hub's client raises its own exception types
        if needs_remote_code(error):
            raise ModelError(remote_code_refusal(name)) from error
        raise ModelError(
            f"no model at {name!r}: {_first_line(error)}; give a directory with a config.json, a name in the hub's "
            "cache of this machine, or --shape 7b"
        ) from error
    named = _named_class(transformers, config)
    if named is not None:
        return build_on_meta(lambda: named._from_config(config), name)
    made = _auto_class(transformers, config)
    if made is None:
        raise ModelError(
            f"model {name!r} of type {getattr(config, 'model_type', '?')} has no class for {', '.join(_TASKS)}; plan a "
            "language model, an encoder-decoder or an image classifier"
        )
    built = build_on_meta(lambda: made.from_config(config, trust_remote_code=trust_remote_code), name)
    if type(built).__name__ not in (getattr(config, "architectures", None) or ()):
        logger.warning(
            f"the configuration of {name!r} names no class that can be built in architectures; it is planned as "
            f"{type(built).__name__}"
        )
    return built


def _named_class(transformers: Any, config: Any) -> Any:
    """Return the class of transformers that `architectures` of the configuration names; None: it names none."""
    for name in getattr(config, "architectures", None) or ():
        found = getattr(transformers, name, None)
        if isinstance(found, type) and getattr(found, "config_class", None) is type(config):
            return found
    return None


def _auto_class(transformers: Any, config: Any) -> Any:
    """Return transformers' automatic class that builds a model of this configuration; None: there is none."""
    remote = getattr(config, "auto_map", None) or {}
    # Encoder-decoders also have a causal class, which contains only their decoder.
    tasks = sorted(_TASKS, key="Seq2SeqLM".__ne__) if getattr(config, "is_encoder_decoder", False) else _TASKS
    for task in tasks:
        found = getattr(transformers, f"AutoModelFor{task}")
        if type(config) in found._model_mapping or found.__name__ in remote:
            return found
    return None


def build_on_meta(make: Callable[[], nn.Module], name: str) -> nn.Module:
    """Call `make` with the meta device as the default, and return the model in training mode. Its layers have the
    pruned widths and low ranks of its configuration.

    Raises:
        ModelError: the construction reads values of tensors; the message names the module.
    """
    model = _build(make, name)
    try:
        apply_entries(model, getattr(model, "config", None))
    except ModelError as error:  # entries of a class with other names, of which some may be applied
        logger.warning(f"the plan of {name!r} has the sizes before it was pruned or factorized: {error}")
        model = _build(make, name)
    own_config: Any = getattr(model, "config", None)
    if getattr(own_config, "use_cache", False):
        own_config.use_cache = False  # training makes no use of cached keys and values
    if getattr(own_config, "is_encoder_decoder", False) and getattr(own_config, "decoder_start_token_id", None) is None:
        own_config.decoder_start_token_id = 0  # any token will do: a plan depends on no value
    return model.train()


def language_batch(micro_batch: int, length: int) -> Callable[[], dict[str, torch.Tensor]]:
    """Return a function that makes token ids and labels `[micro_batch, length]`."""

    def make() -> dict[str, torch.Tensor]:
        ids = torch.zeros((micro_batch, length), dtype=torch.long)
        return {"input_ids": ids, "labels": ids}

    return make


def batch_for(model: nn.Module) -> Callable[[int, int], Callable[[], dict[str, Any]]]:
    """Return the function that makes batches of a model, given the micro-batch and the length of a sample."""
    takes = inspect.signature(model.forward).parameters
    main, name = getattr(model, "main_input_name", "input_ids"), type(model).__name__

    def make(micro_batch: int, length: int) -> Callable[[], dict[str, Any]]:
        def batch() -> dict[str, Any]:
            tokens = torch.zeros((micro_batch, length), dtype=torch.long)
            # A classifier has one label for each sample.
            labels = tokens[:, 0].clone() if name.endswith(_CLASSIFIERS) else tokens
            found: dict[str, Any] = {"labels": labels} if "labels" in takes else {}
            if main == "pixel_values":
                return {main: _pixels(model, micro_batch), **found}
            if main == "input_features":
                return {main: _audio_features(model, micro_batch), **found}
            if main != "input_ids":
                raise ModelError(
                    f"{name} takes {main!r}, for which no batch is known; give the bytes of activations of a "
                    "micro-batch with --activations"
                )
            if "return_loss" in takes:  # pairs of an image and a text, as of CLIP
                found |= {"pixel_values": _pixels(model, micro_batch), "return_loss": True}
            return {"input_ids": tokens, **found}

        return batch

    return make


_CLASSIFIERS = ("ImageClassification", "SequenceClassification", "AudioClassification")


def _pixels(model: nn.Module, micro_batch: int) -> torch.Tensor:
    own: Any = model.config
    config: Any = getattr(own, "vision_config", own)
    size = getattr(config, "image_size", _IMAGE_SIDE)
    sides = size if isinstance(size, (list, tuple)) else (size,) * 2
    return torch.zeros((micro_batch, int(getattr(config, "num_channels", 3)), *sides))


def _audio_features(model: nn.Module, micro_batch: int) -> torch.Tensor:
    config: Any = model.config
    if not hasattr(config, "num_mel_bins") or not hasattr(config, "max_source_positions"):
        raise ModelError(
            f"{type(model).__name__} takes 'input_features' of an unknown length; give the bytes of activations of a "
            "micro-batch with --activations"
        )
    # Whisper's encoder has a convolution of stride 2 in front of its positions.
    return torch.zeros((micro_batch, config.num_mel_bins, 2 * config.max_source_positions))


def longest_sample(model: nn.Module) -> int | None:
    """Return the number of learned positions of a model; None: the model has none, so samples may have any length."""
    config: Any = getattr(model, "config", None)
    for name in ("n_positions", "max_position_embeddings"):
        most = getattr(config, name, None)
        if not isinstance(most, int):
            continue
        for path, module in model.named_modules():
            if path.rpartition(".")[2] not in _POSITION_TABLES or not isinstance(module, nn.Embedding):
                continue
            if most <= module.num_embeddings <= most + 2:
                # Positions begin after the row of the padding (RoBERTa).
                unused = 0 if module.padding_idx is None else module.padding_idx + 1
                return min(most, module.num_embeddings - unused)
    return None


_POSITION_TABLES = ("wpe", "embed_positions", "position_embeddings")


def _build(make: Callable[[], nn.Module], name: str) -> nn.Module:
    try:
        with torch.device("meta"):
            return make()
    except Exception as error:
        raise ModelError(
            f"model {name!r} cannot be built without values: {_constructed_module(error)}: {_first_line(error)}; "
            "create tensors from Python numbers in that module, or plan a model of the same sizes with --shape"
        ) from error


def _constructed_module(error: BaseException) -> str:
    """Return the class of the innermost module whose constructor raised `error`."""
    found, trace = "its constructor", error.__traceback__
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and trace.tb_frame.f_code.co_name == "__init__":
            found = f"module {type(owner).__module__}.{type(owner).__name__}"
        trace = trace.tb_next
    return found


def _first_line(error: BaseException) -> str:
    """Return the first line of an error's message; two lines if the first one ends with a colon. The type comes first
    for an arithmetic, lookup or type error, because such a message is unclear alone."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    first = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return f"{type(error).__name__}: {first}" if isinstance(error, (ArithmeticError, LookupError, TypeError)) else first
