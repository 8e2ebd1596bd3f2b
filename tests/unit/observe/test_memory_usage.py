"""Tests that memory figures follow the process's use, and are absent if the system does not report them."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

from windlass.observe import memory_usage

linux = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
SIZE = 64 << 20


@linux
def test_touched_memory_is_measured() -> None:
    measures = (
        [memory_usage.resident_bytes, memory_usage.proportional_bytes]
        if memory_usage.proportional_bytes() is not None
        else [memory_usage.resident_bytes]
    )
    for measure in measures:
        seen = []
        for _ in range(5):  # memory of earlier tests may be freed between two measurements
            before = measure()
            with mmap.mmap(-1, SIZE) as block:  # not from malloc, which may return pages that are resident already
                block.write(b"1" * SIZE)
                after = measure()
            assert before is not None and after is not None
            seen.append(after - before)
            if 0.9 * SIZE < seen[-1] < 1.5 * SIZE:
                break
        else:
            pytest.fail(f"measured {seen} of {SIZE} bytes")
    peak, now = memory_usage.peak_resident_bytes(), memory_usage.resident_bytes()
    assert peak is not None and now is not None and peak >= 0.99 * now


def test_usage_without_proc_is_none_and_still_logged(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(memory_usage, "_PROC", tmp_path)
    assert (
        memory_usage.resident_bytes() is memory_usage.proportional_bytes() is memory_usage.peak_resident_bytes() is None
    )
    assert "unknown" in memory_usage.see_memory_usage("after step")


def test_units(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "status").write_text("VmHWM:\t 3145728 kB\nVmRSS:\t 2097152 kB\n")
    (tmp_path / "smaps_rollup").write_text("Rss: 2097152 kB\nPss:    1572864 kB\nPss_Anon: 1 kB\n")
    monkeypatch.setattr(memory_usage, "_PROC", tmp_path)
    assert (memory_usage.resident_bytes(), memory_usage.peak_resident_bytes(), memory_usage.proportional_bytes()) == (
        2 << 30,
        3 << 30,
        3 << 29,
    )
    line = memory_usage.see_memory_usage("after step", "cpu")
    assert line == "after step: host resident 2.00 GiB, peak 3.00 GiB, proportional 1.50 GiB"


def test_cpu_reports_no_device_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert memory_usage.device_memory("cpu") is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    figures = {"memory_allocated": 1, "max_memory_allocated": 2, "memory_reserved": 3, "max_memory_reserved": 4}
    for name, value in figures.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value << 30)
    assert memory_usage.device_memory("cpu") is None
    assert memory_usage.device_memory("cuda") == memory_usage.DeviceMemory(1 << 30, 2 << 30, 3 << 30, 4 << 30)
    assert "device allocated 1.00 GiB (peak 2.00 GiB), reserved 3.00" in memory_usage.see_memory_usage("x", "cuda")
