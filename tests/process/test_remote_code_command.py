"""Test that a command does not ask whether to run the Python files of a model directory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.unit.test_remote_code import strange

__all__ = ["strange"]


def test_command_does_not_prompt(strange: tuple[Path, Path], tmp_path: Path) -> None:
    folder, mark = strange
    command = [sys.executable, "-m", "windlass", "generate", str(folder), "--max-new-tokens", "2"]
    ended = subprocess.run(command, input="y\ny\n", capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1 and not mark.exists()
    assert "--trust-remote-code" in ended.stderr and "[y/N]" not in ended.stdout + ended.stderr
