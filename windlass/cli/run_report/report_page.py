"""HTML page of one run, or of two side by side. The page has no script and loads nothing: it opens without a network.

All text from files passes `html.escape`, and the page's Content-Security-Policy forbids scripts and requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from windlass.cli.run_report.run_data import CURVES, RunData, flat_config
from windlass.cli.run_report.svg_charts import COLOURS, bar_chart, format_number, line_chart, with_unit

_STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; color: #20262c; max-width: 1240px; margin: 24px auto; padding: 0 16px; }
h1 { font-size: 22px; } h2 { font-size: 17px; margin-top: 28px; border-bottom: 1px solid #d8dde2; }
table { border-collapse: collapse; } td, th { text-align: left; padding: 2px 14px 2px 0; vertical-align: top; }
th { font-weight: 600; } td.differs { background: #fdf0d8; } td, th { overflow-wrap: anywhere; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(480px, 1fr)); gap: 12px; }
svg { width: 100%; height: auto; font: 11px system-ui, sans-serif; } .title { font-size: 13px; font-weight: 600; }
.grid { stroke: #e3e7ea; } .curve { fill: none; stroke-width: 1.5; } .y { text-anchor: end; } .end { text-anchor: end; }
.mark { display: inline-block; width: 10px; height: 10px; margin-right: 6px; } .none { color: #77808a; }
.first { background: COLOUR0; } .second { background: COLOUR1; }
""".replace("COLOUR0", COLOURS[0]).replace("COLOUR1", COLOURS[1])
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_MOST_ROWS = 200


def report_page(runs: Sequence[RunData]) -> str:
    """Return the page of one run, or of two; the first is compared with the second."""
    names = [run.name for run in runs]
    title = " against ".join(names)
    body = [
        f"<h1>{escape(title)}</h1>",
        _legend(names),
        _section("Run", _comparison([run.facts for run in runs], names)),
        _section("Machine", _comparison([run.machine for run in runs], names)),
        _section("Curves", _charts(runs)),
        _section("Last values", _last_values(runs, names)),
        _section("Phases", _phases(runs)),
        _section("Checkpoints", _rows(runs, "checkpoints", ("time", "action", "step", "seconds", "path"))),
        _section("Warnings", _rows(runs, "warnings", ("time", "level", "message"))),
        _section("Configuration", _comparison([flat_config(run.config) for run in runs], names)),
    ]
    head = (
        f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style>"
    )
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head><body>{"".join(body)}</body></html>\n'


def _legend(names: Sequence[str]) -> str:
    if len(names) < 2:
        return ""
    marks = zip(names, ("first", "second"), strict=True)
    return "<p>" + " ".join(f'<span class="mark {mark}"></span>{escape(name)}' for name, mark in marks) + "</p>"


def _section(title: str, content: str) -> str:
    return f"<h2>{title}</h2>{content or _nothing()}"


def _nothing() -> str:
    return '<p class="none">nothing recorded</p>'


def _comparison(tables: Sequence[dict[str, str]], names: Sequence[str]) -> str:
    """Return a table of values by name with a column for each run; values that differ are marked."""
    keys = list(dict.fromkeys(key for table in tables for key in table))
    if not keys:
        return ""
    heads = "".join(f"<th>{escape(name)}</th>" for name in names) if len(names) > 1 else ""
    rows = [f"<tr><th></th>{heads}</tr>"] if heads else []
    for key in keys:
        values = [table.get(key, "") for table in tables]
        differs = ' class="differs"' if len(set(values)) > 1 else ""
        cells = "".join(f"<td{differs}>{escape(value)}</td>" for value in values)
        rows.append(f"<tr><th>{escape(key)}</th>{cells}</tr>")
    return f"<table>{''.join(rows)}</table>"


def _charts(runs: Sequence[RunData]) -> str:
    charts = []
    for name, unit in CURVES.items():
        curves = {_short_name(run, number): run.curves.get(name, []) for number, run in enumerate(runs)}
        charts.append(line_chart(name, unit, curves))
    drawn = [f"<div>{chart}</div>" for chart in charts if chart]
    return f'<div class="charts">{"".join(drawn)}</div>' if drawn else ""


def _short_name(run: RunData, number: int) -> str:
    name = run.name.rstrip("/").rpartition("/")[2][:16] or run.name[:16]
    return f"{'AB'[number]}: {name}"


def _last_values(runs: Sequence[RunData], names: Sequence[str]) -> str:
    tables = [
        {with_unit(name, CURVES[name]): format_number(curve[-1][1]) for name, curve in run.curves.items()}
        for run in runs
    ]
    return _comparison(tables, names)


def _phases(runs: Sequence[RunData]) -> str:
    bars = {
        "AB"[number] if len(runs) > 1 else "mean": {name: 1000 * seconds for name, seconds in run.phases.items()}
        for number, run in enumerate(runs)
        if run.phases
    }
    return bar_chart("phases of a step by the clock of rank 0", "ms", bars)


def _rows(runs: Sequence[RunData], attribute: str, columns: Sequence[str]) -> str:
    """Return one table for each run: the last 200 of the rows that the run has as `attribute`."""
    parts = []
    for run in runs:
        rows: list[tuple[str, ...]] = getattr(run, attribute)
        if len(runs) > 1:
            parts.append(f"<h3>{escape(run.name)}</h3>")
        if not rows:
            parts.append(_nothing())
            continue
        if len(rows) > _MOST_ROWS:
            parts.append(f"<p>the last {_MOST_ROWS} of {len(rows):,}</p>")
        heads = "".join(f"<th>{column}</th>" for column in columns)
        lines = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows[-_MOST_ROWS:])
        parts.append(f"<table><tr>{heads}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>")
    return "".join(parts)
