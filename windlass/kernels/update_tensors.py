"""Tensors of one parameter's update, checked before native code uses their addresses."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from windlass.base.errors import ModelError
from windlass.base.native_memory import freed_storage_problem, has_memory
from windlass.base.text import plural

SCALE_BLOCK = 256  # elements that share a scale in an 8-bit state
FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
STATE_DTYPES = (torch.float32, torch.bfloat16, torch.uint8)


@dataclass(frozen=True, slots=True)
class UpdateTensors:
    """Tensors of one parameter, or of a span of it: contiguous CPU tensors of `n` elements each, of any shape.

    Args:
        parameter: fp32, bf16 or fp16; updated in place.
        gradient: fp32, bf16 or fp16; only read.
        states: states in the order in which the optimizer rule defines them, all fp32, all bf16 or all 8-bit codes
            (uint8); updated in place.
        scales: with 8-bit codes, fp32 of `count_scales(n)` elements for each state; else empty.
        low_precision_copy: bf16 or fp16; receives the new parameter rounded to nearest even; None: no copy.
    """

    parameter: torch.Tensor
    gradient: torch.Tensor
    states: tuple[torch.Tensor, ...] = ()
    scales: tuple[torch.Tensor, ...] = ()
    low_precision_copy: torch.Tensor | None = None

    @property
    def dtypes(self) -> tuple[torch.dtype, torch.dtype, torch.dtype | None, torch.dtype | None]:
        """Dtypes of parameter, gradient, states (None without states) and low-precision copy (None without copy)."""
        state = self.states[0].dtype if self.states else None
        lowered = None if self.low_precision_copy is None else self.low_precision_copy.dtype
        return self.parameter.dtype, self.gradient.dtype, state, lowered

    def check(self, num_states: int) -> None:
        """Check that all tensors match each other and a rule with `num_states` states.

        Raises:
            ModelError: a tensor does not match. The message names it.
        """
        count = self.parameter.numel()
        if len(self.states) != num_states:
            raise ModelError(
                f"an update needs {num_states} states and got {len(self.states)}; pass {plural(num_states, 'tensor')}, "
                "in the order of the rule"
            )
        _check_tensor("parameter", self.parameter, count, FLOAT_DTYPES)
        _check_tensor("gradient", self.gradient, count, FLOAT_DTYPES)
        for number, state in enumerate(self.states):
            _check_tensor(f"state {number}", state, count, STATE_DTYPES)
            if state.dtype != self.states[0].dtype:
                raise ModelError(f"state {number} is {state.dtype} and state 0 {self.states[0].dtype}; use one dtype")
        coded = bool(self.states) and self.states[0].dtype == torch.uint8
        if len(self.scales) != num_states * coded:
            raise ModelError(
                f"{num_states} states of {self.dtypes[2]} came with {plural(len(self.scales), 'tensor')} of scales; "
                f"pass {num_states * coded}"
            )
        for number, scale in enumerate(self.scales):
            _check_tensor(f"scales of state {number}", scale, count_scales(count), (torch.float32,))
        if self.low_precision_copy is not None:
            _check_tensor("lowered copy", self.low_precision_copy, count, (torch.bfloat16, torch.float16))


def count_scales(count: int) -> int:
    """Return the number of scales of `count` elements."""
    return -(-count // SCALE_BLOCK)


def _check_tensor(name: str, tensor: torch.Tensor, count: int, dtypes: tuple[torch.dtype, ...]) -> None:
    if tensor.device.type != "cpu":
        raise ModelError(
            f"the {name} is on {tensor.device}; CPU kernels take tensors in host memory: move it to the CPU"
        )
    if tensor.dtype not in dtypes:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ModelError(f"the {name} of shape {tuple(tensor.shape)} is {tensor.dtype}; it must be one of {names}")
    if tensor.numel() != count:
        raise ModelError(
            f"the {name} has {tensor.numel()} elements where {count} are needed; pass a tensor of {count} elements"
        )
    if tensor.layout != torch.strided or not tensor.is_contiguous():
        raise ModelError(f"the {name} of shape {tuple(tensor.shape)} is not contiguous; pass .contiguous()")
    if not has_memory(tensor):
        raise ModelError(f"the {name} of shape {tuple(tensor.shape)} {freed_storage_problem(tensor)}")
