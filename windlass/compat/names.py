"""All tables as one: every old dotted name that is known, what is a module among them, and what lies below it."""

from __future__ import annotations

from windlass.compat.entry import Entry
from windlass.compat.tables import TABLES

NAMES: dict[str, Entry] = {}
for _table in TABLES:
    for _name, _entry in _table.items():
        if _name in NAMES:
            raise ValueError(f"{_name} is in two tables")
        NAMES[_name] = _entry

_below: dict[str, set[str]] = {}
for _name in NAMES:
    while "." in _name:
        _parent, _, _own = _name.rpartition(".")
        _below.setdefault(_parent, set()).add(_own)
        _name = _parent


def below(module: str) -> frozenset[str]:
    """The names right below a dotted name."""
    return frozenset(_below.get(module, ()))


def is_module(name: str) -> bool:
    """Whether a dotted name is a module: it has names below it, or its home is a whole module."""
    return name in _below or is_whole(name)


def is_whole(name: str) -> bool:
    """Whether a name's home is a whole module."""
    entry = NAMES.get(name)
    return entry is not None and bool(entry.home) and ":" not in entry.home
