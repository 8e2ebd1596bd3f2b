"""Tests that docs/compat.md equals the tables of DeepSpeed names."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_compat_docs", ROOT / "tools" / "generate_compat_docs.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_page_is_up_to_date() -> None:
    text = (ROOT / "docs" / "compat.md").read_text("utf-8")
    assert generator().render_page(text) == text, "run python tools/generate_compat_docs.py"


def test_check_reports_a_stale_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = generator()
    module.PAGE = tmp_path / "compat.md"
    module.PAGE.write_text("<!-- generated: counts -->old<!-- end generated -->", "utf-8")
    assert module.main(["--check"]) == 1
    assert "out of date" in capsys.readouterr().out
    assert module.main([]) == 0
    assert module.main(["--check"]) == 0
    assert "names:" in module.PAGE.read_text("utf-8")
