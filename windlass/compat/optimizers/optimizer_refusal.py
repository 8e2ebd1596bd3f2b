"""Arguments that an optimizer's class has and no step here honours."""

from __future__ import annotations

from windlass.base.errors import ConfigError


class OptimizerRefusal(ConfigError, RuntimeError):
    """An optimizer was asked for a variant that it does not compute; a RuntimeError, as in DeepSpeed."""


def check_adam(owner: str, amsgrad: bool, bias_correction: bool) -> None:
    """Raise OptimizerRefusal for the variants of Adam that are not there."""
    if amsgrad:
        raise OptimizerRefusal(
            f"{owner}: amsgrad is true, a variant it does not compute; use torch.optim.AdamW(..., amsgrad=True)"
        )
    if not bias_correction:
        raise OptimizerRefusal(f"{owner}: bias_correction is false, and torch's Adam always corrects; delete it")
