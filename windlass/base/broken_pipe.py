"""Handling of a closed output pipe, e.g. of `windlass env | head`."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def exit_quietly_on_broken_pipe() -> Iterator[None]:
    """Exit as click does, with code 1 and without a traceback, if the reader of the output has closed the pipe.

    Use it around a command, or as a decorator of its function.
    """
    try:
        try:
            yield
        finally:  # flush here: at interpreter exit the error could not be caught
            if sys.stdout is not None and not sys.stdout.closed:
                sys.stdout.flush()
    except BrokenPipeError:
        _discard_output()
        sys.exit(1)


def _discard_output() -> None:
    """Redirect the unwritten output to /dev/null, so that the interpreter's last flush does not fail."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # no stream, or its pipe is closed
            stream.flush()
            continue
        with contextlib.suppress(AttributeError, OSError, ValueError):
            os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
