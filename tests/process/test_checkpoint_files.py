"""Tests of checkpoint files with other processes: a standalone script, a live writer, peak memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.unit.compat.test_consolidated import made
from windlass.base.errors import CheckpointError
from windlass.checkpoint import SavedState, save
from windlass.compat.checkpoint.recovery_scripts import SCRIPTS, write_recovery_scripts

STATE = SavedState(tensors={"x": torch.ones(3)})
WRITER = """
import sys, time
from pathlib import Path
from windlass.checkpoint.staging_checkpoint import StagingCheckpoint
kept = StagingCheckpoint(Path(sys.argv[1]), "t")
(kept.path / "rank_00000.safetensors").write_text("half")
print(kept.path.name, flush=True)
time.sleep(600)
"""


def test_staging_checkpoint_of_a_live_writer_is_kept(tmp_path: Path) -> None:
    other = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None
        name = other.stdout.readline().strip()
        assert name.startswith(".t.") and name.endswith(".writing")
        with pytest.raises(CheckpointError, match=f"another job is saving .*: process {other.pid} "):
            save(tmp_path, "t", STATE)
        assert os.listdir(tmp_path) == [name]
        assert (tmp_path / name / "rank_00000.safetensors").read_text() == "half"
    finally:
        other.send_signal(signal.SIGKILL)
        other.communicate()
    save(tmp_path, "t", STATE)
    assert sorted(os.listdir(tmp_path)) == ["latest", "t"]


def test_recovery_script_of_a_checkpoint_runs(tmp_path: Path) -> None:
    weights = made(tmp_path, own=True)
    write_recovery_scripts(tmp_path)
    before = (tmp_path / "zero_to_fp32.py").stat().st_mtime_ns
    write_recovery_scripts(tmp_path)
    assert (tmp_path / "zero_to_fp32.py").stat().st_mtime_ns == before, "what is there is left alone"
    assert all(os.access(tmp_path / name, os.X_OK) for name in SCRIPTS)
    root = str(Path(__file__).resolve().parents[2])
    command = [sys.executable, "zero_to_fp32.py", ".", "out"]
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": root}, check=True)
    assert done.returncode == 0
    written = torch.load(tmp_path / "out" / "pytorch_model.bin", weights_only=True)
    assert torch.equal(written["up.weight"], weights["up.weight"])
    bare = [sys.executable, "-S", "-E", *command[1:]]  # without installed packages
    missing = subprocess.run(bare, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert missing.returncode == 1 and "is not installed here; pip install windlass" in missing.stderr


# The peak comes from /proc: that of getrusage includes the parent's memory before the fork.
_RISE = """
import sys, torch
from pathlib import Path
from windlass.checkpoint.safetensors_export import export_safetensors
import windlass.cli.export
def peak():
    return next(int(l.split()[1]) << 10 for l in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in l)
export_safetensors(sys.argv[2], sys.argv[3], dtype=torch.bfloat16)  # brings the libraries' own pages to memory
Path("/proc/self/clear_refs").write_text("5")
before = peak()
export_safetensors(sys.argv[1], sys.argv[3], dtype=torch.bfloat16, overwrite=True)
print(peak() - before)
"""


@pytest.mark.slow  # It measures memory; other tests check the same export.
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs the kernel's peak of memory")
def test_memory_is_independent_of_the_number_of_tensors(tmp_path: Path) -> None:
    """The export of three tensors of 64 MB raises the peak of memory by less than 24 MiB."""
    big = torch.arange(16_000_000, dtype=torch.float32)
    save(tmp_path / "run", "t", SavedState(tensors={f"param/{n}": big for n in "abc"}))
    save(tmp_path / "small", "t", SavedState(tensors={"param/a": big[:100_000].clone()}))
    done = subprocess.run(
        [sys.executable, "-c", _RISE, str(tmp_path / "run"), str(tmp_path / "small"), str(tmp_path / "out")],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 18)},  # freed memory is returned to the kernel
    )
    assert int(done.stdout) < 24 << 20
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["c"], big.bfloat16())
