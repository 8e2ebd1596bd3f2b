"""Adaptation of an engine to a model that changed during the run: unfrozen, added or removed parameters.

Master weights, optimizer states and averages of parameters move to the new layout through host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from windlass.base.errors import ModelError
from windlass.base.log import logger
from windlass.base.text import plural
from windlass.engine.parallelize import mesh_of_model
from windlass.engine.rank_state_checkpoint import open_rank_states, rank_states
from windlass.zero.access.shard_values import part_param, part_states, set_part_param, set_part_state, set_plain_state
from windlass.zero.access.unfreezing import can_unfreeze, unfreeze
from windlass.zero.core.collective_scheduler import SyncPoint
from windlass.zero.core.sharded_parameter import put_grad, raw_grad
from windlass.zero.parameter_registry import require
from windlass.zero.setup.model_consistency import check_renormalized_embeddings, check_same_model
from windlass.zero.setup.unit_builder import check_devices
from windlass.zero.sharded_model import ShardedModel
from windlass.zero.update.elementwise_update import check_parameters


def refresh_model(
    before: ShardedModel, *, before_destroy: Callable[[], None], rebuild: Callable[[], ShardedModel]
) -> None:
    """Adapt an engine's sharded model as `Engine.refresh` describes. Collective.

    Args:
        before_destroy: function called before storage of the old layout is freed; it waits for an async save, which may
            read that storage.
        rebuild: function that shards the model again, after `before` was destroyed.
    """
    for average in before.averages.values():
        average.refuse_applied("refresh()")
    before.scheduler.sync(SyncPoint.STATE_CHANGE)
    check_same_model(
        before.model, before.update.optimizer if before.update is not None else None, before.mesh.dense.data
    )
    check_renormalized_embeddings(before.model, before.mesh.dense.data, before.mesh.world, trains=before.trains)
    joining = _parameters_only_unfrozen(before)
    # Stages of a pipeline may have unfrozen different parameters, or none: all ranks take the same path.
    if all(before.mesh.world.all_gather_object(bool(joining) and can_unfreeze(before, joining))):
        unfreeze(before, joining)
        return
    # Raise on all ranks if one has gradients: ranks may run different numbers of backwards.
    if step_has_gradients(before):
        raise ModelError(
            "refresh() in the middle of a step would lose the gradients that were accumulated; call it after step()"
        )
    check_devices(before.model, before.device)
    if before.update is not None:
        check_parameters(before.update.optimizer, before.model)
    transfer = _StateTransfer(before)
    trained = sum(unit.numel for unit in before.units if unit.trainable)
    if left := [slot.unit.names[0] for slot in before.slots if slot.has_reduced and slot.unit.unstepped]:
        logger.warning(
            f"refresh() drops the gradient of {left[0]!r}, which is in no group of the optimizer and stayed after the "
            "last step"
        )
    before_destroy()
    # A parameter that is frozen only for now keeps its master weight and states, as in plain PyTorch.
    paused = _paused_parameters(before)
    before.destroy(keeps_mesh=mesh_of_model(before.model) is before.mesh)  # the new layout uses the same process groups
    for parameter in before.model.parameters():
        put_grad(parameter, None)  # gradients of an earlier backward that the engine did not reduce
    with _trainable(paused):
        after = rebuild()
        transfer.restore(after)
    now = sum(unit.numel for unit in after.units if unit.trainable)
    logger.info(f"the model was sharded again: {plural(now, 'parameter')} are trained now, {trained:,} before")


def has_pending_gradients(model: ShardedModel) -> bool:
    """Return True if this rank has accumulated gradients since the last step.

    Gradients of units that are in no group of the optimizer stay after a step and do not count.
    """
    model.runtime.end_failed_backwards()  # gradients of a backward that raised are pending too
    return any((slot.has_reduced and not slot.unit.unstepped) or slot.written for slot in model.slots)


def step_has_gradients(model: ShardedModel) -> bool:
    """Return True if any rank has gradients since the last step, except those that stayed after it. Collective.

    Unlike `has_pending_gradients`, this is False if a script has dropped all gradients: a rank that has dropped its own
    may still join reductions of its peers, with zeros.
    """
    model.runtime.end_failed_backwards()
    here = any(slot.written or (slot.used and not slot.unit.unstepped) for slot in model.slots)
    return any(model.mesh.world.all_gather_object(here))


def unfrozen_parameters(model: ShardedModel) -> list[tuple[str, nn.Parameter]]:
    """Return the optimizer's parameters that were frozen when the model was sharded and require gradients now."""
    if model.update is None:
        return []
    frozen = list(model.unhooked_parameters())
    if not frozen:
        return []
    requested = {id(p) for group in model.update.optimizer.param_groups for p in group["params"]}
    return [(name, parameter) for name, parameter in frozen if parameter.requires_grad and id(parameter) in requested]


def _paused_parameters(model: ShardedModel) -> list[nn.Parameter]:
    """Return the optimizer's parameters that were trained since the model was sharded and are frozen now."""
    if model.update is None:
        return []
    requested = {id(p) for group in model.update.optimizer.param_groups for p in group["params"]}
    never = {id(p) for _, p in model.unhooked_parameters()}
    laid_out = (p for unit in model.units for p in unit.parameters)
    return [p for p in laid_out if not p.requires_grad and id(p) in requested and id(p) not in never]


