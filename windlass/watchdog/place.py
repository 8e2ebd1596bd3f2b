"""Where a thread is: which call of the engine, which wait for other ranks, which line of the user's."""

from __future__ import annotations

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

from windlass.base.activity import During, activity

_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_STANDARD = sysconfig.get_path("stdlib") + os.sep
_LOCAL = ("checkpoint", "elastic", "launcher")  # folders of torch.distributed that do more than wait for ranks
_CALLS = {
    "Engine.eval_batch": "evaluation",
    "Files.save_checkpoint": "save",
    "Files.load_checkpoint": "load",
}


class Kind(Enum):
    """Whose code a file is."""

    USER = "the user's"
    STANDARD = "Python's"
    TORCH = "torch's"
    MEETING = "waits for ranks"
    DISK = "waits for a disk"
    OWN = "windlass's"


@dataclass(frozen=True)
class Place:
    """Where a rank is.

    Attributes:
        call: of the engine, "" outside.
        operation: that waits for other ranks, "" where it waits for none.
        names: of the parameters it is about.
        line: the innermost one outside windlass and torch.
    """

    call: str = ""
    operation: str = ""
    names: tuple[str, ...] = ()
    line: str = ""


@lru_cache(maxsize=4096)
def kind_of(path: str) -> Kind:
    """By the file's path."""
    if path.startswith(_OWN):
        inner = path[len(_OWN) :].replace(os.sep, "/")
        if inner.startswith("comm/") or inner == "zero/norm.py":
            return Kind.MEETING
        if inner.startswith("storage/"):
            return Kind.DISK
        return Kind.USER if inner.startswith("cli/") else Kind.OWN
    if path.startswith(_TORCH):
        parts = path[len(_TORCH) :].split(os.sep)
        return Kind.MEETING if parts[0] == "distributed" and parts[1] not in _LOCAL else Kind.TORCH
    if path.startswith("<frozen") or (path.startswith(_STANDARD) and "-packages" not in path):
        return Kind.STANDARD
    return Kind.USER


class Watcher:
    """Looks where the thread that made it is, again and again: the one that trains.

    Frames are never kept from one look to the next: they would keep the tensors of functions that have returned. A wait
    without a mark is known again by its frame's number, which Python may give to a later frame too; so it counts as the
    same only while its thread takes hardly any CPU time. (Where an accelerator is, waits spin: there the number of
    collectives of the default group has to tell.)

    Attributes:
        waits: what tells one wait from the next: equal as long as the wait is the same; None: no wait.
    """

    def __init__(self) -> None:
        self._main = threading.get_ident()
        self.waits: object | None = None
        spins = torch.cuda.is_available() or not hasattr(time, "pthread_getcpuclockid")
        self._clock = None if spins else time.pthread_getcpuclockid(self._main)
        self._used = self._looked = 0.0
        self._moves = 0

    def look(self) -> Place:
        """Of the thread that trains, and of one of autograd's where a backward runs there."""
        self._note_moves()
        frames = sys._current_frames()
        stack = list(_outwards(frames.get(self._main)))
        mark = activity.of(self._main)
        place, frame = _read(stack, mark)
        self.waits = self._key(frame, mark)
        if self.waits is None and any(frame.f_code.co_name == "_engine_run_backward" for frame, _ in stack):
            for thread, frame in frames.items():
                if thread in (self._main, threading.get_ident()) or self.waits is not None:
                    continue
                mark = activity.of(thread)
                inner, meeting = _read(list(_outwards(frame)), mark)
                self.waits = self._key(meeting, mark)
                if self.waits is not None:
                    place = Place("backward", inner.operation, inner.names, place.line)
        return self._apart(place) if self.waits is None else place

    def _note_moves(self) -> None:
        """Tell a wait that is over from the next one that looks the same."""
        now = time.monotonic()
        if self._clock is not None:
            used = time.clock_gettime(self._clock)
            self._moves += used - self._used > 0.05 * (now - self._looked)
            self._used = used
        elif (group := dist.group.WORLD) is not None:
            self._moves = group._get_sequence_number_for_group()  # type: ignore[attr-defined]
        self._looked = now

    def _key(self, frame: FrameType | None, mark: During | None) -> object | None:
        if frame is None:
            return None
        return (mark, activity.moved) if mark is not None else (id(frame), frame.f_lasti, self._moves)

    def _apart(self, place: Place) -> Place:
        """What was started on an accelerator's own stream and is not finished is waited for wherever the host is."""
        if activity.under_way is None:
            return place
        work, mark = activity.under_way
        if work.is_completed():  # type: ignore[attr-defined]
            activity.under_way = None
            return place
        self.waits = work
        return Place(place.call, mark.operation if mark else "a collective", _names(mark), place.line)


