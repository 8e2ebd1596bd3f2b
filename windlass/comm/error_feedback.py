"""Encoding with error feedback in two steps: all tensors of a message are checked before an error changes.

[Note: error feedback] The part of a tensor that a message leaves out is its error. A sender adds the error of its last
message to the next tensor, so that the sum of all messages equals the sum of all tensors, up to the last error. Errors
belong to the caller, which passes them to each call and saves them.
"""

from __future__ import annotations

import torch

from windlass.comm.codec import Codec
from windlass.comm.lossy_codecs import ScaledCodec


def begin_message(codec: Codec, tensor: torch.Tensor, error: torch.Tensor, encoded: torch.Tensor) -> None:
    """Add the error to `tensor` in place, and begin its encoding. The error is not changed yet.

    Args:
        tensor, error: `[n]` float32, contiguous.
        encoded: see `Codec.encode`.

    Raises:
        CodecError: a value is not finite.
    """
    if isinstance(codec, ScaledCodec) and codec.is_native(tensor):
        codec.begin(tensor, error, encoded)
        return
    codec.encode(tensor.add_(error), encoded)


def end_message(
    codec: Codec, tensor: torch.Tensor, error: torch.Tensor, encoded: torch.Tensor, *, decodes: bool = False
) -> None:
    """Complete an encoding that `begin_message` began, and replace the error by the part of the tensor that the
    encoding leaves out.

    Args:
        decodes: replace `tensor` by its decoded values.
    """
    if isinstance(codec, ScaledCodec) and codec.is_native(tensor):
        codec.end(tensor, error, encoded, decodes=decodes)
        return
    values = torch.empty_like(tensor)
    codec.decode(encoded, values, tensor.dtype)
    torch.sub(tensor, values, out=error)
    if decodes:
        tensor.copy_(values)


def add_decoded(codec: Codec, encoded: torch.Tensor, out: torch.Tensor) -> None:
    """Add the decoded values of a float32 tensor to `out` `[n]`."""
    if isinstance(codec, ScaledCodec) and codec.is_native(out):
        codec.add_decoded(encoded, out)
        return
    values = torch.empty_like(out)
    codec.decode(encoded, values, out.dtype)
    out.add_(values)
