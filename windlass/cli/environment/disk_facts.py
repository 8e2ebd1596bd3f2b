"""Facts about the disk tier: the I/O engine in use, and the speed of a folder's disk under it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from windlass.base.errors import StorageError

_PROBE_BYTES = 128 << 20


def disk_engine() -> str:
    """Return the name of the I/O engine that would be used, and the reason."""
    from windlass import storage

    return storage.default_io_engine()


def disk_rates(folder: Path) -> dict[str, Any]:
    """Measure write and read rate of the disk of `folder` by direct I/O: 128 MiB each way, under a second on an SSD.

    Raises:
        StorageError: the folder cannot be used; the message gives the reason.
    """
    from windlass.storage import DiskTier, inspect_disk_path

    if not folder.is_dir():  # the disk tier would create it
        raise StorageError(f"{folder} is not a directory; give one on the disk to measure")
    prospect = inspect_disk_path(folder)
    with DiskTier([folder], label="windlass-env") as tier:
        found = tier.measure_rates(_PROBE_BYTES)
    return {
        "folder": str(folder),
        "file_system": prospect.filesystem,
        "memory": prospect.is_memory,
        "free_bytes": prospect.free_bytes,
        "measured_bytes": _PROBE_BYTES,
        "read_bytes_per_second": round(found.read_rate),
        "write_bytes_per_second": round(found.write_rate),
    }
