"""Checks that a tensor's memory can be passed by address to native code."""

from __future__ import annotations

import torch


def native_access_problem(tensor: torch.Tensor) -> str:
    """Return the reason, with the fix, why native code can't use `tensor` as contiguous host memory; "" if it can."""
    if tensor.layout != torch.strided:
        return f"is {tensor.layout}; pass a dense tensor"
    if tensor.device.type != "cpu":
        return f"is on {tensor.device}; move it to the CPU"
    if not tensor.is_contiguous():
        return f"has strides {list(tensor.stride())} and is not contiguous; pass .contiguous()"
    if tensor.is_conj() or tensor.is_neg():
        return "is a lazy conjugate or negative view; pass .resolve_conj().resolve_neg()"
    if tensor.untyped_storage().device.type != "cpu":
        return f"is a {type(tensor).__name__} without memory; pass a real tensor"
    return "" if has_memory(tensor) else freed_storage_problem(tensor)


def has_memory(tensor: torch.Tensor) -> bool:
    """Return True if the storage of a contiguous tensor has all its elements.

    A storage may have been freed or resized.
    """
    return (tensor.storage_offset() + tensor.numel()) * tensor.element_size() <= tensor.untyped_storage().nbytes()


def freed_storage_problem(tensor: torch.Tensor) -> str:
    """Return the message for a tensor without its memory (`has_memory` is False)."""
    storage = tensor.untyped_storage()
    return (
        f"needs {(tensor.storage_offset() + tensor.numel()) * tensor.element_size()} bytes of its storage, which has "
        f"{storage.nbytes()}: the storage was freed or resized; pass a tensor that has its memory"
    )
