"""Test of Ctrl-C during `windlass train`: the run saves, ends within a minute, and continues with `--resume`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.process.wait_until import is_alive, until
from windlass.base.processes import descendants
from windlass.checkpoint import read_latest, read_plain


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("ranks", [1, 2])
def test_interrupted_run_is_saved_and_continues(ranks: int, tmp_path: Path) -> None:
    text, out = tmp_path / "corpus.txt", tmp_path / "out"
    text.write_text("".join(f"line {number} of a corpus, {number * number % 977}\n" for number in range(20_000)))
    command = [sys.executable, "-m", "windlass", "train"]
    size = ["--vocab-size", "300", "--seq-len", "32", "--eval-bytes", "20000", "--sample-tokens", "0"]
    options = ["--data", str(text), "--nproc", str(ranks), "--steps", "100000", "--save-every", "5", *size]
    log = tmp_path / "log"
    with log.open("w") as file:
        run = subprocess.Popen(
            [*command, "--model", "tiny", *options, "--out", str(out)],
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # the group that a terminal sends its Ctrl-C to
        )
    try:
        until(lambda: run.poll() is not None or (out / "checkpoint" / "latest").exists(), "a checkpoint appears")
        assert run.poll() is None, log.read_text()
        started = descendants(run.pid)
        assert len(started) >= ranks
        os.killpg(run.pid, signal.SIGINT)
        assert run.wait(60) == 130
        until(lambda: not any(map(is_alive, started)), "all ranks end")
    finally:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)
            run.wait()
    printed = log.read_text()
    assert "Traceback" not in printed
    assert printed.splitlines()[-1] == f"stopped; continue with: windlass train --resume --out {out}"
    steps = read_plain(out / "checkpoint")["engine"]["global_steps"]
    assert read_latest(out / "checkpoint") == f"step{steps}" and steps >= 5
    resumed = [*command, "--resume", "--out", str(out), "--steps", str(steps + 2)]
    done = subprocess.run(resumed, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert read_plain(out / "checkpoint")["engine"]["global_steps"] == steps + 2
