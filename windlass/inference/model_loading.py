"""Loading of a model and its tokenizer for inference, and lookup of the model's end tokens and maximum length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from windlass.base.dtypes import FLOAT_DTYPES
from windlass.base.errors import ConfigError, ModelError, WindlassError
from windlass.base.import_transformers import import_transformers
from windlass.base.remote_code import needs_remote_code, remote_code_refusal
from windlass.base.text import one_line
from windlass.comm.mesh_axis import MeshAxis
from windlass.compress.gguf_model import GgufDirectory, is_gguf_file, read_gguf_tokenizer
from windlass.compress.packed_model import is_packed_directory, load_packed_model
from windlass.inference.model_forward import find_first_position, rope_settings
from windlass.inference.staged_loading import StagedModelSource

_DTYPES = {"auto": None, **FLOAT_DTYPES}

_TOKENIZER_FILES = "tokenizer.json and tokenizer_config.json, tokenizer.model, or vocab.json and merges.txt"

_VOCABULARY_PREFIXES = ("tokenizer", "vocab", "merges", "spiece", "sentencepiece", "tekken", "tiktoken")

DEFAULT_LENGTH = 4096
"""Maximum number of tokens of a sequence if neither the model nor an option states one."""

_LENGTH_NAMES = (
    *("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length"),
    "max_target_positions",
)

_SCALING_ROPE = frozenset({"linear", "yarn"})
# `dynamic` is not listed: its scale depends on the module's longest sequence so far, which other requests change


def parse_dtype(dtype: str | torch.dtype) -> torch.dtype | None:
    """Return the dtype of a name; None for `auto`.

    Raises:
        ConfigError: the name is not known.
    """
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in _DTYPES:
        raise ConfigError(f"dtype is {dtype!r}; write one of {', '.join(_DTYPES)}")
    return _DTYPES[dtype]


def load_model(
    path: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    device: torch.device | str = "cpu",
    trust_remote_code: bool = False,
    pipeline: MeshAxis | None = None,
) -> nn.Module:
    """Load a causal language model of transformers, in eval mode.

    Args:
        path: directory with `config.json` and safetensors files, a GGUF file, or a name on the hub. A GGUF file or a
            directory of packed weights (compressed-tensors, GPTQ, AWQ) gives a model with `PackedLinear` layers.
        dtype: dtype of the weights; `auto`: that of the files. On the CPU, a model with float16 weights is
            converted to float32, since the CPU has no fast float16 arithmetic.
        pipeline: mesh axis pp; each of its ranks reads only the weights of its own stage. None: no pp.

    Raises:
        ModelError: there is no model, it is damaged, it needs its own code, it is an encoder-decoder, or transformers
            is missing.
        ConfigError: the dtype is not known, or `pipeline` would split packed weights.
    """
    transformers = import_transformers("directories of models")
    config = load_config(path, trust_remote_code=trust_remote_code)
    wanted = parse_dtype(dtype)
    if is_packed_directory(path):
        if pipeline is not None:
            raise ConfigError(
                f"{path} has packed weights, which pp does not split; give the unquantized model and the option weights"
            )
        model = load_packed_model(path, dtype=wanted, trust_remote_code=trust_remote_code)
    else:
        source = transformers.AutoModelForCausalLM if pipeline is None else StagedModelSource(config, pipeline)
        model = _load(source, path, trust_remote_code, dtype=wanted or "auto", use_safetensors=None)
    if torch.device(device).type == "cpu" and any(p.dtype == torch.float16 for p in model.parameters()):
        model = model.float()
    if torch.device(device).type != "cpu":
        model = model.to(device)
    found: nn.Module = model.eval()
    return found


def load_config(path: str | Path, *, trust_remote_code: bool = False) -> Any:
    """Load the configuration of a causal language model.

    Raises:
        ModelError: the configuration is missing, is damaged, needs the model's own code or is that of an
            encoder-decoder; or transformers is missing.
    """
    transformers = import_transformers("directories of models")
    if is_gguf_file(path):
        return GgufDirectory(path).transformers_config()
    directory = Path(path)
    if directory.is_dir() and not (directory / "config.json").is_file():
        raise ModelError(f"{path} is not a model: it has no config.json; give a directory that save_pretrained wrote")
    config = _load(transformers.AutoConfig, path, trust_remote_code)
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(
            f"{path} is an encoder-decoder ({config.model_type}); windlass serves causal language models, which have "
            "only a decoder"
        )
    return config


def load_tokenizer_of(path: str | Path, *, trust_remote_code: bool = False) -> Any:
    """Load the tokenizer of a directory, with or without a model, of a name on the hub, or of a GGUF file.

    Raises:
        ModelError: the tokenizer is missing, is damaged or needs its own code; or transformers is missing.
    """
    transformers = import_transformers("directories of models")
    if is_gguf_file(path):
        tokenizer = read_gguf_tokenizer(path)
    else:
        tokenizer = _load(transformers.AutoTokenizer, path, trust_remote_code, what="tokenizer")
    if _is_empty(tokenizer):
        raise ModelError(_describe_missing_tokenizer(path, "its vocabulary is empty"))
    try:
        tokenizer.decode(tokenizer("a").input_ids)
    except Exception as error:  # transformers does not check the values in these files
        reason = one_line(str(error) or type(error).__name__, 300)
        raise ModelError(f"the tokenizer of {path} fails at its first text: {reason}; check its files") from error
    return tokenizer


def find_eos_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Return the tokens that end an answer: the end tokens of the generation settings (if there are none, of the
    model's configuration) and that of the tokenizer. Negative ids stand for no token, and are
    left out.
    """
    found: set[int] = set()
    for source in (getattr(model, "generation_config", None), getattr(model, "config", None), tokenizer):
        value = getattr(source, "eos_token_id", None)
        if value is None or (found and source is getattr(model, "config", None)):
            continue
        found |= set(value) if isinstance(value, (list, tuple)) else {int(value)}
    return frozenset(int(token) for token in found if int(token) >= 0)


