"""Tests that ranks start with the right environment, and that their exit codes are returned."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.ports import free_port
from windlass.cli.main import main
from windlass.launch.exit_status import LaunchExitStatus
from windlass.launch.start_ranks import LaunchError, launch, start_ranks, threads_per_rank

REPORT = """
import json, os, sys
from pathlib import Path
names = "RANK LOCAL_RANK WORLD_SIZE MASTER_ADDR MASTER_PORT OMP_NUM_THREADS COLOUR".split()
report = {"arguments": sys.argv[1:], **{name: os.environ.get(name) for name in names}}
Path(__file__).with_name(f"rank{os.environ['RANK']}.json").write_text(json.dumps(report))
"""


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], str]:
    def write(source: str) -> str:
        path = tmp_path / "script.py"
        path.write_text(source)
        return str(path)

    return write


def reports(folder: Path) -> list[dict[str, str]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("rank*.json"))]


def test_ranks_have_their_environment(
    tmp_path: Path, script: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))  # other tests launch ranks at the same time
    before = dict(os.environ), signal.getsignal(signal.SIGINT)
    arguments = ["--flag", "two words", "$$ ${local_rank}", ""]
    assert launch([script(REPORT), *arguments], 3, env={"COLOUR": "blue"}) == 0
    result = reports(tmp_path)
    assert [report["RANK"] for report in result] == ["0", "1", "2"]
    assert [report["LOCAL_RANK"] for report in result] == ["0", "1", "2"]
    assert len({report["MASTER_PORT"] for report in result}) == 1
    for report in result:
        assert report["WORLD_SIZE"] == "3"
        assert report["MASTER_ADDR"] == "127.0.0.1"
        assert report["OMP_NUM_THREADS"] == str(threads_per_rank(3))
        assert report["COLOUR"] == "blue"
        assert report["arguments"] == arguments
    assert (dict(os.environ), signal.getsignal(signal.SIGINT)) == before, "the launcher left something behind"
    assert list((tmp_path / "temporary").iterdir()) == []


def test_thread_count_of_the_user_is_kept(
    tmp_path: Path, script: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert launch([script(REPORT)], 1) == 0
    assert reports(tmp_path)[0]["OMP_NUM_THREADS"] == "7"


def test_module_is_run(tmp_path: Path, script: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> None:
    script(REPORT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert launch(["script", "one"], 1, module=True) == 0
    assert launch(["-m", "script", "one"], 1) == 0
    assert reports(tmp_path)[0]["arguments"] == ["one"]


def test_worst_exit_code_is_returned(script: Callable[[str], str], capfd: pytest.CaptureFixture[str]) -> None:
    outcome = start_ranks([script("import os, sys; sys.exit([4, 9, 2][int(os.environ['RANK'])])")], 3)
    # Timing decides which ranks fail before the launcher stops the others; only failures before the stop count.
    assert outcome.exit_code == max(failure.status for failure in outcome.failures)
    assert outcome.exit_code in (2, 4, 9)
    assert "Traceback" not in capfd.readouterr().err, "torch told its own version of the failure"


def test_one_failure_stops_the_others_and_is_named(script: Callable[[str], str]) -> None:
    outcome = start_ranks(
        [script("import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(5)\ntime.sleep(600)")], 3
    )
    assert outcome.exit_code == 5
    assert [(failure.rank, failure.status) for failure in outcome.failures] == [(1, 5)]


def test_a_rank_killed_by_a_signal(script: Callable[[str], str]) -> None:
    source = (
        "import os, signal, time\nif os.environ['RANK'] == '0': os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(600)"
    )
    outcome = start_ranks([script(source)], 2)
    assert outcome.exit_code == 128 + signal.SIGKILL
    assert len(outcome.failures) == 1
    assert str(outcome.failures[0]).startswith("rank 0 was ended by SIGKILL")


def test_busy_default_port_is_replaced(script: Callable[[str], str], tmp_path: Path) -> None:
    source = REPORT + (
        "import socket\nsocket.create_connection((os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT']))).close()\n"
    )
    with socket.socket() as squatter:
        squatter.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            squatter.bind(("127.0.0.1", 29500))
            squatter.listen()
        except OSError:
            pass  # another process uses the port, so it is busy anyway
        with pytest.raises(LaunchError, match="port 29500 is in use"):
            start_ranks([script(source)], 2, master_port=29500)
        assert start_ranks([script(source)], 2) == LaunchExitStatus(0)
    assert {report["MASTER_PORT"] for report in reports(tmp_path)} != {"29500"}


def test_a_chosen_port_is_used(script: Callable[[str], str], tmp_path: Path) -> None:
    port = free_port()
    assert start_ranks([script(REPORT)], 2, master_port=port).exit_code == 0
    assert {report["MASTER_PORT"] for report in reports(tmp_path)} == {str(port)}


LATE = """
import os, time, torch, windlass
from pathlib import Path
if os.environ["RANK"] == "1":
    while len(list(Path(__file__).parent.glob("there-*"))) < 2:
        time.sleep(0.01)
    time.sleep(9)
else:
    Path(__file__).with_name("there-" + os.environ["RANK"]).touch()
config = {"train_batch_size": 3, "optimizer": {"type": "AdamW"}, "watchdog": {"report_after_s": 4}}
windlass.initialize(model=torch.nn.Linear(2, 2), config=config)
"""


@pytest.mark.slow
def test_rank_that_initializes_late_is_named(script: Callable[[str], str], capfd: pytest.CaptureFixture[str]) -> None:
    """Ranks that have not reached `initialize`, e.g. because they tokenize, are named before any watchdog runs."""
    assert launch([script(LATE)], 3) == 0
    text = r"windlass: rank 0 has waited in initialize for \d+ s; missing ranks: 1 \(of 3\); see their output"
    assert re.search(text, capfd.readouterr().err)


# All ranks must have started when the launcher gets the signal: rank 0 waits for a file that rank 1 creates.
HANG_UP = """
import os, time
from pathlib import Path
there = Path(__file__).with_name("there")
if os.environ["RANK"] == "1":
    there.touch()
else:
    while not there.exists():
        time.sleep(0.01)
    there.unlink()
    os.kill({launcher}, 1)
time.sleep(0.5)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="there is no SIGHUP here")
def test_nohup_is_respected(script: Callable[[str], str]) -> None:
    source = HANG_UP.format(launcher=os.getpid())
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert launch([script(source)], 2) == 0
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        assert launch([script(source)], 2) == 128 + signal.SIGHUP
    finally:
        signal.signal(signal.SIGHUP, before)


def test_thread_count_given_by_the_caller_is_not_logged(
    tmp_path: Path, script: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    reported: list[str] = []
    monkeypatch.setattr("windlass.launch.start_ranks.logger.info", lambda text, *values: reported.append(text))
    assert launch([script(REPORT)], 1, env={"OMP_NUM_THREADS": "5"}) == 0
    assert not reported and reports(tmp_path)[0]["OMP_NUM_THREADS"] == "5"


def test_run_forwards_the_options_of_the_script(script: Callable[[str], str]) -> None:
    source = "import sys; sys.exit(0 if sys.argv[1:] == ['--debug', '--nproc', 'x', '-h'] else 9)"
    for ours, theirs, code in (("--nproc", ["--debug", "--nproc", "x", "-h"], 0), ("-n", [], 9)):
        with pytest.raises(SystemExit) as ended:
            main(["run", ours, "1", script(source), *theirs])
        assert ended.value.code == code
