"""Tests that all ranks end with the launcher, however it ends, and have time to save after Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.process.wait_until import is_alive, until
from windlass.launch import exec_rank

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads the processes in Linux's /proc")

SAVER = """
import os, signal, sys, time
from pathlib import Path
mine = Path(__file__).with_name("rank" + os.environ["RANK"])
def save(number, frame):
    time.sleep(0.5)
    mine.with_suffix(".saved").touch()
    sys.exit(0)
signal.signal(signal.SIGINT, save)
mine.with_suffix(".pid").write_text(str(os.getpid()))
time.sleep(600)
"""
# Script whose ranks ignore Ctrl-C and start a child outside their process group.
STUBBORN = SAVER.replace(
    "signal.signal(signal.SIGINT, save)",
    """signal.signal(signal.SIGINT, signal.SIG_IGN)
import subprocess
stray = subprocess.Popen(["sleep", "600"], start_new_session=True)
mine.with_name("stray" + os.environ["RANK"]).write_text(str(stray.pid))""",
)
RANKS = 2


class Launched:
    """`windlass run` in a process of its own. Its ranks write their process ids to `folder`."""

    def __init__(self, folder: Path, source: str, *options: str) -> None:
        folder.mkdir()
        self.folder = folder
        script = folder / "script.py"
        script.write_text(source)
        self.arguments = ["run", "--nproc", str(RANKS), *options, str(script)]

    def send(self, number: signal.Signals) -> None:
        os.kill(int((self.folder / "launcher").read_text()), number)

    def is_up(self) -> bool:
        return len(self.pids()) == RANKS

    def pids(self) -> list[int]:
        return [int(text) for path in self.folder.glob("rank*.pid") if (text := path.read_text())]

    def status(self) -> int | None:
        """Return the exit code, negative for a signal, or None while the launcher runs."""
        path = self.folder / "status"
        return int(text) if path.exists() and (text := path.read_text()) else None

    def saved(self) -> int:
        return len(list(self.folder.glob("*.saved")))


# Imports take most of a launcher's time, so one process imports and forks all launchers.
FORKS = """
import json, os, sys
from pathlib import Path
import windlass.cli.run
from windlass.cli.main import main
children = {}
for folder, arguments in json.loads(sys.argv[1]):
    child = os.fork()
    if child == 0:
        os.dup2(os.open(Path(folder, "stderr"), os.O_WRONLY | os.O_CREAT), 2)
        main(arguments)
    children[child] = folder
    Path(folder, "launcher").write_text(str(child))
while children:
    child, status = os.wait()
    Path(children.pop(child), "status").write_text(str(os.waitstatus_to_exitcode(status)))
"""


def test_every_exit_ends_all_ranks(tmp_path: Path) -> None:
    killed = Launched(tmp_path / "killed", SAVER)
    requested = Launched(tmp_path / "asked", SAVER)
    ignored = Launched(tmp_path / "ignored", STUBBORN, "--grace", "1")
    everyone = (killed, requested, ignored)
    jobs = json.dumps([(str(launched.folder), launched.arguments) for launched in everyone])
    # Files that a killed launcher cannot remove stay in this test's folder.
    parent = subprocess.Popen([sys.executable, "-c", FORKS, jobs], env={**os.environ, "TMPDIR": str(tmp_path)})
    try:
        until(lambda: all(launched.is_up() for launched in everyone), "ranks start")
        killed.send(signal.SIGKILL)
        requested.send(signal.SIGINT)
        ignored.send(signal.SIGINT)
        until(lambda: all(launched.status() is not None for launched in everyone), "launchers end")
        until(lambda: not any(is_alive(pid) for launched in everyone for pid in launched.pids()), "ranks end")
        strays = [int(path.read_text()) for path in ignored.folder.glob("stray*")]
        until(lambda: not any(map(is_alive, strays)), "what ranks started ends")
        assert len(strays) == RANKS
    finally:
        for launched in everyone:
            if launched.status() is None and (launched.folder / "launcher").exists():
                launched.send(signal.SIGKILL)
        parent.wait()
    assert killed.status() == -signal.SIGKILL
    assert killed.saved() == 0
    assert requested.status() == 128 + signal.SIGINT
    assert requested.saved() == RANKS, "ranks had no time to save"
    assert ignored.status() == 128 + signal.SIGINT
    assert (requested.folder / "stderr").read_text().splitlines()[
        -1
    ] == "windlass run: stopped by SIGINT, all ranks have ended"


def test_dead_launcher_is_detected(tmp_path: Path) -> None:
    trace = tmp_path / "ran"
    not_the_parent = str(os.getpid())
    command = [sys.executable, exec_rank.__file__, not_the_parent, sys.executable, "-c", f"open({str(trace)!r}, 'w')"]
    between = f"import subprocess, sys; sys.exit(subprocess.call({command!r}))"
    assert subprocess.call([sys.executable, "-c", between]) == 128 + signal.SIGKILL
    assert not trace.exists()
