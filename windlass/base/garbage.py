"""Python's collector of cyclic garbage, off for as long as anybody asks for that."""

from __future__ import annotations

import gc
from collections.abc import Callable

_holders: set[object] = set()
_was_on = True


def hold_off() -> Callable[[], None]:
    """Turn the collector off in this process.

    Returns:
        What ends that: once the last who asked has called theirs, the collector is on again if it was on before.
        Calling it again does nothing.
    """
    global _was_on
    holder = object()
    if not _holders:
        _was_on = gc.isenabled()
        gc.disable()
    _holders.add(holder)

    def end() -> None:
        if holder in _holders:
            _holders.discard(holder)
            if not _holders and _was_on:
                gc.enable()

    return end
