"""Fixtures of the rank tests. The warm pool lives as long as the session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.dist import harness
from tests.dist.quick_rows import mark_slow_rows


@pytest.hookimpl(tryfirst=True)  # before `-m` deselects slow tests
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as slow the rows that `quick_rows` does not choose."""
    mark_slow_rows([item for item in items if item.path.is_relative_to(Path(__file__).parent)])


@pytest.fixture(scope="session", autouse=True)
def _pool() -> Iterator[None]:
    """End the workers when the session ends."""
    yield
    if harness._pool is not None:
        harness._pool.close()


@pytest.fixture(params=["shm", "gloo"])
def transport(request: pytest.FixtureRequest) -> str:
    """Transport of CPU ranks: both in turn. Only gloo reveals a wrong order of collectives."""
    return str(request.param)


@pytest.fixture(params=[0, 1, 2, 3])
def stage(request: pytest.FixtureRequest) -> int:
    """ZeRO stage, each in turn."""
    return int(request.param)
