"""Observer of an engine's steps, for tools such as `windlass verify`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from windlass.zero.sharded_model import ShardedModel


class EngineObserver:
    """Observer that an engine calls on every rank, once it is passed to `Engine.add_observer`.

    This base class does nothing. All methods run on the thread that calls the engine.
    """

    def on_sharded(self, model: ShardedModel) -> None:
        """Observe the engine's sharded model: in `add_observer`, and after each `refresh` that shards it again."""

    def before_backward(self, loss: torch.Tensor, weight: float) -> None:
        """Observe the argument of `backward` or `scale`.

        Args:
            weight: Factor of the loss in the gradients of the step, usually 1 / accumulation steps.
        """

    def after_backward(self) -> None:
        """Observe the end of `backward`, after success or failure. `scale` does not call it."""

    def before_schedule(self, batches: Sequence[Any], to_device: Callable[[Any], Any]) -> None:
        """Observe the micro-batches of a pipeline's step before its first stage. Collective calls are allowed.

        Args:
            batches: Micro-batches as the loader returned them.
            to_device: Moves a micro-batch to the device.
        """

    def before_step(self) -> None:
        """Observe the start of a `step` at the accumulation boundary. Collective calls are allowed."""

    def before_update(self, norm: float, clip: float) -> None:
        """Observe the reduced gradients before the update. Collective calls are allowed.

        Args:
            norm: Norm of the full gradient.
            clip: Clip coefficient.
        """

    def after_step(self) -> None:
        """Observe the end of a successful `step` at the boundary. Collective calls are allowed."""

    def after_failed_step(self) -> None:
        """Observe a `step` at the boundary that raises; its gradients are dropped."""

    def after_load(self) -> None:
        """Observe the end of `load_checkpoint`. Collective calls are allowed."""

    def on_weights_edited(self) -> None:
        """Observe that parameters, master weights or states are about to be replaced, e.g. by a load."""

    def on_gradient_dropped(self, name: str, zero: bool) -> None:
        """Observe that the script drops the gradient of the parameter `name`, or, with `zero`, sets it to zero."""
