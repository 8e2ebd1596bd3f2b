"""The JSON Schema by which editors complete and check a configuration."""

from __future__ import annotations

from typing import Any

from windlass.config.normalise import TOP_LEVEL_AUTO
from windlass.config.root import Config

DIALECT = "https://json-schema.org/draft/2020-12/schema"
_AUTO = {"const": "auto"}


def editor_schema() -> dict[str, Any]:
    """The schema of `ds_config.json`: every key in all its spellings, "auto" where it is read, and each verdict."""
    schema = Config.model_json_schema()
    for definition in schema["$defs"].values():
        _rewrite(definition, auto=None)
    _rewrite(schema, auto=TOP_LEVEL_AUTO)
    zero = schema["properties"]["zero_optimization"]
    schema["properties"]["zero_optimization"] = _either(zero, {"type": "boolean", "deprecated": True})
    return {"$schema": DIALECT, **schema, "title": "windlass training configuration"}


def _rewrite(definition: dict[str, Any], auto: tuple[str, ...] | None) -> None:
    """Turn what the field makers left in each property into schema words; `auto` None means: on every plain value."""
    properties: dict[str, Any] = {}
    for name, original in definition.get("properties", {}).items():
        facts = original.get("windlass", {})
        shown = {key: value for key, value in original.items() if key not in ("windlass", "title")}
        shown["x-verdict"] = facts["verdict"]
        if facts["because"]:
            shown["description"] = f"{facts['verdict']}: {facts['because']}"
        takes_auto = name in auto if auto is not None else not _is_nested(shown)
        properties[name] = _either(shown, _AUTO) if takes_auto else shown
        properties.update({spelling: {**properties[name], "deprecated": True} for spelling in facts["also"]})
    definition["properties"] = properties
    definition.pop("title", None)


def _is_nested(schema: dict[str, Any]) -> bool:
    branches = schema.get("anyOf", [schema])
    return any("$ref" in branch or branch.get("type") in ("object", "array") for branch in branches)


def _either(schema: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """`schema` or `other`; what describes the key stays outside."""
    outside: dict[str, Any] = {key: schema[key] for key in ("description", "default", "x-verdict") if key in schema}
    inside = {key: value for key, value in schema.items() if key not in outside}
    branches = inside["anyOf"] if set(inside) == {"anyOf"} else [inside]
    return {"anyOf": [*branches, other], **outside}
