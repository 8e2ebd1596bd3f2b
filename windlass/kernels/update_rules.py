"""Update rules: the coefficients of one optimizer update, without its tensors."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import Protocol

# Bits of `flags` and values of `kernel_code`, as in windlass/kernels/native/job.hpp.
COUPLED, AMSGRAD, MOMENTUM, NESTEROV, FIRST_STEP, EPS_INSIDE = 1, 2, 4, 8, 16, 32


class UpdateRule(Protocol):
    """Coefficients of one update. One rule may update many parameters in one call."""

    @property
    def kernel_code(self) -> int:
        """Number of the kernel."""

    @property
    def signed_states(self) -> tuple[bool, ...]:
        """For each state, True if its values may be negative. The length is the number of states."""

    @property
    def coefficients(self) -> tuple[float, ...]:
        """Coefficients in the kernel's order, each a value of fp32."""

    @property
    def flags(self) -> int:
        """Bits for the kernel: COUPLED, AMSGRAD, MOMENTUM, NESTEROV, FIRST_STEP and EPS_INSIDE."""

    @property
    def maximize(self) -> bool:
        """True if the sign of the gradient is inverted."""

    @property
    def seed(self) -> int:
        """Seed of the stochastic rounding of narrow states: the step, or 0 for rules without a step (Lion, SGD)."""


@dataclass(frozen=True, slots=True)
class AdamRule:
    """Rule of Adam and AdamW. States: exp_avg, exp_avg_sq and, with `amsgrad`, max_exp_avg_sq. `step` counts from 1."""

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
    """Rule of Lion. State: exp_avg."""

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
    """Rule of Adagrad. State: sum. `step` counts from 1."""

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
    """Rule of SGD. State: momentum_buffer, unless momentum is 0. The first step sets it to the gradient."""

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
    """Rule of LAMB. States: exp_avg and exp_avg_sq. The trust ratio covers the whole tensor. `step` counts from 1."""

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
    """Round numbers to fp32, so that native code and reference use the same values."""
    return tuple(ctypes.c_float(number).value for number in numbers)
