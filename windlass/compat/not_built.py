"""A name that can be imported, since scripts import more than they use, and raises in one sentence when it is used."""

from __future__ import annotations

from typing import Any

from windlass.base.errors import WindlassError


class NotBuiltError(WindlassError, NotImplementedError, AttributeError):
    """What DeepSpeed has under this name is not in windlass. An AttributeError too, so that `hasattr` says no."""


class _RefusedType(type):
    """The class of refused classes: using one raises, mentioning it does not."""

    _reason: str

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise NotBuiltError(cls._reason)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotBuiltError(f"{cls._reason} (asked for its {name!r})")


def make_refused_type(name: str, reason: str) -> type:
    """What stands where `name` would be: it can be imported, subclassed and asked by `isinstance`; calling it, or
    asking for its members, raises `NotBuiltError`."""
    own = name.rpartition(".")[2]
    text = f"{name}: {reason}"
    return _RefusedType(own, (), {"_reason": text, "__doc__": text, "__module__": name.rpartition(".")[0]})
