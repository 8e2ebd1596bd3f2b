"""Tests that a command ends silently when the reader of its output closes the pipe."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


# 1: the line stays in the buffer until exit; 100,000: lines are written before exit
@pytest.mark.parametrize("lines", [1, 100_000])
def test_command_with_closed_output_exits_silently(lines: int) -> None:
    text = f"""
from windlass.base.broken_pipe import exit_quietly_on_broken_pipe
@exit_quietly_on_broken_pipe()
def command():
    for number in range({lines}):
        print("line", number)
    raise SystemExit(0)
command()
"""
    ours, theirs = os.pipe()
    os.close(ours)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", text], stdout=theirs, stderr=subprocess.PIPE, env=env, timeout=60)
    os.close(theirs)
    assert (done.returncode, done.stderr) == (1, b"")


def test_report_with_closed_output_exits_silently() -> None:
    ours, theirs = os.pipe()
    os.close(ours)
    text = "from windlass.compat.ds_report import cli_main; cli_main()"
    words = [sys.executable, "-c", text, "--hide_operator_status"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, stdout=theirs, stderr=subprocess.PIPE, env=env, timeout=120)
    os.close(theirs)
    assert (done.returncode, done.stderr) == (1, b"")
