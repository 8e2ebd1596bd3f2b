"""The base of every section of the schema, and the scalar types that sections are made of."""

from __future__ import annotations

from collections.abc import Iterator
from types import UnionType
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic_core import PydanticCustomError


def _refuse_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise PydanticCustomError("number_type", "input should be a number, not a boolean")
    return value


def _to_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


_DTYPES = {
    "fp32": "fp32", "float32": "fp32", "float": "fp32",
    "bf16": "bf16", "bfloat16": "bf16",
    "fp16": "fp16", "float16": "fp16", "half": "fp16",
}  # fmt: skip


def _dtype_name(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    return _DTYPES.get(value.lower().removeprefix("torch."), value)


NUMBER = BeforeValidator(_refuse_bool)
"""Keeps `true` from counting as 1; it stands after the bounds, so that these reach the JSON Schema."""
Int = Annotated[int, NUMBER]
"""An integer; `5e8` and `"2"` count as integers, as they do in the files that circulate, `980.1` and `true` do not."""
Count = Annotated[int, Field(ge=0), NUMBER]
Positive = Annotated[int, Field(gt=0), NUMBER]
Float = Annotated[float, Field(allow_inf_nan=False), NUMBER]
Fraction = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False), NUMBER]
Names = Annotated[list[str], BeforeValidator(_to_list)]
"""A list of names; a bare string is a list of one."""
DtypeName = Annotated[
    Literal["fp32", "bf16", "fp16"],
    BeforeValidator(_dtype_name),
    WithJsonSchema({"type": "string", "enum": [*_DTYPES, *(f"torch.{name}" for name in _DTYPES)]}),
]
"""A dtype by its short name; the long forms (`"bfloat16"`, `"torch.float16"`) are turned into the short one."""


class ConfigSection(BaseModel):
    """A part of the configuration: unknown keys are errors, values are fixed once read."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=(), hide_input_in_errors=True
    )

    refusal: ClassVar[str] = ""
    """Why this whole section is refused once it is turned on; empty where the fields answer for themselves."""
    enable_key: ClassVar[str] = ""
    """The dotted key that turns the section on; off, it asks for nothing. Empty: any value but a default does."""

    def requested_key(self) -> str | None:
        """The dotted key under this section that asks for something, or None while every such value is its default."""
        if self.enable_key:
            return self.enable_key if self._is_enabled() else None
        return next((key for key, _ in self._non_default_values()), None)

    def value_at(self, dotted: str) -> Any:
        """The value under a dotted key; the section itself for the empty key."""
        value: Any = self
        for part in dotted.split(".") if dotted else ():
            value = getattr(value, part)
        return value

    def _is_enabled(self) -> bool:
        return bool(self.value_at(self.enable_key) != type(self)().value_at(self.enable_key))

    def _non_default_values(self) -> Iterator[tuple[str, Any]]:
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            if isinstance(value, ConfigSection):
                inner = value.requested_key()
                if inner is not None:
                    yield f"{name}.{inner}".removesuffix("."), value.value_at(inner)
            elif value != field.get_default(call_default_factory=True):
                yield name, value


class NestedSection(NamedTuple):
    """A section inside an annotation, and whether it stands there alone, in a list, or under free keys."""

    section: type[ConfigSection]
    shape: Literal["alone", "list", "free keys"]


def nested_section(annotation: Any, shape: Literal["alone", "list", "free keys"] = "alone") -> NestedSection | None:
    """The section that `annotation` (`S`, `S | None`, `list[S]`, `dict[str, S]`, ...) holds, or None."""
    if isinstance(annotation, type) and get_origin(annotation) is None:
        return NestedSection(annotation, shape) if issubclass(annotation, ConfigSection) else None
    origin = get_origin(annotation)
    arguments = get_args(annotation)
    if origin is Annotated:
        return nested_section(arguments[0], shape)
    if origin in (Union, UnionType):
        found = (nested_section(argument, shape) for argument in arguments)
        return next((nested for nested in found if nested), None)
    if origin is list:
        return nested_section(arguments[0], "list")
    if origin is dict:
        return nested_section(arguments[1], "free keys")
    return None
