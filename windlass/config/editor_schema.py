"""JSON Schema with which editors complete and check a configuration."""

from __future__ import annotations

from typing import Any

from windlass.config.key_normalization import TOP_LEVEL_AUTO_KEYS
from windlass.config.root_config import Config

JSON_SCHEMA_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_AUTO = {"const": "auto"}


def build_editor_schema() -> dict[str, Any]:
    """Build the schema of `ds_config.json`: every key in all spellings, with "auto" where accepted, and its status."""
    schema = Config.model_json_schema()
    for definition in schema["$defs"].values():
        _rewrite_properties(definition, auto=None)
    _rewrite_properties(schema, auto=TOP_LEVEL_AUTO_KEYS)
    zero = schema["properties"]["zero_optimization"]
    schema["properties"]["zero_optimization"] = _any_of(zero, {"type": "boolean", "deprecated": True})
    schema["properties"]["offload"] = _any_of(schema["properties"]["offload"], _AUTO)
    return {"$schema": JSON_SCHEMA_DIALECT, **schema, "title": "windlass training configuration"}


def _rewrite_properties(definition: dict[str, Any], auto: tuple[str, ...] | None) -> None:
    """Convert the status, reason and aliases of each field to schema keywords.

    Args:
        auto: keys whose value may be "auto"; None: all keys except sections, objects and lists.
    """
    properties: dict[str, Any] = {}
    for name, original in definition.get("properties", {}).items():
        facts = original.get("windlass", {})
        shown = {key: value for key, value in original.items() if key not in ("windlass", "title")}
        shown["x-status"] = facts["status"]
        if facts["reason"]:
            shown["description"] = f"{facts['status']}: {facts['reason']}"
        takes_auto = name in auto if auto is not None else not _is_nested(shown)
        properties[name] = _any_of(shown, _AUTO) if takes_auto else shown
        properties.update({spelling: {**properties[name], "deprecated": True} for spelling in facts["aliases"]})
    definition["properties"] = properties
    definition.pop("title", None)


def _is_nested(schema: dict[str, Any]) -> bool:
    branches = schema.get("anyOf", [schema])
    return any("$ref" in branch or branch.get("type") in ("object", "array") for branch in branches)


def _any_of(schema: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Return a schema of the values that `schema` or `other` accepts. Description, default and status of `schema` are
    outside the `anyOf`."""
    outside: dict[str, Any] = {key: schema[key] for key in ("description", "default", "x-status") if key in schema}
    inside = {key: value for key, value in schema.items() if key not in outside}
    branches = inside["anyOf"] if set(inside) == {"anyOf"} else [inside]
    return {"anyOf": [*branches, other], **outside}
