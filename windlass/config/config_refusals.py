"""Unsupported settings of a configuration, collected over the whole schema."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from windlass.config import feature_matrix, optimizer_section, scheduler_section
from windlass.config.config_problems import ConfigRefusal
from windlass.config.config_section import ConfigSection
from windlass.config.key_status import KeyStatus, key_facts

if TYPE_CHECKING:
    from windlass.config.root_config import Config

REQUIRED_AUTO_KEYS = ("fp16.enabled", "bf16.enabled", "torch_autocast.enabled")


def find_refusals(config: Config) -> list[ConfigRefusal]:
    """List every unsupported setting in `config`: first keys of sections, in the order of the schema, then parameters
    of optimizer and scheduler, required keys at "auto", and pairs of features that do not work together."""
    found = list(_walk_section(config, ""))
    if config.optimizer:
        found += optimizer_section.find_parameter_refusals(config.optimizer)
    if config.scheduler:
        found += scheduler_section.find_parameter_refusals(config.scheduler)
    for key in REQUIRED_AUTO_KEYS:
        if key in config.auto_keys:
            found.append(ConfigRefusal(key, "auto", "no program filled it in; write true or false"))
    for pair in feature_matrix.unsupported_pairs(feature_matrix.describe_features(config)):
        settings = [feature_matrix.find_setting(config, axis) for axis, _ in (pair.first, pair.second)]
        fix = f"{pair.reason}; change one of the two"
        found.append(
            ConfigRefusal(
                " with ".join(key for key, _ in settings), " with ".join(str(value) for _, value in settings), fix
            )
        )
    return found


def find_section_refusals(section: ConfigSection) -> list[ConfigRefusal]:
    """List every unsupported setting in one section."""
    return list(_walk_section(section, ""))


def _walk_section(section: ConfigSection, path: str) -> Iterator[ConfigRefusal]:
    if section.refusal:
        requested = section.requested_key()
        if requested is not None:
            yield ConfigRefusal(
                ".".join(part for part in (path, requested) if part), section.value_at(requested), section.refusal
            )
        return
    if section.enable_key and section.requested_key() is None:
        return
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        inner = f"{path}.{name}" if path else name
        if isinstance(value, ConfigSection):
            yield from _walk_section(value, inner)
            continue
        for index, item in enumerate(value if isinstance(value, list) else ()):
            if isinstance(item, ConfigSection):
                yield from _walk_section(item, f"{inner}[{index}]")
        facts = key_facts(field)
        if facts["status"] == KeyStatus.REFUSED and value != field.get_default(call_default_factory=True):
            yield ConfigRefusal(inner, value, facts["reason"])
