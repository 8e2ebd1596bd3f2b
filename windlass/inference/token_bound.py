"""Lower bound of the number of tokens of a text, from the number of bytes of the tokenizer's longest token."""

from __future__ import annotations

import json
from typing import Any

_CHARACTER_BYTES = 4  # most bytes of a UTF-8 character; an unknown character is one token
_SPACE_REMOVERS = frozenset({"Strip", "Whitespace", "WhitespaceSplit"})
_KEEP_BYTES = frozenset({"ByteLevel", "Digits", "Metaspace", "Prepend"})
# Most bytes that a normalizer replaces by one byte, over all of Unicode: `Lowercase` turns the Kelvin
# sign (3 bytes) into "k".
_MOST_SHRUNK = {"NFC": 4, "NFD": 3, "NFKC": 4, "NFKD": 4, "Lowercase": 3}
_Part = dict[str, Any]


class TokenBound:
    """Lower bound of the number of tokens of a text, much faster than tokenization.

    Args:
        tokenizer: tokenizer of transformers, or None. The bound is 0 if there is no fast BPE tokenizer, or if one token
            may stand for a text of any length, e.g. for an unknown word.
    """

    def __init__(self, tokenizer: Any) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._longest: int | None = None  # maximum bytes of text in one token; None: no limit
        self._counts_spaces = True
        if backend is not None:
            self._measure(backend)

    def __call__(self, text: str) -> int:
        """Return a lower bound of the number of tokens of the text."""
        if self._longest is None or len(text) <= self._longest:
            return 0
        # errors="replace": the tokenizer, not this bound, refuses lone surrogates
        kept = text if self._counts_spaces else "".join(text.split())
        return -(-len(kept.encode(errors="replace")) // self._longest)

    def _measure(self, backend: Any) -> None:
        normalizers, splitters = _parts(backend.normalizer), _parts(backend.pre_tokenizer)
        added = backend.get_added_tokens_decoder().values()
        names = [part["type"] for part in splitters]
        vocabulary = backend.get_vocab(with_added_tokens=False)
        if not _covers_all(backend.model, vocabulary, is_byte_level="ByteLevel" in names):
            return
        factor = 1
        for part in [*normalizers, *splitters]:
            if part["type"] in _SPACE_REMOVERS:
                self._counts_spaces = False
            elif not _keeps(part):
                return
            factor *= _MOST_SHRUNK.get(part["type"], 1)
        if any(token.lstrip or token.rstrip for token in added):
            self._counts_spaces = False  # such a token takes in any number of spaces next to it
        size = len if "ByteLevel" in names else _byte_size
        longest = max(map(size, vocabulary), default=0)
        longest = max(longest, _CHARACTER_BYTES, *(_byte_size(token.content) for token in added))
        self._longest = factor * longest


def _parts(component: Any) -> list[_Part]:
    """Return the parts of a normalizer or pre-tokenizer, in no particular order, each as a dict of `tokenizer.json`."""
    if component is None:
        return []
    stack, found = [json.loads(component.__getstate__())], []
    while stack:
        part = stack.pop()
        inner = part.get("normalizers") or part.get("pretokenizers") or []
        if part["type"] == "Sequence":
            stack += inner
        else:
            found.append(part)
    return found


def _keeps(part: _Part) -> bool:
    """Return True if a part shortens a text at most by its factor in `_MOST_SHRUNK` (1 if the part is not listed)."""
    kind: str = part["type"]
    if kind == "Replace":
        old = part["pattern"].get("String")  # a regular expression may match any number of characters
        return old is not None and _byte_size(part["content"]) >= _byte_size(old)
    if kind in ("Split", "Punctuation"):
        return bool(part["behavior"] != "Removed")
    return kind in _KEEP_BYTES or kind in _MOST_SHRUNK


def _covers_all(model: Any, vocabulary: dict[str, int], *, is_byte_level: bool) -> bool:
    """Return True if a model is BPE without affixes, drops no character, and does not fuse unknown ones."""
    from tokenizers import models, pre_tokenizers

    if not isinstance(model, models.BPE) or model.continuing_subword_prefix or model.end_of_word_suffix:
        return False
    if is_byte_level and vocabulary.keys() >= set(pre_tokenizers.ByteLevel.alphabet()):
        return True
    if model.byte_fallback and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256)):
        return True
    unknown: str | None = model.unk_token
    return not model.fuse_unk and unknown in vocabulary


def _byte_size(text: str) -> int:
    return len(text.encode())
