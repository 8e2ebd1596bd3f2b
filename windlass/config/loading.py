"""From a source to a configuration, or to every reason at once why it cannot be read."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from pydantic import ValidationError

from windlass.base.errors import ConfigError
from windlass.base.text import nearest, one_line, plural
from windlass.config import optimizer, scheduler
from windlass.config.contradictions import contradictions
from windlass.config.normalise import Normaliser, canonical_names
from windlass.config.problems import Kind, Problem, listing, show
from windlass.config.root import Config
from windlass.config.section import Section, nested_section
from windlass.config.source import Source, read
from windlass.config.words import field_words

_PASSES = 8
"""Faulty keys are taken out and the rest is read again; a missing key may only show once its neighbours are right."""

MOST_HINTS = 50
"""Unknown keys for which the nearest known one is looked up: comparing names takes about a millisecond a key."""


@dataclass(frozen=True)
class Examination:
    """What `examine` found: the configuration with faulty keys left out, and everything that is wrong with it."""

    source: Source
    config: Config
    problems: list[Problem]


def load(source: object) -> Config:
    """Read a configuration from a dict, a path, or url-safe base64 of JSON.

    A key that is understood but not supported does not fail here: see `Config.refusals`.

    Raises:
        ConfigError: the source cannot be read, or has unknown keys, wrong types or contradictions; the text lists all.
    """
    found = examine(source)
    if found.problems:
        head = f"{found.source.name} cannot be used: {plural(len(found.problems), 'problem')}"
        raise ConfigError(f"{head}\n{listing(found.problems)}")
    return found.config


def examine(source: object) -> Examination:
    """Read a configuration and list every unknown key, wrong type and contradiction in it.

    Raises:
        ConfigError: the source cannot be read at all.
    """
    where = read(source)
    normaliser = Normaliser()
    data = normaliser(where.data)
    problems = list(normaliser.problems)
    config, faults = _validate(data)
    problems += faults
    config.remember(where.data, where.name, where.lines, frozenset(normaliser.autos), tuple(normaliser.comments))
    wrong: list[Problem] = []
    if config.optimizer:
        wrong = list(optimizer.parameter_problems(config.optimizer))
        problems += wrong
    if config.scheduler:
        problems += scheduler.parameter_problems(config.scheduler, None if wrong else config.optimizer)
    problems += contradictions(config)
    order = list(Kind)
    problems.sort(key=lambda problem: order.index(problem.kind))
    return Examination(where, config, [_with_line(problem, where) for problem in problems])


def _with_line(problem: Problem, source: Source) -> Problem:
    return replace(problem, line=source.lines.get(problem.path))


def _validate(data: dict[str, Any]) -> tuple[Config, list[Problem]]:
    problems: list[Problem] = []
    remaining = copy.deepcopy(data)
    for _ in range(_PASSES):
        try:
            return Config.model_validate(remaining), problems
        except ValidationError as error:
            faults = {_existing(fault["loc"], remaining): fault for fault in reversed(error.errors())}
            if () in faults:  # not of one key: nothing can be taken out
                problems.append(Problem(Kind.TYPE, "", str(faults[()]["msg"])))
                break
            for loc, fault in reversed(faults.items()):
                problems.append(_problem(loc, fault, hint=len(problems) < MOST_HINTS))
            for loc in faults:
                _take_out(loc, remaining)
    return Config(), problems


def _existing(loc: tuple[Any, ...], data: Any) -> tuple[Any, ...]:
    """The part of pydantic's location that is a path into the data; the rest names members of unions."""
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


def _take_out(loc: tuple[Any, ...], data: Any) -> None:
    """Remove what stands at `loc`; where nothing does (a missing key), remove what should have held it."""
    for step in loc[:-1]:
        data = data[step]
        if isinstance(data, list):
            break
    holder = data
    if isinstance(holder, dict) and loc[-1] in holder:
        del holder[loc[-1]]
    elif isinstance(holder, list | dict):
        holder.clear()


def _problem(loc: tuple[Any, ...], fault: Any, hint: bool) -> Problem:
    path = dotted(loc)
    if fault["type"] == "extra_forbidden":
        return Problem(Kind.UNKNOWN, path, f"unknown key; {_hint(loc) if hint else 'delete it'}")
    if fault["type"] == "missing":
        return Problem(Kind.TYPE, path, "absent, but needed; add it")
    message = f": {fault['msg'][0].lower()}{fault['msg'][1:]}" if fault["type"] != "literal_error" else ""
    field = _field(loc)
    write = f"; write {field_words(field)}" if field else ""
    return Problem(Kind.TYPE, path, f"{show(fault['input'])} does not fit{message}{write}")


def dotted(loc: tuple[Any, ...]) -> str:
    """A location as a dotted path: `a.b[0].c`."""
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in loc).lstrip(".")


def _holders(loc: tuple[Any, ...]) -> type[Section] | None:
    section: type[Section] | None = Config
    for step in loc:
        if isinstance(step, int):
            continue
        if section is None:
            return None
        field = section.model_fields.get(str(step))
        nested = nested_section(field.annotation) if field else None
        section = nested.section if nested else (section if field is None else None)
    return section


def _field(loc: tuple[Any, ...]) -> Any:
    names = [step for step in loc if not isinstance(step, int)]
    holder = _holders(tuple(names[:-1])) if names else None
    return holder.model_fields.get(str(names[-1])) if holder else None


def _hint(loc: tuple[Any, ...]) -> str:
    name = str(loc[-1])
    if len(loc) == 1 and "." in name:
        return f'a key is not a path: write {{"{one_line(name.split(".")[0], 80)}": {{...}}}} and put it inside'
    holder = _holders(loc[:-1])
    prefix = dotted(loc[:-1])
    near = nearest(name, canonical_names(holder)) if holder else None
    if near:
        return f"nearest is {prefix}.{near}".replace("is .", "is ")
    elsewhere = _places().get(name)
    return f"it belongs at {elsewhere}" if elsewhere else "nothing is like it; delete it"


@cache
def _places() -> dict[str, str]:
    """The first path of each key name."""
    places: dict[str, str] = {}
    for path in _all_keys(Config, ""):
        places.setdefault(path.split(".")[-1], path)
    return places


def _all_keys(section: type[Section], path: str) -> Iterator[str]:
    for spelling, name in canonical_names(section).items():
        inner = f"{path}.{spelling}".lstrip(".")
        yield inner
        nested = nested_section(section.model_fields[name].annotation)
        if nested and nested.shape == "alone":
            yield from _all_keys(nested.section, inner)
