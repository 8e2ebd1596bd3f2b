"""Codec of low rank: the product of two thin matrices in place of a tensor."""

from __future__ import annotations

import math

import torch

from windlass.comm.lossy_codecs import SOURCES, require_finite

_PASSES = 2  # passes of subspace iteration


class LowRankCodec:
    """Codec that sends two factors P and Q. P Q^T approximates the tensor of `n` elements, padded by zeros and viewed
    as a matrix with `ceil(sqrt(n))` columns.

    P is an orthonormal basis of the range of the matrix times a constant random matrix, after two passes of subspace
    iteration (Halko et al., arXiv:0909.4061, algorithm 4.4). Q is the transposed matrix times P. The decoded tensor is
    a projection, so that the norm of the error never exceeds that of the tensor. Size: `4 rank` bytes for each row and
    column, or `4 n` bytes if that is less; the tensor is then sent in float32.

    A codec has neither the shape of a parameter nor the basis of the previous message. `PowerSGD` uses both.
    """

    exact = False
    needs_error_feedback = True

    def __init__(self, name: str = "lowrank", rank: int = 4) -> None:
        self.name, self._rank = name, rank

    def accepts(self, dtype: torch.dtype) -> bool:
        return dtype in SOURCES

    def encoded_size(self, numel: int, dtype: torch.dtype) -> int:
        return 4 * min(numel, self._rank * sum(_shape(numel)))

    def encode(self, tensor: torch.Tensor, encoded: torch.Tensor) -> None:
        values, message = tensor.float(), encoded.view(torch.float32)
        require_finite(self.name, values, values.abs().sum()[None])
        rows, columns = _shape(values.numel())
        if message.numel() == values.numel():
            message.copy_(values)
            return
        # Scale by a power of two, which is exact: the iteration multiplies by the squared matrix, which would overflow
        # for elements above 1e19 and underflow for elements below 1e-19.
        scale = torch.ldexp(torch.ones((), device=values.device), torch.frexp(values.abs().amax()).exponent - 1)
        values = values / scale
        matrix = torch.nn.functional.pad(values, (0, rows * columns - values.numel())).view(rows, columns)
        draw = torch.Generator().manual_seed(columns)
        basis = matrix @ torch.randn(columns, self._rank, generator=draw).to(values.device)
        for _ in range(_PASSES):
            basis = matrix @ (matrix.t() @ torch.linalg.qr(basis)[0])
        basis = torch.linalg.qr(basis)[0]
        message[: rows * self._rank].view(rows, self._rank).copy_(basis)
        message[rows * self._rank :].view(columns, self._rank).copy_((matrix.t() @ basis).mul_(scale))

    def decode(self, encoded: torch.Tensor, out: torch.Tensor, dtype: torch.dtype) -> None:
        message = encoded.view(torch.float32)
        rows, columns = _shape(out.numel())
        if message.numel() == out.numel():
            out.copy_(message)
            return
        basis = message[: rows * self._rank].view(rows, self._rank)
        factors = message[rows * self._rank :].view(columns, self._rank)
        out.copy_((basis @ factors.t()).view(-1)[: out.numel()])


def _shape(numel: int) -> tuple[int, int]:
    """Return rows and columns of the matrix of a tensor."""
    columns = math.isqrt(max(0, numel - 1)) + 1
    return -(-numel // columns), columns
