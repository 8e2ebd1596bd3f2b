"""GPTQ: rounding column by column, each error compensated by the columns that are still to be rounded."""

from __future__ import annotations

import torch
from torch import Tensor

from windlass.base.errors import ModelError
from windlass.compress.integer_grid import IntegerGrid, clipped_grid
from windlass.kernels.weight_format import WeightFormat

DAMPING = 0.01  # of the mean of the diagonal, added to it
_BLOCK = 128  # columns whose errors reach the later columns in one product


def gptq_codes(
    form: WeightFormat, weight: Tensor, hessian: Tensor, *, activation_order: bool = True, damping: float = DAMPING
) -> tuple[IntegerGrid, Tensor]:
    """Return a grid and the codes of a matrix, by Frantar et al. 2022 (https://arxiv.org/abs/2210.17323).

    The grid is fixed before, with the searched clip, so that columns in any order keep their groups and the file needs
    no list of groups.

    Args:
        weight: float32 `[rows, columns]`.
        hessian: sum of `x x^T` over all inputs, `[columns, columns]`. A column whose inputs are all zero is rounded to
            nearest.
        activation_order: round the columns with the largest inputs first.

    Returns:
        The grid, and float32 codes `[rows, columns]`.
    """
    columns = weight.shape[1]
    diagonal = hessian.diagonal().clamp(min=0)
    grid = clipped_grid(form, weight, diagonal.to(torch.float32))
    order = torch.arange(columns)
    if activation_order:
        order = torch.argsort(diagonal, descending=True, stable=True)
    factor = inverse_factor(hessian[order][:, order], damping)
    scale, zero = grid.spread(grid.scale, columns)[:, order], grid.spread(grid.zero, columns)[:, order]
    open_weight = weight[:, order].clone()
    codes = torch.empty_like(open_weight)
    for start in range(0, columns, _BLOCK):
        stop = min(start + _BLOCK, columns)
        block, errors = open_weight[:, start:stop], weight.new_empty(len(weight), stop - start)
        for place in range(stop - start):
            column = start + place
            here = grid.column_codes(block[:, place], scale[:, column], zero[:, column])
            value = (here - zero[:, column]) * scale[:, column]
            error = (block[:, place] - value) / factor[column, column]
            block[:, place + 1 :] -= error[:, None] * factor[column, column + 1 : stop]
            codes[:, column], errors[:, place] = here, error
        open_weight[:, stop:] -= errors @ factor[start:stop, stop:]
    straight = torch.empty_like(codes)
    straight[:, order] = codes
    return grid, straight


def inverse_factor(hessian: Tensor, damping: float = DAMPING) -> Tensor:
    """Return the upper Cholesky factor of the inverse of a sum of `x x^T` with a damped diagonal, float32.

    Raises:
        ModelError: no damping makes the matrix positive definite, so that it has values that are not finite.
    """
    wide = hessian.to(torch.float64, copy=True)
    diagonal = wide.diagonal()
    diagonal[diagonal <= 0] = 1.0  # a feature that is always zero: its weights change nothing
    mean = float(diagonal.mean())
    for _ in range(6):
        diagonal += damping * mean
        factor, problem = torch.linalg.cholesky_ex(wide)
        if not int(problem):
            inverse = torch.cholesky_inverse(factor)
            upper: Tensor = torch.linalg.cholesky(inverse, upper=True)
            return upper.to(torch.float32)
        damping *= 10
    raise ModelError("the inputs of a layer have values that are not finite; check the model and the calibration text")
