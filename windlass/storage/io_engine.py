"""Who does the I/O: io_uring or threads of the native module, or threads of Python; which, and why."""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from windlass.base.errors import StorageError
from windlass.storage.disk_error_messages import error_name
from windlass.storage.python_io_engine import BlockSpan, PythonIoEngine

ENGINES = ("io_uring", "threads", "python")
VARIABLE = "WINDLASS_DISK_ENGINE"


class IoRequest(Protocol):
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


class IoEngine(Protocol):
    """Moves blocks between files and memory, many at once, in any order."""

    def submit(self, write: bool, spans: Sequence[BlockSpan]) -> IoRequest | None:
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


class IoEngineChoice(NamedTuple):
    """An engine, its name among `ENGINES`, and why it is that one."""

    engine: IoEngine
    name: str
    reason: str


class _IoEngineOptions(NamedTuple):
    files: list[int]
    queue_depth: int
    threads: int
    block_size: int
    alignment: int


@functools.cache
def native_module() -> tuple[Any, str]:
    """The native module and "", or None and why it is not there."""
    try:
        return importlib.import_module("windlass.kernels._disk"), ""
    except ImportError as error:
        return None, f"the native module is not there ({error})"


def start_io_engine(
    files: list[int], *, requested: str | None, queue_depth: int, threads: int, block_size: int, alignment: int
) -> IoEngineChoice:
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
    requested = requested or os.environ.get(VARIABLE) or None
    if requested is not None and requested not in ENGINES:
        raise StorageError(f"disk engine {requested!r} ({VARIABLE}) is unknown; use one of {', '.join(ENGINES)}")
    plan = _IoEngineOptions(files, queue_depth, threads, block_size, alignment)
    refused: list[str] = []
    for name in [requested] if requested else ENGINES:
        engine = _try_start(name, plan)
        if not isinstance(engine, str):
            return IoEngineChoice(engine, name, "; ".join(refused) or ("as asked" if requested else "the fastest"))
        refused.append(engine)
    raise StorageError(
        f"disk engine {requested!r} ({VARIABLE}) does not work here: {refused[0]}; ask for another, or none"
    )


def default_io_engine() -> str:
    """The engine that a tier started now would use, and why, in one line."""
    file = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    try:
        running = start_io_engine([file], requested=None, queue_depth=1, threads=1, block_size=4096, alignment=1)
        running.engine.close()
        return f"{running.name} ({running.reason})"
    finally:
        os.close(file)


def _try_start(name: str, options: _IoEngineOptions) -> IoEngine | str:
    """The engine, or why there is none."""
    if name == "python":
        return PythonIoEngine(options.files, options.threads, options.block_size, options.alignment)
    module, why = native_module()
    if module is None:
        return str(why)
    kind, at_once = (module.Uring, options.queue_depth) if name == "io_uring" else (module.Threads, options.threads)
    try:
        engine: IoEngine = kind(options.files, at_once, options.block_size, options.alignment)
    except OSError as error:
        return f"the kernel refuses {name} ({error_name(error.errno or 0)})"
    return engine
