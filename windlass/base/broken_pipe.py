"""What a command does once nobody reads its output any more: `windlass env | head`."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def exit_quietly_on_broken_pipe() -> Iterator[None]:
    """Around a command, or before its function: where its reader left, it ends without a word and with exit code 1, as
    commands of click do, and not with a traceback."""
    try:
        try:
            yield
        finally:  # what is still to be written would be missed only when the interpreter ends
            if sys.stdout is not None and not sys.stdout.closed:
                sys.stdout.flush()
    except BrokenPipeError:
        _discard_output()
        sys.exit(1)


def _discard_output() -> None:
    """Let the interpreter end in peace: it writes what is left to nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # none, or one that is no file
            stream.flush()
            continue
        with contextlib.suppress(AttributeError, OSError, ValueError):
            os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
