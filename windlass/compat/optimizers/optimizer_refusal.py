"""Error for arguments of DeepSpeed's optimizers that windlass does not support."""

from __future__ import annotations

from windlass.base.errors import ConfigError


class OptimizerRefusal(ConfigError, RuntimeError):
    """Unsupported variant of an optimizer. Also a RuntimeError, as in DeepSpeed."""


def check_adam(owner: str, amsgrad: bool, bias_correction: bool) -> None:
    """Raise OptimizerRefusal for unsupported variants of Adam."""
    if amsgrad:
        raise OptimizerRefusal(
            f"{owner}: amsgrad is true, which is not supported; use torch.optim.AdamW(..., amsgrad=True)"
        )
    if not bias_correction:
        raise OptimizerRefusal(f"{owner}: bias_correction is false, and torch's Adam always corrects; delete it")
