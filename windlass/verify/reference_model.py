"""Plain PyTorch copy of the model in one process, which replays the ranks' forwards."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from windlass.base.dtypes import is_castable
from windlass.base.errors import ModelError
from windlass.verify.module_trace import ModuleTrace, TraceEvent, differentiable_outputs
from windlass.verify.recorded_forward import RecordedForward, impersonate_rank, replay_arguments, use_rng_states

# options of an optimizer's implementation, which the copy does not take over
_IMPLEMENTATION_KEYS = ("fused", "foreach", "params")


@dataclass
class ReplayResult:
    """Results of a replayed forward.

    Attributes:
        events: weights and outputs of the modules.
        loss: value of the output that is the loss; None if the loss is computed outside the model.
        buffers: values, after the replay, of the buffers that the recorded forward changed.
    """

    events: list[TraceEvent] = field(default_factory=list)
    loss: float | None = None
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)


class ReferenceModel:
    """Copy of a model and of its optimizer, made before the model was sharded.

    A 16-bit model is trained by the plain recipe: the optimizer steps float32 master weights, made from the values
    before the cast, and the model holds them rounded.

    Args:
        model: a model that is not sharded yet; it is not changed.
        optimizer: optimizer of its parameters.
        param_dtype: dtype to which floating-point parameters are cast, except frozen ones of 8 bits; None: each
            parameter keeps its dtype.
        device: device of the computation.
        master_dtypes: dtype in which master weights are stored, and dtype in which the optimizer steps them; None:
            float32.

    Raises:
        ModelError: the model can't be copied.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        param_dtype: torch.dtype | None,
        device: torch.device,
        master_dtypes: tuple[torch.dtype, torch.dtype] | None = None,
    ) -> None:
        self._master_dtype: torch.dtype | None = master_dtypes[0] if master_dtypes is not None else None
        self._state_dtype = master_dtypes[1] if master_dtypes is not None else torch.float32
        memo: dict[int, Any] = {}
        try:
            self.model: nn.Module = copy.deepcopy(model, memo)
        except (RuntimeError, TypeError, NotImplementedError) as error:
            raise ModelError(
                f"verify needs a second copy of the model, and copy.deepcopy(model) failed: {error}; keep what cannot "
                "be copied (locks, open files, tensors with a graph) out of the model's attributes"
            ) from error
        for parameter in model.parameters():  # deepcopy drops the hooks on gradients: register them again
            for hook in (parameter._backward_hooks or {}).values():
                memo[id(parameter)].register_hook(hook)
        self.optimizer = _copy_optimizer(optimizer, memo)
        self.model.to(device)
        self.device = device
        self.parameters = dict(self.model.named_parameters())
        self.master_weights = {name: self._make_master_weight(name, param_dtype) for name in self.parameters}
        self._redirect_optimizer()
        self._trace = ModuleTrace(self.model)
        self._buffers: dict[int, dict[str, torch.Tensor]] = {}  # for each rank, its buffers by name
        self._gradient_sums: dict[str, torch.Tensor] = {}

    def named_master_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Return every parameter in the optimizer's dtype, by name, in model order."""
        return ((name, master.detach()) for name, master in self.master_weights.items())

    def set_value(self, name: str, value: torch.Tensor) -> None:
        """Set a parameter to `value` from the sharded model."""
        with torch.no_grad():
            self.master_weights[name].copy_(value)
            if self.parameters[name] is not self.master_weights[name]:
                self.parameters[name].copy_(self.master_weights[name])

    def replay(self, forward: RecordedForward, rank: int) -> ReplayResult:
        """Replay a forward, and the backward from the recorded gradients of its outputs. See `take_gradient_sums`.

        Raises:
            ModelError: the copy returned fewer tensors with a graph than the model, or its forward communicates.
        """
        self._set_buffers(forward, rank)
        for module, mode in zip(self.model.modules(), forward.module_modes[0], strict=True):
            module.training = mode
        for parameter, wants in zip(self.model.parameters(), forward.module_modes[1], strict=True):
            parameter.requires_grad_(wants)
        enabled, dtype, cache = forward.autocast
        found = ReplayResult()
        self._trace.events = found.events
        args, kwargs = replay_arguments(forward, self.device)
        with (
            impersonate_rank(rank),
            use_rng_states(forward.rng_states, self.device),
            torch.set_grad_enabled(forward.grad_enabled),
            torch.autocast(self.device.type, dtype=dtype, enabled=enabled, cache_enabled=cache),
        ):
            output = self.model(*args, **kwargs)
            self._trace.events = None
        ways = differentiable_outputs(self.model, output)
        if forward.loss is not None and forward.loss[0] < len(ways):
            found.loss = float(ways[forward.loss[0]].detach())
        found.buffers = {name: self.model.get_buffer(name).detach().cpu() for name in forward.buffers_after}
        self._replay_backward(forward, ways)
        return found

    def step(self, gradients: dict[str, torch.Tensor], options: list[dict[str, Any]]) -> None:
        """Step the optimizer with the gradients of master weights, by name, and with the options of its parameter
        groups."""
        for group, given in zip(self.optimizer.param_groups, options, strict=True):
            group.update({key: value for key, value in given.items() if key not in _IMPLEMENTATION_KEYS})
        for name, master in self.master_weights.items():
            given_one = gradients.get(name)
            master.grad = given_one.to(master.device, master.dtype) if given_one is not None else None
        self.optimizer.step()
        for master in self.master_weights.values():
            master.grad = None
        with torch.no_grad():
            for name, master in self.master_weights.items():
                if self.parameters[name] is not master:
                    if self._master_dtype is not None:
                        master.copy_(master.to(self._master_dtype))
                    self.parameters[name].copy_(master)

    def add_gradients(self, gradients: dict[str, torch.Tensor]) -> None:
        """Add gradients by name, as if a replay had computed them."""
        for name, part in gradients.items():
            self._gradient_sums[name] = (
                self._gradient_sums[name] + part if name in self._gradient_sums else part.clone()
            )

    def take_gradient_sums(self) -> dict[str, torch.Tensor]:
        """Return and clear the sums of the weighted gradients of all replays since the last call, by name, in float64
        on the CPU.
        """
        sums, self._gradient_sums = self._gradient_sums, {}
        return sums

    def _replay_backward(self, forward: RecordedForward, outputs: list[torch.Tensor]) -> None:
        for number, (weight, entering) in enumerate(forward.gradients.items()):
            if max(entering, default=-1) >= len(outputs):
                raise ModelError(
                    f"the plain copy of the model returned {len(outputs)} tensors with a graph, the sharded one "
                    "returned more: its forward depends on state that the copy does not share (a global variable or "
                    "counter); keep that state in attributes of the model"
                )
            targets = [outputs[index] for index in entering]
            parts = [gradient.to(self.device) for gradient in entering.values()]
            torch.autograd.backward(targets, parts, retain_graph=number + 1 < len(forward.gradients))
            self._accumulate_gradients(weight)

    def _accumulate_gradients(self, weight: float) -> None:
        """Multiply each parameter's `.grad` by `weight`, add it to the sum of that parameter, and reset `.grad`.

        Args:
            weight: weight of the backward that computed the gradients.
        """
        for name, parameter in self.parameters.items():
            if parameter.grad is not None:
                grad = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
                part = grad.detach().to("cpu", torch.float64, copy=True).mul_(weight)
                self._gradient_sums[name] = (
                    self._gradient_sums[name].add_(part) if name in self._gradient_sums else part
                )
                parameter.grad = None

    def _set_buffers(self, forward: RecordedForward, rank: int) -> None:
        known = self._buffers.setdefault(rank, {})
        known |= forward.buffers
        for name, value in known.items():
            place, _, own = name.rpartition(".")
            module = self.model.get_submodule(place)
            there = module._buffers.get(own)
            if there is not None and there.shape == value.shape and there.dtype == value.dtype:
                there.copy_(value)
            else:
                module._buffers[own] = value.to(self.device, copy=True)
        known |= forward.buffers_after

    def _make_master_weight(self, name: str, param_dtype: torch.dtype | None) -> nn.Parameter:
        parameter = self.parameters[name]
        wide = parameter.detach().float() if parameter.is_floating_point() else parameter.detach()
        trained = parameter.is_floating_point() and parameter.requires_grad
        if param_dtype is not None and (trained or is_castable(parameter.dtype)):
            parameter.data = parameter.data.to(param_dtype)
        narrow = parameter.is_floating_point() and parameter.dtype.itemsize < 4
        if not parameter.requires_grad or not narrow:
            return parameter
        return nn.Parameter(
            (wide if self._master_dtype is None else wide.to(self._master_dtype)).to(self._state_dtype, copy=True)
        )

    def _redirect_optimizer(self) -> None:
        """Replace the parameters in the optimizer by their master weights."""
        of = {id(self.parameters[name]): master for name, master in self.master_weights.items()}
        for group in self.optimizer.param_groups:
            group["params"] = [of.get(id(p), p) for p in group["params"]]
        for parameter in [p for p in self.optimizer.state if id(p) in of]:
            master = of[id(parameter)]
            if master is not parameter:
                self.optimizer.state[master] = self.optimizer.state.pop(parameter)


def _copy_optimizer(optimizer: torch.optim.Optimizer, memo: dict[int, Any]) -> torch.optim.Optimizer:
    """Copy an optimizer for the copied parameters, with all attributes except its post-step hooks. `copy.deepcopy`
    would copy only defaults, groups and state.
    """
    clone: torch.optim.Optimizer = object.__new__(type(optimizer))
    apart = ("step", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    clone.__dict__.update(
        {key: copy.deepcopy(value, memo) for key, value in optimizer.__dict__.items() if key not in apart}
    )
    clone._optimizer_step_pre_hooks = OrderedDict(optimizer._optimizer_step_pre_hooks)
    clone._optimizer_step_post_hooks = OrderedDict()
    return clone
