"""Suspension of Python's cyclic garbage collector, and exclusion of long-lived objects from it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_suspenders: set[object] = set()
_was_enabled = True


def suspend_garbage_collection() -> Callable[[], None]:
    """Turn the collector off in this process.

    Returns:
        A function that ends the suspension. When all suspensions have ended, the collector is turned on again if it was
        on before. Further calls of the function do nothing.
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
def suspended_garbage_collection() -> Iterator[None]:
    """Turn the collector off in a context or a decorated function, for code that creates very many long-lived objects.

    The plans and records of a checkpoint with many tensors are hundreds of thousands of objects without cycles. Each
    time their number grows by a quarter, the collector traverses all of them and the model: a fifth of the time of a
    save.
    """
    end = suspend_garbage_collection()
    try:
        yield
    finally:
        end()


def freeze_live_objects() -> None:
    """Collect garbage once, and exclude the objects that are left from later collections.

    A server process calls this function after its model is loaded. Imported packages and a model are half a million
    objects, whose traversal delays all requests by 0.2 to 0.5 seconds. Objects among them that become garbage are
    not collected if they are in cycles.
    """
    gc.collect()
    gc.freeze()
