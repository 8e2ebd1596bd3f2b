"""What a parameter is while its values are spread over ranks, and what happens to who touches it.

[Note: parameters used elsewhere] A released parameter keeps its shape, dtype and place in its module, but its class is
`Released` and its data are one NaN seen through zero strides. Any torch function that gets it as an argument comes by
here: inside a forward its unit is gathered and from then on tied to the block that runs (a head that computes with
`self.embed.weight` works); outside of one it raises and says how to read it. What does not come by here (C++ that was
handed the data) reads NaN, and an in-place write to overlapping memory is refused by torch itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import ReferenceType, ref

import torch
from torch import nn

from windlass.base.errors import ReleasedParameterError

if TYPE_CHECKING:
    from windlass.zero.unit import Unit

_released: dict[int, tuple[ReferenceType[Unit], type[nn.Parameter]]] = {}  # by id, as long as it is released
_nan: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}

# asked of a tensor without reading its values; looked up by the getter's or method's name
_HARMLESS = frozenset(
    """
    shape size numel nelement dim ndim ndimension stride dtype device layout is_leaf requires_grad requires_grad_ grad
    grad_fn grad_dtype is_floating_point is_complex is_sparse is_quantized is_meta is_cuda is_cpu is_mps is_nested
    is_xla
    element_size itemsize nbytes names name _version __hash__ register_hook register_post_accumulate_grad_hook
    _backward_hooks _post_accumulate_grad_hooks is_contiguous __len__ is_inference type is_shared retains_grad output_nr
    _is_view is_conj is_neg get_device is_signed _has_symbolic_sizes_strides is_tensor
    """.split()  # noqa: SIM905
)


def _name_of(function: Callable[..., Any]) -> str:
    name = getattr(function, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        accessor = getattr(function, "__self__", None)
        own = getattr(accessor, "__name__", "")
        return own if name == "__get__" or own in ("grad", "requires_grad") else f"set {own}"
    return name


class Released(nn.Parameter):
    """A parameter whose values are not here."""

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = _name_of(function)
        if name not in _HARMLESS:
            for parameter in _released_in((args, kwargs)):
                _bring(parameter, name)
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    def __repr__(self, *, tensor_contents: Any = None) -> Any:  # type: ignore[override]
        return f"Released parameter of shape {tuple(self.shape)}, {self.dtype}: its values are spread over ranks"

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        raise _error(self, "deepcopy")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise _error(self, "pickle")


def mark_released(parameter: nn.Parameter, unit: Unit) -> None:
    """Take the values from `parameter`; one that has none stays as it is."""
    if isinstance(parameter, Released):
        return
    _released[id(parameter)] = ref(unit), type(parameter)
    key = (parameter.dtype, parameter.device)
    if key not in _nan:
        empty = float("nan") if parameter.is_floating_point() else 0
        _nan[key] = torch.full((), empty, dtype=parameter.dtype, device=parameter.device)
    parameter.data = _nan[key].expand(parameter.shape)
    parameter.__class__ = Released


def mark_present(parameter: nn.Parameter) -> None:
    """Make `parameter` an ordinary one again; its data are set by who calls."""
    _, parameter.__class__ = _released.pop(id(parameter))


def _released_in(value: Any) -> list[Released]:
    if isinstance(value, Released):
        return [value]
    found: list[Released] = []
    if isinstance(value, (list, tuple)):
        for item in value:
            found += _released_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            found += _released_in(item)
    return found


def unit_of(parameter: nn.Parameter) -> Unit | None:
    """The unit of a released parameter; None for any other tensor."""
    entry = _released.get(id(parameter)) if isinstance(parameter, Released) else None
    return entry[0]() if entry is not None else None


def _bring(parameter: nn.Parameter, what: str) -> None:
    if not isinstance(parameter, Released):
        return  # came with another parameter of its unit
    unit = unit_of(parameter)
    if unit is None or unit.adopt is None or not unit.adopt(unit):
        raise _error(parameter, what)


def _error(parameter: nn.Parameter, what: str) -> ReleasedParameterError:
    unit = unit_of(parameter)
    name = "?"
    if unit is not None:
        name = next((n for n, p in zip(unit.names, unit.parameters, strict=True) if p is parameter), "?")
    return ReleasedParameterError(
        f"{what!r} on parameter {name!r}: at stage 3 its values are spread over ranks outside of a forward; read or "
        "change it inside `with windlass.zero.GatheredParameters([parameter], modifier_rank=None or a rank):`, or read "
        "it with windlass.zero.full_param(parameter)"
    )
