"""What can be said of a path before a disk tier is opened there; nothing is made or changed."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from pathlib import Path

from windlass.storage.claim import refusal
from windlass.storage.failure import in_words
from windlass.storage.stripes import MEMORY, filesystem_of


@dataclass(frozen=True)
class Prospect:
    """A path that a disk tier may be asked to use.

    Attributes:
        problem: why it can't be used; empty if nothing speaks against it.
        kind: of its file system.
        free: bytes.
    """

    path: Path
    problem: str
    kind: str
    free: int

    @property
    def memory(self) -> bool:
        """Whether what is stored there takes memory."""
        return self.kind in MEMORY

    def __str__(self) -> str:
        warning = "; this is memory, so offloading to it saves none" if self.memory else ""
        return f"{self.path} ({self.kind}, {in_words(self.free)} free{warning})"


def look_at(path: Path) -> Prospect:
    """Look at a path, or where it is not there yet, at the directory in which it would be made."""
    there = path.absolute()
    while not there.exists() and there != there.parent:
        there = there.parent
    problem = ""
    if not there.is_dir():
        problem = str(refusal(path, NotADirectoryError(errno.ENOTDIR, "")))
    elif not os.access(there, os.W_OK | os.X_OK):
        problem = str(refusal(path, PermissionError(errno.EACCES, "")))
    state = os.statvfs(there)
    return Prospect(path, problem, filesystem_of(there), state.f_bavail * state.f_frsize)
