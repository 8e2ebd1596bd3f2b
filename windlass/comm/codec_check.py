"""Check of a codec before the first step: trial messages show that it can carry quantized weights or gradients."""

from __future__ import annotations

import torch

from windlass.base.errors import ConfigError
from windlass.comm.codec import Codec, get_codec
from windlass.comm.quantized_wire import encode

_NUMEL = 1000  # number of elements, not a multiple of any built-in block size


def check_codec(key: str, name: str, dtype: torch.dtype, device: torch.device, *, keeps_overflow: bool) -> None:
    """Raise an error if the codec of a configuration key cannot carry messages of `dtype`.

    Args:
        keeps_overflow: True if infinity must be decoded as values that are not finite. Gradients need this, because
            every rank has to find an overflow.

    Raises:
        ConfigError: the codec does not accept the dtype, fails on a trial message, decodes finite values as values that
            are not finite, or decodes infinity as finite values.
    """
    codec = get_codec(name)
    if not codec.accepts(dtype):
        raise ConfigError(
            f'{key}: the codec "{name}" does not accept {dtype}, the dtype of these messages; write another one, such '
            'as "int8"'
        )
    values = torch.linspace(-1, 1, _NUMEL, device=device).to(dtype)
    try:
        decoded = _sent(codec, values)
        values[_NUMEL // 2] = float("inf")
        overflowed = _sent(codec, values) if keeps_overflow else None
    except Exception as error:  # code of a user may raise anything
        raise ConfigError(
            f'{key}: the codec "{name}" fails on a message of {_NUMEL} elements of {dtype} '
            f"({type(error).__name__}: {error}); correct the codec, or write another one"
        ) from error
    if not bool(torch.isfinite(decoded).all()):
        raise ConfigError(
            f'{key}: the codec "{name}" decodes finite values of {dtype} as NaN or infinity; correct the codec'
        )
    if overflowed is not None and bool(torch.isfinite(overflowed).all()):
        raise ConfigError(
            f'{key}: the codec "{name}" decodes infinity as finite values, so that no rank would find a gradient that '
            "overflowed; leave such a value as it is in encode, or in encode_unchecked"
        )


def _sent(codec: Codec, values: torch.Tensor) -> torch.Tensor:
    message = torch.empty(codec.encoded_size(values.numel(), values.dtype), dtype=torch.uint8, device=values.device)
    encode(codec, values, message)
    out = torch.full_like(values, float("nan"))
    codec.decode(message, out, values.dtype)
    return out
