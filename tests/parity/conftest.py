"""The fixtures of the rank tests serve the full product too."""

from tests.dist.conftest import _pool, stage, transport

__all__ = ["_pool", "stage", "transport"]
