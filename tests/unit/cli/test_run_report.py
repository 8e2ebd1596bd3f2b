"""Tests of `windlass report`: the page of a run, and text of files that must not become markup."""

from __future__ import annotations

import asyncio
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from tests.headless_browser import open_page
from windlass.base.errors import ConfigError, DataError
from windlass.base.log import logger
from windlass.cli.main import app
from windlass.cli.run_report.run_data import read_run
from windlass.cli.run_report.svg_charts import line_chart, nice_ticks, thinned
from windlass.cli.training.run_metrics import MetricsLog, MetricsRow
from windlass.observe.run_record import RunRecord, read_record, without_secrets

HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>"


class Page(HTMLParser):
    """Elements and text of a page, with a check that tags are balanced."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        assert not self._open, f"not closed: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in ("meta",):
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self._open and self._open.pop() == tag, tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def write_record(path: Path, steps: int = 6, **config: Any) -> None:
    record = RunRecord(path)
    record.write("run", config=config, machine={"cpu": {"name": "x"}, "memory": {"total_bytes": 2**31}}, world_size=2)
    for step in range(1, steps + 1):
        values = {"loss": math.inf if step == 2 else 4.0 / step, "learning_rate": 1e-3, "seconds": 0.5}
        phases = {"forward": 0.1, "backward": 0.2, "step": 0.05}
        moved = {"gather": 1 << 20, "reduce": 1 << 20}
        record.write("step", step=step, samples=8 * step, **values, phases=phases, bytes_moved=moved)
    logger.warning("a warning of the run")
    record.write("checkpoint", action="save", step=steps, path="out/step6", seconds=0.25)
    record.close()


def page_of(*arguments: str, folder: Path) -> str:
    out = folder / "page.html"
    result = CliRunner().invoke(app, ["report", *arguments, "--out", str(out)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert f"report: {out}" in result.output
    return out.read_text()


def test_a_page_shows_a_run_and_needs_no_network(tmp_path: Path) -> None:
    write_record(tmp_path / "run" / "run.jsonl", zero_optimization={"stage": 2})
    text = page_of(str(tmp_path / "run"), folder=tmp_path)
    page, words = Page(text), " ".join(Page(text).text)
    assert page.tags.count("svg") == 6  # loss, rate, samples per second, seconds, communication; phases
    for expected in ("zero_optimization.stage", "a warning of the run", "out/step6", "2.0 GiB", "ended by the script"):
        assert expected in words
    assert "script" not in page.tags and "link" not in page.tags and "img" not in page.tags
    assert not re.search(r"https?://|//[a-z]", text) and "default-src 'none'" in text
    assert not [name for name, _ in page.attributes if name in ("src", "href") or name.startswith("on")]


def test_text_of_files_stays_text(tmp_path: Path) -> None:
    folder = tmp_path / "<b>run"
    config: dict[str, Any] = {HOSTILE: HOSTILE, "nested": {HOSTILE: [HOSTILE]}}
    write_record(folder / "run.jsonl", **config)
    machine = {HOSTILE: HOSTILE, "devices": [HOSTILE]}
    lines: list[dict[str, Any]] = [{"kind": "run", "transport": HOSTILE, "mesh": {HOSTILE: 1}, "machine": machine}]
    lines += [{"kind": "step", "step": 7, "phases": {HOSTILE: 1.0}, "loss": HOSTILE, "bytes_moved": HOSTILE}]
    lines += [{"kind": "log", "level": HOSTILE, "message": HOSTILE, "time": HOSTILE}]
    lines += [{"kind": "checkpoint", "action": HOSTILE, "path": HOSTILE, "step": HOSTILE, "seconds": HOSTILE}]
    with (folder / "run.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    page = Page(page_of(str(folder), "--against", str(folder), folder=tmp_path))
    assert not {"script", "img", "b"} & set(page.tags)
    assert any(HOSTILE in part for part in page.text)


def test_numbers_beyond_float64_are_left_out(tmp_path: Path) -> None:
    huge = 10**400
    lines: list[dict[str, Any]] = [{"kind": "run", "machine": {"memory": {"total_bytes": huge}}, "world_size": huge}]
    lines += [{"kind": "step", "step": step, "loss": value} for step, value in ((huge, 1.0), (2, huge), (3, 1.5))]
    lines += [{"kind": "checkpoint", "seconds": huge, "time": huge}]
    (tmp_path / "run.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_run(tmp_path).curves["loss"] == [(3.0, 1.5)]
    page_of(str(tmp_path), folder=tmp_path)


def test_a_run_that_was_killed_in_a_line_goes_on_in_a_new_one(tmp_path: Path) -> None:
    path = tmp_path / "run" / "run.jsonl"
    write_record(path, steps=3, seed="of the first start")
    with path.open("a") as file:
        file.write('{"kind": "step", "step": 4, "lo')
    write_record(path, steps=5, seed="of the second start")
    assert [line["step"] for line in read_record(path) if line["kind"] == "step"] == [1, 2, 3, 1, 2, 3, 4, 5]
    words = " ".join(Page(page_of(str(path), folder=tmp_path)).text)
    assert "of the second start" in words and "of the first start" not in words


@pytest.mark.parametrize(("first", "kept"), [(1, [9.0]), (2, [2.0, 9.0])])
def test_a_run_that_begins_again_replaces_the_later_steps(first: int, kept: list[float], tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [{"kind": "run"}, *({"kind": "step", "step": n, "loss": 2.0} for n in (1, 2, 3, 4))]
    lines += [{"kind": "run"}, {"kind": "step", "step": first, "loss": 9.0}]
    (tmp_path / "run.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [loss for _, loss in read_run(tmp_path / "run.jsonl").curves["loss"]] == kept


def test_two_runs_lie_side_by_side_and_differences_are_marked(tmp_path: Path) -> None:
    write_record(tmp_path / "a" / "run.jsonl", zero_optimization={"stage": 2}, seed=1)
    write_record(tmp_path / "b" / "run.jsonl", steps=9, zero_optimization={"stage": 3}, seed=1)
    text = page_of(str(tmp_path / "a"), "--against", str(tmp_path / "b"), folder=tmp_path)
    assert '<tr><th>zero_optimization.stage</th><td class="differs">2</td><td class="differs">3</td></tr>' in text
    assert "<tr><th>seed</th><td>1</td><td>1</td></tr>" in text
    loss = text[text.index("<svg") : text.index("</svg>") + 6]
    assert loss.count("<polyline") == 2 and "A: a" in loss and "B: b" in loss


@pytest.mark.peer
def test_a_browser_shows_the_report_of_two_runs(tmp_path: Path) -> None:
    """Needs Chromium in PATH. Saves a picture of the page in `tmp_path`."""
    write_record(tmp_path / "a" / "run.jsonl", zero_optimization={"stage": 2}, note=HOSTILE)
    write_record(tmp_path / "b" / "run.jsonl", steps=9, zero_optimization={"stage": 3}, note=HOSTILE)
    page_of(str(tmp_path / "a"), "--against", str(tmp_path / "b"), folder=tmp_path)
    found = asyncio.run(_measure_report(tmp_path / "page.html", tmp_path))
    assert found["problems"] == []
    assert len(found["charts"]) == 6 and all(width > 200 and height > 50 for width, height in found["charts"])
    assert found["curves"] == 10 and found["overflow"] <= 0  # two curves in each line chart, no horizontal scrolling
    assert found["requests"] == 0 and "<img src=x onerror=alert(1)>" in found["text"] and "out/step6" in found["text"]


async def _measure_report(page: Path, folder: Path) -> dict[str, Any]:
    sizes = "[...document.querySelectorAll('svg')].map(one => [one.clientWidth, one.clientHeight])"
    curves = "[...document.querySelectorAll('polyline')].filter(one => one.getTotalLength() > 50).length"
    async with open_page(page.as_uri(), folder) as tools:
        await tools.save_picture(folder / "report.png", whole=True)
        return {
            "charts": await tools.value(sizes),
            "curves": await tools.value(curves),
            "overflow": await tools.value("document.documentElement.scrollWidth - window.innerWidth"),
            "requests": await tools.value("performance.getEntriesByType('resource').length"),
            "text": await tools.value("document.body.innerText"),
            "problems": tools.problems,
        }


def test_curves_of_windlass_train_come_from_its_own_files(tmp_path: Path) -> None:
    write_record(tmp_path / "run.jsonl")
    plan = {"config": {"seed": 3}, "model": "tiny", "data": ["a", "b"], "seq_len": 8, "steps": 4}
    (tmp_path / "run.json").write_text(json.dumps(plan))
    (tmp_path / "result.json").write_text(json.dumps({"bits_before": 8.0, "bits_after": 2.5}))
    metrics = MetricsLog(tmp_path / "metrics.csv", None, 0)
    metrics.append(MetricsRow(step=0, held_out_bits_per_byte=8.0))
    metrics.append(MetricsRow(step=1, loss=7.5, tokens_per_second=100.0, memory_bytes=1 << 20))
    metrics.close()
    run = read_run(tmp_path)
    assert run.curves["loss"] == [(1.0, 7.5)]  # the mean over the ranks, not rank 0's loss in the record
    assert run.curves["held-out bits per byte"] == [(0.0, 8.0)] and run.curves["memory"] == [(1.0, 1.0)]
    assert run.curves["communication"][0] == (1.0, 2.0) and run.phases["backward"] == pytest.approx(0.2)
    assert run.facts["model"] == "tiny" and run.facts["after"] == "2.5" and run.config == {"seed": 3}
    assert run.facts["end"] == "finished"


def test_a_record_keeps_no_secrets_and_survives_a_crash(tmp_path: Path) -> None:
    assert without_secrets({"comet": {"api_key": "x", "project": "p"}, "a": [{"token": "y"}]}) == {
        "comet": {"api_key": "(left out)", "project": "p"},
        "a": [{"token": "(left out)"}],
    }
    path = tmp_path / "run.jsonl"
    write_record(path, steps=2)
    whole = list(read_record(path))
    assert [line["kind"] for line in whole] == ["run", "step", "step", "log", "checkpoint", "end"]
    assert whole[2]["loss"] is None  # an infinite loss is stored as null
    path.write_text(path.read_text()[:-20])
    assert list(read_record(path)) == whole[:-1]
    assert read_run(path).facts["end"].startswith("no end was recorded")
    path.write_text('{"kind": "run"}\nnot json\n{"kind": "end"}\n')
    with pytest.raises(DataError, match=r"run\.jsonl, line 2: .*not a record of jsonl_monitor"):
        list(read_record(path))


def test_bad_input_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(DataError, match=r"empty.jsonl has no line of a run yet"):
        read_run(tmp_path / "empty.jsonl")
    with pytest.raises(DataError, match=r"no run at .*nothing.*jsonl_monitor"):
        page_of(str(tmp_path / "nothing"), folder=tmp_path)
    write_record(tmp_path / "run.jsonl")
    with pytest.raises(ConfigError, match="cannot write a page"):
        CliRunner().invoke(app, ["report", str(tmp_path), "--out", str(tmp_path / "x" / "y")], catch_exceptions=False)
    (tmp_path / "run.json").write_text("[" * 500)
    with pytest.raises(DataError, match=r"cannot read .*run\.json"):
        read_run(tmp_path)


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (3.2, 3.2), (-7.0, 1e9), (1e-7, 2e-7), (0.0, 0.0)])
def test_ticks_enclose_the_values(low: float, high: float) -> None:
    ticks = nice_ticks(low, high)
    assert ticks == sorted(set(ticks)) and 2 <= len(ticks) <= 8
    assert ticks[0] <= low + 1e-9 * abs(low) and ticks[-1] >= high - 1e-9 * abs(high)


def test_charts_are_xml_and_thinned_curves_keep_their_extremes() -> None:
    points = [(float(step), math.sin(step / 50)) for step in range(5000)]
    points[1234] = (1234.0, 9.0)
    kept = thinned(points)
    assert len(kept) <= 800 and (1234.0, 9.0) in kept and kept == sorted(kept)
    cases: list[dict[str, list[tuple[float, float]]]] = [{"a": points}, {"a": points, HOSTILE: points[:1]}, {"a": []}]
    for curves in cases:
        chart = line_chart(HOSTILE, HOSTILE, curves)
        assert not chart or ElementTree.fromstring(chart).tag == "svg"
