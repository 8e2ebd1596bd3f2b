"""Optimizer classes that user code added to the names of `optimizer.type`.

`windlass.optim.register_update` adds a class here. The classes are not in `windlass.optim`, because `windlass.config`
is a lower layer. No module of windlass registers a class at import. So `windlass check`, which runs no user code,
accepts the same names as a script that registers nothing.
"""

from __future__ import annotations

from typing import Any

_classes: dict[str, type[Any]] = {}


def registered_optimizers() -> dict[str, type[Any]]:
    """Return the registered classes by name."""
    return dict(_classes)


def find_registered_optimizer(name: str) -> type[Any] | None:
    """Return the class that is registered under `name`, ignoring case; None if no class is."""
    return next((owner for known, owner in _classes.items() if known.lower() == name.lower()), None)


def add_optimizer(name: str, owner: type[Any]) -> None:
    """Register a class. The caller checks that the name is free."""
    _classes[name] = owner
