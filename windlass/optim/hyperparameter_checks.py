"""Check of the hyper-parameters that most optimizers have."""

from __future__ import annotations

from windlass.base.errors import ConfigError


def check_hyperparameters(owner: str, betas: tuple[float, ...] = (), **at_least_zero: float) -> None:
    """Raise a ConfigError unless every value is at least 0 and every beta is in [0, 1)."""
    for name, value in at_least_zero.items():
        if not value >= 0:
            raise ConfigError(f"{owner}: {name} is {value}; it must be at least 0")
    if not all(0 <= beta < 1 for beta in betas):
        raise ConfigError(f"{owner}: betas are {tuple(betas)}; each must be in [0, 1)")
