"""Who does the I/O: io_uring or threads of the native module, or threads of Python; which, and why."""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from windlass.base.errors import StorageError
from windlass.storage.failure import error_name
from windlass.storage.python_engine import PythonEngine, Span

ENGINES = ("io_uring", "threads", "python")
VARIABLE = "WINDLASS_DISK_ENGINE"


class Request(Protocol):
    """What one `submit` started. Done when none of it is queued or in flight, also after a failure."""

    def done(self) -> bool: ...

    def wait(self, seconds: float) -> bool:
        """Wait at most so long; whether it is done."""
        ...

    def failure(self) -> tuple[int, int, int, int] | None:
        """The first block that failed, if any: errno, file, offset in it, bytes done.

        ENODATA is a short read; EBADMSG: the page after those bytes is not what was written there.
        """
        ...


class Engine(Protocol):
    """Moves blocks between files and memory, many at once, in any order."""

    def submit(self, write: bool, spans: Sequence[Span]) -> Request | None:
        """Start moving `spans`. None once closed."""
        ...

    def add_region(self, address: int, nbytes: int) -> int:
        """Tell of memory that will be used often. A number for `remove_region`, or -errno where that is no use."""
        ...

    def remove_region(self, place: int) -> None: ...

    def totals(self) -> tuple[int, int, float, float, float]:
        """Bytes read and written; seconds with reads, writes, either outstanding."""
        ...

    def close(self) -> None:
        """Cancel what waits, await what is in flight."""
        ...


class Running(NamedTuple):
    """An engine, its name among `ENGINES`, and why it is that one."""

    engine: Engine
    name: str
    why: str


class _Plan(NamedTuple):
    files: list[int]
    depth: int
    threads: int
    largest: int
    alignment: int


@functools.cache
def native() -> tuple[Any, str]:
    """The native module and "", or None and why it is not there."""
    try:
        return importlib.import_module("windlass.kernels._disk"), ""
    except ImportError as error:
        return None, f"the native module is not there ({error})"


def start_engine(
    files: list[int], *, asked: str | None, depth: int, threads: int, largest: int, alignment: int
) -> Running:
    """The best engine that this machine has, or the one that is asked for.

    Args:
        files: descriptors, which spans name by their index.
        asked: one of `ENGINES`; None: what the variable WINDLASS_DISK_ENGINE says, else the first that works.
        depth: blocks in flight at once, under io_uring.
        threads: the same, of the others.
        largest: bytes of the largest block.
        alignment: of addresses, as these files need it; blocks elsewhere are copied on their way.

    Raises:
        StorageError: the one that is asked for is unknown, or refused here.
    """
    asked = asked or os.environ.get(VARIABLE) or None
    if asked is not None and asked not in ENGINES:
        raise StorageError(f"disk engine {asked!r} ({VARIABLE}) is unknown; use one of {', '.join(ENGINES)}")
    plan = _Plan(files, depth, threads, largest, alignment)
    refused: list[str] = []
    for name in [asked] if asked else ENGINES:
        engine = _start(name, plan)
        if not isinstance(engine, str):
            return Running(engine, name, "; ".join(refused) or ("as asked" if asked else "the fastest"))
        refused.append(engine)
    raise StorageError(f"disk engine {asked!r} ({VARIABLE}) does not work here: {refused[0]}; ask for another, or none")


def path_in_use() -> str:
    """The engine that a tier started now would use, and why, in one line."""
    file = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    try:
        running = start_engine([file], asked=None, depth=1, threads=1, largest=4096, alignment=1)
        running.engine.close()
        return f"{running.name} ({running.why})"
    finally:
        os.close(file)


def _start(name: str, plan: _Plan) -> Engine | str:
    """The engine, or why there is none."""
    if name == "python":
        return PythonEngine(plan.files, plan.threads, plan.largest, plan.alignment)
    module, why = native()
    if module is None:
        return str(why)
    kind, at_once = (module.Uring, plan.depth) if name == "io_uring" else (module.Threads, plan.threads)
    try:
        engine: Engine = kind(plan.files, at_once, plan.largest, plan.alignment)
    except OSError as error:
        return f"the kernel refuses {name} ({error_name(error.errno or 0)})"
    return engine
