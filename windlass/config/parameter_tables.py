"""Tables of the parameters of optimizers and schedules: their names, and the values that are valid."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from windlass.base.text import join_abridged, nearest_name, one_line
from windlass.config.config_problems import MAX_LISTED, ConfigProblem, ConfigRefusal, ProblemKind, format_value
from windlass.config.key_status import KeyStatus

ValueShape = Literal["float", "int", "bool", "str", "floats", "float or floats", "any"]
MAX_PARAMETER_HINTS = MAX_LISTED
"""Maximum number of unknown parameters for which the nearest known parameter is looked up."""


@dataclass(frozen=True)
class ParameterSpec:
    """Type and range of a parameter's values, its default, and its status.

    `minimum` is an inclusive bound, `greater_than` and `less_than` are exclusive; for a list they bound each number.
    `choices` are the valid values, possibly a view that includes names registered later; None is valid too if it is the
    default.
    """

    shape: ValueShape
    default: Any
    status: KeyStatus = KeyStatus.HONOURED
    reason: str = ""
    minimum: float | None = None
    greater_than: float | None = None
    less_than: float | None = None
    choices: Collection[str] = ()


ParameterTable = Mapping[str, ParameterSpec]


def accepted_parameter(shape: ValueShape, default: Any, reason: str) -> ParameterSpec:
    """Declare a parameter whose type is checked and whose value has no effect."""
    return ParameterSpec(shape, default, KeyStatus.ACCEPTED, reason)


def refused_parameter(shape: ValueShape, default: Any, reason: str) -> ParameterSpec:
    """Declare a parameter that is refused if its value is not `default`."""
    return ParameterSpec(shape, default, KeyStatus.REFUSED, reason)


def convert_integers(params: Mapping[str, Any], table: ParameterTable) -> dict[str, Any]:
    """Return `params` with whole-numbered floats (`1e3`) converted to integers where the table requires integers."""

    def whole(name: str, value: Any) -> Any:
        wants_int = name in table and table[name].shape == "int"
        return int(value) if wants_int and isinstance(value, float) and value.is_integer() else value

    return {name: whole(name, value) for name, value in params.items()}


def unknown_type_problem(path: str, kind: str, given: str, known: Collection[str]) -> ConfigProblem:
    """Return the problem that no `kind` has the given name, with the nearest known name, or else all known names."""
    near = nearest_name(given, known)
    hint = f"nearest is {near}" if near else f"known are {', '.join(sorted(set(known)))}"
    return ConfigProblem(ProblemKind.TYPE, path, f"there is no {kind} {format_value(given)}; {hint}")


def table_problems(path: str, params: Mapping[str, Any], table: ParameterTable, owner: str) -> Iterator[ConfigProblem]:
    """Yield a problem for every parameter that `owner` does not have, or whose value has the wrong type or range."""
    unknown = 0
    for name, value in params.items():
        if name not in table:
            unknown += 1
            hint = _hint(name, table) if unknown <= MAX_PARAMETER_HINTS else "delete it"
            yield ConfigProblem(ProblemKind.UNKNOWN, f"{path}.{name}", f"{owner} has no such parameter; {hint}")
        elif value != "auto" and not fits(value, table[name]):
            yield ConfigProblem(
                ProblemKind.TYPE,
                f"{path}.{name}",
                f"{format_value(value)} does not fit; write {_describe_values(table[name])}",
            )


def table_refusals(path: str, params: Mapping[str, Any], table: ParameterTable) -> Iterator[ConfigRefusal]:
    """Yield a refusal for every parameter that is not supported, or was left at "auto"."""
    for name, value in params.items():
        parameter = table.get(name)
        if value == "auto":
            yield ConfigRefusal(f"{path}.{name}", value, "no program filled it in; write a value or delete the key")
        elif parameter and parameter.status is KeyStatus.REFUSED and value != parameter.default:
            yield ConfigRefusal(f"{path}.{name}", value, parameter.reason)


def try_construct(path: str, owner: str, construct: Callable[[], Any]) -> Iterator[ConfigProblem]:
    """Construct an optimizer or a schedule whose valid parameters are in no table. If that raises, yield the error as a
    problem."""
    try:
        construct()
    except Exception as error:  # a foreign constructor may raise anything, and would raise the same in `initialize`
        reason = one_line(f"{type(error).__name__}: {error}", 300)
        yield ConfigProblem(ProblemKind.TYPE, path, f"{owner} cannot be constructed: {reason}; correct the values")


def shape_of_default(default: Any) -> ValueShape:
    """Return the type of values that a default in a signature implies; "any" if it implies none."""
    if isinstance(default, bool):
        return "bool"
    # torch writes 0 as the default of parameters that take 0.9 (RMSprop's momentum)
    if isinstance(default, int | float):
        return "float"
    if isinstance(default, str):
        return "str"
    numbers = isinstance(default, list | tuple) and bool(default) and all(map(_is_number, default))
    return "floats" if numbers else "any"


def fits(value: Any, parameter: ParameterSpec) -> bool:
    """Return True if `value` has the type and the range of `parameter`."""
    if value is None and parameter.default is None:
        return True
    if not _has_shape(value, parameter.shape, parameter.default):
        return False
    if parameter.choices and value not in parameter.choices:
        return False
    numbers = value if isinstance(value, list | tuple) else [value]
    return all(_in_range(number, parameter) for number in numbers if _is_number(number))


def _hint(name: str, table: ParameterTable) -> str:
    if name == "max_grad_norm":
        return "write gradient_clipping at the top level"
    near = nearest_name(name, table) or ("lr" if name == "learning_rate" and "lr" in table else None)
    return f"nearest is {near}" if near else f"it has {join_abridged(list(table), 40)}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_finite(value: Any) -> bool:
    try:
        return _is_number(value) and math.isfinite(value)
    except OverflowError:  # an integer beyond the range of float
        return False


def _in_range(number: float, parameter: ParameterSpec) -> bool:
    return (
        _is_finite(number)
        and (parameter.minimum is None or number >= parameter.minimum)
        and (parameter.greater_than is None or number > parameter.greater_than)
        and (parameter.less_than is None or number < parameter.less_than)
    )


def _has_shape(value: Any, shape: ValueShape, default: Any) -> bool:
    if shape == "any":
        return True
    if shape == "bool":
        return isinstance(value, bool)
    if shape == "str":
        return isinstance(value, str)
    if shape == "int":
        return _is_finite(value) and float(value).is_integer()
    numbers = isinstance(value, list | tuple) and bool(value) and all(_is_finite(item) for item in value)
    if shape == "floats" and numbers and isinstance(default, list | tuple):
        return len(value) == len(default)
    return (shape != "floats" and _is_finite(value)) or (shape != "float" and numbers)


def _describe_values(parameter: ParameterSpec) -> str:
    words = {
        "float": "a number", "int": "a whole number", "bool": "true or false", "str": "a string",
        "floats": "a list of numbers", "float or floats": "a number or a list of numbers", "any": "any finite value",
    }[parameter.shape]  # fmt: skip
    if parameter.shape == "floats" and isinstance(parameter.default, list | tuple):
        words = f"a list of {len(parameter.default)} numbers"
    if parameter.choices:
        words = " or ".join(map(format_value, parameter.choices))
    bounds = (
        (">=", parameter.minimum),
        (">", parameter.greater_than),
        ("<", parameter.less_than),
    )
    ranges = [f"{sign} {bound:g}" for sign, bound in bounds if bound is not None]
    words = " ".join([words, " and ".join(ranges)]).rstrip()
    return words if parameter.default in (None, ...) else f"{words}, such as {format_value(parameter.default)}"
