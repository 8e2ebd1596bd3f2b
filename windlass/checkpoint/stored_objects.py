"""Objects of classes that a load may rebuild from plain data.

[Note: stored objects] A checkpoint stores an object as the name of its class and a state of plain data. The name never
selects code: it is looked up among `KNOWN_CLASSES`, whose functions check the state before they use it, and among the
classes that the script itself passed to `torch.serialization.add_safe_globals`. Nothing is imported. An object of any
other class is refused at the save, and is an `UnknownObject` at the load.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, eq=False)
class UnknownObject:
    """Stored form of an object: name of its class, and state.

    A load returns it in place of an object whose class is neither known nor declared as safe, or not imported. It is
    then saved again as it was read.

    Attributes:
        module: module that defines the class.
        qualname: name of the class in its module.
        state: plain data of the object.
    """

    module: str
    qualname: str
    state: Any


def to_stored_object(value: object) -> UnknownObject | None:
    """Return class and state of an object, or None if its class is neither known nor declared.

    Raises:
        ValueError: the class is declared, and its objects cannot be rebuilt from their state.
    """
    if isinstance(value, UnknownObject):
        return value
    kind = type(value)
    if known := KNOWN_CLASSES.get((kind.__module__, kind.__qualname__)):
        return UnknownObject(kind.__module__, kind.__qualname__, known[0](value))
    if _declared_class(kind.__module__, kind.__qualname__) is not kind:
        return None
    _require_rebuildable(kind)
    state = value.__getstate__()
    if not hasattr(kind, "__setstate__") and not (state is None or isinstance(state, dict)):
        raise ValueError("it has __slots__, so that its class needs __getstate__ and __setstate__")
    return UnknownObject(kind.__module__, kind.__qualname__, state)


def from_stored_object(stored: UnknownObject) -> Any:
    """Rebuild an object, or return `stored` if its class is neither known nor declared, or not imported.

    Raises:
        ValueError: the state is not valid for the class.
    """
    if known := KNOWN_CLASSES.get((stored.module, stored.qualname)):
        imported = getattr(sys.modules.get(stored.module), stored.qualname, None)
        return known[1](imported, stored.state) if isinstance(imported, type) else stored
    kind = _declared_class(stored.module, stored.qualname)
    if kind is None:
        return stored
    _require_rebuildable(kind)
    made = object.__new__(kind)
    if hasattr(kind, "__setstate__"):
        made.__setstate__(stored.state)
    elif isinstance(stored.state, dict) and all(isinstance(key, str) for key in stored.state):
        vars(made).update(stored.state)
    elif stored.state is not None:
        raise ValueError(f"the state of an object is a {type(stored.state).__name__}")
    return made


def unknown_classes(value: Any) -> set[str]:
    """Return the dotted names of the classes of all `UnknownObject` in plain data."""
    return {f"{one.module}.{one.qualname}" for one in _unknown_objects(value)}


def _unknown_objects(value: Any) -> Iterator[UnknownObject]:
    if isinstance(value, UnknownObject):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _unknown_objects(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _unknown_objects(item)


def _declared_class(module: str, qualname: str) -> type[Any] | None:
    """Return the class of this name that the script declared to torch as safe to rebuild."""
    for entry in torch.serialization.get_safe_globals():
        declared = entry[0] if isinstance(entry, tuple) else entry
        if isinstance(declared, type) and (declared.__module__, declared.__qualname__) == (module, qualname):
            return declared
    return None


def _require_rebuildable(kind: type[Any]) -> None:
    """Raise ValueError unless objects of the class are made without arguments and consist of their state.

    torch and numpy declare classes too, whose constructors expect arguments from a pickle.
    """
    for name in ("__new__", "__reduce__", "__reduce_ex__"):
        if getattr(kind, name) is not getattr(object, name):
            raise ValueError(f"its class has a {name} of its own")


def _history_state(buffer: Any) -> dict[str, Any]:
    values, counts = buffer.data
    return {"values": values, "counts": counts, "max_length": buffer.max_length}


def _history_buffer(kind: type[Any], state: Any) -> Any:
    """Build mmengine's `HistoryBuffer` from two arrays of numbers, `[length]` each."""
    import numpy

    if not isinstance(state, dict) or set(state) != {"values", "counts", "max_length"}:
        raise ValueError("the state of a HistoryBuffer has other keys than values, counts and max_length")
    values, counts, most = state["values"], state["counts"], state["max_length"]
    for array in (values, counts):
        if not isinstance(array, numpy.ndarray) or array.ndim != 1 or array.dtype.kind not in "biuf":
            raise ValueError("the histories of a HistoryBuffer are not arrays of numbers")
    if type(most) is not int or not len(values) == len(counts) <= most:
        raise ValueError("the histories of a HistoryBuffer differ in length, or are longer than max_length")
    return kind(values, counts, max_length=most)


KNOWN_CLASSES: dict[tuple[str, str], tuple[Callable[[Any], Any], Callable[[type[Any], Any], Any]]] = {
    # part of the state of mmengine's message hub, which mmengine's checkpoint hook saves
    ("mmengine.logging.history_buffer", "HistoryBuffer"): (_history_state, _history_buffer),
}
"""Classes of client libraries, by module and name. Each has a function that returns an object's state, and one that
returns an object for the class and a state from an untrusted file. The second raises ValueError for an invalid state.
"""
