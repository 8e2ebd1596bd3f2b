"""The dynamic loss scale by DeepSpeed's rule, and `engine.optimizer.loss_scaler`: what scripts ask of it."""

from __future__ import annotations

from windlass.config.precision_section import Fp16
from windlass.engine.training_progress import TrainingProgress
from windlass.optim.loss_scale import DynamicLossScale, LossScale


class DeepSpeedLossScale(DynamicLossScale):
    """Dynamic loss scale that doubles as DeepSpeed's does since 0.19: after `window + 1` good steps in a row, and after
    every `window` more."""

    def update(self, overflow: bool, location: str = "") -> None:
        """See `DynamicLossScale`."""
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
        scale: as the configuration asks for it.
        zero: at stages 1 to 3. At stage 0 DeepSpeed lowers the scale at every overflow, and goes on at the minimum.
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
    """The engine's loss scale, by DeepSpeed's names; it moves by itself.

    Args:
        scale: the engine's.
        progress: its counters.
        section: the configuration's `fp16`.
    """

    def __init__(self, scale: LossScale, progress: TrainingProgress, section: Fp16) -> None:
        self._scale, self._progress = scale, progress
        self.dynamic = scale.dynamic
        self.dynamic_loss_scale, self.use_grad_scaling = scale.dynamic, section.enabled
        self.scale_window, self.min_scale = section.loss_scale_window, section.min_loss_scale
        self.min_loss_scale, self.scale_factor = section.min_loss_scale, 2.0

    @property
    def loss_scale(self) -> float:
        """The scale now."""
        return self._scale.scale

    @property
    def cur_scale(self) -> float:
        """As `loss_scale`."""
        return self._scale.scale

    @property
    def cur_iter(self) -> int:
        """Steps so far, skipped ones too."""
        return self._progress.global_steps
