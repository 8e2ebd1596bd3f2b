"""Update rules as plain numbers: what an optimizer decides before its tensors are touched."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import Protocol

# The bits of `flags` and the values of `code`, as windlass/kernels/native/job.hpp has them.
COUPLED, AMSGRAD, MOMENTUM, NESTEROV, FIRST_STEP, EPS_INSIDE = 1, 2, 4, 8, 16, 32


class UpdateRule(Protocol):
    """One update of one kind; equal rules may update many parameters in one call."""

    @property
    def kernel_code(self) -> int:
        """Which kernel."""

    @property
    def signed_states(self) -> tuple[bool, ...]:
        """For each state whether its values may be negative; the length is the number of states."""

    @property
    def coefficients(self) -> tuple[float, ...]:
        """Coefficients in the order of the kernel, each a value of fp32."""

    @property
    def flags(self) -> int:
        """The bits above."""

    @property
    def maximize(self) -> bool:
        """Whether the gradient's sign is turned."""

    @property
    def seed(self) -> int:
        """Of the stochastic rounding of narrow states: what differs from step to step."""


@dataclass(frozen=True, slots=True)
class AdamRule:
    """Adam and AdamW: states exp_avg, exp_avg_sq and, with `amsgrad`, max_exp_avg_sq. `step` counts from 1."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    decoupled: bool
    amsgrad: bool
    maximize: bool
    step: int
    kernel_code = 0

    @property
    def signed_states(self) -> tuple[bool, ...]:
        return (True, False, False) if self.amsgrad else (True, False)

    @property
    def coefficients(self) -> tuple[float, ...]:
        beta1, beta2 = self.betas
        correction1, correction2 = 1 - beta1**self.step, 1 - beta2**self.step
        keep = 1 - self.lr * self.weight_decay if self.decoupled else 1.0
        size = -self.lr / correction1
        return _round_to_fp32(
            keep, self.weight_decay, 1 - beta1, beta2, 1 - beta2, math.sqrt(correction2), self.eps, size
        )

    @property
    def flags(self) -> int:
        coupled = bool(self.weight_decay) and not self.decoupled
        return COUPLED * coupled | AMSGRAD * self.amsgrad

    @property
    def seed(self) -> int:
        return self.step


@dataclass(frozen=True, slots=True)
class LionRule:
    """Lion: state exp_avg."""

    lr: float
    betas: tuple[float, float]
    weight_decay: float
    maximize: bool
    kernel_code = 1
    signed_states = (True,)
    flags = 0
    seed = 0

    @property
    def coefficients(self) -> tuple[float, ...]:
        beta1, beta2 = self.betas
        return _round_to_fp32(1 - self.lr * self.weight_decay, beta1, 1 - beta1, beta2, 1 - beta2, self.lr)


@dataclass(frozen=True, slots=True)
class AdagradRule:
    """Adagrad: state sum. `step` counts from 1."""

    lr: float
    lr_decay: float
    eps: float
    weight_decay: float
    maximize: bool
    step: int
    kernel_code = 2
    signed_states = (False,)

    @property
    def coefficients(self) -> tuple[float, ...]:
        return _round_to_fp32(self.weight_decay, self.eps, self.lr / (1 + (self.step - 1) * self.lr_decay))

    @property
    def flags(self) -> int:
        return COUPLED * bool(self.weight_decay)

    @property
    def seed(self) -> int:
        return self.step


@dataclass(frozen=True, slots=True)
class SGDRule:
    """SGD: state momentum_buffer where there is a momentum; `first` fills it with the gradient."""

    lr: float
    momentum: float
    dampening: float
    weight_decay: float
    nesterov: bool
    maximize: bool
    is_first_step: bool
    kernel_code = 3
    seed = 0

    @property
    def signed_states(self) -> tuple[bool, ...]:
        return (True,) if self.momentum else ()

    @property
    def coefficients(self) -> tuple[float, ...]:
        return _round_to_fp32(self.weight_decay, self.momentum, 1 - self.dampening, -self.lr)

    @property
    def flags(self) -> int:
        coupled, moves = bool(self.weight_decay), bool(self.momentum)
        return COUPLED * coupled | MOMENTUM * moves | NESTEROV * self.nesterov | FIRST_STEP * self.is_first_step


@dataclass(frozen=True, slots=True)
class LambRule:
    """LAMB: states exp_avg and exp_avg_sq; the trust ratio is taken over a whole piece. `step` counts from 1."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    bias_correction: bool
    eps_inside_sqrt: bool
    min_coeff: float
    max_coeff: float
    maximize: bool
    step: int
    kernel_code = 4
    signed_states = (True, False)

    @property
    def coefficients(self) -> tuple[float, ...]:
        beta1, beta2 = self.betas
        size = self.lr
        if self.bias_correction:
            size *= math.sqrt(1 - beta2**self.step) / (1 - beta1**self.step)
        numbers = (beta1, 1 - beta1, beta2, 1 - beta2, self.eps, self.weight_decay, size)
        return _round_to_fp32(*numbers, self.min_coeff, self.max_coeff)

    @property
    def flags(self) -> int:
        return EPS_INSIDE * self.eps_inside_sqrt

    @property
    def seed(self) -> int:
        return self.step


def _round_to_fp32(*numbers: float) -> tuple[float, ...]:
    """Rounded to fp32, so that native code and reference start from the same values."""
    return tuple(ctypes.c_float(number).value for number in numbers)
