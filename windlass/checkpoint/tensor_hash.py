"""Hash of named tensors that does not depend on their sharding or on the order of hashing.

[Note: fingerprint] Each element adds `bits * key` modulo 2^64, where the key is odd and derived from the tensor's name,
shape and dtype and from the element's position. So ranks hash their own ranges, and the sums are added. A change of a
single element always changes the sum (multiplication by an odd number is invertible); several changes cancel by
accident once in 2^64 cases, and at most once in 2^32 if all are in the sign bits. The hash does not protect
against a deliberate collision.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any

import torch

from windlass.base.errors import CheckpointError
from windlass.kernels import keyed_sum, keyed_sum_on_host

_MASK = (1 << 64) - 1
_ENCODER = json.JSONEncoder(sort_keys=True, default=repr)
_quoted = json.encoder.encode_basestring_ascii
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class TensorHash:
    """Sum of the hashed elements. The sums of several ranks add up, modulo 2^64, to that of all elements."""

    def __init__(self) -> None:
        self._sums: dict[torch.device, torch.Tensor] = {}
        self._on_host = 0

    def add(self, name: str, shape: tuple[int, ...], start: int, flat: torch.Tensor) -> None:
        """Add elements `[start, start + n)` of a row-major tensor, given as `flat` `[n]` on any device.

        Raises:
            CheckpointError: the elements do not have 1, 2, 4 or 8 bytes.
        """
        seed = _seed(name, tuple(shape), str(flat.dtype))
        if flat.element_size() not in _WORDS:
            raise CheckpointError(f"{name!r} has elements of {flat.dtype}, which the fingerprint does not support")
        words = flat.detach().view(_WORDS[flat.element_size()])
        if words.device.type == "cpu":
            self._on_host += keyed_sum_on_host(words, start, seed)
            return
        if words.device not in self._sums:  # the sum stays on the device, so that adding does not synchronize
            self._sums[words.device] = torch.zeros((), dtype=torch.int64, device=words.device)
        self._sums[words.device] += keyed_sum(words, start, seed)

    def add_plain(self, name: str, value: Any) -> None:
        """Add a named JSON value, such as the shape of a tensor or a state that is a number."""
        text = _ENCODER.encode([name, value])
        self._on_host += int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")

    def value(self) -> int:
        """Return the sum so far, in `[0, 2^64)`."""
        return (self._on_host + sum(int(total) for total in self._sums.values())) & _MASK


def fingerprint_digest(sums: Iterable[int]) -> str:
    """Return the digest of all ranks' sums as 16 hexadecimal digits."""
    return f"{_mix_bits(sum(sums) & _MASK):016x}"


def _seed(name: str, shape: tuple[int, ...], dtype: str) -> int:
    text = f"[{_quoted(name)}, {list(shape)}, {_quoted(dtype)}]"  # same as json.dumps, which takes five times as long
    return _as_int64(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little"))


def _mix_bits(value: int) -> int:
    """Apply the finalizer of splitmix64 (Steele et al. 2014)."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        value = ((value ^ (value >> shift)) * factor) & _MASK
    return value ^ (value >> 31)


def _as_int64(value: int) -> int:
    """Return the int64 with the bits of a number in `[0, 2^64)`."""
    return value - (1 << 64) if value >> 63 else value
