"""Tests that the page on parameter servers has the figures of the measurement, and of their picture."""

from __future__ import annotations

import json
from pathlib import Path

from tests.unit.bench.conftest import BENCH, load_script


def test_the_page_has_the_figures_of_the_result() -> None:
    found = json.loads((BENCH / "results" / "parameter_server.json").read_text())
    summary = load_script("parameter_server").summary(found["curves"])
    assert summary == found["summary"]
    page = " ".join((BENCH.parent / "docs" / "parameter-server.md").read_text("utf-8").split())
    waits, goes = summary["synchronous"], summary["asynchronous"]
    assert f"makes {waits['updates']} updates in 25 s and ends at a held-out loss of {waits['loss']:.2f} nats" in page
    assert f"makes {goes['updates']:,}, has that loss after {summary['seconds_to_equal_loss']:.1f} s" in page
    assert f"ends at {goes['loss']:.2f}." in page


def test_the_curves_are_drawn(tmp_path: Path) -> None:
    found = json.loads((BENCH / "results" / "parameter_server.json").read_text())
    load_script("parameter_server")._example().draw(found["curves"], tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 10_000


def test_curves_that_never_meet_have_no_time() -> None:
    curves = {"synchronous": [[0.0, 0, 5.0], [2.0, 9, 1.0]], "asynchronous": [[0.0, 0, 5.0], [2.0, 20, 2.0]]}
    assert load_script("parameter_server").summary(curves)["seconds_to_equal_loss"] is None
