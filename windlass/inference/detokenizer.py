"""Incremental decoding of generated tokens, and search for stop texts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

_CONTEXT = 6  # last prompt tokens that are decoded too, because e.g. the leading space of an answer depends on them


class TextDecoder:
    """Decoder from token ids to text, shared by sequences of an engine.

    Args:
        tokenizer: tokenizer of transformers.

    Attributes:
        decode: function from a list of token ids to its text.
    """

    def __init__(self, tokenizer: Any, *, skip_special_tokens: bool = True) -> None:
        self.decode = _decoder_of(tokenizer, skip_special_tokens)
        self._decode_all = _decoder_of(tokenizer, skip_special_tokens=False) if skip_special_tokens else self.decode
        self._texts: dict[int, str] = {}  # by token id; at most one text for each token of the vocabulary

    def decode_one(self, token: int) -> str:
        """Return the text of a token decoded without other tokens."""
        text = self._texts.get(token)
        if text is None:
            text = self._texts[token] = self.decode([token])
        return text

    def skips(self, token: int) -> bool:
        """Return True for a special token that `decode` skips."""
        return not self.decode_one(token) and bool(self._decode_all([token]))


class Detokenizer:
    """Incremental decoding of one sequence.

    A token can be a part of a character, and the text of a token can depend on the token before it. So new text is the
    difference between the decoded tail with and without the newest tokens, and is held back while it ends in an
    incomplete character.

    Args:
        prompt: tokens before the generated ones.

    Attributes:
        text: text of the generated tokens, without the text that is held back.
    """

    def __init__(self, decoder: TextDecoder, prompt: Sequence[int]) -> None:
        self._decoder = decoder
        self._ids = list(prompt[-_CONTEXT:])
        self._prefix, self._read = 0, len(self._ids)
        # text of `_ids[_prefix:_read]`, which precedes the tokens whose text is not returned yet; None: not decoded yet
        self._before: str | None = None
        self.text = ""

    def append(self, token: int) -> str:
        """Add a token; return the new text, empty while a character is incomplete."""
        before = self._text_before()
        self._ids.append(token)
        whole = self._decoder.decode(self._ids[self._prefix :])
        if len(whole) <= len(before) or whole.endswith("\N{REPLACEMENT CHARACTER}"):
            if self._decoder.skips(token):
                # The token is dropped, so that a run of special tokens does not make later calls decode a longer list.
                self._ids.pop()
            return ""
        return self._take(whole[len(before) :])

    def finish(self) -> str:
        """Add and return the text that was held back: the replacement character for an incomplete character."""
        before = self._text_before()
        return self._take(self._decoder.decode(self._ids[self._prefix :])[len(before) :])

    def _text_before(self) -> str:
        if self._before is None:
            tail = self._ids[self._prefix : self._read]
            self._before = self._decoder.decode_one(tail[0]) if len(tail) == 1 else self._decoder.decode(tail)
        return self._before

    def _take(self, new: str) -> str:
        self._prefix, self._read, self._before = self._read, len(self._ids), None
        self.text += new
        return new


def _decoder_of(tokenizer: Any, skip_special_tokens: bool) -> Callable[[list[int]], str]:
    """Return a function from token ids to text."""
    backend = _backend_of(tokenizer)
    if backend is not None:
        return lambda ids: backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def decode(ids: list[int]) -> str:
        if not ids:
            return ""
        text = tokenizer.decode(ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
        return str(text)

    return decode


def _backend_of(tokenizer: Any) -> Any:
    """Return the `tokenizers.Tokenizer` inside a fast tokenizer of transformers; None for other tokenizers, and if the
    class of the tokenizer has its own `decode`.

    transformers' `decode` takes three times as long, which matters because tokens are decoded one at a time.
    """
    transformers = sys.modules.get("transformers")  # None if not imported; then the tokenizer is of another library
    fast = getattr(transformers, "PreTrainedTokenizerFast", None)
    kind = type(tokenizer)
    if fast is None or not isinstance(tokenizer, fast):
        return None
    if kind.decode is not fast.decode or kind._decode is not fast._decode:
        return None
    return tokenizer.backend_tokenizer


def text_offsets(tokenizer: Any, ids: Sequence[int], *, skip_special_tokens: bool = True) -> list[int]:
    """Return, for each token, the number of characters before its text in the text of `ids`."""
    detokenizer = Detokenizer(TextDecoder(tokenizer, skip_special_tokens=skip_special_tokens), [])
    offsets = []
    for token in ids:
        offsets.append(len(detokenizer.text))
        detokenizer.append(token)
    return offsets


def find_stop(text: str, new_length: int, stops: Sequence[str]) -> tuple[int, str] | None:
    """Return the position and the text of the earliest stop text that ends in the last `new_length` characters, or
    None.
    """
    found: tuple[int, str] | None = None
    for stop in stops:
        place = text.find(stop, max(len(text) - new_length - len(stop) + 1, 0))
        if place >= 0 and (found is None or place < found[0]):
            found = place, stop
    return found


def held_back(text: str, stops: Sequence[str], most: int) -> int:
    """Return the length of the longest end of `text` that may become a stop text.

    Args:
        most: upper bound of the result: the characters that were held back before, and the new ones. This bound keeps
            the total cost of all calls proportional to the length of the text.
    """
    for length in range(min(most, len(text)), 0, -1):
        end = text[-length:]
        if any(length < len(stop) and stop.startswith(end) for stop in stops):
            return length
    return 0
