"""Test that the launcher names the rank that the kernel killed for lack of memory within a cgroup's limit."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

_LIMIT = 256 << 20
_GREEDY = """
import os, time
kept = []
while os.environ["RANK"] == "1":
    kept.append(bytearray(b"x") * (16 << 20))
time.sleep(600)
"""


@pytest.fixture
def limited_group() -> Iterator[Path]:
    """Make a cgroup with little memory, of either version. Needs the right to make one, as root has."""
    name = f"windlass-test-{os.getpid()}"
    first, second = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
    group = (first if first.is_dir() else second) / name
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made here: {error}")
    try:
        if first.is_dir():
            (group / "memory.limit_in_bytes").write_text(str(_LIMIT))
        else:
            (group / "memory.max").write_text(str(_LIMIT))
            (group / "memory.swap.max").write_text("0")
    except OSError as error:
        group.rmdir()
        pytest.skip(f"no memory limit can be set here: {error}")
    yield group
    group.rmdir()


@pytest.mark.skipif(sys.platform != "linux", reason="cgroups")
def test_launcher_names_the_rank_that_was_out_of_memory(limited_group: Path, tmp_path: Path) -> None:
    script = tmp_path / "greedy.py"
    script.write_text(_GREEDY)
    command = [sys.executable, "-m", "windlass", "run", "--nproc", "2", str(script)]
    inside = ["sh", "-c", 'echo $$ > "$0"/cgroup.procs && exec "$@"', str(limited_group), *command]
    done = subprocess.run(inside, capture_output=True, text=True, timeout=120)
    assert done.returncode == 137, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("windlass run: rank 1 was ended by SIGKILL: the kernel killed a process for lack of memory")
    assert "cgroup" in last and "raise the limit" in last
