"""Run of a user's script in this process by a command that observes it, and the record of its failure."""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from pathlib import Path
from typing import NoReturn

from windlass.base.errors import WindlassError


def rank_import_path() -> str:
    """Return PYTHONPATH for ranks that run a script: the working directory, then the PYTHONPATH of this process."""
    return os.pathsep.join(path for path in (os.getcwd(), os.environ.get("PYTHONPATH", "")) if path)


def run_script(arguments: list[str]) -> None:
    """Run a script as `__main__`. A SystemExit without a code, or with code 0, is a normal end. A process that the
    script forks, and that reaches the end of the script, ends there: only this process returns.

    Args:
        arguments: path of the script, then the arguments of the script.

    Raises:
        SystemExit: the script ended with another code, or an observer ended it by a subclass of SystemExit.
    """
    sys.argv = list(arguments)
    sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
    process = os.getpid()
    try:
        runpy.run_path(arguments[0], run_name="__main__")
    except BaseException as error:
        if os.getpid() != process:
            _end_forked_process(error)
        if type(error) is not SystemExit or error.code:
            raise
    if os.getpid() != process:
        _end_forked_process(None)


def _end_forked_process(error: BaseException | None) -> NoReturn:
    """End this process with the exit code that Python has at the end of a script. Skip exit handlers, as ranks do."""
    code = 0 if error is None else 1
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            code = error.code or 0
        else:
            print(error.code, file=sys.stderr)
    elif error is not None:
        traceback.print_exception(error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code & 0xFF)


def record_script_failure(path: Path, error: BaseException) -> None:
    """Write a failure of this rank to `path`, unless another rank failed first: later failures are consequences.

    The traceback of a WindlassError is printed only if WINDLASS_DEBUG is set; other tracebacks are always printed.
    """
    rank = os.environ.get("RANK", "0")
    text = str(error) if isinstance(error, WindlassError) else f"{type(error).__name__}: {error}"
    text = "\n".join([text, *getattr(error, "__notes__", ())])
    if os.environ.get("WINDLASS_DEBUG", "0") not in ("", "0") or not isinstance(error, WindlassError):
        traceback.print_exc()
    try:
        # Names of files in the text may hold bytes that are not UTF-8.
        with open(path, "x", encoding="utf-8", errors="backslashreplace") as stream:
            stream.write(f"rank {rank}: {text}")
    except FileExistsError:  # another rank failed first
        return
    except OSError:  # e.g. a full disk, which must not hide the failure
        print(f"rank {rank}: {text}", file=sys.stderr)


def is_plain_end(error: BaseException) -> bool:
    """Return True for Ctrl-C and for the end of a program without an error."""
    return isinstance(error, KeyboardInterrupt) or (isinstance(error, SystemExit) and not error.code)
