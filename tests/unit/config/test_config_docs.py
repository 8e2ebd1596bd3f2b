"""Tests that the generated pages equal the schema, and that the editors' schema has every spelling."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from windlass.config.key_table import TRAINING_CONFIG, config_keys

ROOT = Path(__file__).resolve().parents[3]


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_config_docs", ROOT / "tools" / "generate_config_docs.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["config.md", "composition.md", "ds_config.schema.json"])
def test_generated_text_is_up_to_date(name: str) -> None:
    text = generator().render_pages(ROOT / "docs")[ROOT / "docs" / name]
    assert (ROOT / "docs" / name).read_text("utf-8") == text, "run python tools/generate_config_docs.py"


def test_check_names_the_stale_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = generator()
    for name in ("config.md", "composition.md"):
        (tmp_path / name).write_text((ROOT / "docs" / name).read_text("utf-8"), "utf-8")
    module.DOCS = tmp_path
    assert module.main(["--check"]) == 1
    assert "ds_config.schema.json is out of date" in capsys.readouterr().out
    assert module.main([]) == 0
    assert module.main(["--check"]) == 0


def test_page_lists_every_key() -> None:
    page = (ROOT / "docs" / "config.md").read_text("utf-8")
    for row in config_keys():
        assert f"`{row.path}`" in page or row.owner, row.path


def _properties(schema: dict[str, Any], steps: list[str]) -> dict[str, Any] | None:
    node = schema
    for step in steps:
        for branch in (node, *node.get("anyOf", ())):
            target = schema["$defs"][branch["$ref"].split("/")[-1]] if "$ref" in branch else branch
            if step in target.get("properties", {}):
                node = target["properties"][step]
                break
        else:
            return None
    return node


def test_editor_schema_has_every_key_and_alias() -> None:
    schema = json.loads((ROOT / "docs" / "ds_config.schema.json").read_text("utf-8"))
    assert '"windlass": ' not in json.dumps(schema)
    checked = 0
    for row in config_keys():
        if row.root != TRAINING_CONFIG or row.owner or any(mark in row.path for mark in '<["'):
            continue
        *outer, name = row.path.split(".")
        for spelling in (name, *row.aliases):
            result = _properties(schema, [*outer, spelling])
            assert result is not None, (row.path, spelling)
            checked += 1
    assert checked > 350
    bucket = _properties(schema, ["zero_optimization", "reduce_bucket_size"])
    assert bucket is not None
    assert bucket["anyOf"] == [{"exclusiveMinimum": 0, "type": "integer"}, {"const": "auto"}]
