"""What passes from a stage to the next: its tensors, and the form that tells the receiver how to put them together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from windlass.base.errors import ModelError
from windlass.base.tree import tensors as tensors_of


@dataclass(frozen=True)
class Hole:
    """Where a tensor stood."""

    index: int


@dataclass(frozen=True)
class Sheet:
    """What is known of a tensor before it comes.

    Attributes:
        shape, dtype: its.
        learns: a gradient goes back.
        host: it lies in host memory, wherever the model is.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    learns: bool
    host: bool

    @property
    def nbytes(self) -> int:
        """Bytes that travel."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()

    def empty(self, device: torch.device) -> torch.Tensor:
        """Memory for it."""
        return torch.empty(self.shape, dtype=self.dtype, device="cpu" if self.host else device)


@dataclass(frozen=True)
class Form:
    """Everything about a value but what is in its tensors: containers, plain values, and a sheet for each tensor.

    A tensor that occurs twice travels once.
    """

    skeleton: Any
    sheets: tuple[Sheet, ...]

    @property
    def learning(self) -> list[Sheet]:
        """Of the tensors whose gradients go back."""
        return [sheet for sheet in self.sheets if sheet.learns]

    def filled(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The value, with these tensors in it."""
        return _mapped(self.skeleton, Hole, lambda hole: tensors[hole.index])

    def agrees(self, other: Form) -> bool:
        """It is the same, plain values too; of values that can't be compared it is taken that they differ."""
        try:
            return self.sheets == other.sheets and bool(self.skeleton == other.skeleton)
        except Exception:  # of a stranger's __eq__
            return False


def pack(value: Any) -> tuple[Form, list[torch.Tensor]]:
    """The form of a value (tuples, lists and dicts in each other, None, numbers, ...), and its tensors.

    Raises:
        ModelError: a tensor lies in what is none of these.
    """
    found: dict[int, torch.Tensor] = {}

    def take(tensor: torch.Tensor) -> Hole:
        found.setdefault(id(tensor), tensor)
        return Hole(list(found).index(id(tensor)))

    skeleton = _mapped(value, torch.Tensor, take)
    for left in tensors_of(skeleton):
        raise ModelError(
            f"a stage returned {type(value).__name__} with a tensor of shape {tuple(left.shape)} in an object that "
            "can't be taken apart; return tensors, and tuples, lists and dicts of them"
        )
    tensors = list(found.values())
    sheets = [Sheet(tuple(t.shape), t.dtype, t.requires_grad, t.device.type == "cpu") for t in tensors]
    return Form(skeleton, tuple(sheets)), tensors


def _mapped(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """`value` with each object of `kind` changed, in tuples, lists and dicts, which are made anew."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, tuple):
        items = [_mapped(item, kind, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, list):
        return [_mapped(item, kind, change) for item in value]
    if type(value) is dict:
        return {key: _mapped(item, kind, change) for key, item in value.items()}
    return value
