"""Garbage collection limited to new objects, for the tests of saved activations."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="package", autouse=True)
def _only_what_is_new_is_collected() -> Iterator[None]:
    """Exclude existing objects from garbage collection.

    Many tests here collect garbage, and walking through all objects of torch would take most of their time.
    """
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
