"""Tests of the command line: its commands exist, and an expected error prints one message."""

from __future__ import annotations

import errno
import importlib
import os
import signal
import stat
import sys
from pathlib import Path
from types import ModuleType
from typing import Annotated

import pytest
import typer

import windlass
from windlass.base.errors import CheckpointError, ConfigError
from windlass.base.processes import SignalInterrupt
from windlass.cli import main as command_line
from windlass.cli.expected_errors import describe_expected_error
from windlass.cli.main import COMMANDS, app, main
from windlass.launch.exit_status import LaunchExitStatus, RankFailure


@pytest.fixture(autouse=True)
def _own_debug(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WINDLASS_DEBUG", "0")


def call(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    return int(ended.value.code or 0)


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Add a command `fail` that raises the exception that the test assigns to `windlass_failing.error`."""
    module = ModuleType("windlass_failing")

    def fail(code: Annotated[int, typer.Option()] = 0) -> None:
        if code:
            raise typer.Exit(code)
        raise module.error  # type: ignore[attr-defined]

    module.fail = fail  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    entry = command_line.CliCommand("fail", module.__name__, "fail", "Fails.")
    monkeypatch.setattr(command_line, "COMMANDS", (*COMMANDS, entry))
    monkeypatch.setitem(command_line._COMMAND_BY_NAME, "fail", entry)
    return module


def test_every_command_exists_and_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    for entry in COMMANDS:
        assert call(entry.name, "--help") == 0
        assert f"Usage: windlass {entry.name}" in capsys.readouterr().out


def test_help_lists_every_command_without_importing_it(capsys: pytest.CaptureFixture[str]) -> None:
    before = set(sys.modules)
    assert call("--help") == 0
    listed = capsys.readouterr().out
    assert all(f"  {entry.name} " in listed and entry.summary in listed for entry in COMMANDS)
    assert not {entry.module for entry in COMMANDS} & (set(sys.modules) - before)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--version") == 0
    assert capsys.readouterr().out.strip() == windlass.__version__


def test_misspelt_command_is_refused_with_the_nearest_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("trian") == 2
    assert "'train'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ConfigError("zero_optimization.stage is 7; use 0 to 3"), "zero_optimization.stage is 7; use 0 to 3"),
        (CheckpointError("out/latest is damaged"), "out/latest is damaged"),
        (ModuleNotFoundError("No module named 'transformers'", name="transformers"), "pip install 'windlass[hf]'"),
        (ModuleNotFoundError("No module named 'x'", name="matplotlib.pyplot"), "pip install 'windlass[plot]'"),
        (OSError(errno.ENOSPC, "No space left on device", "out/rank_0"), "the disk is full: out/rank_0"),
        (OSError(errno.ENOSPC, "No space left on device"), "the disk is full;"),
        (PermissionError(errno.EACCES, "Permission denied", "ds.json"), "Permission denied: ds.json"),
    ],
)
def test_windlass_errors_print_one_message(
    error: Exception, message: str, failing: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    failing.error = error
    assert call("fail") == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("windlass: ")
    assert message in printed.err
    assert printed.err.count("\n") == 1
    for arguments in (["--debug", "fail"], ["fail", "--debug"]):
        with pytest.raises(type(error)):
            main(arguments)


@pytest.mark.parametrize("command", ["profile", "verify"])
def test_debug_after_two_dashes_belongs_to_the_script(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import click

    group = typer.main.get_command(app)
    words = [command, "train.py", "--debug", "--", "--debug"]
    monkeypatch.setenv("WINDLASS_DEBUG", "0")
    _, _, rest = group.resolve_command(click.Context(group), words)
    assert rest == ["train.py", "--", "--debug"] and os.environ["WINDLASS_DEBUG"] == "1"
    monkeypatch.setenv("WINDLASS_DEBUG", "0")
    _, _, rest = group.resolve_command(click.Context(group), [command, "train.py", "--", "--debug"])
    assert rest == ["train.py", "--", "--debug"] and os.environ["WINDLASS_DEBUG"] == "0"


def test_other_errors_keep_their_traceback(failing: ModuleType) -> None:
    failing.error = KeyError("a bug")
    assert describe_expected_error(failing.error) is None
    with pytest.raises(KeyError):
        main(["fail"])


def test_a_signal_gives_the_exit_code(failing: ModuleType) -> None:
    failing.error = KeyboardInterrupt()
    assert call("fail") == 130
    failing.error = SignalInterrupt(signal.SIGTERM)
    assert call("fail") == 143


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("command", ["profile", "verify"])
def test_a_signal_to_the_ranks_gives_the_exit_code(
    command: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = {"profile": "windlass.tracing.profile_job", "verify": "windlass.verify.verification_run"}[command]
    stopped = LaunchExitStatus(128 + number, interrupted_by=number)
    monkeypatch.setattr(importlib.import_module(job), "start_ranks", lambda *words, **more: stopped)
    monkeypatch.chdir(tmp_path)
    assert call(command, __file__) == 128 + number
    assert capsys.readouterr().err.startswith("windlass: interrupted before the ")
    failed = LaunchExitStatus(3, (RankFailure(0, 3, 0),), interrupted_by=number)
    monkeypatch.setattr(importlib.import_module(job), "start_ranks", lambda *words, **more: failed)
    assert call(command, __file__) == 1
    assert "rank 0 ended with exit code 3" in capsys.readouterr().err


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_ctrl_c_in_an_import_ends_the_command_though_the_import_ignores_it(
    tmp_path: Path, failing: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "import os, signal\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\nexcept BaseException:\n    pass\n"
    (tmp_path / "ignores_exceptions.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(failing, "fail", lambda: importlib.import_module("ignores_exceptions"))
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            main(["fail"])
        finally:
            os._exit(7)  # the import was completed
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 130


def test_handler_of_ctrl_c_is_restored(failing: ModuleType) -> None:
    before = signal.getsignal(signal.SIGINT)
    assert call("fail", "--code", "7") == 7
    assert signal.getsignal(signal.SIGINT) is before


def test_exit_code_of_a_command_is_returned(failing: ModuleType) -> None:
    assert call("fail", "--code", "7") == 7


def test_env_prints_no_unknown_fact(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("env") == 0
    printed = capsys.readouterr().out
    assert windlass.__version__ in printed
    assert "unknown (" not in printed or sys.platform != "linux"


@pytest.mark.parametrize("before", [0o000, 0o022, 0o077])
def test_commands_create_no_world_writable_files(
    before: int, tmp_path: Path, failing: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"

    class Noted(ConfigError):
        def __str__(self) -> str:
            file.touch()
            return "noted"

    failing.error = Noted()  # type: ignore[attr-defined]
    own = os.umask(before)
    try:
        assert call("fail") == 1
    finally:
        os.umask(own)
    assert stat.S_IMODE(file.stat().st_mode) == 0o666 & ~(before | 0o002)
