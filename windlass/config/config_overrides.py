"""Replacement of single keys of a raw configuration, by dotted path."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from windlass.config.config_section import ConfigSection, nested_section
from windlass.config.key_normalization import canonical_names, expand_old_spellings
from windlass.config.root_config import Config


def override_keys(raw: dict[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of `raw` with the given values at dotted canonical paths, such as `zero_optimization.stage`.

    Other spellings of a replaced key are removed, and missing sections are added. None removes the key.
    """
    changed = copy.deepcopy(expand_old_spellings(raw))
    for path, value in values.items():
        _set(changed, Config, path.split("."), value)
    return changed


def value_at_path(raw: Mapping[str, Any], path: str, default: Any = None) -> Any:
    """Return the value of `raw` at a dotted path, in any spelling of its keys; `default` if there is none."""
    section: type[ConfigSection] | None = Config
    found: Any = raw
    for name in path.split("."):
        if not isinstance(found, Mapping):
            return default
        key = next((one for one in _spellings(section, name) if one in found), None)
        if key is None:
            return default
        found, section = found[key], _inner_section(section, name)
    return found


def canonical_path(path: str) -> str:
    """Return a dotted path with the canonical spelling of every key; unknown keys stay as they are."""
    section: type[ConfigSection] | None = Config
    found = []
    for name in path.split("."):
        found.append(canonical_names(section).get(name, name) if section is not None else name)
        section = _inner_section(section, found[-1])
    return ".".join(found)


def is_section(path: str) -> bool:
    """Return True if a section with keys of its own is at a dotted canonical path."""
    section: type[ConfigSection] | None = Config
    for name in path.split("."):
        section = _inner_section(section, name)
    return section is not None


def _set(holder: dict[str, Any], section: type[ConfigSection] | None, path: list[str], value: Any) -> None:
    name, *rest = path
    spelled = [key for key in _spellings(section, name) if key in holder]
    if not rest:
        for key in spelled:
            del holder[key]
        if value is not None:
            holder[name] = value
        return
    key = spelled[0] if spelled else name
    if not isinstance(holder.get(key), dict):  # absent, null or "auto"
        if value is None:
            return
        holder[key] = {}
    _set(holder[key], _inner_section(section, name), rest, value)


def _spellings(section: type[ConfigSection] | None, name: str) -> list[str]:
    if section is None:
        return [name]
    return [name, *(key for key, known in canonical_names(section).items() if known == name and key != name)]


def _inner_section(section: type[ConfigSection] | None, name: str) -> type[ConfigSection] | None:
    field = section.model_fields.get(name) if section is not None else None
    nested = nested_section(field.annotation) if field is not None else None
    return nested.section if nested is not None and nested.shape == "alone" else None
