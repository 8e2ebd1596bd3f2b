"""Optimizer classes that user code added to the names of `optimizer.type`.

`windlass.optim.register_update` adds a class here. Kept apart from `windlass.optim`, because the configuration is
checked below it. No module of windlass registers a class at import, so that `windlass check`, which runs no user code,
accepts the same names as a script that registers none.
"""

from __future__ import annotations

from typing import Any

_classes: dict[str, type[Any]] = {}


def registered_optimizers() -> dict[str, type[Any]]:
    """Return the registered classes by the name that was registered."""
    return dict(_classes)


def find_registered_optimizer(name: str) -> type[Any] | None:
    """Return the class that is registered under `name`, in any case; None if there is none."""
    return next((owner for known, owner in _classes.items() if known.lower() == name.lower()), None)


def add_optimizer(name: str, owner: type[Any]) -> None:
    """Register a class; the name is free, which the caller checks."""
    _classes[name] = owner
