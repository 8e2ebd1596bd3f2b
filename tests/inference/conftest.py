"""Choice of the rows of inference tests that `make test` runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist.quick_rows import mark_slow_rows


@pytest.hookimpl(tryfirst=True)  # before `-m` leaves out slow tests
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as slow the parametrized rows that `quick_rows` does not choose."""
    mark_slow_rows([item for item in items if item.path.is_relative_to(Path(__file__).parent)])
