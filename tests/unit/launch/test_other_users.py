"""Tests of a launch on a host with hostile users: their links in /tmp, their modules in the working directory."""

from __future__ import annotations

import importlib
import os
import stat
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer

import windlass
from windlass.cli import run as run_command
from windlass.compat import deepspeed_command
from windlass.compat.pid_file import pid_file
from windlass.launch import rendezvous_store
from windlass.launch.launch_errors import LaunchError
from windlass.launch.rendezvous_store import RendezvousStore
from windlass.launch.source_path import source_pythonpath


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_link_at_the_name_of_the_pid_file_is_not_followed(temporary: Path) -> None:
    path, victim = temporary / f"{os.getpid()}.deepspeed", temporary / "victim"
    victim.write_text("kept")
    path.symlink_to(victim)
    with pid_file(True):
        assert path.read_text() == str(os.getpid()) and not path.is_symlink()
        assert not stat.S_IMODE(path.stat().st_mode) & 0o022
    assert victim.read_text() == "kept" and sorted(temporary.iterdir()) == [victim]
    with pid_file(False):
        assert not path.exists()


def test_a_pid_file_that_cannot_be_written_is_refused(temporary: Path) -> None:
    path = temporary / f"{os.getpid()}.deepspeed"
    path.mkdir()
    with pytest.raises(LaunchError, match=r"--save_pid: .*\.deepspeed cannot be written .*set TMPDIR"), pid_file(True):
        pass
    assert list(temporary.iterdir()) == [path]


@pytest.mark.parametrize(("words", "exists"), [(["--save_pid"], True), ([], False)])
def test_both_commands_keep_the_pid_file_during_the_launch(
    words: list[str], exists: bool, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []

    def launch(*_: object, **__: object) -> int:
        seen.append((temporary / f"{os.getpid()}.deepspeed").exists())
        return 0

    for command in (run_command, deepspeed_command):
        monkeypatch.setattr(command, "launch_from_args", launch)
    with pytest.raises(typer.Exit):
        run_command.run([*words, __file__])
    deepspeed_command.run([*words, __file__])
    assert seen == [exists, exists] and not list(temporary.iterdir())


def test_the_store_imports_nothing_from_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = "import pathlib, sys; pathlib.Path('searched').write_text('\\n'.join(sys.path))"
    monkeypatch.setattr(rendezvous_store, "_SERVER_PROGRAM", program)
    monkeypatch.chdir(tmp_path)
    store = RendezvousStore(0, all_interfaces=False)
    store.serve()
    searched = tmp_path / "searched"
    for _ in range(1000):
        if searched.exists() and searched.read_text():
            break
        time.sleep(0.02)
    store.close()
    assert not {"", ".", str(tmp_path)} & set(searched.read_text().split("\n"))


def test_workers_of_train_import_nothing_from_the_working_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []
    launched = importlib.import_module("windlass.launch.start_ranks")
    monkeypatch.setattr(launched, "start_ranks", lambda *args, **more: calls.append((*args, more)))
    monkeypatch.setenv("PYTHONPATH", "/of/the/user")
    plan: Any = SimpleNamespace(plan_file="plan", nproc=2)
    importlib.import_module("windlass.cli.train")._launch_ranks(plan, Path("failure"))
    ((command, ranks, more),) = calls
    assert command[:3] == ["-P", "-m", "windlass.cli.train_worker"] and ranks == 2
    assert more["env"]["PYTHONPATH"].split(os.pathsep)[0] == "/of/the/user"


def test_the_source_tree_is_found_from_any_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windlass, "__file__", "/tree/windlass/__init__.py")
    assert source_pythonpath("") == "/tree"
    assert source_pythonpath(os.pathsep.join(["/tree", "/more"])) == os.pathsep.join(["/tree", "/more"])
    monkeypatch.setattr(windlass, "__file__", "/env/site-packages/windlass/__init__.py")
    assert source_pythonpath("/more") == "/more"
