"""Models of GGUF files: configuration, tensors under the names of transformers, tokenizer.

[Note: GGUF as a directory] `GgufDirectory` is a `ModelDirectory` that reads one GGUF file. Matrices of Q8_0, Q4_0,
TQ2_0 and Q1_0 stay packed in the weight format with the same numbers; a quantized embedding table, and matrices of
other quantized types, become float32. All tensors that are not packed get one dtype: that of the unquantized matrices
if these have one dtype and nothing became float32, otherwise float32.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import torch

from windlass.base.errors import ModelError
from windlass.base.log import logger
from windlass.base.text import one_line
from windlass.compress.gguf_blocks import BLOCK_TYPES, decode_blocks
from windlass.compress.gguf_file import (
    ARCHITECTURES,
    LAYER_PARTS,
    OUTER_PARTS,
    SPLITTINGS,
    import_gguf,
    open_gguf,
    pair_rows,
)
from windlass.compress.model_directory import ModelDirectory, TensorPlace
from windlass.kernels.weight_format import PackedWeight, get_weight_format

_METHOD = {"quant_method": "gguf"}
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_MODULES = {short: name for name, short in LAYER_PARTS.items()}
_OUTER = {short: name for name, short in OUTER_PARTS.items()}
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_SIZES = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "max_position_embeddings": "context_length",
}
_CLASSES = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "gemma": "Gemma"}
_REFUSED = ("expert_count", "attention.sliding_window", "rope.scaling.factor")
_SPLITTING_NAMES = {"llama3": "llama-bpe", "llama-v3": "llama-bpe", "default": "gpt-2"}
_TABLE = "model.embed_tokens"
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def is_gguf_file(path: str | Path) -> bool:
    """Return True if a path is a file with the suffix `.gguf`."""
    return Path(path).suffix == ".gguf" and Path(path).is_file()


class GgufDirectory(ModelDirectory):
    """GGUF file, read as the directory of a model; see [Note: GGUF as a directory].

    Attributes:
        formats: weight format of each packed layer.

    Raises:
        ModelError: the file is damaged, is one of several parts of a model, or has an architecture or tensors that
            windlass does not support.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._reader = open_gguf(path)
        self._sources: dict[str, Any] = {}
        self.places: dict[str, TensorPlace] = {}
        self.formats: dict[str, str] = {}
        self.config: dict[str, Any] = _read_config(self)
        self._dtype = self._wide_dtype()
        widened: dict[str, list[str]] = {}
        for tensor in self._reader.tensors:
            if tensor.name == "rope_freqs.weight":
                continue
            name, kind = _name_of(tensor.name, self.path), tensor.tensor_type.name
            layer, _, leaf = name.rpartition(".")
            shape = tuple(int(size) for size in reversed(tensor.shape))
            self._sources[name] = tensor
            self.places[name] = TensorPlace(self.path, self._dtype, shape, 0)
            if kind in BLOCK_TYPES and leaf == "weight" and layer != _TABLE:
                self.formats[layer] = BLOCK_TYPES[kind].format
            elif kind not in _PLAIN and kind not in BLOCK_TYPES:
                widened.setdefault(kind, []).append(name)
        for kind, names in widened.items():
            logger.warning(
                "%s has %d tensors of type %s, which no weight format is; they are held as floats: %s",
                self.path,
                len(names),
                kind,
                ", ".join(names[:3]),
            )

    @property
    def quantization(self) -> dict[str, Any] | None:
        return dict(_METHOD)

    def field(self, key: str, default: Any = None) -> Any:
        """Return a value of the file's metadata."""
        found = self._reader.get_field(key)
        return default if found is None else found.contents()

    def transformers_config(self, *, trust_remote_code: bool = False) -> Any:
        import transformers

        values = {key: value for key, value in self.config.items() if key != "model_type"}
        return transformers.AutoConfig.for_model(self.config["model_type"], **values)

    def has_tensor(self, name: str) -> bool:
        """Return True if a tensor of the file has this GGUF name."""
        return any(tensor.name == name for tensor in self._reader.tensors)

    def tensor(self, name: str) -> Any:
        """Return a tensor, as an object of the package gguf, by its GGUF name."""
        return next(tensor for tensor in self._reader.tensors if tensor.name == name)

    def read_packed(self, layer: str) -> PackedWeight:
        """Return the packed tensors of a layer in the format `formats[layer]`."""
        tensor = self._sources[f"{layer}.weight"]
        return decode_blocks(self._ordered(f"{layer}.weight", _copy(tensor)), BLOCK_TYPES[tensor.tensor_type.name])

    def read(self, name: str) -> torch.Tensor:
        if name not in self._sources:
            raise ModelError(f"{self.path} has no tensor {name!r}; copy the model again")
        tensor = self._sources[name]
        kind = tensor.tensor_type.name
        if kind in BLOCK_TYPES:
            form = get_weight_format(BLOCK_TYPES[kind].format)
            value = form.unpack(decode_blocks(_copy(tensor), BLOCK_TYPES[kind]))
            return self._ordered(name, value).to(self._dtype)
        if kind in _PLAIN:
            data = _copy(tensor)
            value = data.view(torch.uint8).view(torch.bfloat16) if kind == "BF16" else data
        else:
            try:
                value = torch.from_numpy(import_gguf().dequantize(tensor.data, tensor.tensor_type))
            except (NotImplementedError, ValueError) as error:
                raise ModelError(
                    f"tensor {name!r} of {self.path} is {kind}, which the package gguf does not read; convert the file "
                    "to Q8_0"
                ) from error
        if self.config["model_type"] == "gemma" and name.endswith("norm.weight"):
            value = value - 1  # GGUF stores the factor, transformers the factor minus 1
        return self._ordered(name, value).to(self._dtype)

    def map(self, name: str) -> Any:
        raise ModelError(f"tensor {name!r} of {self.path} cannot be mapped: GGUF has other bytes; read it")

    def can_map(self, name: str) -> bool:
        return False

    def _wide_dtype(self) -> torch.dtype:
        kinds = {tensor.tensor_type.name for tensor in self._reader.tensors if len(tensor.shape) == 2}
        wide = {_PLAIN.get(kind, torch.float32) for kind in kinds - set(BLOCK_TYPES)}
        if self.tensor("token_embd.weight").tensor_type.name in BLOCK_TYPES or len(wide) != 1:
            return torch.float32
        return wide.pop()

    def _ordered(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows of a tensor in transformers' order, which is not GGUF's for query and key matrices."""
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
        if heads is None or not ARCHITECTURES[self.config["model_type"]][1]:
            return rows
        order = pair_rows(len(rows), self.config[heads])
        return torch.empty_like(rows).index_copy_(0, order, rows)


def _copy(tensor: Any) -> torch.Tensor:
    return torch.from_numpy(tensor.data.copy())


def _name_of(name: str, path: Path) -> str:
    found = _LAYER.fullmatch(name)
    if found is not None and found[2] in _MODULES:
        return f"model.layers.{found[1]}.{_MODULES[found[2]]}.{found[3]}"
    module, _, leaf = name.rpartition(".")
    if module in _OUTER:
        return f"{_OUTER[module]}.{leaf}"
    raise ModelError(
        f"tensor {name!r} of {path} has no place in a model of the architectures {', '.join(_CLASSES)}; load the model "
        "from safetensors"
    )


def _read_config(directory: GgufDirectory) -> dict[str, Any]:
    """Return the values of `config.json`."""
    path, architecture = directory.path, directory.field("general.architecture")
    if architecture not in _CLASSES:
        raise ModelError(f"{path} has the architecture {architecture!r}; windlass reads {', '.join(_CLASSES)}")
    if directory.field("split.count", 1) > 1:
        raise ModelError(f"{path} is one of {directory.field('split.count')} parts; join them with llama-gguf-split")

    def stated(name: str, default: Any = None) -> Any:
        found = directory.field(f"{architecture}.{name}", default)
        if found is None or isinstance(found, list):
            raise ModelError(f"{path} has {found!r} as {architecture}.{name}; load the model from safetensors")
        return found

    for name in _REFUSED:
        if directory.field(f"{architecture}.{name}"):
            raise ModelError(
                f"{path} has {architecture}.{name} = {directory.field(f'{architecture}.{name}')}, which windlass does "
                "not read from GGUF; load the model from safetensors"
            )
    config: dict[str, Any] = {name: stated(key) for name, key in _SIZES.items()}
    heads = config["num_attention_heads"]
    head_dim = stated("attention.key_length", config["hidden_size"] // heads)
    if {head_dim} != {stated("attention.value_length", head_dim), stated("rope.dimension_count", head_dim)}:
        raise ModelError(f"{path} has heads of {head_dim} features with values or rotations of another size")
    table = directory.tensor("token_embd.weight") if directory.has_tensor("token_embd.weight") else None
    if table is None:
        raise ModelError(f"{path} has no tensor 'token_embd.weight'; copy the file again")
    config |= {
        "model_type": architecture,
        "architectures": [f"{_CLASSES[architecture]}ForCausalLM"],
        "num_key_value_heads": stated("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": stated("attention.layer_norm_rms_epsilon"),
        "vocab_size": int(table.shape[1]),
        "tie_word_embeddings": not directory.has_tensor("output.weight"),
        "rope_parameters": _read_rope(directory, stated("rope.freq_base", 10000.0), head_dim),
    }
    if architecture != "qwen2":
        config["attention_bias"] = directory.has_tensor("blk.0.attn_q.bias")
    if architecture == "llama":
        config["mlp_bias"] = directory.has_tensor("blk.0.ffn_up.bias")
    for name in ("bos", "eos"):
        number = directory.field(f"tokenizer.ggml.{name}_token_id")
        config[f"{name}_token_id"] = None if number is None else int(number)
    return config


def _read_rope(directory: GgufDirectory, theta: float, head_dim: int) -> dict[str, Any]:
    """Return the settings of rotary embeddings.

    Raises:
        ModelError: the file has factors of the rotary frequencies other than those of Llama 3.1 to 3.3.
    """
    if not directory.has_tensor("rope_freqs.weight"):
        return {"rope_type": "default", "rope_theta": theta}
    factors = _copy(directory.tensor("rope_freqs.weight")).double()
    for factor in (8.0, 32.0):
        known = _llama3_factors(theta, head_dim, factor)
        if factors.shape == known.shape and torch.allclose(factors, known, rtol=1e-3):
            return {"rope_type": "llama3", "rope_theta": theta, "factor": factor, **_LLAMA3}
    raise ModelError(
        f"{directory.path} has factors of rotations (rope_freqs.weight) other than those of Llama 3.1 to 3.3; load the "
        "model from safetensors"
    )


def _llama3_factors(theta: float, head_dim: int, factor: float) -> torch.Tensor:
    frequencies = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    turns = _LLAMA3["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return 1 / ((1 - smooth) / factor + smooth)


def read_gguf_tokenizer(path: str | Path) -> Any:
    """Return the tokenizer of a GGUF file, as a tokenizer of transformers.

    Byte-level BPE that splits text as GPT-2, Llama 3 or Qwen 2 is read here; SentencePiece is read by transformers.

    Raises:
        ModelError: the file is damaged, or has no tokenizer, one of another kind, or one that transformers cannot read.
    """
    import transformers

    directory = GgufDirectory(path)
    model = directory.field("tokenizer.ggml.model")
    if model == "llama":
        try:
            return transformers.AutoTokenizer.from_pretrained(
                str(Path(path).parent), gguf_file=Path(path).name, trust_remote_code=False
            )
        except Exception as error:  # transformers, tokenizers and gguf raise exceptions of various classes
            raise ModelError(
                f"transformers cannot read the tokenizer of {path}: {one_line(str(error), 200)}; give tokenizer=DIR, a "
                "directory with tokenizer.json"
            ) from error
    splitting = directory.field("tokenizer.ggml.pre", "default")
    splitting = _SPLITTING_NAMES.get(splitting, splitting)
    if model != "gpt2" or splitting not in ("gpt-2", *SPLITTINGS.values()):
        raise ModelError(
            f"{path} has a tokenizer of the kind {model!r}, splitting {splitting!r}, which windlass does not read; "
            "give tokenizer=DIR, a directory with tokenizer.json"
        )
    tokens = directory.field("tokenizer.ggml.tokens")
    special = {
        f"{name}_token": tokens[number]
        for name in ("bos", "eos", "unk")
        if (number := directory.field(f"tokenizer.ggml.{name}_token_id", -1)) in range(len(tokens))
    }
    found = transformers.PreTrainedTokenizerFast(tokenizer_object=_byte_level(directory, tokens, splitting), **special)
    template = directory.field("tokenizer.chat_template")
    if template is not None:
        found.chat_template = template
    return found


def _byte_level(directory: GgufDirectory, tokens: list[str], splitting: str) -> Any:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    types = import_gguf().TokenType
    kinds = directory.field("tokenizer.ggml.token_type", [int(types.NORMAL)] * len(tokens))
    merges = [tuple(one.split(" ", 1)) for one in directory.field("tokenizer.ggml.merges", [])]
    vocabulary = {text: number for number, text in enumerate(tokens) if kinds[number] != types.UNUSED}
    found = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=splitting == "llama-bpe"))
    expression = {name: regex for regex, name in SPLITTINGS.items()}.get(splitting)
    steps: list[Any] = [] if expression is None else [pre_tokenizers.Split(Regex(expression), "isolated")]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=expression is None))
    found.pre_tokenizer = pre_tokenizers.Sequence(steps)
    found.decoder = decoders.ByteLevel()
    if splitting == "qwen2":
        found.normalizer = normalizers.NFC()
    for text, kind in zip(tokens, kinds, strict=True):
        if kind == types.CONTROL:
            found.add_special_tokens([AddedToken(text, special=True, normalized=False)])
        elif kind == types.USER_DEFINED:
            found.add_tokens([AddedToken(text, normalized=False)])
    number = directory.field("tokenizer.ggml.bos_token_id")
    if number is not None and directory.field("tokenizer.ggml.add_bos_token", splitting == "llama-bpe"):
        bos = tokens[number]
        found.post_processor = processors.TemplateProcessing(f"{bos}:0 $A:0", f"{bos}:0 $A:0 $B:1", [(bos, number)])
    return found
