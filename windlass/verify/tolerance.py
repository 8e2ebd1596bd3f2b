"""Which differences are rounding, phase by phase: from the dtypes in use and the number of summands."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from windlass.base.dtypes import dtype_name

_ROUNDINGS = 8  # of one element on its way through an operation and what follows it
_IN_A_SUM = 8  # times the square root of the number of summands: sums taken in another order
_OF_UPDATE = 64  # roundings of an optimizer's rule, which has quotients and roots
_OF_WEIGHT = 4  # roundings of the new weight itself


@dataclass(frozen=True)
class Tolerance:
    """What may differ in one verification.

    Args:
        compute: the narrowest dtype in which the model computes.
        accumulate: dtype in which gradients are added up over micro-batches.
        wire: dtype in which they travel.
        longest: summands of the longest sum that the model or its backward takes, as far as shapes tell.
        parts: micro-batches of a step over all ranks.
        master: dtype of master weights.
        coded: optimizer states are kept in 8 bits, whose scales depend on where a tensor is cut.
    """

    compute: torch.dtype
    accumulate: torch.dtype
    wire: torch.dtype
    longest: int
    parts: int
    coded: bool = False
    master: torch.dtype = torch.float32

    @property
    def forward(self) -> float:
        """Of outputs and of a rank's own gradients, relative to an element and the typical size together."""
        inside = _eps(self.compute if self.compute == torch.float64 else torch.float32)  # sums of 16 bits are wider
        return _ROUNDINGS * _eps(self.compute) + _IN_A_SUM * inside * math.sqrt(self.longest)

    @property
    def reduce(self) -> float:
        """Of a reduced gradient, relative to the sum of the magnitudes of its parts."""
        return (self.parts + 2) * max(_eps(self.accumulate), _eps(self.wire))

    @property
    def norm(self) -> float:
        """Of the norm of all gradients, relative."""
        return 2 * _ROUNDINGS * max(_eps(self.accumulate), _eps(torch.float32))

    def update(self, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """Of each new weight: of the weight itself, and of the largest change in its tensor."""
        wide = old.dtype == torch.float64
        eps = max(_eps(old.dtype), 0.0 if wide else _eps(torch.float32))
        kept = max(eps, 0.0 if wide else _eps(self.master))
        change = (new.double() - old.double()).abs()
        largest = float(change.max()) if change.numel() else 0.0
        return _OF_WEIGHT * kept * new.double().abs() + self._rule(eps) * largest

    def _rule(self, eps: float) -> float:
        return 2.0**-2 if self.coded else _OF_UPDATE * eps

    def lines(self) -> dict[str, str]:
        """What is allowed, in words, by phase."""
        narrow = dtype_name(self.compute)
        reduce = max((self.accumulate, self.wire), key=_eps)
        rule = "2^-2 (8-bit states)" if self.coded else f"{_OF_UPDATE} eps"
        return {
            "start": "equal bit by bit",
            "forward": f"weights equal bit by bit; outputs {self.forward:.1e} of an element plus its tensor's rms "
            f"({_ROUNDINGS} eps of {narrow}, {_IN_A_SUM} eps x sqrt({self.longest:,} summands))",
            "gradient": f"{self.forward:.1e} of an element plus its tensor's rms, or that of all gradients if larger",
            "reduce": f"{self.reduce:.1e} of the sum of its parts' magnitudes "
            f"({self.parts} + 2 roundings in {dtype_name(reduce)})",
            "clip": f"{self.norm:.1e} of the norm and of the clip coefficient",
            "update": f"{_OF_WEIGHT} eps of a weight, and {rule} of the largest change in its tensor",
        }


def _eps(dtype: torch.dtype) -> float:
    return float(torch.finfo(dtype).eps)
