"""A name that can be imported, since scripts import more than they use, and raises in one sentence when it is used."""

from __future__ import annotations

from typing import Any

from windlass.base.errors import WindlassError


class NotBuiltError(WindlassError, NotImplementedError, AttributeError):
    """What DeepSpeed has under this name is not in windlass. An AttributeError too, so that `hasattr` says no."""


class _Refusing(type):
    """The class of refused classes: using one raises, mentioning it does not."""

    _why: str

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise NotBuiltError(cls._why)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotBuiltError(f"{cls._why} (asked for its {name!r})")


def refusal(name: str, why: str) -> type:
    """What stands where `name` would be: it can be imported, subclassed and asked by `isinstance`; calling it, or
    asking for its members, raises `NotBuiltError`."""
    own = name.rpartition(".")[2]
    text = f"{name}: {why}"
    return _Refusing(own, (), {"_why": text, "__doc__": text, "__module__": name.rpartition(".")[0]})
