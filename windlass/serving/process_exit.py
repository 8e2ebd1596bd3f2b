"""Description of the end of a process."""

from __future__ import annotations

import signal


def describe_exit(code: int) -> str:
    """Describe the exit code of a process; negative codes are signals."""
    if code >= 0:
        return f"with exit code {code}"
    try:
        return f"by {signal.Signals(-code).name}"
    except ValueError:
        return f"by signal {-code}"
