"""Error of the launcher."""

from __future__ import annotations

from windlass.base.errors import WindlassError


class LaunchError(WindlassError, RuntimeError):
    """Error for ranks that cannot be started or supervised: no such script, a port in use, an invalid number, an
    unreachable host."""
