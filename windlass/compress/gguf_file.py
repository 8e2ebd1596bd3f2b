"""GGUF files: export of full models of the Llama family, and import of tensors. The package `gguf` writes and
reads the container."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from windlass.base.atomic_file import temporary_path_beside
from windlass.base.bounded_json import parse_json
from windlass.base.errors import ModelError
from windlass.base.log import logger
from windlass.compress.gguf_blocks import BLOCK_TYPES, decode_blocks, encode_blocks, find_block_type
from windlass.compress.model_directory import ModelDirectory
from windlass.compress.pruned_config import PRUNING_ENTRY
from windlass.compress.quantization_config import read_formats
from windlass.kernels.weight_format import PackedWeight, get_weight_format

# model_type of transformers -> architecture of GGUF, and True if GGUF has rows of query and key in another order
ARCHITECTURES = {
    "llama": ("llama", True),
    "mistral": ("llama", True),
    "qwen2": ("qwen2", False),
    "qwen3": ("qwen3", False),
    "gemma": ("gemma", False),
}
LAYER_PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OUTER_PARTS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
# regular expression by which a tokenizer splits text -> name of this rule in GGUF
SPLITTINGS = {
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + digits + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+": name
    for digits, name in (("{1,3}", "llama-bpe"), ("", "qwen2"))
}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_REQUIRED_SETTINGS = (
    "num_attention_heads",
    "hidden_size",
    "max_position_embeddings",
    "num_hidden_layers",
    "intermediate_size",
    "rms_norm_eps",
    "vocab_size",
)
_PLAIN = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_SILU = ("silu", "swish")
_GELU = ("gelu_pytorch_tanh", "gelu", "gelu_new")  # in Gemma's first configurations "gelu" is the tanh form


def write_gguf(source: str | Path, target: str | Path, *, name: str = "model") -> list[str]:
    """Write the model of a directory as a GGUF file, which appears complete or not at all.

    Packed layers keep their values (see `find_block_type`); the other matrices keep their dtype, vectors become
    float32. Byte-level BPE tokenizers are written if they split text as GPT-2, Llama 3 or Qwen 2 does; for other
    tokenizers the file has no vocabulary.

    Returns:
        The GGUF type of each tensor, as `name: type`.

    Raises:
        ModelError: the package gguf is missing, the model is of another family or has pruned heads, config.json lacks a
            setting or has an activation other than the family's, a format or dtype has no GGUF type, or the file cannot
            be written.
    """
    gguf = import_gguf()
    directory = ModelDirectory(source)
    kind = directory.config.get("model_type")
    if kind not in ARCHITECTURES:
        raise ModelError(f"{source} is of type {kind!r}; GGUF is written for {', '.join(ARCHITECTURES)}")
    if PRUNING_ENTRY in directory.config:
        raise ModelError(
            f"{source} has {PRUNING_ENTRY} in its config.json: numbers of heads that differ from the configuration's, "
            "which are not written to GGUF; prune to heads that transformers builds, or write the unpruned model"
        )
    architecture, permutes = ARCHITECTURES[kind]
    layers = sorted({one.rpartition(".")[0] for one in directory.places if one.endswith(".weight_scale")})
    formats = read_formats(directory.quantization or {}, layers) if layers else {}
    to = Path(target)
    staging = temporary_path_beside(to.absolute())
    writer = gguf.GGUFWriter(staging, architecture)
    _write_settings(writer, directory.config, name)
    _write_tokenizer(gguf, writer, directory)
    sources = list(_sources(directory, formats))
    for label, _, type_name, shape in sources:
        raw = gguf.GGMLQuantizationType[type_name]
        size = torch.Size(shape).numel()
        writer.add_tensor_info(label, shape, torch.zeros(0, dtype=torch.uint8).numpy().dtype, size, raw)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for label, tensor, type_name, shape in sources:
            data = _read_data(directory, tensor, type_name, formats, permutes)
            if tuple(data.shape) != shape:
                raise ModelError(f"tensor {label!r} has {tuple(data.shape)} bytes and not {shape}")
            writer.write_tensor_data(data.numpy())
        writer.close()
        staging.replace(to)
    except OSError as error:
        raise ModelError(f"{to} cannot be written: {error}; free some space or choose another file") from error
    finally:
        staging.unlink(missing_ok=True)
    return [f"{label}: {type_name}" for label, _, type_name, _ in sources]


def read_gguf(path: str | Path) -> dict[str, tuple[str, PackedWeight]]:
    """Return the weight format and the packed tensors of each tensor of a GGUF file, by GGUF's names.

    Tensors of Q8_0, Q4_0, TQ2_0 and Q1_0 have the formats of `BLOCK_TYPES`; F32, F16 and BF16 have "fp32" and "bf16",
    with one tensor `weight` of any shape (F16 widened to float32).

    Raises:
        ModelError: the package gguf is missing, or the file is damaged or has other types.
    """
    found = {}
    for tensor in open_gguf(path).tensors:
        type_name = tensor.tensor_type.name
        data = torch.from_numpy(tensor.data.copy())
        if type_name in BLOCK_TYPES:
            block = BLOCK_TYPES[type_name]
            found[tensor.name] = block.format, decode_blocks(data, block)
        elif type_name in ("F32", "F16"):
            found[tensor.name] = "fp32", {"weight": data.float()}
        elif type_name == "BF16":
            found[tensor.name] = "bf16", {"weight": data.view(torch.uint8).contiguous().view(torch.bfloat16)}
        else:
            raise ModelError(
                f"tensor {tensor.name!r} of {path} is {type_name}; windlass reads F32, F16, BF16 and "
                f"{', '.join(BLOCK_TYPES)}"
            )
    return found


def open_gguf(path: str | Path) -> Any:
    """Return the reader of the package gguf for a file. It maps the file into memory.

    Raises:
        ModelError: the package gguf is missing, or the file is damaged.
    """
    gguf = import_gguf()
    try:
        return gguf.GGUFReader(path)
    except (OSError, ValueError, IndexError, KeyError, TypeError, OverflowError) as error:
        raise ModelError(f"{path} cannot be read as GGUF: {error}; copy the file again") from error


def pair_rows(rows: int, heads: int) -> torch.Tensor:
    """Return, for each row of a query or key matrix in GGUF, its row in transformers. In GGUF the two rows of a
    rotated pair are neighbours."""
    return torch.arange(rows).view(heads, 2, -1).transpose(1, 2).flatten()


def import_gguf() -> Any:
    """Return the package gguf.

    Raises:
        ModelError: the package is missing.
    """
    try:
        import gguf
    except ImportError as error:
        raise ModelError("GGUF files need the package gguf: pip install 'windlass[gguf]'") from error
    return gguf


def _write_settings(writer: Any, config: Mapping[str, Any], name: str) -> None:
    missing = [key for key in _REQUIRED_SETTINGS if config.get(key) is None]
    if missing:
        raise ModelError(
            f"config.json lacks {', '.join(missing)}, which a GGUF file needs; add the values, or save the model "
            "again with transformers"
        )
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        raise ModelError(
            f"rope of type {rope.get('rope_type', rope.get('type'))!r} is not written to GGUF; 'default' is"
        )
    _check_architecture(config)
    writer.add_name(name)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads") or heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(float(config.get("rope_theta") or rope.get("rope_theta") or 10000.0))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])


def _check_architecture(config: Mapping[str, Any]) -> None:
    """Check settings that a GGUF file does not have, because they follow from the architecture.

    Raises:
        ModelError: the activation of the feed-forward layers is another one.
    """
    kind = config["model_type"]
    known = _GELU if kind == "gemma" else _SILU
    given = config.get("hidden_act")
    if given is not None and given not in known:
        raise ModelError(
            f"hidden_act is {given!r} in config.json, and readers of GGUF compute {known[0]!r} for models of type "
            f"{kind!r}; keep this model in safetensors"
        )
    window = config.get("sliding_window")
    uses_window = kind == "mistral" or bool(config.get("use_sliding_window"))
    if uses_window and window is not None and window < config["max_position_embeddings"]:
        logger.warning(
            "sliding_window is %d in config.json, which the GGUF file does not have: its readers attend to all tokens, "
            "so results differ for texts of more than %d tokens",
            window,
            window,
        )


def _write_tokenizer(gguf: Any, writer: Any, directory: ModelDirectory) -> None:
    path = directory.path / "tokenizer.json"
    stored = parse_json(path.read_bytes()) if path.is_file() else {}
    model = stored.get("model") or {}
    splitting = find_splitting(stored)
    if model.get("type") != "BPE" or model.get("byte_fallback") or splitting is None:
        writer.add_tokenizer_model("no_vocab")
        logger.warning(
            "%s has no byte-level BPE tokenizer that splits text as GPT-2, Llama 3 or Qwen 2, so the GGUF file has no "
            "vocabulary",
            directory.path,
        )
        return
    size = directory.config["vocab_size"]
    tokens = [f"[PAD{number}]" for number in range(size)]
    types = [int(gguf.TokenType.UNUSED)] * size
    for text, number in model["vocab"].items():
        if number < size:
            tokens[number], types[number] = text, int(gguf.TokenType.NORMAL)
    for added in stored.get("added_tokens", ()):
        if added["id"] < size:
            kind = gguf.TokenType.CONTROL if added.get("special") else gguf.TokenType.USER_DEFINED
            tokens[added["id"]], types[added["id"]] = added["content"], int(kind)
    merges = [one if isinstance(one, str) else " ".join(one) for one in model.get("merges", ())]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(splitting)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    for key, add in (("bos_token_id", writer.add_bos_token_id), ("eos_token_id", writer.add_eos_token_id)):
        number = directory.config.get(key)
        number = number[0] if isinstance(number, list) and number else number
        if isinstance(number, int) and number < size:
            add(number)
            if key == "bos_token_id":
                writer.add_add_bos_token(_begins_with(stored, tokens[number]))
    template = directory.path / "chat_template.jinja"
    if template.is_file():
        writer.add_chat_template(template.read_text(encoding="utf-8"))


def _begins_with(tokenizer: Mapping[str, Any], token: str) -> bool:
    """Return True if a tokenizer puts a token before each text."""
    whole = tokenizer.get("post_processor") or {}
    steps = [step for step in whole.get("processors", [whole]) if step.get("type") == "TemplateProcessing"]
    return any((step["single"][0].get("SpecialToken") or {}).get("id") == token for step in steps if step["single"])


def find_splitting(tokenizer: Mapping[str, Any]) -> str | None:
    """Return GGUF's name of the rule by which a tokenizer splits text before BPE merges; None if GGUF has no such name.

    Args:
        tokenizer: content of `tokenizer.json`.
    """
    found = tokenizer.get("pre_tokenizer") or {}
    steps = found.get("pretokenizers", [found])
    if [step.get("type") for step in steps] == ["ByteLevel"]:
        return "gpt-2" if steps[0].get("use_regex", True) else None
    if [step.get("type") for step in steps] != ["Split", "ByteLevel"] or steps[1].get("use_regex", True):
        return None
    expression: Any = (steps[0].get("pattern") or {}).get("Regex")
    return SPLITTINGS.get(expression)


def _sources(directory: ModelDirectory, formats: Mapping[str, str]) -> Iterator[tuple[str, str, str, tuple[int, ...]]]:
    """Yield for each tensor its name in GGUF, its name in the source (`<layer>.weight` if packed), its GGUF type, and
    its shape, in which the last dimension is counted in bytes.
    """
    used = {f"{layer}.{part}" for layer, name in formats.items() for part in get_weight_format(name).file_form(1, 1)}
    for layer, name in formats.items():
        form = get_weight_format(name)
        shape = directory.places[
            f"{layer}.weight_packed" if f"{layer}.weight_packed" in used else f"{layer}.weight"
        ].shape
        columns = int(directory.read(f"{layer}.weight_shape")[1]) if f"{layer}.weight_shape" in used else shape[1]
        kind = find_block_type(form, columns)
        yield (
            _gguf_name(f"{layer}.weight"),
            f"{layer}.weight",
            kind.name,
            (shape[0], columns // kind.weights * kind.nbytes),
        )
    for name, place in directory.places.items():
        if name in used:
            continue
        if place.dtype not in _PLAIN:
            raise ModelError(f"tensor {name!r} is {place.dtype}, which GGUF files of windlass do not hold")
        dtype = torch.float32 if len(place.shape) == 1 else place.dtype
        shape = (*place.shape[:-1], place.shape[-1] * dtype.itemsize)
        yield _gguf_name(name), name, _PLAIN[dtype], shape


def _gguf_name(name: str) -> str:
    module, _, leaf = name.rpartition(".")
    layer = _LAYER.fullmatch(module)
    if layer is not None and layer[2] in LAYER_PARTS:
        return f"blk.{layer[1]}.{LAYER_PARTS[layer[2]]}.{leaf}"
    if module in OUTER_PARTS:
        return f"{OUTER_PARTS[module]}.{leaf}"
    raise ModelError(f"tensor {name!r} has no name in GGUF's {', '.join(ARCHITECTURES)} models")


def _read_data(
    directory: ModelDirectory, name: str, type_name: str, formats: Mapping[str, str], permutes: bool
) -> torch.Tensor:
    """Return the bytes of a tensor, uint8: one row for each output of a matrix, a single row for a vector."""
    layer = name.rpartition(".")[0]
    if type_name in BLOCK_TYPES:
        form = get_weight_format(formats[layer])
        packed = {part: directory.read(f"{layer}.{part}") for part in form.file_form(1, 1)}
        data = encode_blocks(form, packed, BLOCK_TYPES[type_name])
    else:
        tensor = directory.read(name)
        tensor = tensor.float() if tensor.dim() == 1 else tensor
        if directory.config["model_type"] == "gemma" and name.endswith("norm.weight"):
            tensor = tensor + 1  # transformers stores Gemma's norm factors minus 1
        data = tensor.contiguous().view(torch.uint8)
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(layer.rpartition(".")[2])
    if permutes and heads is not None:
        count = directory.config.get(heads) or directory.config["num_attention_heads"]
        itemsize = 4 if data.dim() == 1 else 1
        rows = data.view(-1, itemsize) if data.dim() == 1 else data
        data = rows[pair_rows(len(rows), count)].reshape(data.shape)
    return data.contiguous()
