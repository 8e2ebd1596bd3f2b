"""Position of a thread: the engine call, the wait for other ranks, and the line of user code."""

from __future__ import annotations

import gc
import os
import sys
import sysconfig
import threading
import time
import tokenize
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from types import CodeType, FrameType, TracebackType

import torch
import torch.distributed as dist

from windlass.base.collective_activity import WaitScope, activity

_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_WINDLASS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_STANDARD = sysconfig.get_path("stdlib") + os.sep
_NON_COLLECTIVE_FOLDERS = (
    "checkpoint",
    "elastic",
    "launcher",
)  # folders of torch.distributed whose functions do more than wait for ranks
_COLLECTION_MARGIN = 50  # more objects than the walk of a stack allocates from one frame to the next
_ENGINE_CALLS = {
    "Engine.eval_batch": "evaluation",
    "CheckpointMethods.save_checkpoint": "save",
    "CheckpointMethods.load_checkpoint": "load",
}


class CodeOrigin(Enum):
    """Owner of a source file, or, for a file of windlass, the kind of wait that it implements."""

    USER = "the user's"
    STDLIB = "Python's"
    TORCH = "torch's"
    COLLECTIVE_WAIT = "waits for ranks"
    DISK_WAIT = "waits for a disk"
    WINDLASS = "windlass's"


@dataclass(frozen=True)
class ThreadLocation:
    """Position of a rank.

    Attributes:
        engine_call: running call of the engine, "" outside.
        operation: operation that waits for other ranks, "" if the rank does not wait.
        parameter_names: names of the parameters of the operation.
        source_line: innermost line outside windlass and torch.
    """

    engine_call: str = ""
    operation: str = ""
    parameter_names: tuple[str, ...] = ()
    source_line: str = ""


@lru_cache(maxsize=4096)
def code_origin(path: str) -> CodeOrigin:
    """Classify a source file by its path."""
    if path.startswith(_WINDLASS):
        inner = path[len(_WINDLASS) :].replace(os.sep, "/")
        if inner.startswith("comm/") or inner == "zero/core/gradient_norm.py":
            return CodeOrigin.COLLECTIVE_WAIT
        if inner.startswith("storage/"):
            return CodeOrigin.DISK_WAIT
        return CodeOrigin.USER if inner.startswith("cli/") else CodeOrigin.WINDLASS
    if path.startswith(_TORCH):
        parts = path[len(_TORCH) :].split(os.sep)
        return (
            CodeOrigin.COLLECTIVE_WAIT
            if parts[0] == "distributed" and parts[1] not in _NON_COLLECTIVE_FOLDERS
            else CodeOrigin.TORCH
        )
    if path.startswith("<frozen") or (path.startswith(_STANDARD) and "-packages" not in path):
        return CodeOrigin.STDLIB
    return CodeOrigin.USER


class ThreadObserver:
    """Observer of the training thread, which must construct it.

    It never keeps frames between observations, because a frame keeps the tensors of its function alive. A wait outside
    a `WaitScope` is identified by the id of its frame, which Python may reuse for a later frame. So a wait counts as
    the same wait only while the thread uses hardly any CPU time. With an accelerator, threads spin while they wait;
    there the number of collectives of the default group is compared instead.

    Attributes:
        current_wait: key of the current wait, equal between observations of the same wait; None: no wait.
    """

    def __init__(self) -> None:
        self._thread_id = threading.get_ident()
        self.current_wait: object | None = None
        spins = torch.cuda.is_available() or not hasattr(time, "pthread_getcpuclockid")
        self._clock = None if spins else time.pthread_getcpuclockid(self._thread_id)
        self._cpu_seconds = self._observed_at = 0.0
        self._progress_count = 0

    def observe(self) -> ThreadLocation:
        """Return the position of the training thread, or of an autograd thread if a backward waits there."""
        self._count_progress()
        # `f_back` creates a frame object, which may start a garbage collection. Finalizers then let the observed thread
        # run, and CPython may return, or write to, memory of a frame that has ended. A collection here prevents that.
        if gc.isenabled():
            gc.collect(0)
        frames = sys._current_frames()
        stack = list(_walk_outwards(frames.get(self._thread_id)))
        mark = activity.wait_of(self._thread_id)
        place, frame = _read_stack(stack, mark)
        self.current_wait = self._wait_key(frame, mark)
        if self.current_wait is None and any(frame.f_code.co_name == "_engine_run_backward" for frame, _ in stack):
            for thread, frame in frames.items():
                if thread in (self._thread_id, threading.get_ident()) or self.current_wait is not None:
                    continue
                mark = activity.wait_of(thread)
                inner, waiting = _read_stack(list(_walk_outwards(frame)), mark)
                self.current_wait = self._wait_key(waiting, mark)
                if self.current_wait is not None:
                    place = ThreadLocation("backward", inner.operation, inner.parameter_names, place.source_line)
        return self._pending_device_collective(place) if self.current_wait is None else place

    def _count_progress(self) -> None:
        """Count progress, to distinguish a wait from a later one at the same place."""
        now = time.monotonic()
        if self._clock is not None:
            used = time.clock_gettime(self._clock)
            self._progress_count += used - self._cpu_seconds > 0.05 * (now - self._observed_at)
            self._cpu_seconds = used
        elif (group := dist.group.WORLD) is not None:
            self._progress_count = group._get_sequence_number_for_group()  # type: ignore[attr-defined]
        self._observed_at = now

    def _wait_key(self, frame: FrameType | None, mark: WaitScope | None) -> object | None:
        if frame is None:
            return None
        return (mark, activity.progress_count) if mark is not None else (id(frame), frame.f_lasti, self._progress_count)

    def _pending_device_collective(self, location: ThreadLocation) -> ThreadLocation:
        """Return a wait for an unfinished collective on an accelerator's stream, or `location` if there is none."""
        if activity.pending_collective is None:
            return location
        work, mark = activity.pending_collective
        if work.is_completed():  # type: ignore[attr-defined]
            activity.pending_collective = None
            return location
        self.current_wait = work
        return ThreadLocation(
            location.engine_call,
            mark.operation if mark else "a collective",
            _parameter_names(mark),
            location.source_line,
        )


