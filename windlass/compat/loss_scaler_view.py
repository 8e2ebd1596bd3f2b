"""DeepSpeed's growth rule of the dynamic loss scale, and the object at `engine.optimizer.loss_scaler`."""

from __future__ import annotations

from collections.abc import Callable

from windlass.config.precision_section import Fp16
from windlass.engine.training_progress import TrainingProgress
from windlass.optim.loss_scale import DynamicLossScale, LossScale


class DeepSpeedLossScale(DynamicLossScale):
    """Dynamic loss scale that doubles by the rule of DeepSpeed since 0.19.

    The scale doubles after `window + 1` good steps in a row, and after every `window` further ones.
    """

    def update(self, overflow: bool, location: str = "") -> None:
        """Update the scale after a step; see `DynamicLossScale`."""
        if overflow:
            super().update(overflow, location)
            return
        self.good_steps += 1
        if self.consecutive_hysteresis:
            self.hysteresis_left = self.hysteresis
        stable = self.good_steps - 1
        if stable and stable % self.window == 0:
            self.grow()


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
        scale: the engine's loss scale.
        set_scale: replaces it, between two steps.
        progress: the engine's counters.
        section: section `fp16` of the configuration.
    """

    def __init__(
        self, scale: LossScale, set_scale: Callable[[float], None], progress: TrainingProgress, section: Fp16
    ) -> None:
        self._scale, self._set_scale, self._progress = scale, set_scale, progress
        self.dynamic = scale.dynamic
        self.dynamic_loss_scale, self.use_grad_scaling = scale.dynamic, section.enabled
        self.scale_window, self.min_scale = section.loss_scale_window, section.min_loss_scale
        self.min_loss_scale, self.scale_factor = section.min_loss_scale, 2.0

    @property
    def loss_scale(self) -> float:
        """Current scale."""
        return self._scale.scale

    @property
    def cur_scale(self) -> float:
        """Current scale; same as `loss_scale`."""
        return self._scale.scale

    @cur_scale.setter
    def cur_scale(self, scale: float) -> None:
        self._set_scale(scale)

    @property
    def cur_iter(self) -> int:
        """Number of steps so far, including skipped ones."""
        return self._progress.global_steps
