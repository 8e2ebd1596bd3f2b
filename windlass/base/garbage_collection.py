"""Python's collector of cyclic garbage, off for as long as anybody asks for that."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_suspenders: set[object] = set()
_was_enabled = True


def suspend_garbage_collection() -> Callable[[], None]:
    """Turn the collector off in this process.

    Returns:
        What ends that: once the last who asked has called theirs, the collector is on again if it was on before.
        Calling it again does nothing.
    """
    global _was_enabled
    holder = object()
    if not _suspenders:
        _was_enabled = gc.isenabled()
        gc.disable()
    _suspenders.add(holder)

    def end() -> None:
        if holder in _suspenders:
            _suspenders.discard(holder)
            if not _suspenders and _was_enabled:
                gc.enable()

    return end


@contextmanager
def held_off() -> Iterator[None]:
    """A context, or decorator, in which the collector is off: for work that makes very many objects that live on.

    Plans and records of a checkpoint of many tensors are hundreds of thousands of objects without a cycle. Each time
    their number has grown by a quarter the collector walks over all of them and over the model: a fifth of a save.
    """
    end = suspend_garbage_collection()
    try:
        yield
    finally:
        end()
