"""The error of a launch that cannot be done as asked."""

from __future__ import annotations

from windlass.base.errors import WindlassError


class LaunchError(WindlassError, RuntimeError):
    """Ranks that cannot be started: no such script, a port in use, an impossible number, a host out of reach."""
