"""All configuration keys with their status, generated from the schema."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

from windlass.config import optimizer_section, scheduler_section
from windlass.config.config_problems import format_value
from windlass.config.config_section import ConfigSection, nested_section
from windlass.config.inference_section import InitInference, RaggedInference
from windlass.config.key_status import KeyStatus, key_facts
from windlass.config.parameter_tables import ParameterTable
from windlass.config.retired_sections import Amp
from windlass.config.root_config import Config
from windlass.config.type_descriptions import describe_type

TRAINING_CONFIG = "ds_config.json"
CONFIG_ROOTS: dict[str, type[ConfigSection]] = {
    TRAINING_CONFIG: Config,
    "init_inference": InitInference,
    "RaggedInferenceEngineConfig": RaggedInference,
}
"""Configuration objects, by name. All but the first are for inference."""


@dataclass(frozen=True)
class ConfigKey:
    """A key: its path, type, default and status.

    `owner` is the optimizer or schedule that reads the parameter, because several have parameters of the same name.
    """

    root: str
    path: str
    status: KeyStatus
    reason: str
    type: str
    default: str
    owner: str = ""
    aliases: tuple[str, ...] = ()
    windlass_only: bool = False


@cache
def config_keys() -> tuple[ConfigKey, ...]:
    """Return all keys, in the order of the schema."""
    found = [row for root, section in CONFIG_ROOTS.items() for row in _section_keys(root, section, "", section.refusal)]
    found += _parameter_keys("optimizer", optimizer_section.OPTIMIZER_PARAMETERS)
    found += _parameter_keys("scheduler", scheduler_section.SCHEDULER_PARAMETERS)
    found += EXTRA_KEYS
    return tuple(found)


EXTRA_KEYS = (
    ConfigKey(TRAINING_CONFIG, "amp.<key>", KeyStatus.REFUSED, Amp.refusal, "any value", "null"),
    ConfigKey(
        TRAINING_CONFIG, '"zero_optimization.reduce_bucket_size"', KeyStatus.REFUSED,
        "a dotted name at the top level is not a path; put the key inside its section", "any value", "null",
    ),
)  # fmt: skip
"""Keys for which the schema has no field."""


def find_key(root: str, path: str, owner: str = "") -> ConfigKey | None:
    """Return the entry of a key in any of its spellings, or None. A segment in angle brackets matches every name.

    `owner` may be a phrase; the first optimizer or schedule in it that has the key is used.
    """
    if owner:
        kinds = re.findall(r"\w+", owner)
        return next((row for row in config_keys() if row.owner in kinds and row.path == path), None)
    requested = _path_segments(path)
    exact = _keys_by_path(root).get(requested)
    if exact or "<" not in path:
        return exact
    return next((row for known, row in _keys_by_path(root).items() if _matches(requested, known)), None)


def _section_keys(root: str, section: type[ConfigSection], path: str, inherited_refusal: str) -> Iterator[ConfigKey]:
    for name, field in section.model_fields.items():
        facts = key_facts(field)
        nested = nested_section(field.annotation)
        refusal = inherited_refusal or (nested.section.refusal if nested else "")
        key_status = KeyStatus.REFUSED if refusal else KeyStatus(facts["status"])
        reason = facts["reason"] or refusal
        yield ConfigKey(
            root=root,
            path=f"{path}.{name}".lstrip("."),
            status=key_status,
            reason=reason if key_status is not KeyStatus.HONOURED else field.description or "",
            type=describe_type(field.annotation),
            default=_describe_default(field),
            aliases=tuple(facts["aliases"]),
            windlass_only=facts["windlass_only"],
        )
        if nested:
            step = {"alone": "", "list": "[]", "free keys": ".<name>"}[nested.shape]
            yield from _section_keys(root, nested.section, f"{path}.{name}{step}".lstrip("."), refusal)


def _parameter_keys(section: str, tables: dict[str, ParameterTable]) -> Iterator[ConfigKey]:
    for owner, table in tables.items():
        unbuilt = optimizer_section.UNSUPPORTED_OPTIMIZERS.get(owner, "")
        for name, parameter in table.items():
            yield ConfigKey(
                root=TRAINING_CONFIG,
                path=f"{section}.params.{name}",
                status=KeyStatus.REFUSED if unbuilt else parameter.status,
                reason=unbuilt or parameter.reason,
                type=parameter.shape,
                default="required" if parameter.default is ... else format_value(parameter.default),
                owner=owner,
            )


def _describe_default(field: Any) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    return "section" if isinstance(value, ConfigSection) else format_value(value)


def _path_segments(path: str) -> tuple[str, ...]:
    """Split a dotted path into segments; a name in angle brackets or quotes is one segment, and so is `[]`."""
    return tuple(re.findall(r'<[^>]*>|"[^"]*"|\[\]|[^.\[\]]+', path))


@cache
def _keys_by_path(root: str) -> dict[tuple[str, ...], ConfigKey]:
    """Index the keys of a root by their segments, with each segment in each of its spellings."""
    own = [row for row in config_keys() if row.root == root and not row.owner]
    also = {_path_segments(row.path): row.aliases for row in own if row.aliases}
    index: dict[tuple[str, ...], ConfigKey] = {}
    for row in own:
        steps = _path_segments(row.path)
        options = [(step, *also.get(steps[: at + 1], ())) for at, step in enumerate(steps)]
        index.update(dict.fromkeys(product(*options), row))
    return index


def _matches(wanted: tuple[str, ...], known: tuple[str, ...]) -> bool:
    def same(a: str, b: str) -> bool:
        return a == b or a.startswith("<") or b.startswith("<")

    return len(wanted) == len(known) and all(map(same, wanted, known))
