"""Write the generated part of docs/compat.md: every DeepSpeed name, and its counterpart in windlass.

`python tools/generate_compat_docs.py` writes the page; with `--check` it only reports whether the page is out of date.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from windlass.compat.stand_in_entry import NameStatus, StandInEntry
from windlass.compat.stand_in_names import STAND_IN_NAMES
from windlass.compat.tables.member_notes import MEMBER_NOTES

PAGE = Path(__file__).resolve().parent.parent / "docs" / "compat.md"
_MARKS = r"(?P<head><!-- generated: (?P<name>\w+) -->).*?(?P<tail><!-- end generated -->)"
_DEEP = ("runtime", "utils", "ops", "inference", "compile", "compression", "profiling")


def main(arguments: list[str]) -> int:
    """Write or check the page. Return the exit code."""
    text = render_page(PAGE.read_text("utf-8"))
    if text == PAGE.read_text("utf-8"):
        return 0
    if "--check" in arguments:
        print(f"{PAGE} is out of date: run python tools/generate_compat_docs.py")
        return 1
    PAGE.write_text(text, "utf-8")
    print(f"wrote {PAGE}")
    return 0


def render_page(text: str) -> str:
    """Return the page with new text between each pair of marks."""
    parts = {"counts": _count_text, "members": _member_table, "names": _name_tables}

    def renew(match: re.Match[str]) -> str:
        return f"{match['head']}\n\n{parts[match['name']]()}\n\n{match['tail']}"

    return re.sub(_MARKS, renew, text, flags=re.DOTALL)


def _count_text() -> str:
    number = {state: sum(entry.status is state for entry in STAND_IN_NAMES.values()) for state in NameStatus}
    return (
        f"{len(STAND_IN_NAMES)} names: " + ", ".join(f"{count} {state.value}" for state, count in number.items()) + "."
    )


def _member_table() -> str:
    lines = ["| member | | how, or why not |", "|---|---|---|"]
    alike: dict[tuple[NameStatus, str], list[str]] = defaultdict(list)
    for name, entry in MEMBER_NOTES.items():
        alike[entry.status, entry.note].append(name)
    for (state, note), names in alike.items():
        lines.append(f"| {', '.join(f'`{name}`' for name in names)} | {state.value} | {note} |")
    return "\n".join(lines)


def _module_area(name: str) -> str:
    """Return the module under which a name is listed: one level below the root, two in folders with many names."""
    parts = name.split(".")
    depth = 3 if len(parts) > 3 and parts[1] in _DEEP else 2
    return ".".join(parts[: min(depth, len(parts) - 1)]) or parts[0]


def _name_tables() -> str:
    areas: dict[str, list[tuple[str, StandInEntry]]] = defaultdict(list)
    for name, entry in STAND_IN_NAMES.items():
        areas[_module_area(name)].append((name, entry))
    text: list[str] = []
    for area in sorted(areas):
        text += [f"### `{area}`", "", _markdown_table(area, areas[area]), ""]
    return "\n".join(text).rstrip()


def _markdown_table(area: str, rows: Iterable[tuple[str, StandInEntry]]) -> str:
    """Return a table with one line for all names of an area that have the same state, note and counterpart."""
    alike: dict[tuple[NameStatus, str, str], list[str]] = defaultdict(list)
    for name, entry in sorted(rows):
        own = name.rpartition(".")[2]
        home = entry.target
        if home.endswith(f":{own}"):
            home = home.removesuffix(own) + "*"
        alike[entry.status, entry.note, home].append(name.removeprefix(f"{area}."))
    lines = ["| name | | how, or why not | in windlass |", "|---|---|---|---|"]
    for (state, note, home), names in alike.items():
        shown = ", ".join(f"`{name}`" for name in names)
        lines.append(f"| {shown} | {state.value} | {note.replace('|', '/')} | {f'`{home}`' if home else ''} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
