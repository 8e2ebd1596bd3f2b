"""Log-probabilities in the two forms of OpenAI's interface."""

from __future__ import annotations

import math
import re
from functools import cache
from typing import Any

from windlass.inference.outputs import TokenLogprobs

# JSON has no infinity; a masked token gets this log-probability, as in vLLM.
_LOWEST = -9999.0
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class LogprobFormat:
    """Formatting of log-probabilities with one tokenizer.

    Any thread may use it, while another thread encodes: see [Note: tokenizer threads].

    Args:
        as_ids: write `token_id:N` instead of the text of a token, because several tokens may have the same text.
    """

    def __init__(self, tokenizer: Any, as_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def chat(self, tokens: list[int], logprobs: list[TokenLogprobs], top: int) -> dict[str, Any]:
        """Return the `logprobs` of a chat choice."""
        content = [
            {
                **self._entry(token, row[token].logprob, row),
                "top_logprobs": [self._entry(other, row[other].logprob, row) for other in _likeliest(row, top)],
            }
            for token, row in zip(tokens, logprobs, strict=True)
        ]
        return {"content": content, "refusal": None}

    def completion(
        self, tokens: list[int], logprobs: list[TokenLogprobs | None], top: int, text_offsets: list[int]
    ) -> dict[str, Any]:
        """Return the `logprobs` of a completion choice.

        Args:
            logprobs: one entry for each token; None for the first token of a prompt.
            text_offsets: position of each token in the text of the choice.
        """
        result: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": text_offsets,
        }
        for token, row in zip(tokens, logprobs, strict=True):
            result["tokens"].append(self.token_text(token, row))
            if row is None:
                result["token_logprobs"].append(None)
                result["top_logprobs"].append(None)
                continue
            result["token_logprobs"].append(_finite(row[token].logprob))
            shown = dict.fromkeys([*_likeliest(row, top), token])
            entries: dict[str, float] = {}
            for one in shown:  # tokens that are parts of characters may share a text: the likeliest is kept
                entries.setdefault(self.token_text(one, row), _finite(row[one].logprob))
            result["top_logprobs"].append(entries)
        return result

    def token_text(self, token: int, row: TokenLogprobs | None) -> str:
        """Return the text of a token; `token_id:N` with `as_ids` or without a tokenizer."""
        if self._as_ids or self._tokenizer is None:
            return f"token_id:{token}"
        known = row[token].decoded_token if row is not None and token in row else None
        return known if known is not None else str(self._tokenizer.decode([token]))

    def _entry(self, token: int, logprob: float, row: TokenLogprobs) -> dict[str, Any]:
        text = self.token_text(token, row)
        return {"token": text, "logprob": _finite(logprob), "bytes": list(self._bytes(token, text))}

    def _bytes(self, token: int, text: str) -> bytes:
        """Return the bytes of a token. They are not valid UTF-8 if the token is a part of a character."""
        if "�" in text and self._tokenizer is not None:
            piece = self._tokenizer.convert_ids_to_tokens(token)
            found = _BYTE_TOKEN.fullmatch(piece or "")
            if found:
                return bytes([int(found[1], 16)])
            alphabet = _byte_of_character()
            if piece and all(character in alphabet for character in piece):
                return bytes(alphabet[character] for character in piece)
        return text.encode("utf-8", "replace")


@cache
def _byte_of_character() -> dict[str, int]:
    """Return the byte of each character in the alphabet of byte-level BPE (Radford et al. 2019, GPT-2)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


def _likeliest(row: TokenLogprobs, count: int) -> list[int]:
    return sorted(row, key=lambda token: -row[token].logprob)[:count]


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _LOWEST
