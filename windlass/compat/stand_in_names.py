"""All tables combined: the entry of each known DeepSpeed name, the names of modules, and the names below a module."""

from __future__ import annotations

from windlass.compat.stand_in_entry import StandInEntry
from windlass.compat.tables import TABLES

STAND_IN_NAMES: dict[str, StandInEntry] = {}
for _table in TABLES:
    for _name, _entry in _table.items():
        if _name in STAND_IN_NAMES:
            raise ValueError(f"{_name} is in two tables")
        STAND_IN_NAMES[_name] = _entry

_children: dict[str, set[str]] = {}
for _name in STAND_IN_NAMES:
    while "." in _name:
        _parent, _, _own = _name.rpartition(".")
        _children.setdefault(_parent, set()).add(_own)
        _name = _parent


def names_below(module: str) -> frozenset[str]:
    """Return the names directly below a dotted name."""
    return frozenset(_children.get(module, ()))


def is_module(name: str) -> bool:
    """Return True if a dotted name is a module: the tables have names below it, or its target is a module."""
    return name in _children or is_whole_module(name)


def is_whole_module(name: str) -> bool:
    """Return True if a name's target is a module, not an object in a module."""
    entry = STAND_IN_NAMES.get(name)
    return entry is not None and bool(entry.target) and ":" not in entry.target
