"""Transfer of a rank's failure to the parent process, which prints one message."""

from __future__ import annotations

import os
from pathlib import Path

from windlass.base.errors import WindlassError
from windlass.cli.expected_errors import describe_expected_error, with_notes


class TrainingRunError(WindlassError, RuntimeError):
    """Error of a rank that failed and so ended the run. The text is the message of that rank, or its exit status."""


def describe_failure(error: BaseException, rank: int) -> str:
    """Return one message with the problem, its place and the fix."""
    from windlass.engine.out_of_memory import is_out_of_memory  # imported here: it imports torch, which only ranks need

    if is_out_of_memory(error):
        hint = "try a smaller micro-batch, a shorter --seq-len or a higher ZeRO stage"
        return with_notes(f"rank {rank} ran out of memory ({error}); {hint}", error)
    return (
        describe_expected_error(error)
        or f"rank {rank} failed with {type(error).__name__}: {error}; --debug shows where"
    )


def record_failure(path: Path, message: str) -> bool:
    """Write the message to `path`, unless an earlier failure, which caused this failure, is recorded there. Return
    True if the message was written."""
    is_created = False
    try:
        with open(path, "x", encoding="utf-8", errors="backslashreplace") as stream:
            is_created = True
            stream.write(message)
    except OSError:  # the file exists, or the disk is full: the exit code alone then signals the failure
        if is_created:  # an empty file would keep other ranks from recording their failures
            path.unlink(missing_ok=True)
        return False
    return True


def read_failure(path: Path) -> str | None:
    """Read and delete the recorded failure. Return None if there is none."""
    try:
        message = path.read_text()
        os.unlink(path)
    except OSError:
        return None
    return message or None


def stopped_marker_path(path: Path) -> Path:
    """Return the path of the marker file that ranks create after they saved and stopped as requested.

    The launcher's exit code does not show this: a launcher that is itself interrupted returns a different code.
    """
    return path.with_name("stopped")
