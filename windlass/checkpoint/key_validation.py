"""Validation of dictionary keys and set items from untrusted files."""

from __future__ import annotations

import reprlib
from typing import Any

import torch

_LARGEST = 1 << 60  # larger integers can collide: different values with the same hash
_MOST_OTHERS = 4096  # limit for keys whose hashes can be made to collide: a dictionary with more would take too long
_LONGEST, _DEEPEST = 64, 4  # limits for the length and the nesting depth of tuples and frozen sets


class KeyValidator:
    """Validator of the keys of one file.

    Python's hashes of numbers and tuples are predictable, so an attacker can choose keys with equal hashes to make a
    reader hang.
    """

    def __init__(self) -> None:
        self._other_count = 0

    def require(self, key: Any, depth: int = 0) -> None:
        """Check that `key` is a str, bytes, bool, int, float, None, a dtype, or a tuple or frozen set of these.

        Raises:
            ValueError: `key` is of another type, too long or too deep, or too many keys of the file are large integers,
                tuples or frozen sets.
        """
        kind = type(key)
        if kind is str or (kind is int and -_LARGEST < key < _LARGEST):
            return
        if kind in (bool, float, bytes, torch.dtype) or key is None:
            return
        self._other_count += 1
        if kind in (int, tuple, frozenset) and self._other_count > _MOST_OTHERS:
            raise ValueError(
                f"more than {_MOST_OTHERS} keys are tuples, frozen sets or integers beyond 2^60, which a checkpoint "
                "cannot hold; store them in lists or tensors"
            )
        if kind is int:
            return
        if kind in (tuple, frozenset) and len(key) <= _LONGEST and depth < _DEEPEST:
            for item in key:
                self.require(item, depth + 1)
            return
        raise ValueError(f"a {kind.__name__} cannot be a key of a checkpoint's dictionaries ({reprlib.repr(key)})")
