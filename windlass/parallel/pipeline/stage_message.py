"""What passes from a stage to the next: its tensors, and the form that tells the receiver how to put them together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from windlass.base.errors import ModelError
from windlass.base.tensor_tree import iterate_tensors as tensors_of


@dataclass(frozen=True)
class TensorPlaceholder:
    """Where a tensor stood."""

    index: int


@dataclass(frozen=True)
class TensorSpec:
    """What is known of a tensor before it comes.

    Attributes:
        shape, dtype: its.
        learns: a gradient goes back.
        host: it lies in host memory, wherever the model is.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    on_host: bool

    @property
    def nbytes(self) -> int:
        """Bytes that travel."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()

    def empty(self, device: torch.device) -> torch.Tensor:
        """Memory for it."""
        return torch.empty(self.shape, dtype=self.dtype, device="cpu" if self.on_host else device)


@dataclass(frozen=True)
class MessageLayout:
    """Everything about a value but what is in its tensors: containers, plain values, and a sheet for each tensor.

    A tensor that occurs twice travels once.
    """

    skeleton: Any
    tensor_specs: tuple[TensorSpec, ...]

    @property
    def differentiable_specs(self) -> list[TensorSpec]:
        """Of the tensors whose gradients go back."""
        return [sheet for sheet in self.tensor_specs if sheet.requires_grad]

    def fill(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The value, with these tensors in it."""
        return _map_instances(self.skeleton, TensorPlaceholder, lambda hole: tensors[hole.index])

    def matches(self, other: MessageLayout) -> bool:
        """It is the same, plain values too; of values that can't be compared it is taken that they differ."""
        try:
            return self.tensor_specs == other.tensor_specs and bool(self.skeleton == other.skeleton)
        except Exception:  # of a stranger's __eq__
            return False


def pack_message(value: Any) -> tuple[MessageLayout, list[torch.Tensor]]:
    """The form of a value (tuples, lists and dicts in each other, None, numbers, ...), and its tensors.

    Raises:
        ModelError: a tensor lies in what is none of these.
    """
    found: dict[int, torch.Tensor] = {}

    def take(tensor: torch.Tensor) -> TensorPlaceholder:
        found.setdefault(id(tensor), tensor)
        return TensorPlaceholder(list(found).index(id(tensor)))

    skeleton = _map_instances(value, torch.Tensor, take)
    for left in tensors_of(skeleton):
        raise ModelError(
            f"a stage returned {type(value).__name__} with a tensor of shape {tuple(left.shape)} in an object that "
            "can't be taken apart; return tensors, and tuples, lists and dicts of them"
        )
    tensors = list(found.values())
    sheets = [TensorSpec(tuple(t.shape), t.dtype, t.requires_grad, t.device.type == "cpu") for t in tensors]
    return MessageLayout(skeleton, tuple(sheets)), tensors


def _map_instances(value: Any, kind: type, function: Callable[[Any], Any]) -> Any:
    """`value` with each object of `kind` changed, in tuples, lists and dicts, which are made anew."""
    if isinstance(value, kind):
        return function(value)
    if isinstance(value, tuple):
        items = [_map_instances(item, kind, function) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, list):
        return [_map_instances(item, kind, function) for item in value]
    if type(value) is dict:
        return {key: _map_instances(item, kind, function) for key, item in value.items()}
    return value
