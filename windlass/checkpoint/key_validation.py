"""Keys of dictionaries and items of sets that a stranger's file may hold."""

from __future__ import annotations

import reprlib
from typing import Any

import torch

_LARGEST = 1 << 60  # beyond it different integers may have the same hash
_MOST_OTHERS = 4096  # keys whose hashes can be made to be the same: a dictionary of more would take forever
_LONGEST, _DEEPEST = 64, 4  # of tuples


class KeyValidator:
    """Counts the keys of one file. Python's hashes of numbers and tuples are no secret: somebody who wants a reader to
    hang makes keys whose hashes are all the same."""

    def __init__(self) -> None:
        self._other_count = 0

    def require(self, key: Any, depth: int = 0) -> None:
        """Check that `key` is a text, bytes, a number, None, a dtype, or a tuple or frozen set of such. Raises
        ValueError where it is not, or too many keys are large numbers, tuples and sets."""
        kind = type(key)
        if kind is str or (kind is int and -_LARGEST < key < _LARGEST):
            return
        if kind in (bool, float, bytes, torch.dtype) or key is None:
            return
        self._other_count += 1
        if kind is int and self._other_count <= _MOST_OTHERS:
            return
        if (
            kind in (tuple, frozenset)
            and len(key) <= _LONGEST
            and self._other_count <= _MOST_OTHERS
            and depth < _DEEPEST
        ):
            for item in key:
                self.require(item, depth + 1)
            return
        raise ValueError(f"a {kind.__name__} cannot be a key of a checkpoint's dictionaries ({reprlib.repr(key)})")