def location_of_error(error: BaseException, trace: TracebackType | None) -> tuple[ThreadLocation, bool]:
    """Return the position at which an error was raised, and True if that was in a wait for other ranks."""
    stack: list[tuple[FrameType, int]] = []
    while trace is not None:
        stack.append((trace.tb_frame, trace.tb_lineno))
        trace = trace.tb_next
    broken = activity.failed_wait
    mark = broken[1] if broken is not None and broken[0] == id(error) else None
    place, waits = _read_stack(stack[::-1], mark)
    return place, waits is not None


def _walk_outwards(frame: FrameType | None) -> Iterable[tuple[FrameType, int]]:
    while isinstance(frame, FrameType):  # `f_back` may return another object: see `observe`
        yield frame, frame.f_lineno or 0  # f_lineno is None between two lines
        _prevent_collection()
        frame = frame.f_back


def _prevent_collection() -> None:
    """Collect now if a few new objects would start a collection, as the frames of a deep stack do. See `observe`."""
    limit = gc.get_threshold()[0]
    if limit and gc.isenabled() and gc.get_count()[0] > limit - _COLLECTION_MARGIN:
        gc.collect(0)


def _read_stack(stack: list[tuple[FrameType, int]], mark: WaitScope | None) -> tuple[ThreadLocation, FrameType | None]:
    """Return the position that a stack shows, and the frame of its wait or None.

    The stack begins with the innermost frame.
    """
    waits: FrameType | None = None
    operation, line, call, decided, backward = "", "", "", False, False
    for frame, number in stack:
        code = frame.f_code
        kind = code_origin(code.co_filename)
        if code.co_filename.startswith("<") and frame.f_globals.get("__name__") != "__main__":
            kind = CodeOrigin.STDLIB  # generated at run time, e.g. by dataclasses
        if kind is CodeOrigin.USER and not line:
            line = _source_line(code, number)
        # frame of a module's import, not of a wait for other ranks
        if kind is CodeOrigin.COLLECTIVE_WAIT and code.co_name == "<module>":
            waits, operation, decided = None, "", True
        if kind is CodeOrigin.COLLECTIVE_WAIT and not decided:
            waits = frame
            if code.co_name not in ("wrapper", "decorate_context"):
                operation = code.co_name
        elif kind not in (CodeOrigin.STDLIB, CodeOrigin.TORCH):
            decided = True  # outer frames are callers of the wait
        if kind in (CodeOrigin.WINDLASS, CodeOrigin.COLLECTIVE_WAIT) and code.co_filename.startswith(_WINDLASS):
            call = _engine_call(code)
        backward = backward or code.co_name == "_engine_run_backward"
    if backward and not call.startswith(("backward", "step")):
        call = "backward"
    if call == "forward" and activity.is_evaluating:
        call = "evaluation"
    if waits is None:
        return ThreadLocation(call, "", (), line), None
    return ThreadLocation(call, mark.operation if mark else operation, _parameter_names(mark), line), waits


def _engine_call(code: CodeType) -> str:
    name = code.co_qualname
    if name.endswith((".__enter__", ".__exit__")):
        return name.rpartition(".")[0]
    return _ENGINE_CALLS.get(name, code.co_name)


def _parameter_names(mark: WaitScope | None) -> tuple[str, ...]:
    """Return the parameter names of the innermost scope that has names.

    Inner scopes may have none, e.g. an exchange of small values inside an all-gather of parameters.
    """
    while mark is not None and not mark.parameter_names:
        mark = mark.outer
    return tuple(mark.parameter_names) if mark is not None else ()


def _source_line(code: CodeType, number: int) -> str:
    path = code.co_filename
    try:
        near = os.path.relpath(path) if path.startswith(os.getcwd() + os.sep) else path
    except FileNotFoundError:  # the working directory was deleted
        near = path
    source = _source_lines(path)
    text = source[number - 1].strip() if 0 < number <= len(source) else ""
    where = f"{near}:{number} in {code.co_name}"
    return f"{where}: {text[:100]}" if text else where


@lru_cache(maxsize=64)
def _source_lines(path: str) -> list[str]:
    """Read a Python file's lines without `linecache`, whose cache the main thread may be changing."""
    try:
        with tokenize.open(path) as file:
            return file.readlines()
    except (OSError, SyntaxError, UnicodeDecodeError):
        return []
