"""Names of floating-point dtypes in configurations."""

from __future__ import annotations

import torch

from windlass.base.errors import ConfigError

FLOAT_DTYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "float": torch.float32,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
    "half": torch.float16,
}
"""Dtypes by their names in configurations."""


def parse_dtype(name: str | torch.dtype) -> torch.dtype:
    """Return the dtype with a name from a configuration (`"bf16"`, `"torch.float32"`, ...).

    Raises:
        ConfigError: the name is not fp32, bf16, fp16 or one of their long forms.
    """
    if isinstance(name, torch.dtype):
        return name
    dtype = FLOAT_DTYPES.get(str(name).lower().removeprefix("torch."))
    if dtype is None:
        raise ConfigError(f"unknown dtype {name!r}; use one of fp32, bf16, fp16")
    return dtype


def is_castable(dtype: torch.dtype) -> bool:
    """Return True if a change of precision may cast values of this dtype: floating-point of at least 16 bits.

    Values of 8 bits and fewer are quantised: they mean something only together with their scales, and the code that
    reads them expects their format.
    """
    return dtype.is_floating_point and dtype.itemsize > 1


def dtype_name(dtype: torch.dtype) -> str:
    """Return the short name of a dtype for tables: `fp32`, `bf16`, `fp16`, else torch's name."""
    return {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}.get(
        dtype, str(dtype).removeprefix("torch.")
    )
