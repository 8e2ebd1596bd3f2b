"""Information about a path before a disk tier is opened there. Inspecting changes nothing on the disk."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from pathlib import Path

from windlass.storage.disk_error_messages import format_bytes
from windlass.storage.process_directory import unusable_path_error
from windlass.storage.striped_files import MEMORY_FILESYSTEMS, filesystem_of


@dataclass(frozen=True)
class DiskPathInfo:
    """Path that a disk tier may use.

    Attributes:
        problem: reason why it can't be used; empty if it can.
        filesystem: type of its file system.
        free_bytes: free space.
    """

    path: Path
    problem: str
    filesystem: str
    free_bytes: int

    @property
    def is_memory(self) -> bool:
        """True if files there are stored in memory."""
        return self.filesystem in MEMORY_FILESYSTEMS

    def __str__(self) -> str:
        warning = "; this is memory, so offloading to it saves none" if self.is_memory else ""
        return f"{self.path} ({self.filesystem}, {format_bytes(self.free_bytes)} free{warning})"


def inspect_disk_path(path: Path) -> DiskPathInfo:
    """Inspect a path. If it does not exist yet, inspect its nearest existing parent."""
    there = path.absolute()
    while not there.exists() and there != there.parent:
        there = there.parent
    problem = ""
    if not there.is_dir():
        problem = str(unusable_path_error(path, NotADirectoryError(errno.ENOTDIR, "")))
    elif not os.access(there, os.W_OK | os.X_OK):
        problem = str(unusable_path_error(path, PermissionError(errno.EACCES, "")))
    state = os.statvfs(there)
    return DiskPathInfo(path, problem, filesystem_of(there), state.f_bavail * state.f_frsize)
