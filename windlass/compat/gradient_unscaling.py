"""Method `unscale_and_clip_grads` of DeepSpeed's optimizers, for scripts that call it on gradients of their own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from windlass.compat.not_built import NotBuiltError


def combined_scale(total_norm: float | torch.Tensor, loss_scale: float, max_norm: float) -> float:
    """Return the divisor that removes the loss scale and clips to `max_norm` (0: no clipping).

    Args:
        total_norm: norm of the gradients, including the loss scale.
    """
    if max_norm <= 0:
        return loss_scale
    return max((float(total_norm) / loss_scale + 1e-6) / max_norm, 1.0) * loss_scale


class GradientUnscaling:
    """Callable that unscales and clips the gradients passed to it. The engine's step does not call it.

    Args:
        optimizer: optimizer with the current `loss_scale` and `clip_grad`.
        takes_gradients: False for the optimizer kind whose method takes only the norm, and scales its own gradients.
    """

    def __init__(self, optimizer: Any, takes_gradients: bool) -> None:
        self._optimizer, self._takes_gradients = optimizer, takes_gradients

    def __call__(self, *args: Any, apply_scale: bool = True, **kwargs: Any) -> float:
        """Divide gradients by the combined scale in place, and return the scale.

        Args:
            args: `(grad_groups_flat, total_norm)`, or `(total_norm,)` for the unfused optimizer of stage 0.

        Raises:
            NotBuiltError: `apply_scale` is True for the unfused optimizer.
        """
        names = ("grad_groups_flat", "total_norm") if self._takes_gradients else ("total_norm",)
        given = dict(zip((*names, "apply_scale"), args, strict=False)) | kwargs
        scale = combined_scale(given["total_norm"], self._optimizer.loss_scale, self._optimizer.clip_grad)
        if given.get("apply_scale", apply_scale):
            if not self._takes_gradients:
                raise NotBuiltError(
                    "optimizer.unscale_and_clip_grads: engine.step() unscales and clips gradients itself; pass "
                    "apply_scale=False to get only the factor"
                )
            for gradient in _flatten(given["grad_groups_flat"]):
                gradient.detach().mul_(1.0 / scale)
        return scale


def _flatten(gradients: Iterable[Any]) -> Iterable[torch.Tensor]:
    for one in gradients:
        if isinstance(one, torch.Tensor):
            yield one
        else:
            yield from _flatten(one)
