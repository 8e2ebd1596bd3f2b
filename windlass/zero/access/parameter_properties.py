"""`.grad` and `.data` of an engine's parameters, as a script reads and sets them between a backward and a step.

[Note: gradients that a script sees] The hooks on parameters move each gradient out of `.grad` during the backward, so
the attribute that autograd fills does not have the gradient that a step would use. While an engine exists, `.grad` and
`.data` of `torch.nn.Parameter` are Python properties, for all parameters of the process. torch has no hook for access
to these attributes. A subclass would change `type(parameter)`, which torch.compile and `nn.Parameter(other)` examine.
Autograd writes the attribute in C++ and bypasses the properties. The hot path bypasses them too, through `raw_grad`,
`put_grad` and `put_data`. For parameters without an engine the properties behave like the original attributes.

- Setting `.grad` to None drops the parameter's gradient of the current step. All of torch's ways to drop gradients
  (`Optimizer.zero_grad`, `Module.zero_grad`) set the `.grad` of each parameter to None.
- Reading `.grad` returns a `ShardedGradient` if the step has a gradient. It has shape and dtype and can be zeroed.
  Reading or changing its values raises an error that names the function to use instead.
- Setting `.grad` of a trainable parameter to a tensor raises. Engines of `import deepspeed` drop the tensor with a
  warning instead.
- Reading `.data` is recorded if the unit is resharded, or if the master weights are separate memory from the parameter.
  A change through `.data` does not increment the parameter's version, so the next reshard or step compares the
  values with a copy or with the master weights.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Protocol
from weakref import finalize

import torch
from torch import nn

from windlass.base.errors import GradientAccessError
from windlass.zero.core.sharded_parameter import METADATA_CALLS, call_name, nan_placeholder, raw_data, raw_grad
from windlass.zero.core.sharded_parameter import put_data as _put_data
from windlass.zero.core.sharded_parameter import put_grad as _put_grad
from windlass.zero.parameter_registry import ParameterLocation, find, is_registered

_GRAD, _DATA = "grad", "data"
# torch's fake tensors copy `.grad` while a graph is traced; they must not get a placeholder.
_TRACING = frozenset({"safe_grad"})
_DEEPCOPY = nn.Parameter.__deepcopy__.__code__
_ZEROES = frozenset({"zero_", "_foreach_zero_"})
_KEEPS = frozenset({"detach_", "requires_grad_", "set requires_grad", "record_stream"})


class GradientStore(Protocol):
    """Gradients of one model, by parameter."""

    def has(self, place: ParameterLocation, *, anywhere: bool) -> bool:
        """Return True if this rank has a gradient of the parameter in the current step.

        Args:
            anywhere: Return True for every parameter of a unit with a gradient, because the parameter may have a
                gradient on other ranks only.
        """
        ...

    def drop(self, place: ParameterLocation, *, zero: bool) -> None:
        """Drop the parameter's gradient, or set it to zero if `zero`."""
        ...

    def refuse(self, place: ParameterLocation, parameter: nn.Parameter) -> None:
        """Raise ModelError if scripts must not set gradients of this parameter. Else do nothing."""
        ...

    def hides(self) -> bool:
        """Return True if `.grad` always reads as None, except in functions that zero gradients."""
        ...


