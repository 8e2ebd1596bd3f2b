"""Trace of a forward: the weights and outputs of each module."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from windlass.base.backward_callbacks import current_backward_id
from windlass.base.tensor_tree import iterate_tensors
from windlass.zero.core.sharded_parameter import ShardedParameter

LIMIT = 1024  # maximum number of elements in a sample; a smaller tensor is sampled completely


@dataclass(frozen=True)
class TensorSample:
    """Every `stride`-th element of a tensor, on the CPU, and the 2-norm of all elements.

    Attributes:
        values: `[at most LIMIT]`, in the tensor's dtype, or float32 for 8-bit floats; of a complex tensor, real and
            imaginary parts.
        shape: shape of the tensor.
        stride: distance of the sampled elements in the flat tensor.
        norm: 2-norm of all elements, in float64.
    """

    values: torch.Tensor
    shape: torch.Size
    stride: int
    norm: float

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of `values`."""
        return self.values.dtype

    @property
    def rms(self) -> float:
        """Root mean square of all elements."""
        return self.norm / math.sqrt(max(1, self.shape.numel()))


def sample_tensor(tensor: torch.Tensor) -> TensorSample:
    """Copy a sample of `tensor`. The tensor may change afterwards."""
    dense = tensor.detach() if tensor.layout is torch.strided else tensor.detach().to_dense()
    flat = dense.reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat.resolve_conj()).reshape(-1)
    if flat.is_floating_point() and flat.dtype.itemsize == 1:
        flat = flat.float()  # torch can neither sum nor unpickle 8-bit floats
    stride = max(1, -(-flat.numel() // LIMIT))
    wide = flat if flat.is_floating_point() else flat.double()
    norm = float(torch.linalg.vector_norm(wide, dtype=torch.float64))
    return TensorSample(flat[::stride].clone().cpu(), tensor.shape, stride, norm)


WEIGHT, OUTPUT = "weight", "output"
_TORCH_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))  # attributes that torch itself sets on a module


@dataclass(frozen=True)
class TraceEvent:
    """Tensor that a module used or returned.

    Attributes:
        kind: `WEIGHT` or `OUTPUT`.
        module: path of the module, empty for the model itself.
        tensor: the parameter's full name; for outputs their index among the module's outputs.
        sample: sample of the tensor's values.
    """

    kind: str
    module: str
    tensor: str
    sample: TensorSample

    @property
    def key(self) -> tuple[str, str, str]:
        """Key that identifies the event; it excludes the values."""
        return self.kind, self.module, self.tensor


class ModuleTrace:
    """Hooks on all modules of a model, which record events while `events` is a list.

    A recomputation inside a backward is not recorded. Compiled modules and TorchScript modules, and the modules inside
    them, have no hooks.
    """

    def __init__(self, model: nn.Module) -> None:
        self.events: list[TraceEvent] | None = None
        self._names = {id(p): name for name, p in model.named_parameters()}
        hidden: tuple[str, ...] = ()
        for name, module in model.named_modules():
            if name.startswith(hidden) and hidden:
                continue
            if getattr(module, "_compiled_call_impl", None) is not None or isinstance(module, torch.jit.ScriptModule):
                hidden += (f"{name}." if name else "",)
                continue
            module.register_forward_pre_hook(self._forward_pre_hook(name))
            module.register_forward_hook(self._forward_hook(name))

    def _forward_pre_hook(self, name: str) -> Any:
        def before(module: nn.Module, args: Any) -> None:
            if self.events is None or current_backward_id() >= 0:
                return
            for parameter in module._parameters.values():
                # A sharded parameter is gathered when the module uses it; reading it here would gather it too early.
                if parameter is not None and not isinstance(parameter, ShardedParameter):
                    known = self._names.get(id(parameter))
                    if known is not None:
                        self.events.append(TraceEvent(WEIGHT, name, known, sample_tensor(parameter)))

        return before

    def _forward_hook(self, name: str) -> Any:
        def after(module: nn.Module, args: Any, output: Any) -> None:
            if self.events is None or current_backward_id() >= 0:
                return
            for number, tensor in enumerate(iterate_tensors(output)):
                if not isinstance(tensor, nn.Parameter):
                    self.events.append(TraceEvent(OUTPUT, name, str(number), sample_tensor(tensor)))

        return after


def differentiable_outputs(model: nn.Module, output: Any) -> list[torch.Tensor]:
    """Return the tensors through which gradients enter the model's backward, in an order that is the same for
    a copy of the model.

    These tensors are the outputs, and tensors that the forward stored on modules (e.g. the loss of a router).
    """
    found = {id(tensor): tensor for tensor in _tensors_with_graph(output)}
    for _, _, left in _module_attributes(model):
        for tensor in _tensors_with_graph(left):
            found.setdefault(id(tensor), tensor)
    return list(found.values())


def replace_with_copies(model: nn.Module, output: Any) -> tuple[Any, list[torch.Tensor]]:
    """Replace each of the `differentiable_outputs` by a copy, also where modules store it.

    A gradient of a copy always comes from outside the model. A gradient of the original may also come from another
    output that depends on it: e.g. a returned hidden state also gets a gradient from the logits.

    Returns:
        The new output, and the copies.
    """
    found = differentiable_outputs(model, output)
    new = {id(tensor): tensor.clone() for tensor in found}
    for module, name, left in _module_attributes(model):
        module.__dict__[name] = _replace_tensors(left, new)
    return _replace_tensors(output, new), list(new.values())


def _module_attributes(model: nn.Module) -> list[tuple[nn.Module, str, Any]]:
    return [
        (module, name, left)
        for module in model.modules()
        for name, left in vars(module).items()
        if isinstance(left, torch.Tensor) or (isinstance(left, list | dict) and name not in _TORCH_MODULE_ATTRIBUTES)
    ]


def _replace_tensors(value: Any, replacements: Mapping[int, torch.Tensor]) -> Any:
    """Replace each tensor in `value` whose id is a key of `replacements`, in all containers that `iterate_tensors`
    visits.
    """
    if isinstance(value, torch.Tensor):
        return replacements.get(id(value), value)
    if not any(id(tensor) in replacements for tensor in iterate_tensors(value)):
        return value
    if isinstance(value, tuple):
        items = [_replace_tensors(item, replacements) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, (list, set, frozenset)):
        return type(value)(_replace_tensors(item, replacements) for item in value)
    other = copy.copy(value)
    if isinstance(other, MutableMapping):
        for key in list(other):
            other[key] = _replace_tensors(other[key], replacements)
        return other
    for name, item in list(vars(other).items()):
        object.__setattr__(other, name, _replace_tensors(item, replacements))
    return other


def _tensors_with_graph(value: Any) -> Iterator[torch.Tensor]:
    return (tensor for tensor in iterate_tensors(value) if tensor.requires_grad and tensor.grad_fn is not None)
