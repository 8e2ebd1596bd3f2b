"""Scales and zero points of integer weight formats, with a smaller error than the format's own rounding.

[Note: layer error] The output error of a layer is `tr(D H D^T)`, where `D` is the change of its weight and `H` the sum
of `x x^T` over the inputs of the calibration text. The diagonal of `H` is the importance of each input feature.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from windlass.base.errors import WeightFormatError
from windlass.kernels.coded_formats import SCALE_DTYPE, GroupCodes, IntegerWeightFormat
from windlass.kernels.weight_format import Int8WeightFormat, PackedWeight, WeightFormat, get_weight_format

CLIP_STEPS = 26  # number of candidates for the part of a group's range that is used, from 1 to `_LEAST_CLIP`
_LEAST_CLIP = 0.5
_CACHED_NUMEL = 1 << 16  # weights that are searched together; they stay in the CPU's cache


@dataclass(frozen=True)
class IntegerGrid:
    """Values of the codes of a matrix: `(code - zero) * scale`.

    Attributes:
        form: weight format of the codes.
        low, high: smallest and largest code.
        group: number of consecutive input features with one scale.
        scale: float32 `[rows, groups]`, of values that the format stores exactly.
        zero: code of the value 0, float32 `[rows, groups]`.
    """

    form: WeightFormat
    low: int
    high: int
    group: int
    scale: Tensor
    zero: Tensor

    def spread(self, values: Tensor, columns: int) -> Tensor:
        """Repeat values `[rows, groups]` for each input feature of their group. Returns `[rows, columns]`."""
        return values.repeat_interleave(self.group, 1)[:, :columns]

    def codes(self, weight: Tensor) -> Tensor:
        """Return the codes whose values are nearest to a matrix, as float32."""
        columns = weight.shape[1]
        return self.column_codes(weight, self.spread(self.scale, columns), self.spread(self.zero, columns))

    def column_codes(self, weight: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        """Return the codes whose values are nearest to `weight`, for these scales and zero points."""
        return ((weight / _divisor(scale)).round_() + zero).clamp_(self.low, self.high)

    def values(self, codes: Tensor) -> Tensor:
        """Return the values of codes."""
        columns = codes.shape[1]
        return (codes - self.spread(self.zero, columns)) * self.spread(self.scale, columns)

    def pack(self, codes: Tensor) -> PackedWeight:
        """Return codes as the format's packed tensors."""
        if isinstance(self.form, Int8WeightFormat):
            return {"weight": codes.to(torch.int8), "weight_scale": self.scale.clone()}
        assert isinstance(self.form, IntegerWeightFormat)
        zero = self.zero.to(torch.uint8) if self.form.has_zeros else None
        return self.form.pack_codes(GroupCodes(codes.to(torch.uint8), self.scale.to(SCALE_DTYPE), zero))


def is_integer_format(form: WeightFormat | str) -> bool:
    """Return True if the codes of a format are integers with a scale, so that it has an `IntegerGrid`."""
    return isinstance(
        get_weight_format(form) if isinstance(form, str) else form, (IntegerWeightFormat, Int8WeightFormat)
    )


def plain_grid(form: WeightFormat, weight: Tensor, clip: Tensor | float = 1.0) -> IntegerGrid:
    """Return the format's own grid of a float32 matrix, for a part of each group's range.

    Args:
        clip: part of each range that the grid covers, a number or `[rows, groups]`; 1: the format's own rounding.

    Raises:
        WeightFormatError: the codes of the format are not integers, or a scale is outside of the range of float16.
    """
    return _Ranges(form, weight).grid(clip)


class _Ranges:
    """Smallest and largest weight of each group of a matrix, from which grids of a format follow."""

    def __init__(self, form: WeightFormat, weight: Tensor) -> None:
        self.form, self.columns = form, weight.shape[1]
        if isinstance(form, Int8WeightFormat):
            self.groups = weight.unsqueeze(1)
            self._high = weight.abs().amax(1, keepdim=True)
            return
        if not isinstance(form, IntegerWeightFormat):
            raise WeightFormatError(
                f"format {form.name!r} has no grid of integers; choose int1 to int8 or a group of them"
            )
        self.groups, _ = form.group_weights(weight)  # [rows, groups, features]
        if form.has_zeros:
            self._low, self._high = self.groups.amin(2).clamp(max=0), self.groups.amax(2).clamp(min=0)
        else:
            low, high = self.groups.aminmax(dim=2)
            self._high = torch.maximum(-low, high)

    def grid(self, clip: Tensor | float) -> IntegerGrid:
        """Return the grid that covers the part `clip` of each group's range."""
        form = self.form
        if isinstance(form, Int8WeightFormat):
            scale = self._high / 127 * clip
            return IntegerGrid(form, -127, 127, max(self.columns, 1), scale, torch.zeros_like(scale))
        assert isinstance(form, IntegerWeightFormat)
        top, size = 2**form.bits - 1, self.groups.shape[2]
        if form.has_zeros:
            low, high = self._low * clip, self._high * clip
            scale = ((high - low) / top).to(SCALE_DTYPE).float()
            zero = (-low / _divisor(scale)).round_().clamp_(0, top)
        else:
            scale = (self._high / form.steps * clip).to(SCALE_DTYPE).float()
            zero = torch.full_like(scale, form.zero)
        if not bool(torch.isfinite(scale).all()):
            raise WeightFormatError(f"format {form.name!r} has a scale outside of the range of {SCALE_DTYPE}")
        return IntegerGrid(form, 0, top, size, scale, zero)

    def errors(self, grid: IntegerGrid, importance: Tensor | None, memory: Tensor) -> Tensor:
        """Return the squared error of each group. Work in `memory`, because a search tries many grids.

        Args:
            importance: importance of each feature of a group, `[1, groups, features]`.
            memory: buffer of the size of all groups, which is overwritten.
        """
        scale = grid.scale.unsqueeze(2)
        torch.div(self.groups, _divisor(scale), out=memory)
        memory.round_()
        if isinstance(self.form, IntegerWeightFormat) and self.form.has_zeros:
            zero = grid.zero.unsqueeze(2)
            memory.clamp_(grid.low - zero, grid.high - zero)
        else:
            middle = self.form.zero if isinstance(self.form, IntegerWeightFormat) else 0.0
            memory.clamp_(grid.low - middle, grid.high - middle)
        squares = memory.mul_(scale).sub_(self.groups).square_()
        return (squares if importance is None else squares.mul_(importance)).sum(2)


