"""Conversion of tensors of any dtype and strides to bytes.

Backends support different dtypes, but all of them move bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from windlass.base.errors import CommunicationError

FinishCallback = Callable[[], None]


def require_dense(tensor: torch.Tensor) -> None:
    """Raise CommunicationError for a sparse or quantized tensor, and for an object that is not a tensor."""
    if not isinstance(tensor, torch.Tensor):
        raise CommunicationError(f"a collective got a {type(tensor).__name__}: {tensor!r:.80}; pass a tensor")
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise CommunicationError(
            f"a tensor of layout {tensor.layout}{', quantised,' if tensor.is_quantized else ''} cannot be sent; "
            "pass tensor.to_dense(), or tensor.dequantize() of a quantised one"
        )


def flatten(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements as `[numel]`, detached: the tensor's memory if `is_flat_view`, else a copy."""
    require_dense(tensor)
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    # A flat tensor of one element may have a stride other than 1, and torch then refuses a view of its bytes.
    return flat.as_strided((flat.numel(),), (1,))


def is_flat_view(tensor: torch.Tensor) -> bool:
    """Return True if `flatten` returns the tensor's own memory."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements as uint8 `[bytes]`: the tensor's memory if `is_flat_view`, else a copy."""
    one = flatten(tensor)
    return (torch.view_as_real(one).reshape(-1) if one.is_complex() else one).view(torch.uint8)


def describe_tensor(tensor: torch.Tensor) -> str:
    """Return the shape and dtype as text for a message."""
    return f"{list(tensor.shape)} {tensor.dtype}"


def nbytes_of(tensor: torch.Tensor) -> int:
    """Return the size of the tensor's elements in bytes."""
    return tensor.numel() * tensor.element_size()


def receive_buffer(tensor: torch.Tensor) -> tuple[torch.Tensor, FinishCallback | None]:
    """Return a byte buffer to receive into, and a callback that copies it to `tensor`; None if they share memory."""
    require_dense(tensor)
    if is_flat_view(tensor):
        return as_bytes(tensor), None
    landed = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return as_bytes(landed), lambda: copy_elements(landed, tensor)


def copy_elements(value: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copy the elements of `value` to `tensor`, in order."""
    tensor.detach().copy_(value.reshape(tensor.shape))


def combine_callbacks(finishes: Sequence[FinishCallback | None]) -> FinishCallback | None:
    """Return a callback that runs all of `finishes` in order; None if there are none."""
    each = [finish for finish in finishes if finish is not None]
    if not each:
        return None

    def finish() -> None:
        for one in each:
            one()

    return finish


def pack_bytes(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate the bytes of several tensors."""
    return torch.cat([as_bytes(tensor) for tensor in tensors]) if len(tensors) != 1 else as_bytes(tensors[0])


def unpack_bytes(packed: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors whose bytes `packed` holds, with the shapes and dtypes of `like`."""
    tensors, start = [], 0
    for tensor in like:
        piece = packed[start : start + nbytes_of(tensor)]
        start += nbytes_of(tensor)
        real = tensor.dtype.to_real() if tensor.is_complex() else tensor.dtype
        if piece.storage_offset() % real.itemsize:  # a view needs its dtype's alignment
            piece = piece.clone()
        elements = piece.view(real)
        if tensor.is_complex():
            elements = torch.view_as_complex(elements.reshape(-1, 2))
        tensors.append(elements.reshape(tensor.shape))
    return tensors
