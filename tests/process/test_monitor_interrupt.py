"""Tests that an interrupted run has written its monitor values."""

from __future__ import annotations

import csv
import signal
import subprocess
import sys
from pathlib import Path

import pytest

INTERRUPTED = """
import sys
from types import SimpleNamespace as N
from windlass.observe.monitor_writers import RunMonitor
off = N(enabled=False)
on = N(enabled=True, output_path=sys.argv[1], job_name="j")
monitor = RunMonitor(N(tensorboard=off, wandb=off, comet=off, csv_monitor=on), rank=0)
for step in range(10**9):
    monitor.write_events([("loss", 1.0, step)])
    if step == 20:
        print("going", flush=True)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGINT")
def test_interrupted_run_leaves_complete_rows(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert process.stdout is not None
    with process:
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
    content = (tmp_path / "j" / "loss.csv").read_text()
    assert content.endswith("\n")
    table = list(csv.reader(content.splitlines()))
    assert table[0] == ["step", "loss"] and len(table) > 20
    assert table[1:] == [[str(step), "1.0"] for step in range(len(table) - 1)]
