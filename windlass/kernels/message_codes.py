"""Native computation of scales and codes of compressed messages: float32 tensors on the CPU, codes of 1, 4 or 8 bits.

The results are bit for bit those of the codecs in `windlass.comm.lossy_codecs`, which call these functions where
`can_encode` returns True.
"""

from __future__ import annotations

import importlib
from functools import cache
from types import ModuleType

import torch

from windlass.base.errors import ModelError
from windlass.base.native_memory import native_access_problem
from windlass.kernels.kernel_dispatch import get_active_kernel_path

_KINDS = {"sign": 0, "int8": 1, "int4": 2, "fine_sign": 3}  # same numbers in windlass/kernels/native/codecs.cpp


def can_encode(codec: str, tensor: torch.Tensor) -> bool:
    """Return True if native code encodes and decodes `tensor` with this codec."""
    return (
        codec in _KINDS
        and tensor.dtype == torch.float32
        and tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and get_active_kernel_path().is_native
        and _native_module() is not None
    )


def write_scales(codec: str, values: torch.Tensor, scales: torch.Tensor, errors: torch.Tensor | None = None) -> bool:
    """Write the scale of each block.

    Args:
        values: `[n]`.
        scales: `[blocks]` float32.
        errors: `[n]`, added to `values` in place before the scales are computed.

    Returns:
        False if a scale is not finite.
    """
    _check(values, scales, errors)
    finite: bool = _required_module().write_scales(
        _KINDS[codec], values.numel(), values.data_ptr(), _address(errors), scales.data_ptr(), torch.get_num_threads()
    )
    return finite


def write_codes(
    codec: str,
    values: torch.Tensor,
    scales: torch.Tensor,
    codes: torch.Tensor,
    errors: torch.Tensor | None = None,
    decoded: torch.Tensor | None = None,
) -> None:
    """Write the codes of values, given the scales that `write_scales` wrote.

    Args:
        codes: uint8, receives the codes.
        errors: `[n]`, receives the rounding errors of the codes.
        decoded: `[n]`, receives the decoded values; may be `values`.
    """
    _check(values, scales, codes, errors, decoded)
    _required_module().write_codes(
        _KINDS[codec],
        values.numel(),
        values.data_ptr(),
        scales.data_ptr(),
        codes.data_ptr(),
        _address(errors),
        _address(decoded),
        torch.get_num_threads(),
    )


def decode(codec: str, scales: torch.Tensor, codes: torch.Tensor, out: torch.Tensor, *, adds: bool = False) -> None:
    """Write the decoded values to `out`, or add them to it."""
    _check(scales, codes, out)
    _required_module().decode(
        _KINDS[codec], out.numel(), scales.data_ptr(), codes.data_ptr(), out.data_ptr(), adds, torch.get_num_threads()
    )


def _check(*tensors: torch.Tensor | None) -> None:
    for tensor in tensors:
        if tensor is not None and (problem := native_access_problem(tensor)):
            raise ModelError(f"a tensor {tuple(tensor.shape)} of a compressed message {problem}")


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _required_module() -> ModuleType:
    module = _native_module()
    assert module is not None, "can_encode was not called"
    return module


@cache
def _native_module() -> ModuleType | None:
    try:
        return importlib.import_module("windlass.kernels._codecs")
    except ImportError:  # not logged here: the optimizers' kernels, built together with this module, log why
        return None
