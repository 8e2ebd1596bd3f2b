"""GPTQ: rounding column by column, each error compensated by the columns that are still to be rounded."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from windlass.base.errors import ModelError
from windlass.compress.integer_grid import IntegerGrid, clipped_grid
from windlass.kernels.weight_format import WeightFormat

DAMPING = 0.01  # added to the Hessian's diagonal, relative to the diagonal's mean
_BLOCK = 128  # columns whose errors are carried to all later columns by one matrix product


@dataclass(frozen=True)
class ColumnOrder:
    """Order in which the columns of matrices with the same input are rounded, and the factor that compensates errors.

    Attributes:
        diagonal: diagonal of the Hessian.
        order: indices of the columns in the order in which they are rounded.
        factor: Cholesky factor of the inverse Hessian in this order; see `inverse_factor`.
    """

    diagonal: Tensor
    order: Tensor
    factor: Tensor

    @classmethod
    def of(cls, hessian: Tensor, *, activation_order: bool = True, damping: float = DAMPING) -> ColumnOrder:
        """Return the order for a Hessian: the sum of `x x^T` over all inputs, `[columns, columns]`.

        Args:
            activation_order: True: round the columns with the largest inputs first; False: from the first to the last.
            damping: part of the mean of the diagonal that is added to the diagonal.
        """
        diagonal = hessian.diagonal().clamp(min=0)
        order = torch.arange(len(diagonal))
        if activation_order:
            order = torch.argsort(diagonal, descending=True, stable=True)
        return cls(diagonal.to(torch.float32), order, inverse_factor(hessian[order][:, order], damping))


def gptq_codes(
    form: WeightFormat, weight: Tensor, columns: ColumnOrder, stays: Tensor | None = None
) -> tuple[IntegerGrid, Tensor]:
    """Return a grid and the codes of a matrix, by Frantar et al. 2022 (https://arxiv.org/abs/2210.17323).

    The grid is chosen first, with the clipping range that `clipped_grid` finds. So groups consist of neighbouring
    columns in any rounding order, and the file needs no list of each column's group.

    Args:
        weight: float32 `[rows, columns]`.
        columns: order that was computed from the layer's inputs. A column with only zero inputs is rounded to nearest.
        stays: False where a weight is and stays 0, bool `[rows, columns]`; None: no weight does.

    Returns:
        The grid, and float32 codes `[rows, columns]`.
    """
    count, order, factor = weight.shape[1], columns.order, columns.factor
    grid = clipped_grid(form, weight, columns.diagonal)
    # transpose, so that a column is contiguous
    scale = grid.spread(grid.scale, count).t()[order]
    zero = grid.spread(grid.zero, count).t()[order]
    left = weight.t()[order]
    codes = torch.empty_like(left)
    removed = None if stays is None else ~stays.t()[order]
    diagonal = factor.diagonal().tolist()
    for start in range(0, count, _BLOCK):
        stop = min(start + _BLOCK, count)
        block, errors = left[start:stop], left.new_empty(stop - start, len(weight))
        for place in range(stop - start):
            column = start + place
            here = grid.column_codes(block[place], scale[column], zero[column])
            if removed is not None:
                here = torch.where(removed[column], zero[column], here)
            torch.sub(here, zero[column], out=errors[place])
            torch.addcmul(block[place], errors[place], scale[column], value=-1, out=errors[place])
            errors[place] /= diagonal[column]
            block[place + 1 :].addr_(factor[column, column + 1 : stop], errors[place], alpha=-1)
            codes[column] = here
        left[stop:].addmm_(factor[start:stop, stop:].t(), errors, alpha=-1)
    straight = torch.empty_like(weight)
    straight[:, order] = codes.t()
    return grid, straight


def inverse_factor(hessian: Tensor, damping: float = DAMPING) -> Tensor:
    """Return the upper Cholesky factor of the inverse of a sum of `x x^T` with a damped diagonal, float32.

    Raises:
        ModelError: no damping makes the matrix positive definite, because it has values that are not finite.
    """
    wide = hessian.to(torch.float64, copy=True)
    diagonal = wide.diagonal()
    diagonal[diagonal <= 0] = 1.0  # a feature that is always zero: its weights change nothing
    inverse = torch.cholesky_inverse(damped_factor(wide, damping))
    upper: Tensor = torch.linalg.cholesky(inverse, upper=True)
    return upper.to(torch.float32)


def damped_factor(hessian: Tensor, damping: float) -> Tensor:
    """Return the lower Cholesky factor of a sum of `x x^T`, float64, whose diagonal is damped in place: by `damping`
    times its mean, and by ten times more in each further try, until the matrix is positive definite.

    Raises:
        ModelError: no damping makes the matrix positive definite, because it has values that are not finite.
    """
    diagonal = hessian.diagonal()
    mean = max(float(diagonal.mean()), 1e-30)
    for _ in range(6):
        diagonal += damping * mean
        found: tuple[Tensor, Tensor] = torch.linalg.cholesky_ex(hessian)
        if not int(found[1]):
            return found[0]
        damping *= 10
    raise ModelError("the inputs of a layer have values that are not finite; check the model and the calibration text")
