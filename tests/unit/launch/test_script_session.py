"""Tests of the run of a script, and of the record of its failure."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from windlass.launch.script_session import record_script_failure


def test_a_failure_that_quotes_a_name_in_another_encoding_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    name = os.fsdecode(b"caf\xe9")
    record_script_failure(tmp_path / "failure", ValueError(f"{name} → bad"))
    record_script_failure(tmp_path / "failure", ValueError("a consequence"))
    assert (tmp_path / "failure").read_text(encoding="utf-8") == "rank 1: ValueError: caf\\udce9 → bad"


@pytest.mark.parametrize(
    ("end", "code"),
    [("sys.exit()", 0), ("sys.exit(3)", 3), ("sys.exit('why')", 1), ("pass", 0), ("raise ValueError", 1)],
)
def test_a_process_that_the_script_forks_ends_with_the_script(tmp_path: Path, end: str, code: int) -> None:
    script = tmp_path / "forks.py"
    wait = "print('child ended with', os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))"
    script.write_text(
        f"import os, sys\nchild = os.fork()\nif child:\n    {wait}\nelse:\n    print('child', flush=True)\n    {end}\n"
    )
    run = f"from windlass.launch.script_session import run_script; run_script([{str(script)!r}]); print('returned')"
    found = subprocess.run([sys.executable, "-c", run], capture_output=True, text=True)
    assert found.stdout.splitlines() == ["child", f"child ended with {code}", "returned"], found.stderr
    assert ("why" in found.stderr, "ValueError" in found.stderr) == ("why" in end, "ValueError" in end)