def clipped_grid(
    form: WeightFormat, weight: Tensor, importance: Tensor | None = None, *, stride: int = 1
) -> IntegerGrid:
    """Return the grid for the part of each group's range that gives the least squared error.

    Values outside of a smaller range are clamped to its ends; values inside are rounded more finely.

    Args:
        weight: float32 `[rows, columns]`.
        importance: importance of each column, e.g. the diagonal of `H`; None: equal for all columns. See [Note: layer
            error].
        stride: step between the candidates that are tried.
    """
    parts = [
        _clipped_part(form, rows, importance, stride)
        for rows in weight.split(max(_CACHED_NUMEL // max(weight.shape[1], 1), 1))
    ]
    scale, zero = torch.cat([one.scale for one in parts]), torch.cat([one.zero for one in parts])
    return replace(parts[0], scale=scale, zero=zero)


def _clipped_part(form: WeightFormat, weight: Tensor, importance: Tensor | None, stride: int) -> IntegerGrid:
    """Return `clipped_grid` of some rows, which stay in the cache during the search."""
    ranges = _Ranges(form, weight)
    memory = torch.empty_like(ranges.groups)
    if importance is not None:
        groups, size = ranges.groups.shape[1:]
        importance = torch.nn.functional.pad(importance, (0, groups * size - len(importance))).view(1, groups, size)
    least = ranges.errors(ranges.grid(1.0), importance, memory)
    clip = torch.ones_like(least)
    for step in range(stride, CLIP_STEPS, stride):
        part = 1 - step * (1 - _LEAST_CLIP) / (CLIP_STEPS - 1)
        errors = ranges.errors(ranges.grid(part), importance, memory)
        better = errors < least
        least, clip = torch.where(better, errors, least), torch.where(better, part, clip)
    return ranges.grid(clip)


def half_quadratic_grid(form: WeightFormat, weight: Tensor, *, steps: int = 20) -> IntegerGrid:
    """Return the grid found by half-quadratic quantization, which needs no data (Badri and Shaji 2023, HQQ).

    It minimizes `|w - value| ** 0.7` in alternating steps: first `e = shrink(w - value)` separates outliers, then the
    zero point is the mean, and the scale the least-squares fit, of the rest `w - e`. Zero points stay integers, since
    formats store them as codes; formats without zero points change only the scale. Each group gets
    the result of the step with its least loss.
    """
    columns = weight.shape[1]
    best = plain_grid(form, weight)
    least = _group_losses(best, weight)
    grid, beta = best, 10.0
    is_coded = isinstance(form, IntegerWeightFormat)
    moves_zero = isinstance(form, IntegerWeightFormat) and form.has_zeros
    for _ in range(steps):
        codes = grid.codes(weight)
        error = weight - grid.values(codes)
        rest = weight - error.sign() * (error.abs() - error.abs().clamp(min=1e-12).pow(_NORM - 1) / beta).clamp(min=0)
        scale, zero = grid.scale, grid.zero
        if moves_zero:
            shifts = codes - rest / _divisor(grid.spread(scale, columns))
            zero = (
                (_group_sums(grid, shifts) / _group_sums(grid, torch.ones_like(shifts))).round_().clamp_(0, grid.high)
            )
        steps_of = codes - grid.spread(zero, columns)
        squares = _group_sums(grid, steps_of * steps_of)
        scale = torch.where(squares > 0, _group_sums(grid, rest * steps_of) / _divisor(squares), scale)
        if is_coded:
            scale = scale.to(SCALE_DTYPE).float()
        scale = torch.where((scale > 0) & torch.isfinite(scale), scale, grid.scale)
        grid = IntegerGrid(form, grid.low, grid.high, grid.group, scale, zero)
        losses = _group_losses(grid, weight)
        better = losses < least
        least = torch.where(better, losses, least)
        scale, zero = torch.where(better, grid.scale, best.scale), torch.where(better, grid.zero, best.zero)
        best = IntegerGrid(form, grid.low, grid.high, grid.group, scale, zero)
        beta *= 1.01
    return best


_NORM = 0.7


def _group_losses(grid: IntegerGrid, weight: Tensor) -> Tensor:
    return _group_sums(grid, (weight - grid.values(grid.codes(weight))).abs().pow(_NORM))


def _group_sums(grid: IntegerGrid, values: Tensor) -> Tensor:
    """Return the sum of each group, `[rows, groups]`."""
    rows, columns = values.shape
    padded = torch.nn.functional.pad(values, (0, grid.scale.shape[1] * grid.group - columns))
    return padded.view(rows, -1, grid.group).sum(2)


def _divisor(values: Tensor) -> Tensor:
    return torch.where(values > 0, values, torch.ones_like(values))
