"""Functions that wait for other processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path


def until(condition: Callable[[], bool], what: str, seconds: float = 60) -> None:
    """Wait until `condition()` is true. After `seconds`, fail with `what` in the message."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not after {seconds} s"
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    """Return True if a process runs. A zombie counts as ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
