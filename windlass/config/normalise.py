"""One spelling for every key: older names become today's, "auto" becomes "absent", and comments are left out."""

from __future__ import annotations

from functools import cache
from typing import Any

from windlass.config.batch import KEYS
from windlass.config.problems import Kind, Problem
from windlass.config.root import Config
from windlass.config.section import Nested, Section, nested_section
from windlass.config.verdict import facts_of

TOP_LEVEL_AUTO = (*KEYS, "gradient_clipping")


class Normaliser:
    """A walk over raw data beside the schema; collects the keys left at "auto", the keys spelled twice and the keys
    that are comments."""

    def __init__(self) -> None:
        self.autos: set[str] = set()
        self.comments: list[str] = []
        self.problems: list[Problem] = []

    def __call__(self, data: dict[str, Any]) -> dict[str, Any]:
        """A deep enough copy of `data` with one spelling for every key; `data` itself is not written to."""
        data = _old_offload(_boolean_zero(data))
        return self._section(data, Config, "")

    def _section(self, data: dict[str, Any], section: type[Section], path: str) -> dict[str, Any]:
        names = canonical_names(section)
        result: dict[str, Any] = {}
        for key, value in data.items():
            name = names.get(key, key)
            inner = f"{path}.{key}" if path else str(key)
            if name not in section.model_fields and is_comment(key):
                self.comments.append(inner)
            elif name in result:
                sentence = f'"{key}" and "{name}" are two spellings of one key; delete one'
                self.problems.append(Problem(Kind.CONTRADICTION, inner, sentence))
            elif value == "auto" and name in section.model_fields and (path or name in TOP_LEVEL_AUTO):
                self.autos.add(f"{path}.{name}" if path else name)
            else:
                result[name] = self._value(value, section, name, inner)
        return result

    def _value(self, value: Any, section: type[Section], name: str, path: str) -> Any:
        field = section.model_fields.get(name)
        nested = nested_section(field.annotation) if field else None
        if nested is None:
            return self._free(value, path) if isinstance(value, dict) else value
        return self._nested(value, nested, path)

    def _free(self, value: dict[str, Any], path: str) -> dict[str, Any]:
        """Leave comments out of an object whose keys are the user's, such as an optimizer's parameters."""
        self.comments += [f"{path}.{key}" for key in value if is_comment(key)]
        return {key: item for key, item in value.items() if not is_comment(key)}

    def _nested(self, value: Any, nested: Nested, path: str) -> Any:
        if nested.shape == "list" and isinstance(value, list):
            alone = Nested(nested.section, "alone")
            return [self._nested(item, alone, f"{path}[{index}]") for index, item in enumerate(value)]
        if not isinstance(value, dict):
            return value
        if nested.shape == "free keys":
            alone = Nested(nested.section, "alone")
            return {key: self._nested(item, alone, f"{path}.{key}") for key, item in value.items()}
        return self._section(value, nested.section, path)


def is_comment(key: str) -> bool:
    """Return True for keys that hold remarks, which JSON lacks: `_comment`, `_anything`, `//`, `comment`, `$schema`."""
    return key.startswith(("_", "//", "#")) or key.lower() in ("comment", "comments", "$schema")


@cache
def canonical_names(section: type[Section]) -> dict[str, str]:
    """Every spelling that `section` knows, and the name of its field."""
    names = {name: name for name in section.model_fields}
    for name, field in section.model_fields.items():
        names.update(dict.fromkeys(facts_of(field)["also"], name))
    return names


def _boolean_zero(data: dict[str, Any]) -> dict[str, Any]:
    zero = data.get("zero_optimization")
    if not isinstance(zero, bool):
        return data
    section: dict[str, Any] = {"stage": int(zero)}
    if "allgather_size" in data:
        section["allgather_bucket_size"] = data["allgather_size"]
    return {**data, "zero_optimization": section}


def _old_offload(data: dict[str, Any]) -> dict[str, Any]:
    """`cpu_offload: true` is how `offload_optimizer: {"device": "cpu"}` was written once. Both together stay, to be
    told of."""
    zero = data.get("zero_optimization")
    if not isinstance(zero, dict):
        return data
    zero = dict(zero)
    for old, new in (("cpu_offload", "offload_optimizer"), ("cpu_offload_param", "offload_param")):
        given = zero.get(old)
        if isinstance(given, bool) and zero.get(new) is None:
            del zero[old]
            if given:
                zero[new] = {"device": "cpu"}
    return {**data, "zero_optimization": zero}
