"""Determination of one fact about the machine, without letting any error end the command."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping
from typing import Any

UNKNOWN = "unknown"
_COMMAND_TIMEOUT_S = 20.0  # tools of a faulty driver can hang


def try_fact(question: Callable[[], Any]) -> Any:
    """Return the result of `question`, or `{"unknown": "ErrorType: reason"}` if it raises."""
    try:
        return question()
    except Exception as error:  # the report must work on broken machines, where errors are part of its content
        return {UNKNOWN: f"{type(error).__name__}: {str(error).strip() or 'no reason given'}"}


def is_unknown(answer: Any) -> bool:
    """Return True if `answer` is the error that `try_fact` caught."""
    return isinstance(answer, Mapping) and set(answer) == {UNKNOWN}


def output_of(*command: str) -> str:
    """Run a program and return its stdout.

    Raises:
        OSError: the program is not installed, or took too long.
        RuntimeError: the program failed; the message has the first line of its output.
    """
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired as error:
        raise OSError(f"{command[0]} did not answer within {_COMMAND_TIMEOUT_S:.0f} s") from error
    if done.returncode:
        message = (done.stderr.strip() or done.stdout.strip() or "it printed nothing").splitlines()[0]
        raise RuntimeError(f"{' '.join(command)} ended with exit code {done.returncode}: {message}")
    return done.stdout
