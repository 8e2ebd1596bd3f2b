"""Choice of the function that multiplies by a packed matrix on an accelerator, and the matrix form of its kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from windlass.kernels.device_attention import has_triton

_MOST_WIDE_ROWS = 64  # maximum number of float32 rows, which the kernel multiplies without tensor cores
_LEAST_CAPABILITY = (8, 0)  # the first GPUs that multiply bfloat16


@dataclass(frozen=True)
class CodedMatrix:
    """Packed matrix whose weights are `(code - zero) * scale`.

    Attributes:
        codes: `[out_features, ...]`, rows of codes in the form that `coding` names: int32 words, int8, float8 e4m3
            ("fp8"), or bytes with five base-3 digits each ("trits").
        scale: `[out_features, groups]`.
        bits: number of bits of a code in words.
        group: number of features that share a scale, 32, 64 or 128; None: all features of a row.
        zero: code of the value 0.
        zeros: words `[..., groups]` with the code of the value 0 of each group, packed along the outputs; or None.
    """

    coding: Literal["words", "int8", "fp8", "trits"]
    codes: torch.Tensor
    scale: torch.Tensor
    bits: int = 8
    group: int | None = None
    zero: float = 0.0
    zeros: torch.Tensor | None = None

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        return [self.codes, self.scale, *([] if self.zeros is None else [self.zeros])]


class DeviceProduct:
    """Product of inputs and a packed matrix by the Triton kernel.

    Implements `windlass.kernels.packed_matmul.Product`.
    """

    def __init__(self, matrix: CodedMatrix) -> None:
        self._matrix = matrix

    def __call__(self, input: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        from windlass.kernels import triton_matmul

        with torch.no_grad(), torch.cuda.device_of(input):
            flat = input.reshape(-1, input.shape[-1])
            return triton_matmul.multiply(flat, self._matrix, bias).view(*input.shape[:-1], len(self._matrix.codes))

    def end_backward(self) -> None:
        """Free nothing: the product holds only the packed weight."""


def has_kernel(input: torch.Tensor) -> bool:
    """Return True if the Triton kernel supports an input; otherwise rows are unpacked and multiplied by torch.

    The kernel supports bfloat16 and float16, and up to 64 rows of float32, on CUDA devices that multiply bfloat16.
    Compiled code always unpacks the rows, because the compiler can trace that.
    """
    if torch.compiler.is_compiling() or type(input) not in (torch.Tensor, nn.Parameter) or input.numel() == 0:
        return False
    if input.dtype == torch.float32:
        if input.numel() // input.shape[-1] > _MOST_WIDE_ROWS:
            return False
    elif input.dtype not in (torch.bfloat16, torch.float16):
        return False
    return runs_kernels(input.device)


def runs_kernels(device: torch.device) -> bool:
    """Return True if the Triton kernel runs on a device."""
    return device.type == "cuda" and has_triton() and torch.cuda.get_device_capability(device) >= _LEAST_CAPABILITY


def find_device_product(input: torch.Tensor, matrix: CodedMatrix) -> DeviceProduct | None:
    """Return the kernel's product with `matrix` for an input that `has_kernel` accepts.

    None if the matrix is empty, not contiguous, or on another device than the input.
    """
    apart = any(one.device != input.device or not one.is_contiguous() for one in matrix.tensors)
    return None if apart or len(matrix.codes) == 0 else DeviceProduct(matrix)
