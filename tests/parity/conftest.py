"""Fixtures of the rank tests, for the full products."""

from tests.dist.conftest import _pool, stage, transport

__all__ = ["_pool", "stage", "transport"]
