"""Normalization of raw data: aliases become canonical keys; keys at "auto" and comments are removed and recorded."""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from typing import Any

from pydantic import TypeAdapter, ValidationError

from windlass.config.batch_sizes import KEYS
from windlass.config.config_problems import ConfigProblem, ProblemKind
from windlass.config.config_section import ConfigSection, NestedSection, nested_section
from windlass.config.key_status import key_facts
from windlass.config.root_config import Config

TOP_LEVEL_AUTO_KEYS = (*KEYS, "gradient_clipping")
_COMMENT_STARTS = ("_", "//", "#")
_TABLES_OF_MODULES = ("tensor_table", "post_init_quant", "layers")
_BOOLEAN = TypeAdapter(bool)


class KeyNormalizer:
    """Walk over raw data along the schema. Collects the keys at "auto", keys in two spellings, and comment keys."""

    def __init__(self) -> None:
        self.auto_keys: set[str] = set()
        self.comments: list[str] = []
        self.problems: list[ConfigProblem] = []

    def __call__(self, data: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of `data` with canonical keys. `data` itself is not modified."""
        return self._section(expand_old_spellings(_copy_plain(data)), Config, "")

    def _section(self, data: dict[str, Any], section: type[ConfigSection], path: str) -> dict[str, Any]:
        names = canonical_names(section)
        result: dict[str, Any] = {}
        seen: dict[str, str] = {}  # key by the name of its field
        for key, value in data.items():
            name = names.get(key, key)
            inner = f"{path}.{key}" if path else str(key)
            if name not in section.model_fields and is_comment(key):
                self.comments.append(inner)
            elif name in seen:
                sentence = f'"{key}" and "{seen[name]}" are two spellings of one key; delete one'
                self.problems.append(ConfigProblem(ProblemKind.CONTRADICTION, inner, sentence))
            elif value == "auto" and name in section.model_fields and (path or name in TOP_LEVEL_AUTO_KEYS):
                self.auto_keys.add(f"{path}.{name}" if path else name)
            else:
                result[name] = self._value(value, section, name, inner)
            seen.setdefault(name, key)
        return result

    def _value(self, value: Any, section: type[ConfigSection], name: str, path: str) -> Any:
        field = section.model_fields.get(name)
        nested = nested_section(field.annotation) if field else None
        if nested is None:
            return self._drop_comments(value, path, name) if isinstance(value, dict) else value
        return self._nested(value, nested, path, name)

    def _drop_comments(self, value: dict[str, Any], path: str, name: str) -> dict[str, Any]:
        """Remove comments from an object with free keys, such as an optimizer's parameters."""
        # Keys of these tables are names of modules, which may begin with an underscore.
        starts = ("_comment", "//", "#") if name in _TABLES_OF_MODULES else _COMMENT_STARTS
        comments = {key for key in value if is_comment(key, starts)}
        self.comments += [f"{path}.{key}" for key in value if key in comments]
        return {key: item for key, item in value.items() if key not in comments}

    def _nested(self, value: Any, nested: NestedSection, path: str, name: str) -> Any:
        if nested.shape == "list" and isinstance(value, list):
            alone = NestedSection(nested.section, "alone")
            return [self._nested(item, alone, f"{path}[{index}]", name) for index, item in enumerate(value)]
        if not isinstance(value, dict):
            return value
        if nested.shape == "free keys":
            alone = NestedSection(nested.section, "alone")
            items = self._drop_comments(value, path, name)
            return {key: self._nested(item, alone, f"{path}.{key}", name) for key, item in items.items()}
        return self._section(value, nested.section, path)


def is_comment(key: str, starts: tuple[str, ...] = _COMMENT_STARTS) -> bool:
    """Return True for keys that serve as comments: `_comment`, `_anything`, `//`, `comment`, `$schema`."""
    return key.startswith(starts) or key.lower() in ("comment", "comments", "$schema")


@cache
def canonical_names(section: type[ConfigSection]) -> dict[str, str]:
    """Map every spelling of a key in `section` to the name of its field."""
    names = {name: name for name in section.model_fields}
    for name, field in section.model_fields.items():
        names.update(dict.fromkeys(key_facts(field)["aliases"], name))
    return names


def expand_old_spellings(data: dict[str, Any]) -> dict[str, Any]:
    """Return `data` with `"zero_optimization": true`, `cpu_offload` and `"offload": "auto"` replaced by the sections
    that they stand for."""
    return _expand_auto_offload(_expand_cpu_offload(_expand_boolean_zero(data)))


def _expand_auto_offload(data: dict[str, Any]) -> dict[str, Any]:
    return {**data, "offload": {}} if data.get("offload") == "auto" else data


def _expand_boolean_zero(data: dict[str, Any]) -> dict[str, Any]:
    zero = data.get("zero_optimization")
    if not isinstance(zero, bool):
        return data
    section: dict[str, Any] = {"stage": int(zero)}
    if "allgather_size" in data:
        section["allgather_bucket_size"] = data["allgather_size"]
    return {**data, "zero_optimization": section}


def _expand_cpu_offload(data: dict[str, Any]) -> dict[str, Any]:
    """Replace the old spelling `cpu_offload: true` by `offload_optimizer: {"device": "cpu"}`, and
    `cpu_offload_param: true` by the same section at `offload_param`. If the old and the new key are both set, they are
    left as they are, and reported as a contradiction. An old key whose value is not a boolean is left for the
    validation to report."""
    zero = data.get("zero_optimization")
    if not isinstance(zero, dict):
        return data
    zero = dict(zero)
    for old, new in (("cpu_offload", "offload_optimizer"), ("cpu_offload_param", "offload_param")):
        if zero.get(old) is None or zero.get(new) not in (None, "auto"):
            continue
        with suppress(ValidationError):
            given = _BOOLEAN.validate_python(zero[old])
            del zero[old]
            if given:
                zero[new] = {"device": "cpu"}
    return {**data, "zero_optimization": zero}


def _copy_plain(value: Any) -> Any:
    """Return a copy of dicts, lists and tuples, in which Python's numbers and lists replace numpy's scalars and arrays.
    Other values, such as a process group, are not copied."""
    if isinstance(value, dict):
        return {key: _copy_plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_copy_plain(item) for item in value]
    if type(value) is tuple:
        return tuple(_copy_plain(item) for item in value)
    return value.tolist() if type(value).__module__ == "numpy" and hasattr(value, "tolist") else value
