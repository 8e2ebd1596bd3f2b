"""Writes the generated parts of docs/config.md and docs/composition.md, and docs/ds_config.schema.json.

`python tools/generate_config_docs.py` writes them; with `--check` it only says which ones are out of date.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable
from itertools import groupby
from pathlib import Path

from windlass.config import composition, table
from windlass.config.editor_schema import editor_schema
from windlass.config.optimizer import PARAMETERS, UNBUILT_TYPES
from windlass.config.problems import show
from windlass.config.table import TRAINING, Row
from windlass.config.verdict import Verdict

DOCS = Path(__file__).resolve().parent.parent / "docs"


def main(arguments: list[str]) -> int:
    """Write or check all generated text; returns the exit code."""
    stale = [path for path, text in rendered(DOCS).items() if not path.is_file() or path.read_text("utf-8") != text]
    if "--check" in arguments:
        for path in stale:
            print(f"{path} is out of date: run python tools/generate_config_docs.py")
        return 1 if stale else 0
    for path in stale:
        path.write_text(rendered(DOCS)[path], "utf-8")
        print(f"wrote {path}")
    return 0


def rendered(docs: Path) -> dict[Path, str]:
    """The text that each generated file should have, by path."""
    return {
        docs / "config.md": _filled(docs / "config.md"),
        docs / "composition.md": _filled(docs / "composition.md"),
        docs / "ds_config.schema.json": json.dumps(editor_schema(), indent=1, sort_keys=True) + "\n",
    }


def _filled(path: Path) -> str:
    """The file with the text between each pair of `generated` marks renewed."""

    def renew(match: re.Match[str]) -> str:
        return f"{match['head']}\n\n{PARTS[match['name']]()}\n\n{match['tail']}"

    marks = r"(?P<head><!-- generated: (?P<name>[\w ]+) -->).*?(?P<tail><!-- end generated -->)"
    return re.sub(marks, renew, path.read_text("utf-8"), flags=re.DOTALL)


def _grid(head: Iterable[str], body: Iterable[Iterable[str]]) -> str:
    lines = [tuple(head), *(tuple(cell.replace("|", "\\|") for cell in row) for row in body)]
    rule = tuple("---" for _ in lines[0])
    return "\n".join(f"| {' | '.join(line)} |" for line in (lines[0], rule, *lines[1:]))


def _counts() -> str:
    training = [row for row in table.rows() if row.root == TRAINING]
    number = {verdict: sum(row.verdict is verdict for row in training) for verdict in Verdict}
    return ", ".join(f"{count} {verdict}" for verdict, count in number.items()) + "."


def _keys() -> str:
    sections = [row for row in table.rows() if row.root == TRAINING and not row.owner]
    singles = [row for row in sections if _top(row) == row.path and not _has_children(row, sections)]
    text = ["### Top level", "", _key_grid(singles)]
    for name, rows in groupby((row for row in sections if row not in singles), key=_top):
        text += ["", f"### `{name}`", "", _key_grid(list(rows))]
    return "\n".join(text)


def _top(row: Row) -> str:
    return row.path if row.path.startswith('"') else row.path.split(".")[0]


def _has_children(row: Row, rows: list[Row]) -> bool:
    return any(other.path.startswith(f"{row.path}.") for other in rows)


def _key_grid(rows: list[Row]) -> str:
    return _grid(("key", "value", "default", "verdict", "what it does, or why not"), map(_key_line, rows))


def _key_line(row: Row) -> tuple[str, ...]:
    also = f" (also {', '.join(f'`{name}`' for name in row.also)})" if row.also else ""
    native = " (windlass only)" if row.native else ""
    text = row.because.replace("\n", " ")
    return f"`{row.path}`{also}{native}", row.type, f"`{row.default}`", str(row.verdict), text


def _optimizer_defaults() -> str:
    body = []
    for name, parameters in PARAMETERS.items():
        if name in UNBUILT_TYPES:
            body.append((f"`{name}`", f"refused: {UNBUILT_TYPES[name]}"))
            continue
        known = [f"`{key}` {show(one.default)}" for key, one in parameters.items() if one.verdict is Verdict.HONOURED]
        body.append((f"`{name}`", ", ".join(known)))
    return _grid(("optimizer", "honoured parameters and their defaults"), body)


def _parameters() -> str:
    rows = [row for row in table.rows() if row.owner and row.owner not in UNBUILT_TYPES]
    text = []
    for owner, group in groupby(rows, key=lambda row: row.owner):
        body = [(f"`{row.path}`", row.type, f"`{row.default}`", str(row.verdict), row.because) for row in group]
        text += [f"### {owner}", "", _grid(("key", "value", "default", "verdict", "why not"), body), ""]
    return "\n".join(text).rstrip()


def _unbuilt_parameters() -> str:
    rows = [row for row in table.rows() if row.owner in UNBUILT_TYPES]
    body = [
        (f"`{owner}`", ", ".join(f"`{row.path.split('.')[-1]}`" for row in group))
        for owner, group in groupby(rows, key=lambda row: row.owner)
    ]
    return _grid(("refused optimizer", "parameters that are known with it"), body)


def _serving() -> str:
    text = []
    for root in table.ROOTS:
        if root != TRAINING:
            rows = [row for row in table.rows() if row.root == root]
            text += [f"### `{root}`", "", f"{rows[0].because}.", "", _serving_grid(rows), ""]
    return "\n".join(text).rstrip()


def _serving_grid(rows: list[Row]) -> str:
    return _grid(("key", "value", "default", "verdict"), [_key_line(row)[:4] for row in rows])


def _axes() -> str:
    body = []
    for axis, values in composition.AXES.items():
        for name, value in values.items():
            offered = value.unbuilt or (f"yes, needs {value.needs}" if value.needs else "yes")
            body.append((axis, name, value.means, offered))
    return _grid(("axis", "value", "meaning", "offered"), body)


def _exceptions() -> str:
    pairs = (frozenset((pair.first, pair.second)) for pair in composition.pairs())
    body = [
        (*(f"{axis} {value}" for axis, value in sorted(pair, reverse=True)), composition.EXCEPTIONS[pair])
        for pair in pairs
        if pair in composition.EXCEPTIONS
    ]
    return _grid(("this", "with this", "why not"), body)


def _pair_counts() -> str:
    pairs = composition.pairs()
    working = sum(pair.works for pair in pairs)
    on_cpu = len(composition.working_pairs({"transformer"}))
    return f"{len(pairs)} pairs; {working} work, {on_cpu} of them on a machine without a GPU."


PARTS: dict[str, Callable[[], str]] = {
    "counts": _counts,
    "keys": _keys,
    "optimizer defaults": _optimizer_defaults,
    "parameters": _parameters,
    "unbuilt parameters": _unbuilt_parameters,
    "serving": _serving,
    "axes": _axes,
    "exceptions": _exceptions,
    "pair counts": _pair_counts,
}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
