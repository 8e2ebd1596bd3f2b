"""Iteration over tensors in nested containers, dataclasses and plain objects, and their replacement in containers."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch

_LEAVES = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device, torch.Size)


def iterate_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor in `value` once, in order.

    Containers and dataclasses are searched, and the attributes of other objects except modules, classes and callables.
    """
    yield from _iterate(value, set())


def _iterate(value: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    if isinstance(value, _LEAVES) or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        for item in value:
            yield from _iterate(item, seen)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _iterate(item, seen)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _iterate(getattr(value, field.name, None), seen)
    elif not isinstance(value, (torch.nn.Module, type)) and not callable(value):
        for item in _attributes(value):
            yield from _iterate(item, seen)


def _attributes(value: Any) -> list[Any]:
    """Return the values of an object's attributes, also of those in `__slots__` of its classes."""
    slots = [getattr(kind, "__slots__", ()) for kind in type(value).__mro__]
    names = [name for of_class in slots for name in ((of_class,) if isinstance(of_class, str) else of_class)]
    own = list(getattr(value, "__dict__", {}).values())
    return own + [getattr(value, name) for name in names if name != "__dict__" and hasattr(value, name)]


def replace_tensors(value: Any, replacements: Mapping[int, torch.Tensor], *, in_place: bool = False) -> Any:
    """Return `value` with tensors in nested tuples, lists and dicts replaced. Other containers are not searched.

    Args:
        replacements: new tensors by the `id` of the old.
        in_place: Change lists and dicts of `value` in place. Otherwise they are copied.
    """
    if isinstance(value, torch.Tensor):
        return replacements.get(id(value), value)
    if isinstance(value, tuple):
        items = [replace_tensors(item, replacements, in_place=in_place) for item in value]
        if all(a is b for a, b in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if not isinstance(value, list) and type(value) is not dict:
        return value
    if not in_place:
        value = list(value) if isinstance(value, list) else dict(value)
    for key, item in list(enumerate(value) if isinstance(value, list) else value.items()):
        new = replace_tensors(item, replacements, in_place=in_place)
        if new is item:
            continue
        if isinstance(value, list):
            list.__setitem__(value, key, new)  # the `__setitem__` of a subclass may refuse changes
        else:
            value[key] = new
    return value
