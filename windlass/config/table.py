"""Every key that there is, and what becomes of it: drawn from the schema, so that it cannot differ from it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

from windlass.config import optimizer, scheduler
from windlass.config.inference import InitInference, RaggedInference
from windlass.config.parameters import Table
from windlass.config.problems import show
from windlass.config.retired import Amp
from windlass.config.root import Config
from windlass.config.section import Section, nested_section
from windlass.config.verdict import Verdict, facts_of
from windlass.config.words import type_words

TRAINING = "ds_config.json"
ROOTS: dict[str, type[Section]] = {
    TRAINING: Config,
    "init_inference": InitInference,
    "RaggedInferenceEngineConfig": RaggedInference,
}
"""The configuration objects that hold keys; all but the first belong to serving."""


@dataclass(frozen=True)
class Row:
    """A key: where it stands, what may stand there, and what becomes of it.

    `owner` is the optimizer or schedule that reads the key, where several share its name.
    """

    root: str
    path: str
    verdict: Verdict
    because: str
    type: str
    default: str
    owner: str = ""
    also: tuple[str, ...] = ()
    native: bool = False


@cache
def rows() -> tuple[Row, ...]:
    """Every key, in the order of the schema."""
    found = [row for root, section in ROOTS.items() for row in _rows(root, section, "", section.refusal)]
    found += _parameter_rows("optimizer", optimizer.PARAMETERS)
    found += _parameter_rows("scheduler", scheduler.PARAMETERS)
    found += EXTRA
    return tuple(found)


EXTRA = (
    Row(TRAINING, "amp.<key>", Verdict.REFUSED, Amp.refusal, "any value", "null"),
    Row(
        TRAINING, '"zero_optimization.reduce_bucket_size"', Verdict.REFUSED,
        "a dotted name at the top level is no path; put the key inside its section", "any value", "null",
    ),
)  # fmt: skip
"""Keys with free names, for which the schema has no field."""


def find(root: str, path: str, owner: str = "") -> Row | None:
    """The row of a key in any of its spellings; a path segment in angle brackets stands for every name.

    `owner` may be a phrase: the first optimizer or schedule in it that has the key is meant.
    """
    if owner:
        kinds = re.findall(r"\w+", owner)
        return next((row for row in rows() if row.owner in kinds and row.path == path), None)
    wanted = _segments(path)
    exact = _index(root).get(wanted)
    if exact or "<" not in path:
        return exact
    return next((row for known, row in _index(root).items() if _matches(wanted, known)), None)


def _rows(root: str, section: type[Section], path: str, inherited: str) -> Iterator[Row]:
    for name, field in section.model_fields.items():
        facts = facts_of(field)
        nested = nested_section(field.annotation)
        refusal = inherited or (nested.section.refusal if nested else "")
        verdict = Verdict.REFUSED if refusal else Verdict(facts["verdict"])
        reason = facts["because"] or refusal
        yield Row(
            root=root,
            path=f"{path}.{name}".lstrip("."),
            verdict=verdict,
            because=reason if verdict is not Verdict.HONOURED else field.description or "",
            type=type_words(field.annotation),
            default=_default(field),
            also=tuple(facts["also"]),
            native=facts["native"],
        )
        if nested:
            step = {"alone": "", "list": "[]", "free keys": ".<name>"}[nested.shape]
            yield from _rows(root, nested.section, f"{path}.{name}{step}".lstrip("."), refusal)


def _parameter_rows(section: str, tables: dict[str, Table]) -> Iterator[Row]:
    for owner, table in tables.items():
        unbuilt = optimizer.UNBUILT_TYPES.get(owner, "")
        for name, parameter in table.items():
            yield Row(
                root=TRAINING,
                path=f"{section}.params.{name}",
                verdict=Verdict.REFUSED if unbuilt else parameter.verdict,
                because=unbuilt or parameter.because,
                type=parameter.shape,
                default="required" if parameter.default is ... else show(parameter.default),
                owner=owner,
            )


def _default(field: Any) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    return "section" if isinstance(value, Section) else show(value)


def _segments(path: str) -> tuple[str, ...]:
    """The steps of a dotted path; a name in angle brackets or quotes is one step, and so is `[]`."""
    return tuple(re.findall(r'<[^>]*>|"[^"]*"|\[\]|[^.\[\]]+', path))


@cache
def _index(root: str) -> dict[tuple[str, ...], Row]:
    """The rows of a root by their steps, each step in each of its spellings."""
    own = [row for row in rows() if row.root == root and not row.owner]
    also = {_segments(row.path): row.also for row in own if row.also}
    index: dict[tuple[str, ...], Row] = {}
    for row in own:
        steps = _segments(row.path)
        options = [(step, *also.get(steps[: at + 1], ())) for at, step in enumerate(steps)]
        index.update(dict.fromkeys(product(*options), row))
    return index


def _matches(wanted: tuple[str, ...], known: tuple[str, ...]) -> bool:
    def same(a: str, b: str) -> bool:
        return a == b or a.startswith("<") or b.startswith("<")

    return len(wanted) == len(known) and all(map(same, wanted, known))
