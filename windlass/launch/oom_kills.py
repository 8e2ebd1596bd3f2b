"""Count of out-of-memory kills by the kernel, to explain why a rank was ended by SIGKILL."""

from __future__ import annotations

import contextlib
from pathlib import Path

_COUNTER_NAME = "oom_kill"


class OomKillCounter:
    """Counts of out-of-memory kills at construction, for a later comparison.

    Args:
        root: root of the file system; tests set it.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._before = self._counts()

    def has_increased(self) -> bool:
        """Return True if the kernel has killed a process for lack of memory since construction (machine or cgroup)."""
        now = self._counts()
        return any(count > self._before.get(path, 0) for path, count in now.items())

    def _counts(self) -> dict[Path, int]:
        found = {}
        for path in self._counter_files():
            with contextlib.suppress(OSError, ValueError):  # not Linux, or another version of cgroups
                for line in path.read_text().splitlines():
                    name, _, count = line.partition(" ")
                    if name == _COUNTER_NAME:
                        found[path] = int(count)
        return found

    def _counter_files(self) -> list[Path]:
        files, groups = [self._root / "proc/vmstat"], self._root / "sys/fs/cgroup"
        with contextlib.suppress(OSError):
            for line in (self._root / "proc/self/cgroup").read_text().splitlines():
                _, controllers, path = line.split(":", 2)
                if not controllers:
                    files.append(groups / path.lstrip("/") / "memory.events")
                elif "memory" in controllers.split(","):
                    files.append(groups / "memory" / path.lstrip("/") / "memory.oom_control")
        return files
