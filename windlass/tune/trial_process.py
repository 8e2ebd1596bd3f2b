"""One run of the program in a separate session, with a time limit. Finds its error, and ends processes left behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from windlass.base.processes import descendants, is_alive, start_time_of
from windlass.base.text import one_line
from windlass.launch import reaper

_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER
_GRACE_S = 5.0
_POLL_S = 0.02
_TAIL_BYTES = 64 << 10
_LONGEST_ERROR = 400

_RANK = re.compile(r"^(?:\[rank ?\d+[^\]]*\]:? ?)+")  # prefixes of the launcher, and of torch's exception hook
_EXCEPTION = re.compile(r"^((?:[A-Za-z_]\w*\.)*[A-Z]\w*)(?::\s|$)")
_NAMED = re.compile(r"(?:Error|Exception|Interrupt)$")
_LAUNCHER_LINE = re.compile(r"^(?:windlass run|windlass|deepspeed): ")
_OUT_OF_MEMORY = re.compile(
    r"out of memory|OutOfMemoryError|DeviceMemoryError|emulated device is full|std::bad_alloc|can't allocate memory"
    r"|Cannot allocate memory|MemoryError|for lack of memory",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class TrialEnd:
    """End of a run.

    Attributes:
        code: Exit code; None: the run was ended at its time limit.
        error: Explanation of the failure, with the error in the output (`find_error`); empty if the trial was measured.
        is_out_of_memory: The error is a lack of memory.
        left_behind: Command lines of processes that the run left behind. They were ended.
        seconds: Duration of the run.
    """

    code: int | None
    error: str
    is_out_of_memory: bool
    left_behind: tuple[str, ...]
    seconds: float


def run_trial(
    command: Sequence[str], folder: Path, environ: Mapping[str, str], limit_s: float, result: Path
) -> TrialEnd:
    """Run `command` with its output in `stdout.log` and `stderr.log` of `folder`, and end processes that it leaves.

    Args:
        limit_s: Seconds after which the run is ended.
        result: File that the program writes once it is measured. If the file exists, the trial counts as measured,
            whatever its exit code.

    Raises:
        KeyboardInterrupt: Ctrl-C, after all processes of the trial have ended.
    """
    started = time.monotonic()
    with _adopting_orphans(), open(folder / "stdout.log", "wb") as out, open(folder / "stderr.log", "wb") as err:
        known = descendants(os.getpid())
        process = subprocess.Popen(
            _ended_with_this_process(command),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env=dict(environ),
            start_new_session=True,
        )
        try:
            code = _wait(process, started + limit_s)
        except BaseException:
            _end(process)
            _end_others(known, process.pid)
            raise
        if code is None:
            _end(process)
        left = _end_others(known, process.pid)
    seconds = time.monotonic() - started
    if result.is_file():
        return TrialEnd(code, "", False, left, seconds)
    output = _tail(folder / "stderr.log") + "\n" + _tail(folder / "stdout.log")
    # At the time limit, the launcher's lines report the SIGTERM of `_end`, which is not the program's error.
    error = find_error(output, reads_launcher=code is not None)
    return TrialEnd(code, _explain(code, error, limit_s), bool(_OUT_OF_MEMORY.search(error)), left, seconds)


def find_error(text: str, *, reads_launcher: bool = True) -> str:
    """Return the error in the output of a program: the line of the first exception, else the last line about a lack of
    memory, else the last line; "" without output.

    Args:
        reads_launcher: Also search the launcher's lines, if the program has printed no error.
    """
    lines = [line for whole in text.splitlines() if (line := _RANK.sub("", whole.rstrip())).strip()]
    lines = [line for line in lines if reads_launcher or not _LAUNCHER_LINE.match(line)]
    launcher = [line for line in lines if _LAUNCHER_LINE.match(line)]
    own = [line for line in lines if not _LAUNCHER_LINE.match(line)]
    memory = [line for line in lines if _OUT_OF_MEMORY.search(line)]
    raised = [line for line in own if (found := _EXCEPTION.match(line)) and _NAMED.search(found[1])]
    for candidates in (raised, memory, own[-1:], launcher[-1:]):
        if candidates:
            return one_line(candidates[0 if candidates is raised else -1], _LONGEST_ERROR)
    return ""


def _ended_with_this_process(command: Sequence[str]) -> list[str]:
    """Return the command line of a process that runs `command` and ends it if this process is killed."""
    if sys.platform != "linux":
        return list(command)
    return [sys.executable, "-I", "-S", reaper.__file__, str(os.getpid()), *command]


def _explain(code: int | None, error: str, limit_s: float) -> str:
    last = f"its last line: {error}" if error else "it printed nothing"
    if code is None:
        return (
            f"the program took longer than {limit_s:g} s (--trial-seconds) for the steps of a trial, and was ended; "
            f"{last}"
        )
    if error.startswith("EOFError"):
        return f"the program reads standard input, and a trial has none; pass arguments instead: {error}"
    if code == 0:
        return (
            "the program ended before the steps of a trial: call windlass.initialize, and engine.step() more often, or "
            f"lower --warmup and --steps; {last}"
        )
    return error or f"the program ended with exit code {code} and printed nothing"


def _wait(process: subprocess.Popen[bytes], deadline: float) -> int | None:
    """Return the exit code; None at the deadline."""
    try:
        return process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return None


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the group of the process: first by SIGTERM, so that a launcher ends the ranks of other hosts."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
            return


def _end_others(known: Mapping[int, str], own: int) -> tuple[str, ...]:
    """End all descendants that are not in `known`, and return their command lines."""
    named: dict[int, str] = {}
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + (_GRACE_S if number == signal.SIGTERM else 60)
        while left := _new_descendants(known, own):
            for pid in left:
                if pid not in named:
                    named[pid] = _command_line(pid)
                    _send(pid, number)
                elif number == signal.SIGKILL:
                    _send(pid, number)
            if time.monotonic() > deadline:
                break
            time.sleep(_POLL_S)
        if not left:
            break
    return tuple(line for line in named.values() if line)


def _new_descendants(known: Mapping[int, str], own: int) -> list[int]:
    found = descendants(os.getpid())
    new = [pid for pid, start in found.items() if known.get(pid) != start and pid != own]
    for pid in new:
        with contextlib.suppress(ChildProcessError):  # a child of another process
            os.waitpid(pid, os.WNOHANG)  # an adopted orphan that has ended
    return [pid for pid in new if is_alive(pid) and start_time_of(pid) == found[pid]]


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _command_line(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return ""
    return one_line(" ".join(word.decode(errors="replace") for word in words if word), 200)


def _tail(path: Path) -> str:
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        return file.read().decode(errors="replace")


@contextlib.contextmanager
def _adopting_orphans() -> Iterator[None]:
    """Context in which orphans of descendants become children of this process (Linux)."""
    if sys.platform != "linux":
        yield
        return
    before = ctypes.c_int()
    library = ctypes.CDLL(None)
    library.prctl(37, ctypes.byref(before), 0, 0, 0)  # PR_GET_CHILD_SUBREAPER
    library.prctl(_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        library.prctl(_SUBREAPER, before.value, 0, 0, 0)
