"""`engine.optimizer.loss_scaler`: what scripts ask of the loss scale."""

from __future__ import annotations

from windlass.config.precision import Fp16
from windlass.engine.progress import Progress
from windlass.optim.loss_scale import LossScale


class Scaler:
    """The engine's loss scale, by DeepSpeed's names; it moves by itself.

    Args:
        scale: the engine's.
        progress: its counters.
        section: the configuration's `fp16`.
    """

    def __init__(self, scale: LossScale, progress: Progress, section: Fp16) -> None:
        self._scale, self._progress = scale, progress
        self.dynamic = scale.dynamic
        self.scale_window, self.min_scale = section.loss_scale_window, section.min_loss_scale
        self.scale_factor = 2.0

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
