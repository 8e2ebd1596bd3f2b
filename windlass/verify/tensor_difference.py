"""Distance of two tensors in units in the last place and relative to their size."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Difference:
    """Difference between an actual and an expected tensor.

    Attributes:
        allowance_ratio: largest ratio of an element's distance to its allowed distance; infinite if an element differs
            and its allowed distance is 0.
        ulps: largest distance of two elements in units in the last place of the larger one.
        relative: 2-norm of the difference over the 2-norm of the expected tensor; infinite if the latter is 0.
        exceeding_count: number of elements that are further apart than allowed.
        worst_index: flat index of the element with the largest ratio.
        actual: value of the element `worst_index` in the actual tensor.
        expected: value of the element `worst_index` in the expected tensor.
    """

    allowance_ratio: float
    ulps: float
    relative: float
    exceeding_count: int
    worst_index: int = 0
    actual: float = 0.0
    expected: float = 0.0


EQUAL = Difference(0.0, 0.0, 0.0, 0)
MISSING = Difference(math.inf, math.inf, math.inf, 1)  # difference of a tensor without counterpart


def measure_difference(
    actual: torch.Tensor, expected: torch.Tensor, allowed: torch.Tensor | float, dtype: torch.dtype
) -> Difference:
    """Compare two tensors element by element. Equal infinities count as equal, and so do two NaN.

    Args:
        allowed: largest distance that counts as equal: one number, or one for each element.
        dtype: dtype whose units in the last place are counted; for integers the unit is 1.
    """
    have, want = actual.detach().double().cpu().reshape(-1), expected.detach().double().cpu().reshape(-1)
    if have.numel() == 0 or torch.equal(have, want):
        return EQUAL
    same = (have == want) | (have.isnan() & want.isnan())
    gap = torch.where(same, 0.0, (have - want).abs()).nan_to_num(nan=math.inf, posinf=math.inf)
    limit = allowed.double().cpu().reshape(-1) if isinstance(allowed, torch.Tensor) else torch.tensor(float(allowed))
    share = torch.where(gap == 0, 0.0, gap / limit.nan_to_num(nan=0.0, posinf=0.0))
    place = int(share.argmax())
    wanted_norm = float(want.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).norm())
    return Difference(
        allowance_ratio=float(share[place]),
        ulps=float((gap / ulp_size(torch.maximum(have.abs(), want.abs()), dtype)).max()),
        relative=float(gap.norm()) / wanted_norm if wanted_norm else math.inf,
        exceeding_count=int((share > 1).sum()),
        worst_index=place,
        actual=float(have[place]),
        expected=float(want[place]),
    )


def ulp_size(size: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the unit in the last place of numbers of this size (float64, not negative) in `dtype`; 1 for integers."""
    if not dtype.is_floating_point:
        return torch.ones_like(size)
    info = torch.finfo(dtype)
    _, exponent = torch.frexp(size.nan_to_num(nan=1.0, posinf=info.max).clamp(min=info.tiny))
    return torch.ldexp(torch.full_like(size, info.eps), exponent - 1)
