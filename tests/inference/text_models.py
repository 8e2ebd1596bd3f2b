"""Tiny tokenizers, built from a short text, and models for them."""

from __future__ import annotations

from typing import Any

from tests.causal_models import build

TEXT = [
    "the quick brown fox jumps over the lazy dog and stops here. ",
    'a list of numbers: 1, 2, 3, 44, 55; {"name": "value", "count": 12, "flag": true} ',
    "größer, naïve, 東京タワー, привет, \N{GRINNING FACE}\N{THUMBS UP SIGN} ",
] * 4
END = "<|end|>"


def byte_level_tokenizer(size: int = 400) -> Any:
    """Return a byte-level BPE tokenizer as in GPT-2 and Llama 3: a character may be several tokens."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    made = ByteLevelBPETokenizer()
    made.train_from_iterator(TEXT, vocab_size=size, min_frequency=2, special_tokens=["<pad>", "<bos>", END])
    return PreTrainedTokenizerFast(
        tokenizer_object=made._tokenizer, eos_token=END, bos_token="<bos>", pad_token="<pad>"
    )


def sentencepiece_tokenizer() -> Any:
    """Return a tokenizer as in Llama 2 and Gemma: pieces with a mark for spaces, and single bytes for other text."""
    from tokenizers import Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    words = [word for text in TEXT[:2] for word in text.split()]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += sorted({"▁", *(c for word in words for c in word), *("▁" + word[0] for word in words)})
    merges = sorted({("▁", word[0]) for word in words})
    made = Tokenizer(
        models.BPE({p: i for i, p in enumerate(pieces)}, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>", bos_token="<s>", unk_token="<unk>")


def text_model(tokenizer: Any, *, extra: int = 7, **changes: Any) -> Any:
    """Return a random model whose vocabulary is larger than the tokenizer's."""
    size = {"vocab_size": len(tokenizer) + extra, "eos_token_id": tokenizer.eos_token_id}
    return build("llama", max_position_embeddings=256, **size, **changes).eval()
