"""Memory for staging: page-aligned buffers, and how large they may be in what is free."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from pathlib import Path

import torch

from windlass.base.errors import StorageError
from windlass.storage.disk_error_messages import format_bytes
from windlass.storage.extent_allocator import page_up

_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # shared memory, the default, gets no huge pages
_LEAST = 1 << 20
_UNKNOWN = 1 << 30
_UNLIMITED = 1 << 60


def aligned_buffer(nbytes: int) -> tuple[torch.Tensor, object]:
    """A page-aligned `[nbytes]` uint8 tensor on memory of its own, and the object that dies just before that memory."""
    if nbytes < 1:
        raise StorageError(f"a staging buffer of {nbytes} bytes was asked for; ask for at least 1")
    try:
        memory = mmap.mmap(-1, page_up(nbytes), flags=_PRIVATE)
    except (OSError, OverflowError) as error:
        raise StorageError(
            f"no memory for a staging buffer of {format_bytes(nbytes)} ({error}); lower buffer_size or buffer_count"
        ) from error
    with contextlib.suppress(OSError, AttributeError):  # huge pages are quicker to fill and to look up, and optional
        memory.madvise(mmap.MADV_HUGEPAGE)
    # mmap tells its end only after the memory is gone; ctypes tells it before.
    owner = (ctypes.c_ubyte * len(memory)).from_buffer(memory)
    return torch.frombuffer(owner, dtype=torch.uint8)[:nbytes], owner


def staging_buffer_bytes(
    wanted: int, count: int, *, requested: int | None = None, ranks: int = 1, fraction: float = 0.25
) -> int:
    """How large each of `count` staging buffers should be, in whole pages.

    What the host and its control groups have left is shared by all ranks; what this process may still take under its
    own limits (`ulimit -d`, `ulimit -v`) is not.

    Args:
        wanted: bytes beyond which a buffer is of no use: the largest thing that passes through one.
        count: buffers that are in use at once.
        told: bytes that the user asked for; taken as they are, also where memory looks too small for them.
        ranks: processes of this host that take as many.
        share: of the free memory that all buffers of all ranks may take together.

    Raises:
        StorageError: not even buffers of 1 MiB fit into the free memory.
    """
    if requested is not None:
        return page_up(max(requested, 1))
    allowed = int(available_memory(ranks=ranks) * fraction) // max(1, count)
    if allowed < min(_LEAST, wanted):
        raise StorageError(
            f"{count} staging buffers on each of {ranks} ranks do not fit into {format_bytes(available_memory(ranks=1))} of free "
            "memory; "
            "free some, or say a smaller buffer_count"
        )
    return page_up(min(wanted, allowed))


def available_memory(*, ranks: int) -> int:
    """Bytes of host memory that this process may take, where `ranks` processes of the host take as many."""
    free = free_memory()
    return min((_UNKNOWN if free is None else free) // max(1, ranks), _rlimit_headroom())


def free_memory() -> int | None:
    """Bytes that this process can take without swapping: of the host, and of the control groups it is in.

    None where the system does not tell.
    """
    found = [_host(), *_cgroups_available()]
    known = [nbytes for nbytes in found if nbytes is not None]
    return max(0, min(known)) if known else None


def _rlimit_headroom() -> int:
    """Bytes that this process may still map under its limits of data (`ulimit -d`) and address space (`ulimit -v`)."""
    left = _UNLIMITED
    with contextlib.suppress(OSError, ImportError, ValueError):
        import resource

        used = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        for limit, name in ((resource.RLIMIT_DATA, "VmData"), (resource.RLIMIT_AS, "VmSize")):
            most = resource.getrlimit(limit)[0]
            if most != resource.RLIM_INFINITY and name in used:
                left = min(left, most - int(used[name].split()[0]) * 1024)
    return max(0, left)


def _host() -> int | None:
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def _cgroups_available() -> list[int | None]:
    """What every limit above this process leaves, under both versions of control groups."""
    found: list[int | None] = []
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                found += _cgroup_chain_available(
                    Path("/sys/fs/cgroup"), path, "memory.max", "memory.current", "inactive_file"
                )
            elif "memory" in controllers.split(","):
                names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
                found += _cgroup_chain_available(Path("/sys/fs/cgroup/memory"), path, *names)
    return found


def _cgroup_chain_available(root: Path, path: str, limit: str, usage: str, cache: str) -> list[int | None]:
    """Of a group and all that it lies in: its limit, less what is in use and can't simply be dropped."""
    group = root / path.lstrip("/")
    return [
        _cgroup_available(folder, limit, usage, cache)
        for folder in (group, *group.parents)
        if folder.is_relative_to(root)
    ]


def _cgroup_available(folder: Path, limit: str, usage: str, cache: str) -> int | None:
    try:
        most, used = (folder / limit).read_text().strip(), int((folder / usage).read_text())
        if most == "max" or int(most) > _UNLIMITED:
            return None
        kept = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return int(most) - used + int(kept.get(cache, 0))
    except (OSError, ValueError):  # no such file in the root group, or a container that hides it
        return None
