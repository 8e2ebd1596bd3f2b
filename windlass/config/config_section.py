"""Base class of all sections of the schema, and the scalar types of their fields."""

from __future__ import annotations

from collections.abc import Iterator
from types import UnionType
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema
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
"""Validator that rejects booleans, so that `true` does not count as 1. A type lists its bounds before this validator,
so that the bounds reach the JSON Schema."""
Int = Annotated[int, NUMBER]
"""Integer. `5e8` and `"2"` are accepted as integers, because common files have them; `980.1` and `true` are not."""
Count = Annotated[int, Field(ge=0), NUMBER]
Positive = Annotated[int, Field(gt=0), NUMBER]
Float = Annotated[float, Field(allow_inf_nan=False), NUMBER]
Fraction = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False), NUMBER]
Names = Annotated[list[str], BeforeValidator(_to_list)]
"""List of names; a bare string is a list of one."""
Paths = Annotated[Names, AfterValidator(lambda paths: [path for path in paths if path])]
"""List of paths; a bare string is a list of one path, and empty strings are left out."""
DtypeName = Annotated[
    Literal["fp32", "bf16", "fp16"],
    BeforeValidator(_dtype_name),
    WithJsonSchema({"type": "string", "enum": [*_DTYPES, *(f"torch.{name}" for name in _DTYPES)]}),
]
"""Dtype by its short name; the long forms (`"bfloat16"`, `"torch.float16"`) are converted to it."""


class ConfigSection(BaseModel):
    """Section of the configuration. Unknown keys are errors; values are immutable."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=(), hide_input_in_errors=True
    )

    refusal: ClassVar[str] = ""
    """Reason why the section is refused if it is enabled; empty if each field has a status of its own."""
    enable_key: ClassVar[str] = ""
    """Dotted key that enables the section. Empty: any value other than a default enables it."""

    def requested_key(self) -> str | None:
        """Return the dotted key under this section that enables it, or None if the section is not enabled."""
        if self.enable_key:
            return self.enable_key if self._is_enabled() else None
        return next((key for key, _ in self._non_default_values()), None)

    def value_at(self, dotted: str) -> Any:
        """Return the value at a dotted key; the section itself for the empty key."""
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
    """Section in the type annotation of a field, and its position: alone, in a list, or in a dict with any keys."""

    section: type[ConfigSection]
    shape: Literal["alone", "list", "free keys"]


def nested_section(annotation: Any, shape: Literal["alone", "list", "free keys"] = "alone") -> NestedSection | None:
    """Return the section in `annotation` (`S`, `S | None`, `list[S]`, `dict[str, S]`, ...), or None."""
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
