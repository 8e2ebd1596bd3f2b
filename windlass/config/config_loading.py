"""Loading of a configuration: returns a `Config`, or reports all problems at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from pydantic import ValidationError

from windlass.base.errors import ConfigError
from windlass.base.text import nearest_name, one_line, plural
from windlass.config import optimizer_section, scheduler_section
from windlass.config.config_problems import MAX_LISTED, ConfigProblem, ProblemKind, format_value, numbered_list
from windlass.config.config_section import ConfigSection, nested_section
from windlass.config.config_source import ConfigSource, read_source
from windlass.config.contradictions import find_contradictions
from windlass.config.key_normalization import KeyNormalizer, canonical_names
from windlass.config.root_config import Config
from windlass.config.type_descriptions import describe_field

_MAX_PASSES = 8
"""Bound on validation passes. Each pass removes faulty keys and validates the rest again, because a missing key may
only show after other errors are removed."""

MAX_HINTS = MAX_LISTED
"""Maximum number of unknown keys for which the nearest known key is looked up, because a lookup takes about a
millisecond. Unknown keys are listed first, so every one that is printed has its hint."""


@dataclass(frozen=True)
class ValidationResult:
    """Result of `validate_config`: the configuration without its faulty keys, and all problems."""

    source: ConfigSource
    config: Config
    problems: list[ConfigProblem]


def load_config(source: object) -> Config:
    """Load a configuration from a dict, a path, url-safe base64 of JSON, or a `ConfigSource`.

    Keys that are known but not supported do not fail here: see `Config.refusals`.

    Raises:
        ConfigError: the source cannot be read, or has unknown keys, wrong types or contradictions. The message lists
            all of them.
    """
    found = validate_config(source)
    if found.problems:
        head = f"{found.source.name} cannot be used: {plural(len(found.problems), 'problem')}"
        raise ConfigError(f"{head}\n{numbered_list(found.problems)}")
    return found.config


def validate_config(source: object) -> ValidationResult:
    """Load a configuration and list every unknown key, wrong type and contradiction in it.

    Raises:
        ConfigError: the source cannot be read at all.
    """
    where = read_source(source)
    normaliser = KeyNormalizer()
    data = normaliser(where.data)
    problems = list(normaliser.problems)
    config, faults = _validate(data)
    problems += faults
    config.set_origin(where.data, where.name, where.lines, frozenset(normaliser.auto_keys), tuple(normaliser.comments))
    wrong: list[ConfigProblem] = []
    if config.optimizer:
        wrong = list(optimizer_section.find_parameter_problems(config.optimizer))
        problems += wrong
    if config.scheduler:
        problems += scheduler_section.find_parameter_problems(config.scheduler, None if wrong else config.optimizer)
    problems += find_contradictions(config)
    order = list(ProblemKind)
    problems.sort(key=lambda problem: order.index(problem.kind))
    return ValidationResult(where, config, [_with_line(problem, where) for problem in problems])


def _with_line(problem: ConfigProblem, source: ConfigSource) -> ConfigProblem:
    return replace(problem, line=source.lines.get(problem.path))


def _validate(remaining: dict[str, Any]) -> tuple[Config, list[ConfigProblem]]:
    """Return the configuration without faulty keys, which are removed from `remaining`, and a problem for each."""
    problems: dict[tuple[Any, ...], ConfigProblem] = {}
    unknown = 0
    for _ in range(_MAX_PASSES):
        try:
            return Config.model_validate(remaining), list(problems.values())
        except ValidationError as error:
            faults = {_path_in_data(fault["loc"], remaining): fault for fault in reversed(error.errors())}
            if () in faults:  # a fault of the whole object: there is no key to remove
                problems[()] = ConfigProblem(ProblemKind.TYPE, "", str(faults[()]["msg"]))
                break
            for loc, fault in reversed(faults.items()):
                # Keep the first problem of a key: a required key with a wrong value is missing in the next pass.
                problems.setdefault(loc, _make_problem(loc, fault, hint=unknown < MAX_HINTS))
                unknown += fault["type"] == "extra_forbidden"
            for loc in faults:
                _remove_at(loc, remaining)
    return Config(), list(problems.values())


def _path_in_data(loc: tuple[Any, ...], data: Any) -> tuple[Any, ...]:
    """Return the prefix of pydantic's error location that is a path into the data; the rest names members of unions."""
    path: list[Any] = []
    for step in loc:
        inside = (isinstance(data, dict) and step in data) or (
            isinstance(data, list) and isinstance(step, int) and step < len(data)
        )
        if not inside:
            return (*path, step) if isinstance(data, dict) and step == loc[-1] else tuple(path)
        path.append(step)
        data = data[step]
    return tuple(path)


