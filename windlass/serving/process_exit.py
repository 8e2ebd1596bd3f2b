"""End of a process in words."""

from __future__ import annotations

import signal


def describe_exit(code: int) -> str:
    """Return the end of a process in words; negative codes are signals."""
    if code >= 0:
        return f"with exit code {code}"
    try:
        return f"by {signal.Signals(-code).name}"
    except ValueError:
        return f"by signal {-code}"
