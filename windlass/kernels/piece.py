"""The tensors of one parameter's update, checked before their addresses are used."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from windlass.base.errors import ModelError
from windlass.base.raw_memory import freed, has_memory

BLOCK = 256  # elements that share a scale where a state is coded in 8 bits
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
STATES = (torch.float32, torch.bfloat16, torch.uint8)


@dataclass(frozen=True, slots=True)
class Piece:
    """One parameter, whole or a span of it: contiguous CPU tensors of `n` elements each, of any shape.

    Args:
        parameter: fp32, bf16 or fp16; updated in place.
        gradient: fp32, bf16 or fp16; only read.
        states: in the order of the rule, all fp32, all bf16 or all 8-bit codes (uint8); updated in place.
        scales: with 8-bit codes, fp32 of `scales_of(n)` elements for each state; else empty.
        lowered: bf16 or fp16, receives the new parameter rounded to nearest even; None: nobody wants it.
    """

    parameter: torch.Tensor
    gradient: torch.Tensor
    states: tuple[torch.Tensor, ...] = ()
    scales: tuple[torch.Tensor, ...] = ()
    lowered: torch.Tensor | None = None

    @property
    def formats(self) -> tuple[torch.dtype, torch.dtype, torch.dtype | None, torch.dtype | None]:
        """dtypes of parameter, gradient, states (None without), lowered (None without)."""
        state = self.states[0].dtype if self.states else None
        lowered = None if self.lowered is None else self.lowered.dtype
        return self.parameter.dtype, self.gradient.dtype, state, lowered

    def check(self, states: int) -> None:
        """Raise ModelError, naming the tensor, unless all fit together and to a rule with `states` states."""
        count = self.parameter.numel()
        if len(self.states) != states:
            raise ModelError(f"an update needs {states} states and got {len(self.states)}")
        _check("parameter", self.parameter, count, FLOATS)
        _check("gradient", self.gradient, count, FLOATS)
        for number, state in enumerate(self.states):
            _check(f"state {number}", state, count, STATES)
            if state.dtype != self.states[0].dtype:
                raise ModelError(f"state {number} is {state.dtype} and state 0 {self.states[0].dtype}; make them one")
        coded = bool(self.states) and self.states[0].dtype == torch.uint8
        if len(self.scales) != states * coded:
            raise ModelError(f"{states} states of {self.formats[2]} came with {len(self.scales)} tensors of scales")
        for number, scale in enumerate(self.scales):
            _check(f"scales of state {number}", scale, scales_of(count), (torch.float32,))
        if self.lowered is not None:
            _check("lowered copy", self.lowered, count, (torch.bfloat16, torch.float16))


def scales_of(count: int) -> int:
    """How many scales `count` elements have."""
    return -(-count // BLOCK)


def _check(name: str, tensor: torch.Tensor, count: int, dtypes: tuple[torch.dtype, ...]) -> None:
    if tensor.device.type != "cpu":
        raise ModelError(
            f"the {name} is on {tensor.device}; CPU kernels take tensors in host memory: move it to the CPU"
        )
    if tensor.dtype not in dtypes:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ModelError(f"the {name} of shape {tuple(tensor.shape)} is {tensor.dtype}; it must be one of {names}")
    if tensor.numel() != count:
        raise ModelError(f"the {name} has {tensor.numel()} elements where {count} are needed")
    if tensor.layout != torch.strided or not tensor.is_contiguous():
        raise ModelError(f"the {name} of shape {tuple(tensor.shape)} is not contiguous; pass .contiguous()")
    if not has_memory(tensor):
        raise ModelError(f"the {name} of shape {tuple(tensor.shape)} {freed(tensor)}")
