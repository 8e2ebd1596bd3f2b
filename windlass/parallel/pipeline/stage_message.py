"""Message between pipeline stages: the tensors of a value, and a layout from which the receiver rebuilds the value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from windlass.base.errors import ModelError
from windlass.base.tensor_tree import iterate_tensors as tensors_of


@dataclass(frozen=True)
class TensorPlaceholder:
    """Stand-in for a tensor in a message's skeleton (the value without its tensors), with the index of the tensor."""

    index: int


@dataclass(frozen=True)
class TensorSpec:
    """Properties of a tensor, sent ahead so that the receiver can allocate memory for it.

    Attributes:
        shape, dtype: shape and dtype of the tensor.
        requires_grad: True if a gradient is sent back.
        on_host: True if the tensor is in host memory, whatever the device of the model.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    on_host: bool

    @property
    def nbytes(self) -> int:
        """Size of the transfer in bytes."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()

    def empty(self, device: torch.device) -> torch.Tensor:
        """Allocate memory for the tensor."""
        return torch.empty(self.shape, dtype=self.dtype, device="cpu" if self.on_host else device)


@dataclass(frozen=True)
class MessageLayout:
    """Structure of a value without the contents of its tensors: containers, plain values, and a spec of each tensor.

    A tensor that occurs twice is sent once.
    """

    skeleton: Any
    tensor_specs: tuple[TensorSpec, ...]

    @property
    def differentiable_specs(self) -> list[TensorSpec]:
        """Specs of the tensors whose gradients are sent back."""
        return [spec for spec in self.tensor_specs if spec.requires_grad]

    def fill(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Rebuild the value, with `tensors` in place of the placeholders."""
        return _map_instances(self.skeleton, TensorPlaceholder, lambda hole: tensors[hole.index])

    def matches(self, other: MessageLayout) -> bool:
        """Return True if both layouts are equal, including plain values.

        Values whose comparison raises count as different.
        """
        try:
            return self.tensor_specs == other.tensor_specs and bool(self.skeleton == other.skeleton)
        except Exception:  # the `__eq__` of a foreign class may raise anything
            return False


def pack_message(value: Any) -> tuple[MessageLayout, list[torch.Tensor]]:
    """Split a value (nested tuples, lists and dicts, None, numbers, ...) into its layout and its tensors.

    Raises:
        ModelError: a tensor is in a container of another type.
    """
    found: dict[int, torch.Tensor] = {}

    def take(tensor: torch.Tensor) -> TensorPlaceholder:
        found.setdefault(id(tensor), tensor)
        return TensorPlaceholder(list(found).index(id(tensor)))

    skeleton = _map_instances(value, torch.Tensor, take)
    for left in tensors_of(skeleton):
        raise ModelError(
            f"a stage returned {type(value).__name__} with a tensor of shape {tuple(left.shape)} in an object of "
            "unknown structure; return tensors, and tuples, lists and dicts of them"
        )
    tensors = list(found.values())
    specs = [TensorSpec(tuple(t.shape), t.dtype, t.requires_grad, t.device.type == "cpu") for t in tensors]
    return MessageLayout(skeleton, tuple(specs)), tensors


def _map_instances(value: Any, kind: type, function: Callable[[Any], Any]) -> Any:
    """Return `value` with `function` applied to each object of `kind` in nested tuples, lists and dicts, which are
    copied.
    """
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
