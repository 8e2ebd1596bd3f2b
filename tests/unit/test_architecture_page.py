"""Test that docs/architecture.md names existing files, all files of `zero` and `inference` and the layers."""

from __future__ import annotations

import re
import tomllib
from itertools import takewhile
from pathlib import Path

import pytest

import windlass

ROOT = Path(windlass.__file__).parent
PAGE = (ROOT.parent / "docs" / "architecture.md").read_text("utf-8")
TEXT = re.sub(r"(?ms)^```.*?^```", "", PAGE)
NAMES = set(re.findall(r"`([a-z]\w*(?:/\w+)*)/?`", TEXT))
FILES = {path.relative_to(ROOT).with_suffix("").as_posix() for path in ROOT.rglob("*.py")}


def first_files(text: str) -> list[str]:
    """Return the names of the files that a page says to read first, without folder and suffix."""
    (paragraph,) = re.findall(r"(?is)read (?:the code, read )?these eight files first(.*?)(?:\n\n|\Z)", text)
    return re.findall(r"(\w+)(?:`|\.py\])", re.sub(r"\]\([^)]*\)", "]", paragraph).split("docs/")[0])


def test_every_path_is_a_file_or_folder_of_the_package() -> None:
    paths = {name for name in NAMES if "/" in name and not name.startswith("docs/")}
    places = FILES | {path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*") if path.is_dir()}
    places |= {f"windlass/{place}" for place in places}
    assert not [path for path in paths if not any(place == path or place.endswith("/" + path) for place in places)]


@pytest.mark.parametrize("folder", ["zero", "zero/core", "zero/setup", "zero/update", "zero/access", "inference"])
def test_every_file_of_the_folder_is_named(folder: str) -> None:
    named = {name.rsplit("/", 1)[-1] for name in NAMES}
    assert not [file.name for file in (ROOT / folder).glob("[a-z]*.py") if file.stem not in named]


def test_layers_are_those_of_the_import_contract() -> None:
    contracts = tomllib.loads((ROOT.parent / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    (block,) = re.findall(r"(?ms)^## Layers\n.*?^```\n(.*?)^```", PAGE)
    packages = {path.stem for path in ROOT.iterdir()}
    drawn = [set(takewhile(packages.__contains__, line.split())) for line in block.splitlines()]
    assert [set(layer.replace("|", " ").split()) for layer in layers] == drawn


def test_readme_names_the_same_first_files() -> None:
    readme = first_files((ROOT.parent / "README.md").read_text("utf-8"))
    assert len(readme) == 8 and readme == first_files(PAGE)
