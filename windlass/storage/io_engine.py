"""Choice of the I/O engine: io_uring or threads of the native module, or Python threads."""

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
    """Blocks that one `submit` started. Done when none of them is queued or in flight, also after a failure."""

    def done(self) -> bool: ...

    def wait(self, seconds: float) -> bool:
        """Wait at most `seconds`. Return True if the request is done."""
        ...

    def failure(self) -> tuple[int, int, int, int] | None:
        """Return the first failed block as (errno, file, offset in it, bytes done), or None.

        ENODATA: the file ended before the block did. EBADMSG: the first page that is not done differs from the page
        that was written. ECANCELED: the engine was closed.
        """
        ...


class IoEngine(Protocol):
    """Engine that moves many blocks between files and memory at once, in any order."""

    def submit(self, write: bool, spans: Sequence[BlockSpan]) -> IoRequest | None:
        """Start moving `spans`. Return None if the engine is closed."""
        ...

    def add_region(self, address: int, nbytes: int) -> int:
        """Register memory that transfers use often.

        Return a number for `remove_region`, or -errno if that is not possible.
        """
        ...

    def remove_region(self, place: int) -> None: ...

    def totals(self) -> tuple[int, int, float, float, float]:
        """Return bytes read and written, and the seconds with reads in flight, with writes, and with either or both."""
        ...

    def close(self) -> None:
        """Cancel queued blocks and wait for those in flight."""
        ...


class IoEngineChoice(NamedTuple):
    """Engine, its name in `ENGINES`, and the reason for the choice."""

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
    """Return the native module and "", or None and the reason why it can't be imported."""
    try:
        return importlib.import_module("windlass.kernels._disk"), ""
    except ImportError as error:
        return None, f"the native module is missing ({error})"


def start_io_engine(
    files: list[int], *, requested: str | None, queue_depth: int, threads: int, block_size: int, alignment: int
) -> IoEngineChoice:
    """Start the requested engine, or the fastest one that works on this machine.

    Args:
        files: descriptors. Spans refer to them by index.
        requested: one of `ENGINES`. None: the environment variable WINDLASS_DISK_ENGINE, else the first that works.
        queue_depth: blocks in flight at once under io_uring.
        threads: blocks in flight at once under the other engines.
        block_size: bytes of the largest block.
        alignment: alignment of addresses that these files need. Blocks at other addresses pass through a buffer.

    Raises:
        StorageError: the requested engine is unknown or does not work here.
    """
    source = "" if requested else f" ({VARIABLE})"
    requested = requested or os.environ.get(VARIABLE) or None
    if requested is not None and requested not in ENGINES:
        raise StorageError(f"disk engine {requested!r}{source} is unknown; use one of {', '.join(ENGINES)}")
    plan = _IoEngineOptions(files, queue_depth, threads, block_size, alignment)
    refused: list[str] = []
    for name in [requested] if requested else ENGINES:
        engine = _try_start(name, plan)
        if not isinstance(engine, str):
            return IoEngineChoice(engine, name, "; ".join(refused) or ("as requested" if requested else "the fastest"))
        refused.append(engine)
    raise StorageError(
        f"disk engine {requested!r}{source} does not work here: {refused[0]}; use another one, or none for the fastest"
    )


def default_io_engine() -> str:
    """Return one line: the name of the engine that an NVMe tier would use here, and the reason for this choice."""
    file = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    try:
        running = start_io_engine([file], requested=None, queue_depth=1, threads=1, block_size=4096, alignment=1)
        running.engine.close()
        return f"{running.name} ({running.reason})"
    finally:
        os.close(file)


def _try_start(name: str, options: _IoEngineOptions) -> IoEngine | str:
    """Return the engine, or the reason why it can't start."""
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
