"""How a rank's failure reaches the user: once, from the parent, in one message."""

from __future__ import annotations

import os
from pathlib import Path

from windlass.base.errors import WindlassError
from windlass.cli.expected_errors import describe_expected_error


class TrainingRunError(WindlassError, RuntimeError):
    """A rank ended a run early; the text is that rank's own."""


def describe_failure(error: BaseException, rank: int) -> str:
    """One message that says what, where and what to do."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        hint = "try a smaller micro-batch, a shorter --seq-len or a higher ZeRO stage"
        return f"rank {rank} ran out of memory ({error}); {hint}"
    return (
        describe_expected_error(error)
        or f"rank {rank} failed with {type(error).__name__}: {error}; --debug shows where"
    )


def record_failure(path: Path, message: str) -> bool:
    """Keeps the first failure of all ranks; True for the rank whose it is. What fails later follows from it."""
    try:
        with open(path, "x") as stream:
            stream.write(message)
    except OSError:  # another rank's is there, or the disk is full: then the exit code alone has to tell
        return False
    return True


def read_failure(path: Path) -> str | None:
    """The recorded failure, if any, which is then forgotten."""
    try:
        message = path.read_text()
        os.unlink(path)
    except OSError:
        return None
    return message or None


def stopped_marker_path(path: Path) -> Path:
    """The file beside the failure's that ranks leave when they saved and stopped as asked.

    A launcher that was interrupted itself cannot tell this by an exit code.
    """
    return path.with_name("stopped")