def place_of_error(error: BaseException, trace: TracebackType | None) -> tuple[Place, bool]:
    """Where an error arose, and whether that was in a wait for other ranks."""
    stack: list[tuple[FrameType, int]] = []
    while trace is not None:
        stack.append((trace.tb_frame, trace.tb_lineno))
        trace = trace.tb_next
    broken = activity.broken
    mark = broken[1] if broken is not None and broken[0] == id(error) else None
    place, waits = _read(stack[::-1], mark)
    return place, waits is not None


def _outwards(frame: FrameType | None) -> Iterable[tuple[FrameType, int]]:
    while frame is not None:
        yield frame, frame.f_lineno or 0  # Python knows none between two lines
        frame = frame.f_back


def _read(stack: list[tuple[FrameType, int]], mark: During | None) -> tuple[Place, FrameType | None]:
    """The place of a stack, innermost frame first; and the frame of the wait that it is in."""
    waits: FrameType | None = None
    operation, line, call, decided, backward = "", "", "", False, False
    for frame, number in stack:
        code = frame.f_code
        kind = kind_of(code.co_filename)
        if code.co_filename.startswith("<") and frame.f_globals.get("__name__") != "__main__":
            kind = Kind.STANDARD  # written at run time, as dataclasses do
        if kind is Kind.USER and not line:
            line = _line(code, number)
        if kind is Kind.MEETING and code.co_name == "<module>":  # it is being imported
            waits, operation, decided = None, "", True
        if kind is Kind.MEETING and not decided:
            waits = frame
            if code.co_name not in ("wrapper", "decorate_context"):
                operation = code.co_name
        elif kind not in (Kind.STANDARD, Kind.TORCH):
            decided = True  # what lies further out called the wait
        if kind in (Kind.OWN, Kind.MEETING) and code.co_filename.startswith(_OWN):
            call = _call(code)
        backward = backward or code.co_name == "_engine_run_backward"
    if backward and not call.startswith(("backward", "step")):
        call = "backward"
    if call == "forward" and activity.evaluating:
        call = "evaluation"
    if waits is None:
        return Place(call, "", (), line), None
    return Place(call, mark.operation if mark else operation, _names(mark), line), waits


def _call(code: CodeType) -> str:
    name = code.co_qualname
    if name.endswith((".__enter__", ".__exit__")):
        return name.rpartition(".")[0]
    return _CALLS.get(name, code.co_name)


def _names(mark: During | None) -> tuple[str, ...]:
    """The parameters of the innermost mark that names some: a wait for the agreed order serves the gather around it."""
    while mark is not None and not mark.names:
        mark = mark.around
    return tuple(mark.names) if mark is not None else ()


def _line(code: CodeType, number: int) -> str:
    path = code.co_filename
    near = os.path.relpath(path) if path.startswith(os.getcwd() + os.sep) else path
    source = _source(path)
    text = source[number - 1].strip() if 0 < number <= len(source) else ""
    where = f"{near}:{number} in {code.co_name}"
    return f"{where}: {text[:100]}" if text else where


@lru_cache(maxsize=64)
def _source(path: str) -> list[str]:
    """The lines of a file of Python; not by `linecache`, which the main thread may be changing."""
    try:
        with tokenize.open(path) as file:
            return file.readlines()
    except (OSError, SyntaxError, UnicodeDecodeError):
        return []
