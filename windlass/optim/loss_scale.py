"""Static and dynamic loss scales, which keep fp16 gradients from underflow."""

from __future__ import annotations

from typing import Literal, Protocol

from windlass.base.errors import LossError, LossScalingError
from windlass.base.log import logger

_MAX_SCALE = 2.0**126  # at 2**127 even a loss of 2 would overflow fp32 when scaled


class Fp16Settings(Protocol):
    """Keys of the configuration section `fp16` that are read here."""

    @property
    def loss_scale(self) -> float: ...
    @property
    def initial_scale_power(self) -> int: ...
    @property
    def loss_scale_window(self) -> int: ...
    @property
    def hysteresis(self) -> int: ...
    @property
    def consecutive_hysteresis(self) -> bool: ...
    @property
    def min_loss_scale(self) -> float: ...


class StaticLossScale:
    """Constant loss scale. An overflow only skips its step. 1.0 means no scaling (fp32, bf16)."""

    dynamic = False

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = float(scale)

    def set_scale(self, scale: float) -> None:
        """Replace the scale. Raises LossScalingError unless it is above 0 and at most 2**126."""
        self.scale = _checked_scale(scale)

    def update(self, overflow: bool, location: str = "") -> None:
        """Record the end of a step. On overflow, log a warning with `location`, the place of the first non-finite
        gradient.
        """
        if overflow:
            logger.warning(
                f"gradients overflowed at the static loss scale {self.scale:g}: step "
                f"skipped{_format_location(location)}"
            )

    def state_dict(self) -> dict[str, float]:
        """Return the scale as a plain number."""
        return {"scale": self.scale}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Ignore the saved state: the configured scale applies."""


class DynamicLossScale:
    """Dynamic loss scale. It halves on overflow, and doubles, up to 2**126, after `window` good steps in a row since
    the last overflow or doubling.

    `hysteresis - 1` overflows are tolerated before the scale is halved: their steps are skipped and the scale stays.
    This allowance is restored when the scale doubles, or after every good step with `consecutive_hysteresis`.

    Source: Micikevicius et al., "Mixed Precision Training", arXiv:1710.03740, section 3.2; the options are those of
    DeepSpeed's section `fp16`.

    Args:
        scale: initial scale.
        window: number of good steps before the scale doubles.
        min_scale: lower bound of the scale.
        on_min_scale: behaviour on an overflow at `min_scale`: `raise` a LossError, or `continue` to skip steps with a
            warning.
    """

    dynamic = True

    def __init__(
        self,
        scale: float = 2.0**16,
        window: int = 1000,
        hysteresis: int = 2,
        consecutive_hysteresis: bool = False,
        min_scale: float = 1.0,
        on_min_scale: Literal["raise", "continue"] = "raise",
    ) -> None:
        self.scale = max(float(scale), float(min_scale))
        self.window = window
        self.hysteresis = hysteresis
        self.consecutive_hysteresis = consecutive_hysteresis
        self.min_scale = float(min_scale)
        self.on_min_scale = on_min_scale
        self.good_steps = 0
        self.hysteresis_left = hysteresis

    def set_scale(self, scale: float) -> None:
        """Replace the scale, and keep the count of good steps.

        Raises:
            LossScalingError: the scale is 0 or less, below `min_scale`, or above 2**126.
        """
        scale = _checked_scale(scale)
        if scale < self.min_scale:
            raise LossScalingError(
                f"the loss scale cannot be set to {scale:g}, below fp16.min_loss_scale {self.min_scale:g}; set a "
                "larger one, or lower fp16.min_loss_scale"
            )
        self.scale = scale

    def update(self, overflow: bool, location: str = "") -> None:
        """Record the end of a step. `location` is the place of the first non-finite gradient (parameter, rank,
        micro-batch).

        Raises:
            LossError: overflow at the minimum scale, unless `on_min_scale` is `continue`.
        """
        if overflow:
            self.good_steps = 0
            self._handle_overflow(location)
            return
        self.good_steps += 1
        if self.consecutive_hysteresis:
            self.hysteresis_left = self.hysteresis
        if self.good_steps % self.window == 0:
            self.grow()

    def grow(self) -> None:
        """Double the scale, and restore the allowance of tolerated overflows."""
        self.hysteresis_left = self.hysteresis
        self.scale = min(self.scale * 2, _MAX_SCALE)

    def state_dict(self) -> dict[str, float]:
        """Return the state to save, as plain numbers."""
        return {"scale": self.scale, "good_steps": self.good_steps, "hysteresis_left": self.hysteresis_left}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore a `state_dict()`. The options stay as configured. The state of a static scale is ignored."""
        if "good_steps" not in state:
            logger.info(f"the saved loss scale was static; dynamic scaling starts at {self.scale:g}")
            return
        self.scale = max(float(state["scale"]), self.min_scale)
        self.good_steps = int(state["good_steps"])
        self.hysteresis_left = min(int(state["hysteresis_left"]), self.hysteresis)

    def _handle_overflow(self, where: str) -> None:
        if self.hysteresis_left > 1:
            self.hysteresis_left -= 1
            logger.info(
                f"gradients overflowed at loss scale {self.scale:g}: step skipped, scale kept "
                f"({self.hysteresis_left - 1} more tolerated){_format_location(where)}"
            )
            return
        if self.scale <= self.min_scale:
            self._handle_min_scale(where)
            return
        before, self.scale = self.scale, max(self.scale / 2, self.min_scale)
        logger.info(
            f"gradients overflowed at loss scale {before:g}: step skipped, scale now "
            f"{self.scale:g}{_format_location(where)}"
        )

    def _handle_min_scale(self, where: str) -> None:
        message = (
            f"gradients overflowed at loss scale {self.scale:g}, and it cannot fall below fp16.min_loss_scale "
            f"{self.min_scale:g}{_format_location(where)}. "
        )
        if self.on_min_scale == "continue":
            logger.warning(f"{message}Step skipped.")
            return
        raise LossError(
            f"{message}The model itself overflows fp16 or is no longer finite: use bf16 (a model trained in bf16 often "
            "exceeds fp16's 65504), lower the learning rate, or lower fp16.min_loss_scale below 1."
        )


LossScale = StaticLossScale | DynamicLossScale


def make_loss_scale(fp16: Fp16Settings, on_min_scale: Literal["raise", "continue"] = "raise") -> LossScale:
    """Build the loss scale for an enabled section `fp16`: dynamic if `loss_scale` is 0, else static at that value."""
    if fp16.loss_scale:
        return StaticLossScale(fp16.loss_scale)
    return DynamicLossScale(
        scale=2.0**fp16.initial_scale_power,
        window=fp16.loss_scale_window,
        hysteresis=fp16.hysteresis,
        consecutive_hysteresis=fp16.consecutive_hysteresis,
        min_scale=fp16.min_loss_scale,
        on_min_scale=on_min_scale,
    )


def _checked_scale(scale: float) -> float:
    if not 0 < float(scale) <= _MAX_SCALE:
        raise LossScalingError(
            f"the loss scale cannot be set to {float(scale):g}; set a number above 0 and up to 2**126, such as 2**16"
        )
    return float(scale)


def _format_location(where: str) -> str:
    return f"; first non-finite: {where}" if where else ""
