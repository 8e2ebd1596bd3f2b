"""Write the generated parts of docs/config.md and docs/composition.md, and docs/ds_config.schema.json.

`python tools/generate_config_docs.py` writes the files; with `--check` it only lists the files that are out of date.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable
from itertools import groupby
from pathlib import Path

from windlass.config import feature_matrix, key_table
from windlass.config.config_problems import format_value
from windlass.config.editor_schema import build_editor_schema
from windlass.config.key_status import KeyStatus
from windlass.config.key_table import TRAINING_CONFIG, ConfigKey
from windlass.config.optimizer_section import OPTIMIZER_PARAMETERS, UNSUPPORTED_OPTIMIZERS

DOCS = Path(__file__).resolve().parent.parent / "docs"


def main(arguments: list[str]) -> int:
    """Write or check all generated text. Return the exit code."""
    stale = [path for path, text in render_pages(DOCS).items() if not path.is_file() or path.read_text("utf-8") != text]
    if "--check" in arguments:
        for path in stale:
            print(f"{path} is out of date: run python tools/generate_config_docs.py")
        return 1 if stale else 0
    for path in stale:
        path.write_text(render_pages(DOCS)[path], "utf-8")
        print(f"wrote {path}")
    return 0


def render_pages(docs: Path) -> dict[Path, str]:
    """Return the text of each generated file by path."""
    return {
        docs / "config.md": _fill_page(docs / "config.md"),
        docs / "composition.md": _fill_page(docs / "composition.md"),
        docs / "ds_config.schema.json": json.dumps(build_editor_schema(), indent=1, sort_keys=True) + "\n",
    }


def _fill_page(path: Path) -> str:
    """Return the file with new text between each pair of `generated` marks."""

    def renew(match: re.Match[str]) -> str:
        return f"{match['head']}\n\n{PAGE_PARTS[match['name']]()}\n\n{match['tail']}"

    marks = r"(?P<head><!-- generated: (?P<name>[\w ]+) -->).*?(?P<tail><!-- end generated -->)"
    return re.sub(marks, renew, path.read_text("utf-8"), flags=re.DOTALL)


def _markdown_table(head: Iterable[str], body: Iterable[Iterable[str]]) -> str:
    lines = [tuple(head), *(tuple(cell.replace("|", "\\|") for cell in row) for row in body)]
    rule = tuple("---" for _ in lines[0])
    return "\n".join(f"| {' | '.join(line)} |" for line in (lines[0], rule, *lines[1:]))


def _count_text() -> str:
    training = [row for row in key_table.config_keys() if row.root == TRAINING_CONFIG]
    number = {status: sum(row.status is status for row in training) for status in KeyStatus}
    return ", ".join(f"{count} {status}" for status, count in number.items()) + "."


def _key_tables() -> str:
    sections = [row for row in key_table.config_keys() if row.root == TRAINING_CONFIG and not row.owner]
    singles = [row for row in sections if _top_level_key(row) == row.path and not _has_children(row, sections)]
    text = ["### Top level", "", _key_table(singles)]
    for name, rows in groupby((row for row in sections if row not in singles), key=_top_level_key):
        text += ["", f"### `{name}`", "", _key_table(list(rows))]
    return "\n".join(text)


def _top_level_key(row: ConfigKey) -> str:
    return row.path if row.path.startswith('"') else row.path.split(".")[0]


def _has_children(row: ConfigKey, rows: list[ConfigKey]) -> bool:
    return any(other.path.startswith(f"{row.path}.") for other in rows)


def _key_table(rows: list[ConfigKey]) -> str:
    return _markdown_table(("key", "value", "default", "status", "what it does, or why not"), map(_key_row, rows))


def _key_row(row: ConfigKey) -> tuple[str, ...]:
    also = f" (also {', '.join(f'`{name}`' for name in row.aliases)})" if row.aliases else ""
    native = " (windlass only)" if row.windlass_only else ""
    text = row.reason.replace("\n", " ")
    return f"`{row.path}`{also}{native}", row.type, f"`{row.default}`", str(row.status), text


def _optimizer_defaults_table() -> str:
    body = []
    for name, parameters in OPTIMIZER_PARAMETERS.items():
        if name in UNSUPPORTED_OPTIMIZERS:
            body.append((f"`{name}`", f"refused: {UNSUPPORTED_OPTIMIZERS[name]}"))
            continue
        known = [
            f"`{key}` {format_value(item.default)}"
            for key, item in parameters.items()
            if item.status is KeyStatus.HONOURED
        ]
        body.append((f"`{name}`", ", ".join(known)))
    return _markdown_table(("optimizer", "honoured parameters and their defaults"), body)


def _parameter_tables() -> str:
    rows = [row for row in key_table.config_keys() if row.owner and row.owner not in UNSUPPORTED_OPTIMIZERS]
    text = []
    for owner, group in groupby(rows, key=lambda row: row.owner):
        body = [(f"`{row.path}`", row.type, f"`{row.default}`", str(row.status), row.reason) for row in group]
        text += [f"### {owner}", "", _markdown_table(("key", "value", "default", "status", "why not"), body), ""]
    return "\n".join(text).rstrip()


def _unbuilt_parameter_table() -> str:
    rows = [row for row in key_table.config_keys() if row.owner in UNSUPPORTED_OPTIMIZERS]
    body = [
        (f"`{owner}`", ", ".join(f"`{row.path.split('.')[-1]}`" for row in group))
        for owner, group in groupby(rows, key=lambda row: row.owner)
    ]
    return _markdown_table(("refused optimizer", "parameters that are known with it"), body)


def _serving_tables() -> str:
    text = []
    for root in key_table.CONFIG_ROOTS:
        if root != TRAINING_CONFIG:
            rows = [row for row in key_table.config_keys() if row.root == root]
            text += [f"### `{root}`", "", f"{rows[0].reason}.", "", _serving_table(rows), ""]
    return "\n".join(text).rstrip()


def _serving_table(rows: list[ConfigKey]) -> str:
    return _markdown_table(("key", "value", "default", "status"), [_key_row(row)[:4] for row in rows])


def _axis_table() -> str:
    body = []
    for axis, values in feature_matrix.FEATURES.items():
        for name, value in values.items():
            offered = value.not_built_reason or (f"yes, needs {value.requirement}" if value.requirement else "yes")
            body.append((axis, name, value.meaning, offered))
    return _markdown_table(("axis", "value", "meaning", "offered"), body)


def _exception_table() -> str:
    pairs = (frozenset((pair.first, pair.second)) for pair in feature_matrix.all_pairs())
    body = [
        (*(f"{axis} {value}" for axis, value in sorted(pair, reverse=True)), feature_matrix.INCOMPATIBLE_PAIRS[pair])
        for pair in pairs
        if pair in feature_matrix.INCOMPATIBLE_PAIRS
    ]
    return _markdown_table(("this", "with this", "why not"), body)


def _pair_count_text() -> str:
    pairs = feature_matrix.all_pairs()
    working = sum(pair.is_supported for pair in pairs)
    on_cpu = len(feature_matrix.supported_pairs({"transformer", "mpi"}))
    return f"{len(pairs)} pairs; {working} work, {on_cpu} of them on a machine without a GPU."


PAGE_PARTS: dict[str, Callable[[], str]] = {
    "counts": _count_text,
    "keys": _key_tables,
    "optimizer defaults": _optimizer_defaults_table,
    "parameters": _parameter_tables,
    "unbuilt parameters": _unbuilt_parameter_table,
    "serving": _serving_tables,
    "axes": _axis_table,
    "exceptions": _exception_table,
    "pair counts": _pair_count_text,
}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
