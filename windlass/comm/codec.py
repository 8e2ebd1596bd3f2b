"""Codecs: encoding of a message before it is sent and decoding after it arrives, and their registry.

[Note: codecs] A codec maps a flat tensor to bytes and back. It has no state: error feedback, statistics and random
numbers belong to the caller. The size of an encoding depends only on the number of elements and the dtype, so that a
receiver can allocate its buffer before the message arrives. `windlass.comm.compressed_collectives` sends every message
through a codec.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from windlass.base.errors import CodecError
from windlass.comm.lossy_codecs import FineSignCodec, Fp8Codec, Int4Codec, Int8Codec, SignCodec, TopKCodec
from windlass.comm.low_rank_codec import LowRankCodec
from windlass.config.registered_codecs import add_codec

_BF16_SOURCES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class Codec(Protocol):
    """Stateless encoding of flat tensors as bytes.

    Attributes:
        name: name of the codec in the registry.
        exact: True if `decode` returns the bits that `encode` received, for every dtype that the codec accepts.

    Optional members: `needs_error_feedback` is True if a single message leaves out most of a tensor; ZeRO++ does not
    accept a codec for which it is True. `encode_unchecked` is `encode` without the error for infinity and NaN; decoding
    then gives values that are not finite.
    """

    @property
    def name(self) -> str: ...

    @property
    def exact(self) -> bool: ...

    def accepts(self, dtype: torch.dtype) -> bool:
        """Return True if tensors of `dtype` can be encoded."""
        ...

    def encoded_size(self, numel: int, dtype: torch.dtype) -> int:
        """Return the bytes of the encoding of `numel` elements of `dtype`; 0 elements take 0 bytes."""
        ...

    def encode(self, tensor: torch.Tensor, encoded: torch.Tensor) -> None:
        """Write the encoding of `tensor` to `encoded`.

        Args:
            tensor: `[n]`, contiguous, of a dtype that the codec accepts.
            encoded: `[encoded_size(n, tensor.dtype)]` uint8, contiguous, on the tensor's device, aligned to 16 bytes.

        Raises:
            CodecError: a value is infinity or NaN, and the codec cannot represent it.
        """
        ...

    def decode(self, encoded: torch.Tensor, out: torch.Tensor, dtype: torch.dtype) -> None:
        """Write the decoded values to `out`.

        Args:
            encoded: `[encoded_size(n, dtype)]` uint8, contiguous, aligned to 16 bytes.
            out: `[n]`, contiguous, of `dtype` or of the dtype in which sums are computed (`accumulation_dtype`).
            dtype: dtype of the tensor that was encoded.
        """
        ...


class IdentityCodec:
    """Codec that sends the bytes of a tensor as they are; accepts every dtype."""

    name = "identity"
    exact = True

    def accepts(self, dtype: torch.dtype) -> bool:
        return True

    def encoded_size(self, numel: int, dtype: torch.dtype) -> int:
        return numel * dtype.itemsize

    def encode(self, tensor: torch.Tensor, encoded: torch.Tensor) -> None:
        encoded.copy_(tensor.view(torch.uint8))

    def decode(self, encoded: torch.Tensor, out: torch.Tensor, dtype: torch.dtype) -> None:
        out.copy_(encoded.view(dtype))


class Bf16Codec:
    """Codec that sends floating-point values as bfloat16, rounded to nearest, ties to even, as `Tensor.bfloat16`
    does."""

    name = "bf16"
    exact = False  # only bfloat16 tensors are sent exactly

    def accepts(self, dtype: torch.dtype) -> bool:
        return dtype in _BF16_SOURCES

    def encoded_size(self, numel: int, dtype: torch.dtype) -> int:
        return 2 * numel

    def encode(self, tensor: torch.Tensor, encoded: torch.Tensor) -> None:
        encoded.view(torch.bfloat16).copy_(tensor)

    def decode(self, encoded: torch.Tensor, out: torch.Tensor, dtype: torch.dtype) -> None:
        out.copy_(encoded.view(torch.bfloat16))


_codecs: dict[str, Codec] = {}


def register_codec(codec: Codec) -> None:
    """Make `codec` available under its name, also to keys of the configuration.

    Call this function on every rank before `initialize`. A registered codec whose class name and attributes are equal
    is replaced, e.g. after a notebook has defined the class again.

    Raises:
        CodecError: another codec has the name.
    """
    before = _codecs.get(codec.name, codec)
    if before is not codec and not _are_equal(before, codec):
        raise CodecError(f"a codec named {codec.name!r} is registered already; register this one under another name")
    _codecs[codec.name] = codec
    add_codec(codec.name, needs_error_feedback=bool(getattr(codec, "needs_error_feedback", False)))


def _are_equal(one: Codec, other: Codec) -> bool:
    """Return True if two codecs have the same class name and equal attributes."""
    names = [(type(codec).__module__, type(codec).__qualname__, vars(codec).keys()) for codec in (one, other)]
    return names[0] == names[1] and all(_is_equal(value, vars(other)[name]) for name, value in vars(one).items())


def _is_equal(one: object, other: object) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_is_equal, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_is_equal(value, other[key]) for key, value in one.items())
    # `==` compares tensors and arrays element by element
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and bool((one == other.to(one.device)).all())
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return bool(np.array_equal(one, other))
    return bool(one == other)


def get_codec(name: str) -> Codec:
    """Return the codec of a name.

    Raises:
        CodecError: no codec has the name.
    """
    if name not in _codecs:
        raise CodecError(f"there is no codec named {name!r}; use one of {', '.join(sorted(_codecs))}")
    return _codecs[name]


def list_codecs() -> list[str]:
    """Return the names of all codecs, sorted."""
    return sorted(_codecs)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which tensors of `dtype` are summed: float32 for floating-point types of up to 32 bits, else
    `dtype` itself."""
    return torch.float32 if dtype.is_floating_point and dtype.itemsize <= 4 else dtype


_ALL = (
    IdentityCodec(),
    Bf16Codec(),
    SignCodec(),
    FineSignCodec(),
    Int8Codec(),
    Int4Codec(),
    Fp8Codec(),
    TopKCodec(),
    LowRankCodec(),
)
for _codec in _ALL:
    register_codec(_codec)
