"""What the tests of kept activations share: a garbage collection that looks at what they made, and at nothing older."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="package", autouse=True)
def _only_what_is_new_is_collected() -> Iterator[None]:
    """Many tests here collect garbage; walking through all of torch each time would take most of their time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
