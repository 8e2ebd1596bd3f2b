"""Context manager OnDevice: constructs modules with their tensors on one device and in one dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors


class _DtypeMode(TorchFunctionMode):
    """Mode that converts newly constructed floating-point tensors to one dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype, self._constructors = dtype, _device_constructors()

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = function(*args, **(kwargs or {}))
        if function in self._constructors and isinstance(made, torch.Tensor) and made.is_floating_point():
            return made.to(self._dtype)
        return made


class OnDevice:
    """Context manager in which torch's tensor constructors use `device`, and `dtype` for floating-point tensors.

    `torch.Tensor(...)` and the other legacy constructors, which take no device, are not affected.
    """

    def __init__(self, dtype: torch.dtype, device: str | torch.device = "meta", enabled: bool = True) -> None:
        self.dtype, self.device, self.enabled = dtype, device, enabled
        self._entered_contexts: list[Any] = []

    def __enter__(self) -> OnDevice:
        if self.enabled:
            self._entered_contexts = [_DtypeMode(self.dtype), torch.device(self.device)]
            for context in self._entered_contexts:
                context.__enter__()
        return self

    def __exit__(self, *failure: Any) -> None:
        while self._entered_contexts:
            self._entered_contexts.pop().__exit__(*failure)
