"""Memory for staging buffers: page-aligned allocation, and buffer sizes that fit in the free memory."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from pathlib import Path

import torch

from windlass.base.errors import StorageError
from windlass.kernels.huge_pages import advise_huge_pages
from windlass.storage.disk_error_messages import format_bytes
from windlass.storage.extent_allocator import page_up

_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # shared memory, mmap's default, gets no huge pages
_LEAST = 1 << 20
_UNKNOWN = 1 << 30
_UNLIMITED = 1 << 60


def aligned_buffer(nbytes: int) -> tuple[torch.Tensor, object]:
    """Return a page-aligned `[nbytes]` uint8 tensor in new memory, and the owner of the memory.

    Finalizers of the owner run when the last view of the memory is gone, just before the memory is unmapped.

    Raises:
        StorageError: `nbytes` is below 1, or there is not enough memory.
    """
    if nbytes < 1:
        raise StorageError(f"a staging buffer can't have {nbytes} bytes; request at least 1")
    try:
        memory = mmap.mmap(-1, page_up(nbytes), flags=_PRIVATE)
    except (OSError, OverflowError) as error:
        raise StorageError(
            f"no memory for a staging buffer of {format_bytes(nbytes)} ({error}); lower buffer_size or buffer_count"
        ) from error
    advise_huge_pages(memory, 0, len(memory))  # faster page faults and address translation
    # Finalizers attach to the ctypes array: one on the mmap would run after the memory is unmapped.
    owner = (ctypes.c_ubyte * len(memory)).from_buffer(memory)
    return torch.frombuffer(owner, dtype=torch.uint8)[:nbytes], owner


def staging_buffer_bytes(
    wanted: int, count: int, *, requested: int | None = None, ranks: int = 1, fraction: float = 0.25
) -> int:
    """Return the bytes of each of `count` staging buffers, rounded up to whole pages.

    All ranks of the host share the free memory of the host and its control groups. This process's own limits (`ulimit
    -d`, `ulimit -v`) are not shared.

    Args:
        wanted: size of the largest transfer in bytes. A larger buffer is useless.
        count: buffers in use at once.
        requested: bytes that the user configured. They are used unchecked, even if memory looks too small.
        ranks: number of processes on this host that allocate as much.
        fraction: fraction of the free memory that all buffers of all ranks may use together.

    Raises:
        StorageError: buffers of 1 MiB, or of `wanted` bytes if that is less, do not fit in this fraction.
    """
    if requested is not None:
        return page_up(max(requested, 1))
    allowed = int(available_memory(ranks=ranks) * fraction) // max(1, count)
    if allowed < min(_LEAST, wanted):
        raise StorageError(
            f"{count} staging buffers on each of {ranks} ranks do not fit into their part of "
            f"{format_bytes(available_memory(ranks=1))} of free memory; free some memory, or set a smaller buffer_count"
        )
    return page_up(min(wanted, allowed))


def available_memory(*, ranks: int) -> int:
    """Return the bytes of host memory that this process may use if `ranks` processes on the host use as much each."""
    free = free_memory()
    return min((_UNKNOWN if free is None else free) // max(1, ranks), _rlimit_headroom())


def free_memory() -> int | None:
    """Return the bytes that this process can use without swapping: the least that the host or a control group leaves.

    None if the system does not provide the number.
    """
    found = [_host(), *_cgroups_available()]
    known = [nbytes for nbytes in found if nbytes is not None]
    return max(0, min(known)) if known else None


def _rlimit_headroom() -> int:
    """Return the bytes that this process may still map under its data (`ulimit -d`) and address-space (`ulimit -v`)
    limits.
    """
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
    """Return the memory left under each limit that applies to this process, in both versions of control groups."""
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
    """Return, for a group and each of its parents, its limit minus the memory in use that is not reclaimable cache."""
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
    except (OSError, ValueError):  # the root cgroup has no such files, and some containers hide them
        return None
