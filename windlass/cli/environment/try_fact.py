"""One fact about the machine: asked for in such a way that nothing which is missing can end the command."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping
from typing import Any

UNKNOWN = "unknown"
_COMMAND_TIMEOUT_S = 20.0  # seconds; a driver in trouble makes its tools hang


def try_fact(question: Callable[[], Any]) -> Any:
    """The answer, or `{"unknown": "ErrorType: why"}`."""
    try:
        return question()
    except Exception as error:  # a report on a broken machine is what this is for: the error is its content
        return {UNKNOWN: f"{type(error).__name__}: {str(error).strip() or 'no reason given'}"}


def is_unknown(answer: Any) -> bool:
    """Whether `ask` got no answer."""
    return isinstance(answer, Mapping) and set(answer) == {UNKNOWN}


def output_of(*command: str) -> str:
    """What a program writes to stdout.

    Raises:
        OSError: it is not there, or took too long.
        RuntimeError: it failed; with its own words.
    """
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired as error:
        raise OSError(f"{command[0]} did not answer within {_COMMAND_TIMEOUT_S:.0f} s") from error
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip() or "it said nothing").splitlines()[0]
        raise RuntimeError(f"{' '.join(command)} ended with exit code {done.returncode}: {said}")
    return done.stdout
