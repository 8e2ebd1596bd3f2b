"""Optimizer object of an engine, for users: the groups of their optimizer, full states, and the engine's `step`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from windlass.base.errors import ModelError, WindlassError
from windlass.base.log import logger
from windlass.base.text import plural
from windlass.checkpoint.torch_state_dicts import UNRESTORED_KEYS
from windlass.engine.optimizer_modes import modes_of
from windlass.optim.elementwise_optimizers import enable_fused_step
from windlass.zero.access.full_values import full_states, set_full_state
from windlass.zero.access.shard_values import has_state_memory, keep_states, require_states_on_device, set_plain_state
from windlass.zero.parameter_registry import require
from windlass.zero.sharded_model import ShardedModel
from windlass.zero.update.elementwise_update import check_parameters


@dataclass(frozen=True)
class ShardedOptimizerCallbacks:
    """Callables of the engine that its optimizer calls.

    Attributes:
        step: The engine's step.
        refresh: Shards the model again, to include parameters that were not trained before.
        loss_scale: Returns the engine's loss scale.
        set_loss_scale: Replaces the engine's loss scale.
    """

    step: Callable[[], None]
    refresh: Callable[[], None]
    loss_scale: Callable[[], float]
    set_loss_scale: Callable[[float], None]


class ShardedOptimizer(torch.optim.Optimizer):
    """Wrapper that shares the `param_groups` of the user's optimizer, so that schedulers and callers may change them.

    Args:
        optimizer: the optimizer that the user passed or the configuration named.
        model: the sharded model whose parameters are optimized.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, model: ShardedModel, callbacks: ShardedOptimizerCallbacks
    ) -> None:
        self.__dict__.update(
            optimizer.__dict__
        )  # share the same groups and defaults; torch's constructor would copy them
        self.__dict__.pop("step", None)
        self.optimizer = optimizer
        self._model, self._callbacks = model, callbacks
        self.overflow = False
        for name, call in modes_of(optimizer).items():
            self.__dict__[name] = optimizer.__dict__[name] = call

    @property
    def loss_scale(self) -> float:
        """Loss scale of the next backward. It can be set between two steps of an engine with `fp16`.

        Raises:
            LossScalingError: on setting another value, if it is out of range, `fp16` is off, or a step has begun.
        """
        return self._callbacks.loss_scale()

    @loss_scale.setter
    def loss_scale(self, scale: float) -> None:
        self._callbacks.set_loss_scale(scale)

    @property
    def cur_scale(self) -> float:
        """Loss scale (older name)."""
        return self.loss_scale

    @cur_scale.setter
    def cur_scale(self, scale: float) -> None:
        self.loss_scale = scale

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Call `engine.step()`.

        In the DeepSpeed compatibility layer, `step` leaves the learning rate scheduler to the script.
        """
        if closure is not None:
            raise ModelError(
                "step() got a closure, which would compute gradients in the middle of a step; call engine.backward, "
                "then engine.step without a closure"
            )
        self._callbacks.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of this optimizer's parameters, as torch does. `step` drops them too.

        Args:
            set_to_none: if False, gradients become zero, and the next step uses these zeros.
        """
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        self._model.script_gradients.drop_all(parameters, zero=not set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of the model's parameters, as torch does. Collective if any of them was not trained before."""
        groups = self.param_groups
        before = len(groups)
        # the optimizer's class may override this and create several groups from one
        self.optimizer.add_param_group(param_group)
        try:
            check_parameters(self, self._model.model)
            if not all(self._model.all_trained(group["params"]) for group in groups[before:]):
                self._callbacks.refresh()
        except WindlassError:
            del groups[before:]
            raise
        enable_fused_step(self.optimizer)

    def attach(self, model: ShardedModel) -> None:
        """Switch to another sharded model of the same parameters."""
        self._model = model

    def mark_called(self) -> None:
        """Mark a step as taken for torch's schedulers, also on the user's optimizer."""
        self._opt_called = True
        self.optimizer.__dict__["_opt_called"] = True

    def run_post_hooks(self) -> None:
        """Call the hooks that are registered to run after each step."""
        for hook in list(self.optimizer._optimizer_step_post_hooks.values()):
            hook(self.optimizer, (), {})

    def state_dict(self) -> dict[str, Any]:
        """Return the `state_dict()` of a plain torch optimizer, with full states. Collective."""
        groups, state, number = [], {}, 0
        for group in self.param_groups:
            numbers = []
            for parameter in group["params"]:
                states = full_states(parameter)
                if states:
                    state[number] = states
                numbers.append(number)
                number += 1
            groups.append({**{key: value for key, value in group.items() if key != "params"}, "params": numbers})
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Replace groups and states by a plain torch optimizer's `state_dict()`, the same on every rank. Collective.

        As in torch, a parameter without saved states begins with new ones. The groups keep their `fused`, `foreach`,
        `capturable`, `differentiable` and `state_dtype`. Per-rank states, such as error feedback, are not
        part of such a dict and are unchanged. Unlike in torch, the states of a parameter that has been frozen since
        `initialize` are dropped, with a warning.

        Raises:
            ModelError: the groups have other numbers of parameters, or states are offloaded. Nothing was changed.
        """
        given = state_dict["param_groups"]
        if [len(g["params"]) for g in given] != [len(g["params"]) for g in self.param_groups]:
            raise ModelError(
                f"the saved groups have {[len(g['params']) for g in given]} parameters, this optimizer's have "
                f"{[len(g['params']) for g in self.param_groups]}; build the optimizer with the same groups"
            )
        # Check before anything changes, so that an error leaves groups and states as they were.
        of_parameter = state_dict["state"]
        for parameter in (one for group in self.param_groups for one in group["params"]):
            require_states_on_device(parameter)
        dropped = []
        for group, saved in zip(self.param_groups, given, strict=True):
            group.update({key: value for key, value in saved.items() if key not in {"params", *UNRESTORED_KEYS}})
            for parameter, number in zip(group["params"], saved["params"], strict=True):
                states = of_parameter.get(number, {})
                keep_states(parameter, states)
                if states and not has_state_memory(parameter):
                    dropped.append(require(parameter).name)
                for key, value in states.items():
                    set_state = set_full_state if isinstance(value, torch.Tensor) else set_plain_state
                    set_state(parameter, key, value)
        if dropped:
            logger.warning(
                f"load_state_dict drops the states of {plural(len(dropped), 'parameter')} frozen since initialize, "
                f"{dropped[0]!r} first; to train them with these states later, set requires_grad, call "
                "engine.refresh() and load again, then freeze them if they should not be trained yet"
            )
        self._model.choose_gradient_mode()  # loaded step counts may cross a freeze
