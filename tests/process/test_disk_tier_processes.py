"""Tests of the end of processes with a disk tier: no file remains; the next tier removes a killed process's folder."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.unit.storage.conftest import engine, refusal
from windlass.storage import DiskTier
from windlass.storage.io_engine import ENGINES

__all__ = ["engine"]

# Importing torch takes seconds: one process imports it, and each case runs in a fork of it. The exit of Python with
# torch is slow too, so cases that do not test it run only the exit handlers.
_FORKS = """
import atexit, json, os, signal, sys, threading, torch, traceback
from windlass.base.errors import StorageError
from windlass.storage import DiskTier
codes = {}
for name, (code, engine, folder) in json.load(sys.stdin).items():
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        os.dup2(os.open(folder + ".out", os.O_CREAT | os.O_WRONLY), 1)
        os.dup2(1, 2)
        if name.endswith(" end"):
            exec(code)
            sys.exit()
        status = 0
        try:
            exec(code)
        except SystemExit as leaving:
            status = leaving.code
        except BaseException:
            traceback.print_exc()
            status = 1
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        os._exit(status)
    codes[name] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
print(json.dumps(codes))
"""
_BEGIN = """
tier = DiskTier([folder], engine=engine)
extent = tier.allocate(1 << 22, "values")
pending = tier.write(extent, 0, torch.ones(1 << 20))
print(os.listdir(folder), flush=True)
"""
_FORKED = """
grandchild = os.fork()
if grandchild == 0:
    refused = 0
    reads = lambda: tier.read(extent, 0, torch.zeros(1))
    for act in (lambda: tier.allocate(1, "x"), pending.wait, pending.poll, reads):
        try: act()
        except StorageError as error: refused += "forked" in str(error)
    tier.close()
    del tier, extent, pending, act, reads
    sys.exit(refused)
refused = os.waitstatus_to_exitcode(os.waitpid(grandchild, 0)[1])
pending.wait()
back = torch.zeros(1 << 20)
tier.read(extent, 0, back).wait()
sys.exit(10 * refused + bool((back == 1).all()) + len(os.listdir(folder)))
"""
_ENDS = {  # code with which the process ends, and its exit code
    "end": ("", 0),
    "exception": ("raise RuntimeError('odd')", 1),
    "exit": ("sys.exit(3)", 3),
    "dropped": ("del tier, extent, pending", 0),
    "forks": (_FORKED, 42),
    "killed": ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
}


class Ended(NamedTuple):
    """Process that made a tier and ended."""

    code: int
    said: str
    folder: Path


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """Ended processes, by engine and kind of end."""
    root = tmp_path_factory.mktemp("ended")
    engines = [name for name in ENGINES if refusal(name) is None]
    cases = {f"{engine} {end}": (_BEGIN + code, engine) for engine in engines for end, (code, _) in _ENDS.items()}
    tasks = {name: (code, engine, str(root / name)) for name, (code, engine) in cases.items()}
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _FORKS],
        input=json.dumps(tasks),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert run.returncode == 0, run.stderr
    codes = json.loads(run.stdout)
    return {name: Ended(codes[name], Path(f"{root / name}.out").read_text(), root / name) for name in tasks}


def _left(folder: Path) -> list[str]:
    return [entry.name for entry in folder.iterdir()]


@pytest.mark.parametrize("end", [end for end in _ENDS if end != "killed"])
def test_nothing_is_left_when_the_process_ends(ended: dict[str, Ended], engine: str, end: str) -> None:
    result = ended[f"{engine} {end}"]
    assert result.code == _ENDS[end][1], result.said
    assert result.said.startswith("['windlass-")
    assert ("odd" in result.said) == (end == "exception") and "StorageError" not in result.said
    assert _left(result.folder) == []


def test_a_killed_run_leaves_no_bytes_and_the_next_removes_its_directory(ended: dict[str, Ended], engine: str) -> None:
    result = ended[f"{engine} killed"]
    assert result.code == -signal.SIGKILL
    (name,) = _left(result.folder)
    assert list((result.folder / name).iterdir()) == []
    (result.folder / name / "stripe").write_bytes(b"killed between opening and unlinking")
    DiskTier([result.folder], engine=engine).close()
    assert _left(result.folder) == []
