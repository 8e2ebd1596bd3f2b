"""Construction of the causal language model that a run names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from windlass.base.bounded_json import parse_json
from windlass.base.errors import ModelError
from windlass.base.import_transformers import import_transformers
from windlass.base.remote_code import needs_remote_code, remote_code_refusal
from windlass.cli.training.default_recipe import (
    BUILT_IN_MODELS,
    TINY_MODEL,
    TINY_MOE_MODEL,
    tiny_llama_config,
    tiny_mixtral_config,
)

_PICKLE_PATTERN = "pytorch_model*.bin"


def build_model(
    name: str, vocab_size: int, seq_len: int, seed: int, eos: int, *, trust_remote_code: bool = False
) -> nn.Module:
    """Build a model: with random weights from `seed` for the built-in models and for configurations without weights,
    otherwise with the weights of its directory or of the hub.

    Weights are read from safetensors only, because the older format is pickle, which can run code.

    Args:
        eos: token id that ends a text, for models with random weights.
        trust_remote_code: run Python files that come with the model.

    Raises:
        ModelError: transformers is missing, the model does not exist, it needs `trust_remote_code`, its weights are
            pickled, or its vocabulary is smaller than the tokenizer's.
    """
    transformers = import_transformers("models", quiet=True)
    torch.manual_seed(seed % 2**63)
    if name == TINY_MODEL:
        config = transformers.LlamaConfig(**tiny_llama_config(vocab_size, seq_len), bos_token_id=eos, eos_token_id=eos)
        return _check_vocab_size(transformers.LlamaForCausalLM(config), name, vocab_size)
    if name == TINY_MOE_MODEL:
        config = transformers.MixtralConfig(
            **tiny_mixtral_config(vocab_size, seq_len), bos_token_id=eos, eos_token_id=eos
        )
        return _check_vocab_size(transformers.MixtralForCausalLM(config), name, vocab_size)
    try:
        if name.startswith("hub:") or has_weights(Path(name)):
            model = transformers.AutoModelForCausalLM.from_pretrained(
                name.removeprefix("hub:"), use_safetensors=True, trust_remote_code=trust_remote_code
            )
        else:
            # Pass the folder instead of the file, because transformers searches the folder for the model's code.
            file = config_file(name)
            config = transformers.AutoConfig.from_pretrained(
                file.parent if file.name == "config.json" else file, trust_remote_code=trust_remote_code
            )
            config.eos_token_id = eos
            model = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    except ModelError:
        raise
    except Exception as error:  # safetensors and the hub's client raise their own exception types
        if needs_remote_code(error):
            raise ModelError(remote_code_refusal(name)) from error
        reason = str(error).strip().split("\n")[0]
        raise ModelError(
            f"cannot build model {name!r}: {reason}; give 'tiny', 'tiny-moe', a Hugging Face config.json, a directory, "
            "or hub:NAME"
        ) from error
    return _check_vocab_size(model, name, vocab_size)


def config_file(name: str) -> Path:
    """Return the config.json of `name`, a file or a directory.

    Raises:
        ModelError: the file does not exist.
    """
    path = Path(name)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ModelError(
            f"no model at {name!r}: {file} does not exist; give 'tiny', 'tiny-moe', a Hugging Face config.json, a "
            "directory that holds one, or hub:NAME"
        )
    return file


def declared_vocab_size(name: str) -> int | None:
    """Return the vocabulary size in the model's configuration; None for built-in models and models of the hub.

    Raises:
        ModelError: there is no configuration, or it is not that of a language model.
    """
    if name in BUILT_IN_MODELS or name.startswith("hub:"):
        return None
    file = config_file(name)
    try:
        settings = parse_json(file.read_bytes())
        return int(settings.get("text_config", settings)["vocab_size"])
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise ModelError(
            f"{file} is not the configuration of a language model ({error!r}); it needs at least model_type and "
            "vocab_size"
        ) from error


def has_weights(path: Path) -> bool:
    """Return True if a directory contains weights to start from.

    Raises:
        ModelError: the directory contains pickled weights only. Ignoring them would silently train from random weights.
    """
    if not path.is_dir():
        return False
    if next(path.glob("*.safetensors"), None):
        return True
    pickled = next(path.glob(_PICKLE_PATTERN), None)
    if pickled is not None:
        raise ModelError(
            f"{pickled} is a pickle, which can run code and is not read; save the model with save_pretrained of a "
            "recent transformers, which writes safetensors, or give its config.json to start from random weights"
        )
    return False


def _check_vocab_size(model: Any, name: str, vocab_size: int) -> nn.Module:
    rows = model.get_input_embeddings().weight.shape[0]
    if rows < vocab_size:
        raise ModelError(
            f"model {name!r} has a vocabulary of {rows}, the tokenizer one of {vocab_size}; use the model's own "
            f"tokenizer, or --vocab-size {rows}"
        )
    model.config.use_cache = False  # training makes no use of cached keys and values
    assert isinstance(model, nn.Module)
    return model