@contextmanager
def _trainable(parameters: list[nn.Parameter]) -> Iterator[None]:
    """Context in which frozen `parameters` require gradients, so that the model is sharded as if they were trained."""
    for parameter in parameters:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(False)


def _parameters_only_unfrozen(model: ShardedModel) -> list[nn.Parameter]:
    """Return the unfrozen parameters; an empty list if parameters were also added or removed."""
    laid_out = {id(parameter) for unit in model.units for parameter in unit.parameters}
    if laid_out != {id(parameter) for parameter in model.model.parameters()}:
        return []
    return [parameter for _, parameter in unfrozen_parameters(model)]


def check_no_lost_gradients(model: ShardedModel) -> None:
    """Check that no optimizer parameter unfrozen or added since the model was sharded has a gradient.

    A step would ignore this gradient.

    Raises:
        ModelError: an unfrozen or added parameter has a gradient.
    """
    groups = model.update.optimizer.param_groups if model.update is not None else []
    unseen = [p for group in groups if not model.all_trained(group["params"]) for p in group["params"]]
    lost = {id(p) for p in unseen if raw_grad(p) is not None and not model.all_trained([p])}
    for name, parameter in model.model.named_parameters() if lost else ():
        if id(parameter) in lost:
            raise ModelError(
                f"{name!r} has a gradient, but was frozen or missing when the engine was last refreshed: call "
                "engine(...) rather than its module after requires_grad_(True), and engine.refresh() after a parameter "
                "was added or exchanged"
            )


def drop_external_gradients(model: ShardedModel) -> list[str]:
    """Drop the `.grad` of all trained parameters that have one. Return the names of these parameters.

    The engine takes gradients out of `.grad` during a backward, so a `.grad` at a step was set by the script. Such a
    gradient was not reduced, and the next backward would add to it.
    """
    dropped = []
    with torch._C.DisableTorchFunctionSubclass():  # placeholders of sharded parameters would otherwise raise or gather
        for slot in model.slots:
            for name, parameter in zip(slot.unit.names, slot.unit.parameters, strict=True):
                if raw_grad(parameter) is not None:
                    put_grad(parameter, None)
                    dropped.append(name)
    return dropped


@dataclass
class _TransferredState:
    weight: torch.Tensor
    states: dict[str, Any] = field(default_factory=dict)
    averages: dict[str, torch.Tensor] = field(default_factory=dict)


class _StateTransfer:
    """Copy of a model's trained parameters, their averages and optimizer states in host memory. Collective.

    The data-parallel ranks take turns: each parameter is kept unsharded on one of them. So a rank needs about
    `1 / data-parallel ranks` of the size of weights, states and averages in host memory, and temporarily one unsharded
    parameter with its states.

    Args:
        model: Model to copy from. It may be destroyed afterwards.
    """

    def __init__(self, model: ShardedModel) -> None:
        self._states: list[tuple[nn.Parameter, int, _TransferredState | None]] = []
        self._averages = list(model.averages.values())
        model.finish_update()  # an update or transfer in flight would still change states
        # The ranks stay the same, so each keeps its own per-rank states, see [Note: per-rank states].
        self._rank_states = {
            (id(state.unit.parameters[state.index]), state.key): state.read().cpu().clone()
            for state in rank_states(model)
        }
        with torch.no_grad():
            for unit in model.units:
                group = unit.dp_group.mesh.data
                for parameter in unit.parameters if model.masters.chunks_of(unit) else ():
                    owner = len(self._states) % group.size
                    copied = _TransferredState(part_param(parameter), part_states(parameter))
                    for average in self._averages:
                        if average.updates:
                            copied.averages[average.name] = average.part_param(parameter)
                    self._states.append((parameter, owner, _in_host_memory(copied) if owner == group.index else None))

    def restore(self, model: ShardedModel) -> None:
        """Set the copied values in the parameters that `model` trains, and free the copy. Collective.

        Values of parameters that were removed, or that are frozen and in no group of the optimizer, are dropped.
        """
        for average in self._averages:
            average.rebind(model)
        trained = {id(p) for unit in model.units if model.masters.chunks_of(unit) for p in unit.parameters}
        for parameter, owner, copied in self._states:
            if id(parameter) not in trained:
                continue
            received = require(parameter).unit.dp_group.mesh.data.broadcast_object(copied, owner)
            assert received is not None
            set_part_param(parameter, received.weight.to(model.device))
            for key, value in received.states.items():
                if isinstance(value, torch.Tensor):
                    set_part_state(parameter, key, value)
                else:
                    set_plain_state(parameter, key, value)
            for name, value in received.averages.items():
                model.averages[name].set_part_param(parameter, value.to(model.device))
        self._states = []
        if self._rank_states:
            open_rank_states(model, {key for _, key in self._rank_states})
        for state in rank_states(model):
            values = self._rank_states.get((id(state.unit.parameters[state.index]), state.key))
            if values is not None:
                state.set(values)


def _in_host_memory(state: _TransferredState) -> _TransferredState:
    states = {key: v.cpu() if isinstance(v, torch.Tensor) else v for key, v in state.states.items()}
    return _TransferredState(state.weight.cpu(), states, {name: value.cpu() for name, value in state.averages.items()})
