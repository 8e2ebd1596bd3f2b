"""DeepSpeed's growth rule of the dynamic loss scale, and the object at `engine.optimizer.loss_scaler`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from windlass.config.precision_section import Fp16
from windlass.engine.training_progress import TrainingProgress
from windlass.optim.loss_scale import DynamicLossScale, LossScale


class DeepSpeedLossScale(DynamicLossScale):
    """Dynamic loss scale that doubles by the rule of DeepSpeed since 0.19.

    The scale doubles after `window + 1` good steps in a row, and after every `window` further ones.

    Attributes:
        cur_iter: number of updates.
    """

    cur_iter = 0

    def update(self, overflow: bool, location: str = "") -> None:
        """Update the scale after a step; see `DynamicLossScale`."""
        self.cur_iter += 1
        if overflow:
            super().update(overflow, location)
            return
        self.good_steps += 1
        if self.consecutive_hysteresis:
            self.hysteresis_left = self.hysteresis
        stable = self.good_steps - 1
        if stable and stable % self.window == 0:
            self.grow()

    def state_dict(self) -> dict[str, float]:
        """Return the state to save, as plain numbers."""
        return {**super().state_dict(), "cur_iter": self.cur_iter}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore a `state_dict()`, also that of a `DynamicLossScale`, which counts no updates."""
        super().load_state_dict(state)
        if "good_steps" in state:
            self.cur_iter = int(state.get("cur_iter", self.good_steps))


def scale_of(scale: LossScale, *, zero: bool) -> LossScale:
    """Return the loss scale that DeepSpeed would use in place of `scale`.

    Args:
        scale: loss scale made from the configuration.
        zero: True at stages 1 to 3. At stage 0, DeepSpeed lowers the scale at every overflow and continues at the
            minimum.
    """
    if not isinstance(scale, DynamicLossScale):
        return scale
    return DeepSpeedLossScale(
        scale=scale.scale,
        window=scale.window,
        hysteresis=scale.hysteresis if zero else 1,
        consecutive_hysteresis=scale.consecutive_hysteresis,
        min_scale=scale.min_scale,
        on_min_scale=scale.on_min_scale if zero else "continue",
    )


class LossScalerView:
    """View of the engine's loss scale with DeepSpeed's attribute names. `cur_scale` can be set.

    Args:
        scale: the loss scale of the configuration.
        optimizer: optimizer of the engine. Its attribute `loss_scale` is the current scale.
        progress: the engine's counters.
        section: section `fp16` of the configuration.
        scale_loss: multiplies a loss by the scale, and prepares the engine for its backward.
        update_scale: updates the scale at the end of a step; its argument is True after an overflow.
    """

    def __init__(
        self,
        scale: LossScale,
        optimizer: Any,
        progress: TrainingProgress,
        section: Fp16,
        scale_loss: Callable[[Any], Any],
        update_scale: Callable[[bool], None],
    ) -> None:
        self._scale, self._optimizer, self._progress = scale, optimizer, progress
        self.scale_loss, self.update_scale = scale_loss, update_scale
        self.dynamic = scale.dynamic
        self.dynamic_loss_scale, self.use_grad_scaling = scale.dynamic, section.enabled
        self.scale_window, self.min_scale = section.loss_scale_window, section.min_loss_scale
        self.min_loss_scale, self.scale_factor = section.min_loss_scale, 2.0

    @property
    def loss_scale(self) -> float:
        """Current scale."""
        return float(self._optimizer.loss_scale)

    @property
    def cur_scale(self) -> float:
        """Current scale; same as `loss_scale`."""
        return self.loss_scale

    @cur_scale.setter
    def cur_scale(self, scale: float) -> None:
        self._optimizer.loss_scale = scale

    @property
    def cur_iter(self) -> int:
        """Number of steps so far, including skipped ones."""
        return self._progress.global_steps

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        """Backpropagate a loss times the scale."""
        self.scale_loss(loss).backward(retain_graph=retain_graph)


class DynamicLossScalerView(LossScalerView):
    """View of a dynamic loss scale."""

    _scale: DeepSpeedLossScale

    @property
    def cur_iter(self) -> int:
        """Number of updates of the scale."""
        return self._scale.cur_iter

    @property
    def last_overflow_iter(self) -> int:
        """`cur_iter` before the last overflow; -1: no overflow so far."""
        return self._scale.cur_iter - 1 - self._scale.good_steps

    @property
    def cur_hysteresis(self) -> int:
        """Number of overflows until the scale is halved."""
        return self._scale.hysteresis_left

    @property
    def delayed_shift(self) -> int:
        """Attribute `hysteresis` of the loss scale."""
        return self._scale.hysteresis

    @property
    def consecutive_hysteresis(self) -> bool:
        """Attribute `consecutive_hysteresis` of the loss scale."""
        return self._scale.consecutive_hysteresis

    @property
    def raise_error_at_min_scale(self) -> bool:
        """True if an overflow at the minimum scale is an error."""
        return self._scale.on_min_scale == "raise"
