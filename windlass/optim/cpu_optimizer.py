"""Base class of the host-memory optimizers: 16-bit and 8-bit states, gradient scaling, low-precision copies, state
dicts.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from windlass.base.errors import ConfigError, ModelError
from windlass.kernels import reference
from windlass.kernels.kernel_dispatch import apply_updates, prefer_huge_pages
from windlass.kernels.page_sums import PageSums
from windlass.kernels.update_rules import UpdateRule
from windlass.kernels.update_tensors import UpdateTensors, count_scales
from windlass.optim import quantized_states

_STATE_DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "8bit": torch.uint8}
_NO_TENSORS: Mapping[torch.Tensor, torch.Tensor] = MappingProxyType({})


@dataclass(frozen=True)
class StateFormat:
    """Storage format of an elementwise state. `dtype` is uint8 for 8-bit codes with scales; `is_signed` is True if the
    values may be negative.
    """

    dtype: torch.dtype
    is_signed: bool

    @property
    def is_quantized(self) -> bool:
        """True if the values are 8-bit codes with separate scales."""
        return self.dtype == torch.uint8


class CPUOptimizer(torch.optim.Optimizer):
    """Base of the optimizers that step parameters in host memory by `windlass.kernels` (`docs/kernels.md`).

    `step()` reads five attributes, which are unset or empty by default:
    - `grad_scale`: one-element tensor by which gradients are divided, without writing them; set by
      `torch.amp.GradScaler`;
    - `found_inf`: one-element tensor; unless it is 0, nothing is updated, including the step counters;
    - `low_precision_copies`: maps a parameter to a bf16 or fp16 tensor that receives the updated parameter, rounded to
      nearest even;
    - `gradient_overrides`: maps a parameter to a gradient that replaces `.grad`, in fp32, bf16 or fp16;
    - `page_sums`: checksums of the memory of parameters and states, compared and renewed in the pass that updates them.

    Args:
        state_dtype: dtype of the moments: "fp32"; "bf16", with stochastic rounding; or "8bit", where two moments take
            2.03 bytes per element.
    """

    _step_supports_amp_scaling = True
    # These attributes have no default, because GradScaler tests whether they are set.
    grad_scale: torch.Tensor | None
    found_inf: torch.Tensor | None
    low_precision_copies: Mapping[torch.Tensor, torch.Tensor] = _NO_TENSORS
    gradient_overrides: Mapping[torch.Tensor, torch.Tensor] = _NO_TENSORS
    page_sums: Sequence[PageSums] = ()

    def __init__(self, params: ParamsT, defaults: dict[str, Any], state_dtype: str | torch.dtype) -> None:
        super().__init__(params, {**defaults, "state_dtype": _state_dtype_name(type(self).__name__, state_dtype)})

    @abstractmethod
    def _state_names(self, group: dict[str, Any]) -> tuple[tuple[str, bool], ...]:
        """Return `(name, is_signed)` for each state of a parameter of `group`; see `StateFormat`."""

    @abstractmethod
    def _update_rule(self, group: dict[str, Any], step: int, is_first: bool) -> UpdateRule:
        """Return the update rule of a parameter of `group`. `step` is the parameter's step number, from 1; in a class
        that counts no steps it is always 1. `is_first` is True if the parameter's states are new.
        """

    def state_formats(self, group: dict[str, Any]) -> dict[str, StateFormat]:
        """Return the storage format of each state of a parameter of `group`, by name."""
        dtype = self._storage_dtype(group)
        return {name: StateFormat(dtype, signed) for name, signed in self._state_names(group)}

    def _storage_dtype(self, group: dict[str, Any]) -> torch.dtype:
        return _STATE_DTYPES[group.get("state_dtype", self.defaults["state_dtype"])]

    _has_step_count = True  # True if a parameter's state has `step`

    def _initial_value(self, group: dict[str, Any]) -> float:
        """Return the initial value of the states."""
        return 0.0

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every parameter that has a gradient. Return the result of `closure`.

        Raises:
            ModelError: a parameter or gradient is not in host memory, is sparse, or has a dtype without a kernel.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        found_inf, scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        if found_inf is not None and found_inf.item():
            return loss
        divisor = 1.0 if scale is None else float(scale.item())
        for group in self.param_groups:
            self._step_group(group, divisor)
        return loss

    def _step_group(self, group: dict[str, Any], divisor: float) -> None:
        by_rule: dict[UpdateRule, list[UpdateTensors]] = defaultdict(list)
        stepped: list[torch.Tensor] = []
        scattered: list[tuple[torch.Tensor, torch.Tensor]] = []
        for parameter in group["params"]:
            gradient = self.gradient_overrides.get(parameter, parameter.grad)
            if gradient is None:
                continue
            _check_dense(type(self).__name__, parameter, gradient)
            values = parameter.detach()
            if not values.is_contiguous():
                values = values.contiguous()
                scattered.append((parameter, values))
            state, first = self._prepare_state(parameter, group)
            rule = self._update_rule(group, int(state["step"].item()) if self._has_step_count else 1, first)
            by_rule[rule].append(self._update_tensors(parameter, values, gradient, state, group))
            stepped.append(parameter)
        for rule, pieces in by_rule.items():
            apply_updates(rule, pieces, divisor, page_sums=self.page_sums)
        for parameter, values in scattered:
            parameter.copy_(values)
        if stepped:
            # The kernels write through raw addresses. A graph that saved the old values must detect the change.
            torch.autograd.graph.increment_version(stepped)

    def _update_tensors(
        self,
        parameter: torch.Tensor,
        values: torch.Tensor,
        gradient: torch.Tensor,
        state: dict[str, Any],
        group: dict[str, Any],
    ) -> UpdateTensors:
        names = [name for name, _ in self._state_names(group)]
        scales = tuple(state[f"{name}_scale"] for name in names if f"{name}_scale" in state)
        moments = tuple(state[name] for name in names)
        return UpdateTensors(values, gradient.contiguous(), moments, scales, self.low_precision_copies.get(parameter))

    def _prepare_state(self, parameter: torch.Tensor, group: dict[str, Any]) -> tuple[dict[str, Any], bool]:
        """Return the state of `parameter`, created if missing and with its step counter advanced, and True if its
        moments are new.
        """
        state = self.state[parameter]
        if self._has_step_count:
            if not isinstance(state.get("step"), torch.Tensor):  # old checkpoints have plain numbers
                state["step"] = torch.tensor(float(state.get("step", 0)), dtype=torch.float32)
            state["step"] += 1
        first = False
        for name, signed in self._state_names(group):
            if state.get(name) is None:
                first = True
                self._allocate_state(state, name, signed, parameter, group)
        return state, first

    def _allocate_state(
        self, state: dict[str, Any], name: str, signed: bool, parameter: torch.Tensor, group: dict[str, Any]
    ) -> None:
        dtype = self._storage_dtype(group)
        moment = torch.empty(parameter.shape, dtype=dtype, device=parameter.device)
        prefer_huge_pages(moment)
        state[name] = moment.zero_()
        if dtype == torch.uint8:
            state[f"{name}_scale"] = torch.zeros(count_scales(parameter.numel()), dtype=torch.float32)
        start = self._initial_value(group)
        if start:
            _store_state(state, name, torch.full_like(moment, start, dtype=torch.float32), signed)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict, and convert its states to this optimizer's `state_dtype`.

        Options that a saved group lacks keep their values. For example, groups of DeepSpeed's DeepSpeedCPUAdam have no
        `decoupled_weight_decay`. torch's own method would cast every state to its parameter's dtype, including 8-bit
        codes.
        """
        chosen = [dict(group) for group in self.param_groups]
        super().load_state_dict(state_dict)
        saved_ids = [number for group in state_dict["param_groups"] for number in group["params"]]
        own = [(group, parameter) for group in self.param_groups for parameter in group["params"]]
        for group, own_options in zip(self.param_groups, chosen, strict=True):
            group["state_dtype"] = own_options["state_dtype"]
            for key, value in own_options.items():
                group.setdefault(key, value)
        for number, (group, parameter) in zip(saved_ids, own, strict=True):
            saved = state_dict["state"].get(number)
            if saved:
                self._restore_state(saved, parameter, group)

    def _restore_state(self, saved: Mapping[str, Any], parameter: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        for name, signed in self._state_names(group):
            moment, scale = saved.get(name), saved.get(f"{name}_scale")
            state.pop(f"{name}_scale", None)
            if not isinstance(moment, torch.Tensor):
                continue
            self._allocate_state(state, name, signed, parameter, group)
            if moment.dtype == state[name].dtype:
                state[name].copy_(moment)
                if scale is not None:
                    state[f"{name}_scale"].copy_(scale)
            else:
                wide = (
                    moment.float()
                    if scale is None
                    else reference.dequantize_blockwise(moment.reshape(-1), scale, signed)
                )
                _store_state(state, name, wide.view(parameter.shape), signed)


def _store_state(state: dict[str, Any], name: str, values: torch.Tensor, signed: bool) -> None:
    """Store fp32 values in the format of the state, rounded to nearest."""
    if state[name].dtype == torch.uint8:
        quantized_states.quantize_state(values.reshape(-1), state[name].view(-1), state[f"{name}_scale"], signed)
    else:
        state[name].copy_(values)


def _state_dtype_name(owner: str, state_dtype: str | torch.dtype) -> str:
    for name, dtype in _STATE_DTYPES.items():
        if state_dtype in (name, dtype):
            return name
    raise ConfigError(f"{owner}: state_dtype is {state_dtype!r}; it must be one of {', '.join(_STATE_DTYPES)}")


def _check_dense(owner: str, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    if gradient.is_sparse:
        raise ModelError(
            f"{owner}: the gradient of a parameter of shape {tuple(parameter.shape)} is sparse; make it dense"
        )
    if parameter.device.type != "cpu":
        raise ModelError(
            f"{owner}: a parameter of shape {tuple(parameter.shape)} is on {parameter.device}; this optimizer updates "
            f"host memory only: use the class of torch.optim, or offload the optimizer (offload_optimizer)"
        )
