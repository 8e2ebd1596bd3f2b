"""Tests that the snippet of docs/disk.md runs as written, with smaller sizes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

PAGE = Path(__file__).parents[3] / "docs/disk.md"


def test_snippet_runs(tmp_path: Path) -> None:
    found = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert found is not None
    code = found[1].replace("/mnt", str(tmp_path)).replace("50_000_000", "5000")
    code = code.replace("measure_rates()", "measure_rates(1 << 20)")
    assert "measure_rates(1" in code and "50_000_000" not in code
    for disk in ("nvme0", "nvme1"):
        (tmp_path / disk).mkdir()
    names: dict[str, Any] = {}
    exec(compile(code, str(PAGE), "exec"), names)
    assert torch.equal(names["staging"], names["moments"].view(torch.uint8))
