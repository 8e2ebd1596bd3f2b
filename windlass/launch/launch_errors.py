"""Error of the launcher."""

from __future__ import annotations

from windlass.base.errors import WindlassError


class LaunchError(WindlassError, RuntimeError):
    """Failure to start or supervise ranks: no such script, a port in use, an invalid number, an unreachable host."""
