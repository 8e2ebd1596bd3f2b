"""Fixtures with disk tiers on every I/O engine that the system supports."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from windlass.base.errors import StorageError
from windlass.storage import DiskTier
from windlass.storage.io_engine import ENGINES, start_io_engine

MakeTier = Callable[..., DiskTier]


def refusal(engine: str) -> str | None:
    """Return the reason why an engine is not available, or None if it is."""
    file = os.open(os.devnull, os.O_RDWR)
    try:
        start_io_engine([file], requested=engine, queue_depth=1, threads=1, block_size=4096, alignment=1).engine.close()
    except StorageError as error:
        return str(error)
    finally:
        os.close(file)
    return None


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    why = refusal(request.param)
    if why is not None:
        pytest.skip(why)
    return str(request.param)


@pytest.fixture
def make_tier(tmp_path: Path) -> Iterator[MakeTier]:
    """Return a function that makes tiers with small blocks, by default in one directory. All are closed at the end."""
    tiers: list[DiskTier] = []

    def make(*, paths: Any = None, block_size: int = 8192, queue_depth: int = 4, **options: Any) -> DiskTier:
        tier = DiskTier(paths or [tmp_path / "disk"], block_size=block_size, queue_depth=queue_depth, **options)
        tiers.append(tier)
        return tier

    yield make
    for tier in tiers:
        tier.close()


@pytest.fixture
def tier(make_tier: MakeTier, engine: str) -> DiskTier:
    return make_tier(engine=engine)
