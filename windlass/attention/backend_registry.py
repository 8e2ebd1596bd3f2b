"""Registry of attention backends by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from windlass.attention.attention_backend import AttentionBackend, require_backend
from windlass.base.errors import ConfigError

BackendFactory = Callable[..., AttentionBackend]
"""Callable that builds a backend from keyword arguments of its own; usually the backend's class."""

_factories: dict[str, BackendFactory] = {}


def register_backend(name: str, factory: BackendFactory) -> None:
    """Register a backend under a name. Registering the same factory again changes nothing.

    Raises:
        ConfigError: the name is empty, or taken by another factory, or the factory cannot be called.
    """
    if not name:
        raise ConfigError("an attention backend needs a name; give register_backend a non-empty string")
    if not callable(factory):
        raise ConfigError(f'register_backend("{name}"): {factory!r} is not a class or function; pass the class')
    if _factories.setdefault(name, factory) is not factory:
        raise ConfigError(f'an attention backend "{name}" is registered already ({_factories[name]}); use another name')


def get_backend(name: str, **options: Any) -> AttentionBackend:
    """Build the backend of this name.

    Args:
        options: arguments of its factory.

    Raises:
        ConfigError: no backend of this name is registered, its factory does not take the options, or the backend is
            incomplete.
    """
    if name not in _factories:
        raise ConfigError(
            f'no attention backend "{name}" is registered; registered are {", ".join(backend_names())}. Import the '
            "package that defines it, or call windlass.attention.register_backend"
        )
    factory = _factories[name]
    try:
        # Check only the arguments here, so that a TypeError inside the factory is not taken for wrong options.
        inspect.signature(factory).bind(**options)
    except TypeError as error:
        raise ConfigError(
            f'attention backend "{name}" got the options {sorted(options)}: {error}; pass those it accepts'
        ) from error
    return require_backend(factory(**options))


def backend_names() -> list[str]:
    """Return the registered names, sorted."""
    return sorted(_factories)