class ShardedGradient(torch.Tensor):
    """Placeholder for the gradient of an engine's parameter, with shape, dtype and device.

    `zero_()` zeroes the gradient. Reading or changing values raises GradientAccessError.
    """

    place: ParameterLocation

    @classmethod
    def of(cls, parameter: nn.Parameter, place: ParameterLocation) -> ShardedGradient:
        """Return the placeholder of a parameter's gradient."""
        with torch._C.DisableTorchFunctionSubclass():
            placeholder = torch.Tensor._make_subclass(cls, nan_placeholder(parameter), False)
        placeholder.place = place
        return placeholder

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = call_name(function)
        if name in METADATA_CALLS:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {}))
        gradients = _gradients_in(args) or _gradients_in((kwargs or {}).values())
        if name in _ZEROES:
            for gradient in gradients:
                gradient.place.model.script_gradients.drop(gradient.place, zero=True)
            others = [one for one in args[0] if not isinstance(one, ShardedGradient)] if name != "zero_" else []
            if others:  # an optimizer may also have parameters of no engine
                torch._foreach_zero_(others)
            return args[0]
        if name in _KEEPS:
            return args[0]
        raise gradients[0]._error(name) if gradients else _access_error(name, "a parameter")

    def _error(self, what: str) -> GradientAccessError:
        return _access_error(what, repr(self.place.name))

    def __repr__(self, *, tensor_contents: Any = None) -> Any:  # type: ignore[override]
        return f"ShardedGradient of {self.place.name!r}, shape {tuple(self.shape)}, {self.dtype}"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise self._error("pickle")

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise self._error("deepcopy")


def _access_error(what: str, name: str) -> GradientAccessError:
    return GradientAccessError(
        f"{what!r} on the gradient of {name}: between backward and step it is reduced and sharded over ranks. Read it "
        "with windlass.zero.full_grad(parameter), replace it with windlass.zero.set_full_grad(parameter, value), which "
        "all ranks call; clip with gradient_clipping in the configuration; drop it with parameter.grad = None"
    )


def _gradients_in(values: Any) -> list[ShardedGradient]:
    gradients: list[ShardedGradient] = []
    for value in values:
        if isinstance(value, ShardedGradient):
            gradients.append(value)
        elif isinstance(value, (list, tuple)):
            gradients += _gradients_in(value)
    return gradients


def _read_gradient(parameter: nn.Parameter) -> torch.Tensor | None:
    raw: torch.Tensor | None = raw_grad(parameter)
    # The original attribute may have a tensor, e.g. during a backward or for parameters without an engine.
    if raw is not None or not is_registered(parameter) or (place := find(parameter)) is None:
        return raw
    caller = sys._getframe(1).f_code.co_name
    # `zero_grad` skips parameters whose `.grad` is None, so return placeholders for peers' gradients too.
    zeroing = caller == "zero_grad"
    store = place.model.script_gradients
    if caller in _TRACING or (store.hides() and not zeroing) or not store.has(place, anywhere=zeroing):
        return None
    return ShardedGradient.of(parameter, place)


def _set_gradient(parameter: nn.Parameter, value: torch.Tensor | None) -> None:
    place = find(parameter) if is_registered(parameter) else None
    if place is not None and value is None:
        place.model.script_gradients.drop(place, zero=False)
    elif place is not None:
        if isinstance(value, ShardedGradient) and value.place == place:
            return  # the script wrote `p.grad = p.grad`, which changes nothing
        place.model.script_gradients.refuse(place, parameter)
    if isinstance(value, ShardedGradient):
        raise value._error("assignment to another parameter")
    _put_grad(parameter, value)


def _delete_gradient(parameter: nn.Parameter) -> None:
    _set_gradient(parameter, None)


def _read_data(parameter: nn.Parameter) -> torch.Tensor:
    copies = sys._getframe(1).f_code is _DEEPCOPY  # deepcopy keeps no view through which the data could change
    if not copies and is_registered(parameter) and (place := find(parameter)) is not None:
        place.model.track_data_edits(place)
    data: torch.Tensor = raw_data(parameter)
    return data


_users = 0


def install(model: object) -> finalize[[], object]:
    """Make `.grad` and `.data` properties while `model` exists, or until the returned finalizer is called."""
    global _users
    # Several engines share the properties, which are removed with the last of these engines.
    _users += 1
    if _users == 1:
        setattr(nn.Parameter, _GRAD, property(_read_gradient, _set_gradient, _delete_gradient))
        setattr(nn.Parameter, _DATA, property(_read_data, _put_data))
    return finalize(model, _remove)


def _remove() -> None:
    global _users
    _users -= 1
    if _users == 0:
        delattr(nn.Parameter, _GRAD)
        delattr(nn.Parameter, _DATA)
