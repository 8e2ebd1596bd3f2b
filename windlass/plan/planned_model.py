"""Models on the meta device, for plans and simulations: built from a directory, the name of a model in the hub's cache,
a configuration or a shape."""

from __future__ import annotations

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
    """Build a Llama model of a known size on the meta device.

    Raises:
        ModelError: there is no such shape.
    """
    sizes = SHAPES.get(shape.lower())
    if sizes is None:
        raise ModelError(
            f"--shape {shape!r} is unknown; give one of {', '.join(SHAPES)}, or a config.json as MODEL instead"
        )
    transformers = import_transformers("models", quiet=True)
    return build_on_meta(lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)), shape)


_IMAGE_SIDE = 224  # pixels of an image's side, for models that take images of any size, such as ResNet
_TASKS = ("CausalLM", "Seq2SeqLM", "MaskedLM", "ImageClassification", "SequenceClassification", "TokenClassification")
"""Tasks of models that `build_from_name` builds, in search order; for an encoder-decoder, Seq2SeqLM comes first."""


def build_from_name(name: str, *, trust_remote_code: bool = False) -> nn.Module:
    """Build a model of transformers on the meta device: of the class that `architectures` of its configuration names.

    Without a name, or with that of a model without a head, the class is that of the first task of `_TASKS` that the
    configuration supports.

    Args:
        name: A directory with a config.json, the path of a config.json, or the name of a model in the hub's cache on
            this machine.
        trust_remote_code: Run Python files that come with the model.

    Raises:
        ModelError: there is no such model, it supports none of these tasks, `architectures` names a class of another
            task, it needs its own code, or its construction reads values of tensors.
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
    classes = _auto_classes(transformers, config)
    if not classes:
        raise ModelError(
            f"model {name!r} of type {getattr(config, 'model_type', '?')} has no class for {', '.join(_TASKS)}; plan a "
            "language model, an encoder-decoder or a classifier"
        )
    stated = (getattr(config, "architectures", None) or [None])[0]
    made = next((one for one, built in classes.items() if built == stated), next(iter(classes)))
    model = build_on_meta(lambda: made.from_config(config, trust_remote_code=trust_remote_code), name)
    if hasattr(transformers, stated or "") and stated != type(model).__name__:
        if stated != type(getattr(model, "base_model", None)).__name__:
            raise ModelError(
                f"model {name!r} is a {stated}, and a plan makes batches for {', '.join(_TASKS)} alone; plan it in "
                "Python: windlass.plan.plan_run.plan_memory with a RunShape whose make_batch makes its batches"
            )
        logger.warning(f"{name!r} has a {stated}, which has no loss; the plan is that of a {type(model).__name__}")
    return model


def _auto_classes(transformers: Any, config: Any) -> dict[Any, str]:
    """Return transformers' automatic classes that build a model of this configuration, with the name of what each
    builds."""
    remote = getattr(config, "auto_map", None) or {}
    # Encoder-decoders also have a causal class, which contains only their decoder.
    tasks = sorted(_TASKS, key="Seq2SeqLM".__ne__) if getattr(config, "is_encoder_decoder", False) else _TASKS
    found: dict[Any, str] = {}
    for task in tasks:
        one = getattr(transformers, f"AutoModelFor{task}")
        if one.__name__ in remote:
            found[one] = remote[one.__name__].rpartition(".")[2]
        elif type(config) in one._model_mapping:
            built = one._model_mapping[type(config)]
            found[one] = (built[0] if isinstance(built, tuple) else built).__name__
    return found


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


def _classified_batch(micro_batch: int, length: int) -> Callable[[], dict[str, torch.Tensor]]:
    """Return a function that makes token ids `[micro_batch, length]` and labels `[micro_batch]`."""

    def make() -> dict[str, torch.Tensor]:
        ids = torch.zeros((micro_batch, length), dtype=torch.long)
        return {"input_ids": ids, "labels": ids[:, 0].clone()}

    return make


def batch_for(model: nn.Module) -> Callable[[int, int], Callable[[], dict[str, torch.Tensor]]]:
    """Return the function that makes batches of a model, given the micro-batch and the length of a sample."""
    if type(model).__name__.endswith("ForSequenceClassification"):
        return _classified_batch
    if getattr(model, "main_input_name", "input_ids") != "pixel_values":
        return language_batch
    own: Any = model.config
    config: Any = getattr(own, "vision_config", own)
    size = getattr(config, "image_size", _IMAGE_SIDE)
    sides = size if isinstance(size, (list, tuple)) else (size,) * 2
    shape = (int(getattr(config, "num_channels", 3)), *sides)

    def make(micro_batch: int, length: int) -> Callable[[], dict[str, torch.Tensor]]:
        return lambda: {
            "pixel_values": torch.zeros((micro_batch, *shape)),
            "labels": torch.zeros(micro_batch, dtype=torch.long),
        }

    return make


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
