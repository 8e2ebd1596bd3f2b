"""Exit codes of worker processes: their description in messages, and the error that ends the server."""

from __future__ import annotations

import signal

from windlass.base.errors import WindlassError


class WorkerExitError(WindlassError, RuntimeError):
    """Error for a process of a served model that ended before the model could be served.

    Args:
        message: cause, or where to find the cause.
        code: exit code of the process; negative codes are signals. The server ends with the same code; for a signal,
            with 128 plus its number, as a shell does; for code 0, with 1.
    """

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.exit_code = 128 - code if code < 0 else code or 1


def describe_exit(code: int) -> str:
    """Describe the exit code of a process; negative codes are signals."""
    if code >= 0:
        return f"with exit code {code}"
    try:
        return f"by {signal.Signals(-code).name}"
    except ValueError:
        return f"by signal {-code}"
