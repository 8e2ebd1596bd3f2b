"""Tests of the lower bound of a text's token count: never above the count, and close to it for long tokens."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from windlass.inference.token_bound import TokenBound

_TEXTS = (
    "aaaa" * 500,
    "a b  " * 300,
    " " * 3000,
    "é\u212a\u0301ẞ" * 200,
    "\u0390\u1ed5\U0001fbf9" * 200,
    "<m>" + " " * 900 + "<m>",
    "aaaa\n" * 300,
    "",
)


def _byte_level(*added: AddedToken, normalizer: Any = None, splitters: tuple[Any, ...] = ()) -> Any:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*alphabet, "aa", "aaaa", "ĠĠ"])}
    made = Tokenizer(models.BPE(vocabulary, merges=[("a", "a"), ("aa", "aa"), ("Ġ", "Ġ")]))
    parts = [*splitters, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    made.pre_tokenizer = pre_tokenizers.Sequence(parts)
    made.normalizer = normalizer
    made.add_tokens(list(added))
    return PreTrainedTokenizerFast(tokenizer_object=made)


def _byte_fallback(*, fuse_unk: bool = True, byte_fallback: bool = True) -> Any:
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "aa", "▁▁"]
    vocabulary = {token: number for number, token in enumerate(names)}
    model = models.BPE(
        vocabulary, [("a", "a"), ("▁", "▁")], unk_token="<unk>", fuse_unk=fuse_unk, byte_fallback=byte_fallback
    )
    made = Tokenizer(model)
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return PreTrainedTokenizerFast(tokenizer_object=made)


@pytest.mark.parametrize(
    ("tokenizer", "most"),
    [
        (_byte_level(), 500),
        (_byte_level(normalizer=normalizers.NFC()), 125),
        (_byte_level(normalizer=normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])), 42),
        (_byte_level(AddedToken("<m>", rstrip=True)), 500),
        (_byte_level(splitters=(pre_tokenizers.WhitespaceSplit(),)), 500),
        (_byte_level(splitters=(pre_tokenizers.Split(" ", "merged_with_previous"),)), 500),
        (_byte_level(splitters=(pre_tokenizers.Split("a", "removed"),)), 0),
        (_byte_level(normalizer=normalizers.Replace(Regex("a+"), "a")), 0),
        (_byte_fallback(), 334),
        (_byte_fallback(byte_fallback=False), 0),
        (_byte_fallback(byte_fallback=False, fuse_unk=False), 334),
        (PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"u": 0}, unk_token="u"))), 0),
        (object(), 0),
        (None, 0),
    ],
)
def test_the_bound_is_at_most_the_number_of_tokens(tokenizer: Any, most: int) -> None:
    bound = TokenBound(tokenizer)
    assert bound(_TEXTS[0]) == most
    if isinstance(tokenizer, PreTrainedTokenizerFast):
        for text in _TEXTS:
            assert bound(text) <= len(tokenizer.encode(text, add_special_tokens=False)), text[:10]