def _remove_at(loc: tuple[Any, ...], data: Any) -> None:
    """Remove the value at `loc`. If it is an element of a list, clear the whole list. If it is a required key that is
    missing, remove the section that lacks the key."""
    holder = data
    for step in loc[:-1]:
        if isinstance(holder, dict) and step not in holder:
            return  # already removed because of another fault
        holder = holder[step]
        if isinstance(holder, list):
            break
    if isinstance(holder, dict) and loc[-1] in holder:
        del holder[loc[-1]]
    elif isinstance(holder, dict) and len(loc) > 1:
        _remove_at(loc[:-1], data)
    elif isinstance(holder, list | dict):
        holder.clear()


def _make_problem(loc: tuple[Any, ...], fault: Any, hint: bool) -> ConfigProblem:
    path = dotted_path(loc)
    if fault["type"] == "extra_forbidden":
        return ConfigProblem(ProblemKind.UNKNOWN, path, f"unknown key; {_hint(loc) if hint else 'delete it'}")
    if fault["type"] == "missing":
        return ConfigProblem(ProblemKind.TYPE, path, "absent, but needed; add it")
    message = f": {fault['msg'][0].lower()}{fault['msg'][1:]}" if fault["type"] != "literal_error" else ""
    field = _field_at(loc)
    write = f"; write {describe_field(field)}" if field else ""
    return ConfigProblem(ProblemKind.TYPE, path, f"{format_value(fault['input'])} does not fit{message}{write}")


def dotted_path(loc: tuple[Any, ...]) -> str:
    """Format a location as a dotted path: `a.b[0].c`."""
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in loc).lstrip(".")


def _section_at(loc: tuple[Any, ...]) -> type[ConfigSection] | None:
    section: type[ConfigSection] | None = Config
    for step in loc:
        if isinstance(step, int):
            continue
        if section is None:
            return None
        field = section.model_fields.get(str(step))
        nested = nested_section(field.annotation) if field else None
        section = nested.section if nested else (section if field is None else None)
    return section


def _field_at(loc: tuple[Any, ...]) -> Any:
    names = [step for step in loc if not isinstance(step, int)]
    holder = _section_at(tuple(names[:-1])) if names else None
    return holder.model_fields.get(str(names[-1])) if holder else None


def _hint(loc: tuple[Any, ...]) -> str:
    name = str(loc[-1])
    if len(loc) == 1 and "." in name:
        return f'a key is not a path: write {{"{one_line(name.split(".")[0], 80)}": {{...}}}} and put it inside'
    holder = _section_at(loc[:-1])
    prefix = dotted_path(loc[:-1])
    near = nearest_name(name, canonical_names(holder)) if holder else None
    if near:
        return f"nearest is {prefix}.{near}".replace("is .", "is ")
    elsewhere = _first_paths().get(name)
    return f"it belongs at {elsewhere}" if elsewhere else "no known key is similar; delete it"


@cache
def _first_paths() -> dict[str, str]:
    """Return, by name of a key, the first dotted path of the schema that ends with this name."""
    places: dict[str, str] = {}
    for path in _all_keys(Config, ""):
        places.setdefault(path.split(".")[-1], path)
    return places


def _all_keys(section: type[ConfigSection], path: str) -> Iterator[str]:
    for spelling, name in canonical_names(section).items():
        inner = f"{path}.{spelling}".lstrip(".")
        yield inner
        nested = nested_section(section.model_fields[name].annotation)
        if nested and nested.shape == "alone":
            yield from _all_keys(nested.section, inner)
