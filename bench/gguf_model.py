"""The benchmark's random Llama as files of llama.cpp."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import typer

_NAMES = {
    "embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
}


def require_programs(folder: Path, *names: str) -> None:
    """Check that the folder has these programs of llama.cpp, before anything is measured.

    Raises:
        typer.BadParameter: a program is missing.
    """
    missing = [name for name in names if not os.access(folder / name, os.X_OK)]
    if missing:
        raise typer.BadParameter(
            f"{folder} lacks {', '.join(missing)}; build llama.cpp and give the folder of its programs, build/bin",
            param_hint="--llama-bin",
        )


def write_gguf(folder: Path, config: Any, weights: dict[str, Any]) -> Path:
    """Write a float32 GGUF of a Llama with tied embeddings, and a vocabulary of bytes and words.

    Args:
        config: configuration of transformers.
        weights: float32 arrays of the checkpoint, by name.

    Raises:
        ImportError: the package `gguf` is missing.
    """
    import gguf

    path = folder / "f32.gguf"
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    words = [b"<unk>", b"<s>", b"</s>", *(f"<0x{byte:02X}>".encode() for byte in range(256))]
    words += [f"\u2581w{number}".encode() for number in range(len(words), config.vocab_size)]
    out = gguf.GGUFWriter(str(path), "llama")
    out.add_context_length(config.max_position_embeddings)
    out.add_embedding_length(config.hidden_size)
    out.add_block_count(config.num_hidden_layers)
    out.add_feed_forward_length(config.intermediate_size)
    out.add_head_count(heads)
    out.add_head_count_kv(kv_heads)
    out.add_layer_norm_rms_eps(config.rms_norm_eps)
    out.add_rope_freq_base(10_000.0)
    out.add_rope_dimension_count(config.hidden_size // heads)
    out.add_vocab_size(config.vocab_size)
    out.add_tokenizer_model("llama")
    out.add_token_list(words)
    out.add_token_scores([-float(number) for number in range(len(words))])
    out.add_token_types([2, 3, 3] + [6] * 256 + [1] * (len(words) - 259))
    out.add_bos_token_id(1)
    out.add_eos_token_id(2)
    out.add_add_bos_token(False)
    for key, array in weights.items():
        if key == "lm_head.weight":
            continue
        name = next(new for old, new in _NAMES.items() if old in key)
        prefix = f"blk.{key.split('.')[2]}." if ".layers." in key else ""
        if name in ("attn_q", "attn_k"):  # llama.cpp expects the halves of a rotary pair side by side
            count = heads if name == "attn_q" else kv_heads
            halves = array.reshape(count, 2, array.shape[0] // count // 2, -1)
            array = halves.swapaxes(1, 2).reshape(array.shape).copy()
        out.add_tensor(f"{prefix}{name}.weight", array)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return path


def quantize(path: Path, kind: str, tools: Path) -> Path:
    """Convert the file to another format of llama.cpp, e.g. `q8_0`, by llama.cpp's tool, and return the new file."""
    if kind == "f32":
        return path
    target = path.with_name(f"{kind}.gguf")
    command = [str(tools / "llama-quantize"), str(path), str(target), kind.upper()]
    subprocess.run(command, check=True, capture_output=True)
    return target
