"""Free-form parameters of optimizers and schedules: what a name means, and whether a value fits it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from windlass.config.problems import Kind, Problem, Refusal, nearest, show
from windlass.config.verdict import Verdict

Shape = Literal["float", "int", "bool", "str", "floats", "float or floats", "any"]


@dataclass(frozen=True)
class Parameter:
    """A named parameter: the shape of its values, its default, and what becomes of it."""

    shape: Shape
    default: Any
    verdict: Verdict = Verdict.HONOURED
    because: str = ""


Table = Mapping[str, Parameter]


def ignored(shape: Shape, default: Any, because: str) -> Parameter:
    """A parameter whose shape is checked and whose value changes nothing."""
    return Parameter(shape, default, Verdict.ACCEPTED, because)


def unbuilt(shape: Shape, default: Any, because: str) -> Parameter:
    """A parameter that is refused when its value is not `default`."""
    return Parameter(shape, default, Verdict.REFUSED, because)


def integral(params: Mapping[str, Any], table: Table) -> dict[str, Any]:
    """`params` with whole-numbered floats (`1e3`) turned into integers where the table asks for integers."""

    def whole(name: str, value: Any) -> Any:
        wants_int = name in table and table[name].shape == "int"
        return int(value) if wants_int and isinstance(value, float) and value.is_integer() else value

    return {name: whole(name, value) for name, value in params.items()}


def unknown_type(path: str, kind: str, given: str, known: Collection[str]) -> Problem:
    """There is no `kind` of that name: the nearest that there is, or all."""
    near = nearest(given, known)
    hint = f"nearest is {near}" if near else f"known are {', '.join(sorted(set(known)))}"
    return Problem(Kind.TYPE, path, f'there is no {kind} "{given}"; {hint}')


def problems(path: str, params: Mapping[str, Any], table: Table, owner: str) -> Iterator[Problem]:
    """Every parameter under `path` that `owner` does not have, or whose value has the wrong shape."""
    for name, value in params.items():
        if name not in table:
            hint = _hint(name, table)
            yield Problem(Kind.UNKNOWN, f"{path}.{name}", f"{owner} has no such parameter; {hint}")
        elif value != "auto" and not _fits(value, table[name].shape, table[name].default):
            yield Problem(Kind.TYPE, f"{path}.{name}", f"{show(value)} does not fit; write {_words(table[name])}")


def refusals(path: str, params: Mapping[str, Any], table: Table) -> Iterator[Refusal]:
    """Every parameter under `path` that asks for something not built, or was left at "auto"."""
    for name, value in params.items():
        parameter = table.get(name)
        if value == "auto":
            yield Refusal(f"{path}.{name}", value, "nobody filled it in; write a value or delete the key")
        elif parameter and parameter.verdict is Verdict.REFUSED and value != parameter.default:
            yield Refusal(f"{path}.{name}", value, parameter.because)


def _hint(name: str, table: Table) -> str:
    if name == "max_grad_norm":
        return "write gradient_clipping at the top level"
    near = nearest(name, table) or ("lr" if name == "learning_rate" and "lr" in table else None)
    return f"nearest is {near}" if near else f"it has {', '.join(table)}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _fits(value: Any, shape: Shape, default: Any) -> bool:
    if shape == "any" or (value is None and default is None):
        return True
    if shape == "bool":
        return isinstance(value, bool)
    if shape == "str":
        return isinstance(value, str)
    if shape == "int":
        return _is_number(value) and float(value).is_integer()
    numbers = isinstance(value, list | tuple) and bool(value) and all(_is_number(item) for item in value)
    if shape == "floats" and numbers and isinstance(default, list):
        return len(value) == len(default)
    return (shape != "floats" and _is_number(value)) or (shape != "float" and numbers)


def _words(parameter: Parameter) -> str:
    words = {
        "float": "a number", "int": "a whole number", "bool": "true or false", "str": "a string",
        "floats": "a list of numbers", "float or floats": "a number or a list of numbers", "any": "any value",
    }[parameter.shape]  # fmt: skip
    return words if parameter.default in (None, ...) else f"{words}, such as {show(parameter.default)}"
