"""Device whose memory the CPU cannot address, for tests of the code of GPUs without a GPU.

Tensors inside `SeparateDevice` that are on `DEVICE` have values, which lie in hidden CPU tensors. As for tensors on a
GPU, an operation of such a tensor with a CPU tensor raises, and so does `numpy`; `to` and `copy_` move values. A
division by a number multiplies by its reciprocal, as torch does on CUDA. `DEVICE` is torch's meta device, because torch
checks names of devices.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

DEVICE = torch.device("meta")
_CPU = torch.device("cpu")
_MOVES = ("aten::copy_", "aten::_to_copy")
_PRODUCTS = {
    torch.ops.aten.div.Tensor: torch.ops.aten.mul.Tensor,
    torch.ops.aten.div_.Tensor: torch.ops.aten.mul_.Tensor,
}


class SeparateTensor(torch.Tensor):
    """Tensor on `DEVICE` with values."""

    hidden: torch.Tensor

    @staticmethod
    def __new__(cls, hidden: torch.Tensor) -> SeparateTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls, hidden.size(), strides=hidden.stride(), dtype=hidden.dtype, device=DEVICE
        )
        made.hidden = hidden
        return made  # type: ignore[no-any-return]

    def numpy(self, **options: Any) -> Any:
        raise TypeError("numpy() of a tensor on a separate device")

    def data_ptr(self) -> int:
        return -self.hidden.data_ptr()  # can be compared; not an address of the CPU

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _dispatch(function, args, kwargs or {})


class _Factories(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _dispatch(function, args, kwargs or {})


class SeparateDevice(TorchFunctionMode):
    """Context in which new tensors on `DEVICE` have values."""

    def __enter__(self) -> SeparateDevice:
        self._factories = _Factories()
        self._factories.__enter__()
        super().__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        self._factories.__exit__(kind, error, trace)

    def __torch_function__(self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if function is torch.tensor and kwargs.get("device") == DEVICE:  # no operation that a dispatch mode sees
            return torch.tensor(*args, **{**kwargs, "device": _CPU}).to(DEVICE)
        return function(*args, **kwargs)


def _dispatch(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    inputs = [one for one in tree_flatten((args, kwargs))[0] if isinstance(one, torch.Tensor)]
    ours = {id(one.hidden): one for one in inputs if isinstance(one, SeparateTensor)}
    device = kwargs.get("device")
    if ours and function._schema.name not in _MOVES:
        away = [one for one in inputs if not isinstance(one, SeparateTensor) and one.dim()]
        assert not away, f"{function}: tensors of the CPU and of a separate device"
    if device is not None:
        kwargs = {**kwargs, "device": _CPU}
    args, kwargs = tree_map(lambda one: one.hidden if isinstance(one, SeparateTensor) else one, (args, kwargs))
    if ours and function in _PRODUCTS and id(args[1]) not in ours:
        function, args = _PRODUCTS[function], (args[0], float(1 / torch.tensor(float(args[1]))))
    result = function(*args, **kwargs)
    is_ours = bool(ours) if device is None else torch.device(device) == DEVICE
    given = {id(one) for one in inputs}

    def wrap(one: Any) -> Any:
        if not isinstance(one, torch.Tensor) or id(one) in given:
            return one
        if id(one) in ours:
            return ours[id(one)]
        return SeparateTensor(one) if is_ours else one

    return tree_map(wrap, result)
