"""Descriptions of types in terms of JSON."""

from __future__ import annotations

from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from windlass.config.config_problems import format_value
from windlass.config.config_section import ConfigSection

_NAMES = {
    int: "whole number",
    float: "number",
    bool: "true or false",
    str: "string",
    NoneType: "null",
    Any: "any value",
}


def describe_type(annotation: Any) -> str:
    """Describe the values of a type: `whole number`, `"row" or "column"`, `list of string`, `section`, ..."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return describe_type(arguments[0])
    if origin in (Union, UnionType):
        return " or ".join(describe_type(argument) for argument in arguments)
    if origin is Literal:
        return " or ".join(format_value(argument) for argument in arguments)
    if origin is list:
        return f"list of {describe_type(arguments[0])}"
    if origin is dict:
        return "object"
    if isinstance(annotation, type) and issubclass(annotation, ConfigSection):
        return "section"
    return _NAMES.get(annotation, str(annotation))


def describe_field(field: FieldInfo) -> str:
    """Describe the values of a field, with bounds and an example: `whole number >= 0, such as 5`."""
    signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
    bounds = [
        f"{sign} {getattr(item, name)}"
        for item in _bounds_of(field)
        for name, sign in signs.items()
        if hasattr(item, name)
    ]
    words = f"{describe_type(field.annotation)} {' and '.join(bounds)}".rstrip()
    default = None if field.is_required() else field.get_default(call_default_factory=True)
    plain = isinstance(default, bool | int | float | str) and default != ""
    return f"{words}, such as {format_value(default)}" if plain else words


def _bounds_of(field: FieldInfo) -> list[Any]:
    found = list(field.metadata)
    for argument in get_args(field.annotation):
        if get_origin(argument) is Annotated:
            found += [item for extra in get_args(argument)[1:] for item in getattr(extra, "metadata", (extra,))]
    return found
