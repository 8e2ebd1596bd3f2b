"""Shapes of a forward's inputs, from which batches of other sizes are made."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

_PLAIN = (str, bytes, int, float, complex, bool, type(None), Enum, torch.dtype, torch.device, torch.Size)
_DEEPEST = 16  # containers inside each other that are searched


@dataclass(frozen=True)
class _TensorShape:
    """Tensor without its values.

    Attributes:
        number: Number of the tensor among those of the batch, which may have one tensor in several places.
    """

    number: int
    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool


@dataclass(frozen=True)
class _UnknownValue:
    """Value of a type that cannot be copied without its tensors."""

    type_name: str


class BatchShapes:
    """Positional and keyword arguments of a forward, with shapes in place of tensors.

    Lists, tuples, mappings and dataclasses are searched for tensors. Plain values and functions are kept; of
    others only the type is.

    Attributes:
        first: Shape of the first tensor with two dimensions or more; None: there is none.
        unknown: Types of the values that cannot be made again.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.first: torch.Size | None = None
        self.unknown: list[str] = []
        self._shapes: list[torch.Size] = []
        self._numbers: dict[int, int] = {}  # number of each tensor by its id, while it is described
        self._args, self._kwargs = self._described(args, 0), self._described(kwargs, 0)
        self._numbers.clear()

    def make(self, micro: int, of: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return arguments of zeros for `micro` samples.

        Args:
            of: Samples of the forward whose shapes these are. Its samples are along the first dimension; if no tensor
                has `of` rows but some have `of` columns, along the second one. Tensors of another size keep their size.
        """
        columns = not any(shape[0] == of for shape in self._shapes if shape) and any(
            shape[1] == of for shape in self._shapes if len(shape) > 1
        )
        along = 1 if columns else 0
        sizes = [shape[along] for shape in self._shapes if len(shape) > along]
        fed = of if of in sizes else next(iter(sizes), of)

        def rows(shape: torch.Size) -> torch.Size:
            if len(shape) <= along or shape[along] != fed:
                return shape
            return torch.Size([*shape[:along], max(1, fed * micro // of), *shape[along + 1 :]])

        tensors: dict[int, torch.Tensor] = {}

        def zeros(one: _TensorShape) -> torch.Tensor:
            if one.number not in tensors:
                shape = rows(one.shape)
                tensors[one.number] = torch.zeros(shape, dtype=one.dtype, requires_grad=one.requires_grad)
            return tensors[one.number]

        made: tuple[tuple[Any, ...], dict[str, Any]] = _made(self._args, zeros), _made(self._kwargs, zeros)
        return made

    def _described(self, value: Any, depth: int) -> Any:
        if isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_nested:
            number = self._numbers.setdefault(id(value), len(self._numbers))
            self._shapes.append(value.shape)
            if self.first is None and value.dim() >= 2:
                self.first = value.shape
            return _TensorShape(number, value.shape, value.dtype, value.requires_grad)
        if isinstance(value, _PLAIN) or callable(value):
            return value
        if depth > _DEEPEST:  # a list may contain itself
            return self._without(value)
        if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
            items = [self._described(item, depth + 1) for item in value]
            return tuple(items) if isinstance(value, tuple) else items
        if isinstance(value, Mapping):
            found = {key: self._described(item, depth + 1) for key, item in value.items()}
            return found if type(value) is dict else _Rebuilt(type(value), found, as_fields=False)
        fields = _fields(value)
        if fields is not None:
            found = {name: self._described(getattr(value, name, None), depth + 1) for name in fields}
            return _Rebuilt(type(value), found, as_fields=True)
        return self._without(value)

    def _without(self, value: Any) -> _UnknownValue:
        self.unknown.append(type(value).__name__)
        return _UnknownValue(type(value).__name__)


@dataclass(frozen=True)
class _Rebuilt:
    """Mapping, named tuple or dataclass that is built again from its items.

    Attributes:
        as_fields: The items are keyword arguments of `kind`; else `kind` takes one dict.
    """

    kind: type
    items: dict[str, Any]
    as_fields: bool


def _fields(value: Any) -> list[str] | None:
    """Return the names of the fields of a named tuple or dataclass; None for other values."""
    if isinstance(value, tuple):
        return list(value._fields)  # type: ignore[attr-defined]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [one.name for one in dataclasses.fields(value) if one.init]
    return None


def _made(value: Any, zeros: Callable[[_TensorShape], torch.Tensor]) -> Any:
    if isinstance(value, _TensorShape):
        return zeros(value)
    if isinstance(value, _Rebuilt):
        made = _made(value.items, zeros)
        return value.kind(**made) if value.as_fields else value.kind(made)
    if isinstance(value, dict):
        return {key: _made(item, zeros) for key, item in value.items()}
    if isinstance(value, torch.Size):
        return value
    if isinstance(value, (list, tuple)):
        items = [_made(item, zeros) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    return value
