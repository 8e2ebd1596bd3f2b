"""Error of a launch that is impossible as requested."""

from __future__ import annotations

from windlass.base.errors import WindlassError


class LaunchError(WindlassError, RuntimeError):
    """Ranks cannot be started: no such script, a port in use, an invalid number, an unreachable host."""