def count_embeddings(model: Any) -> int:
    """Return the number of tokens that a model embeds, which may be more than its logits; 0 if it is unknown."""
    try:
        embedding = model.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        return 0
    return int(getattr(embedding, "num_embeddings", 0))


def find_max_length(model: Any) -> int | None:
    """Return the number of tokens that the model can attend to; None if its configuration has no maximum, e.g. for
    many recurrent models and models with ALiBi.
    """
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    for name in _LENGTH_NAMES:
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value - (find_first_position(model) if isinstance(model, nn.Module) else 0)
    return None


def find_scaled_length(model: Any) -> int | None:
    """Return the number of tokens to which linear or YaRN scaling extends the rotary embeddings; None without scaling.

    The maximum of a configuration with a scaling factor may be that before scaling, as in Qwen's documentation of YaRN.
    """
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    maximum, lengths = find_max_length(model), []
    for rope in rope_settings(config):
        factor, kind = rope.get("factor"), rope.get("rope_type", rope.get("type"))
        start = (rope.get("original_max_position_embeddings") if kind == "yarn" else None) or maximum
        if kind in _SCALING_ROPE and isinstance(factor, int | float) and start is not None:
            lengths.append(int(start * factor))
    return max(lengths, default=None)


def _load(source: Any, path: str | Path, trust_remote_code: bool, *, what: str = "model", **arguments: Any) -> Any:
    directory = Path(path)
    if not directory.is_dir() and (directory.is_absolute() or str(path).startswith(".")):
        files = "config.json and safetensors files" if what == "model" else _TOKENIZER_FILES
        raise ModelError(f"{path} is not a directory; give one with {files}")
    try:
        return source.from_pretrained(path, trust_remote_code=trust_remote_code, **arguments)
    except WindlassError:
        raise
    except Exception as error:  # safetensors, tokenizers and the hub raise their own exception types
        if needs_remote_code(error):
            raise ModelError(remote_code_refusal(path)) from error
        text = str(error).strip() or type(error).__name__
        if what == "tokenizer":
            reason = one_line(" ".join(text.split()), 400)
            raise ModelError(_describe_missing_tokenizer(path, reason)) from error
        absent = "" if directory.exists() else "; no such directory exists: check the path, or the name on the hub"
        raise ModelError(f"cannot load the {what} of {path}: {text.splitlines()[0]}{absent}") from error


def _is_empty(tokenizer: Any) -> bool:
    """Return True if all tokens but at most one are added tokens, as for GPT-2 and Qwen without vocabulary files."""
    try:
        num_added = len(tokenizer.added_tokens_decoder)
    except (AttributeError, NotImplementedError):  # tokenizers of mistral-common, which do not load without their files
        return False
    return len(tokenizer) - num_added <= 1


def _describe_missing_tokenizer(path: str | Path, reason: str) -> str:
    directory = Path(path)
    if directory.is_dir() and not any(file.name.startswith(_VOCABULARY_PREFIXES) for file in directory.iterdir()):
        reason = f"the directory has none of its files ({_TOKENIZER_FILES})"
    return (
        f"cannot load the tokenizer of {path}: {reason}; copy the tokenizer's files of the original model there, or "
        "give their directory as tokenizer (--tokenizer of `windlass serve`); LLM(..., skip_tokenizer_init=True) takes "
        "token ids without one"
    )
