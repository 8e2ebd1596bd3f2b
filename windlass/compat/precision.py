"""Engine mixin with DeepSpeed's methods that return configured dtypes and cast a module."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from windlass.base.dtypes import is_castable, parse_dtype


class Precision:
    """Mixin with the configured dtypes, and a cast of the module's parameters and buffers.

    `initialize` does its own cast (`windlass.engine.module_buffers`); these methods are for scripts that call them.
    """

    _config: Any
    module: nn.Module
    fp16_enabled: Callable[[], bool]
    bfloat16_enabled: Callable[[], bool]

    def _mixed_precision_dtypes(self) -> tuple[torch.dtype | None, torch.dtype | None]:
        """Return the dtypes to which parameters and buffers are cast; None: not cast."""
        parameters = None
        if self.fp16_enabled():
            parameters = torch.half
        elif self.bfloat16_enabled():
            parameters = torch.bfloat16
        named = self._config.buffer_dtype
        return parameters, parse_dtype(named) if named is not None else None

    def _assert_valid_mixed_precision_config(self) -> None:
        """Check `data_types.param_dtype` against the enabled precision.

        Raises:
            AssertionError: dtype and precision differ.
        """
        named = self._config.param_dtype
        if named is None:
            return
        enabled = torch.half if self.fp16_enabled() else torch.bfloat16 if self.bfloat16_enabled() else torch.float32
        assert parse_dtype(named) == enabled, (
            f"data_types.param_dtype is {named!r}, but fp16.enabled and bf16.enabled make parameters {enabled}; remove "
            "param_dtype"
        )

    def _cast_module_mixed_precision(
        self,
        param_dtype: torch.dtype | None,
        buffer_dtype: torch.dtype | None,
        is_zero_init_model: bool,
        keep_pattern: re.Pattern[str] | None = None,
    ) -> None:
        """Cast the floating-point parameters and buffers of the module in place.

        Args:
            param_dtype: dtype of parameters; None: unchanged.
            buffer_dtype: dtype of buffers; None: unchanged.
            is_zero_init_model: parameters were created by `zero.Init` in their final dtype and are not cast.
            keep_pattern: buffers with a matching name are cast to fp32.
        """
        if param_dtype is not None and not is_zero_init_model:
            _cast(self.module.parameters(), param_dtype)
        kept = [b for name, b in self.module.named_buffers() if keep_pattern is not None and keep_pattern.search(name)]
        apart = {id(buffer) for buffer in kept}
        if buffer_dtype is not None:
            _cast((buffer for buffer in self.module.buffers() if id(buffer) not in apart), buffer_dtype)
        _cast(kept, torch.float32)


def _cast(tensors: Iterable[torch.Tensor], dtype: torch.dtype) -> None:
    for tensor in tensors:
        if is_castable(tensor.dtype) and tensor.dtype != dtype:
            tensor.data = tensor.data.to(dtype)
