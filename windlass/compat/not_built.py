"""Placeholders for DeepSpeed names that windlass lacks. They can be imported; using one raises an error."""

from __future__ import annotations

from typing import Any

from windlass.base.errors import WindlassError


class NotBuiltError(WindlassError, NotImplementedError, AttributeError):
    """Error for the use of a DeepSpeed name that windlass lacks. Also an AttributeError, so that `hasattr` returns
    False."""


class _RefusedType(type):
    """Metaclass of placeholder classes. Calling a class or reading its attributes raises; referring to it does not."""

    _reason: str

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise NotBuiltError(cls._reason)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotBuiltError(f"{cls._reason} (attribute {name!r})")


def make_refused_type(name: str, reason: str) -> type:
    """Create a placeholder class for `name`. It can be imported, subclassed and passed to `isinstance`.

    Calling it, or reading its attributes, raises `NotBuiltError`.
    """
    own = name.rpartition(".")[2]
    text = f"{name}: {reason}"
    return _RefusedType(own, (), {"_reason": text, "__doc__": text, "__module__": name.rpartition(".")[0]})
