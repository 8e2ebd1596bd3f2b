"""Bounds of rounding errors in each phase of a verified step, from the dtypes and the number of summands."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from windlass.base.dtypes import dtype_name

_ROUNDINGS = 8  # times that an operation and the operations after it may round an element
_SUM_FACTOR = 8  # a sum in another order may differ by this many roundings times the root of the number of summands
_UPDATE_ROUNDINGS = 64  # roundings of an optimizer's rule, with its divisions and roots
_WEIGHT_ROUNDINGS = 4  # roundings of the new weight itself


@dataclass(frozen=True)
class Tolerance:
    """Allowed differences of one verification.

    Args:
        compute_dtype: the narrowest dtype in which the model computes.
        accumulate_dtype: dtype in which gradients are accumulated over micro-batches.
        reduce_dtype: dtype of gradients in a reduction.
        max_summands: number of summands of the longest sum in the model or its backward, estimated from shapes.
        micro_batch_count: number of micro-batches of a step on all ranks together.
        has_8bit_states: True if optimizer states are stored in 8 bits, with scales that depend on the shard boundaries.
        master_dtype: dtype of master weights.
    """

    compute_dtype: torch.dtype
    accumulate_dtype: torch.dtype
    reduce_dtype: torch.dtype
    max_summands: int
    micro_batch_count: int
    has_8bit_states: bool = False
    master_dtype: torch.dtype = torch.float32

    @property
    def forward(self) -> float:
        """Tolerance of outputs and of a rank's own gradients, relative to the element plus the rms of its tensor (for
        gradients, of all gradients if that is larger).
        """
        inside = _eps(
            self.compute_dtype if self.compute_dtype == torch.float64 else torch.float32
        )  # sums of 16-bit values are accumulated in float32
        return _ROUNDINGS * _eps(self.compute_dtype) + _SUM_FACTOR * inside * math.sqrt(self.max_summands)

    @property
    def reduce(self) -> float:
        """Tolerance of a reduced gradient, relative to the sum of its parts' magnitudes."""
        return (self.micro_batch_count + 2) * max(_eps(self.accumulate_dtype), _eps(self.reduce_dtype))

    @property
    def norm(self) -> float:
        """Relative tolerance of the norm of all gradients and of the clip coefficient."""
        return 2 * _ROUNDINGS * max(_eps(self.accumulate_dtype), _eps(torch.float32))

    def update(self, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """Return the tolerance of each new weight, from the weight itself and the largest change in its tensor."""
        wide = old.dtype == torch.float64
        eps = max(_eps(old.dtype), 0.0 if wide else _eps(torch.float32))
        kept = max(eps, 0.0 if wide else _eps(self.master_dtype))
        change = (new.double() - old.double()).abs()
        largest = float(change.max()) if change.numel() else 0.0
        return _WEIGHT_ROUNDINGS * kept * new.double().abs() + self._rule_tolerance(eps) * largest

    def _rule_tolerance(self, eps: float) -> float:
        return 2.0**-2 if self.has_8bit_states else _UPDATE_ROUNDINGS * eps

    def descriptions(self) -> dict[str, str]:
        """Return, by phase, a text with its tolerance."""
        narrow = dtype_name(self.compute_dtype)
        reduce = max((self.accumulate_dtype, self.reduce_dtype), key=_eps)
        rule = "2^-2 (8-bit states)" if self.has_8bit_states else f"{_UPDATE_ROUNDINGS} eps"
        return {
            "start": "equal bit by bit",
            "forward": f"weights equal bit by bit; outputs {self.forward:.1e} of an element plus its tensor's rms "
            f"({_ROUNDINGS} eps of {narrow}, {_SUM_FACTOR} eps x sqrt({self.max_summands:,} summands))",
            "gradient": f"{self.forward:.1e} of an element plus the rms of its tensor, or of all gradients if larger",
            "reduce": f"{self.reduce:.1e} of the sum of its parts' magnitudes "
            f"({self.micro_batch_count} + 2 roundings in {dtype_name(reduce)})",
            "clip": f"{self.norm:.1e} of the norm and of the clip coefficient",
            "update": f"{_WEIGHT_ROUNDINGS} eps of a weight, and {rule} of the largest change in its tensor",
        }


def _eps(dtype: torch.dtype) -> float:
    return float(torch.finfo(dtype).eps)
