"""A model that changed in mid-run: parameters were unfrozen, or modules with parameters added or taken away."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from windlass.base.errors import ModelError
from windlass.base.log import logger
from windlass.base.text import plural
from windlass.engine.parallelize import mesh_of_model
from windlass.zero.access.state_transfer import StateTransfer
from windlass.zero.access.unfreezing import can_unfreeze, unfreeze
from windlass.zero.core.model_consistency import check_same_model
from windlass.zero.core.sharded_parameter import put_grad, raw_grad
from windlass.zero.unit_builder import check_devices
from windlass.zero.update.elementwise_update import check_parameters

if TYPE_CHECKING:
    from windlass.engine.training_engine import Engine
    from windlass.zero.sharded_model import ShardedModel


def refresh_engine(engine: Engine) -> None:
    """See `Engine.refresh`."""
    before = engine._sharded
    for average in before.averages.values():
        average.refuse_applied("refresh()")
    before.scheduler.sync("a change of parameters or states")
    check_same_model(
        before.model, before.update.optimizer if before.update is not None else None, before.mesh.dense.data
    )
    if (joining := _parameters_only_unfrozen(before)) and can_unfreeze(before, joining):
        unfreeze(before, joining)
        return
    if has_pending_gradients(before):
        raise ModelError(
            "refresh() in the middle of a step would lose the gradients that were accumulated; call it after step()"
        )
    check_devices(before.model, before.device)
    if before.update is not None:
        check_parameters(before.update.optimizer, before.model)
    carried = StateTransfer(before)
    trained = sum(unit.numel for unit in before.units if unit.trainable)
    engine._async_save.wait()  # what it reads goes with the old layout
    before.destroy(keeps_mesh=mesh_of_model(before.model) is before.mesh)  # it is laid out again over the same groups
    for parameter in before.model.parameters():
        put_grad(parameter, None)  # of a backward before, of which nobody took anything
    after = engine.rebuild_sharded_model(engine)
    engine._attach(after)
    carried.restore(after)
    now = sum(unit.numel for unit in after.units if unit.trainable)
    logger.info(f"the model was laid out again: trained are {plural(now, 'parameter')} now, {trained:,} before")


def has_pending_gradients(model: ShardedModel) -> bool:
    """Whether a step has begun: there are gradients, the same on all ranks."""
    return any(slot.has_reduced or slot.written for slot in model.slots)


def unfrozen_parameters(model: ShardedModel) -> list[tuple[str, nn.Parameter]]:
    """Parameters of the optimizer that were frozen when the model was laid out and are to be trained now."""
    if model.update is None:
        return []
    frozen = list(model.unhooked_parameters())
    if not frozen:
        return []
    asked = {id(p) for group in model.update.optimizer.param_groups for p in group["params"]}
    return [(name, parameter) for name, parameter in frozen if parameter.requires_grad and id(parameter) in asked]


def _parameters_only_unfrozen(model: ShardedModel) -> list[nn.Parameter]:
    """What was unfrozen; none if modules came or went besides."""
    laid_out = {id(parameter) for unit in model.units for parameter in unit.parameters}
    if laid_out != {id(parameter) for parameter in model.model.parameters()}:
        return []
    return [parameter for _, parameter in unfrozen_parameters(model)]


def check_no_lost_gradients(model: ShardedModel) -> None:
    """A step would leave out gradients of parameters that were unfrozen, or that came, where the engine did not see it.

    Raises:
        ModelError: there is one.
    """
    groups = model.update.optimizer.param_groups if model.update is not None else []
    unseen = [p for group in groups if not model.all_trained(group["params"]) for p in group["params"]]
    lost = {id(p) for p in unseen if raw_grad(p) is not None and not model.all_trained([p])}
    for name, parameter in model.model.named_parameters() if lost else ():
        if id(parameter) in lost:
            raise ModelError(
                f"{name!r} has a gradient, and was frozen or not there when the engine last looked: call engine(...) "
                "rather than its module after requires_grad_(True), and engine.refresh() after a parameter was added "
                "or exchanged"
            )


def drop_external_gradients(model: ShardedModel) -> list[str]:
    """Drop every `.grad` of a trained parameter; their names.

    Gradients leave `.grad` while a backward makes them, so what is there at a step was put there by hand. Nobody
    reduced it, and the next backward would add to it.
    """
    found = []
    with torch._C.DisableTorchFunctionSubclass():  # released parameters are asked for nothing but this
        for slot in model.slots:
            for name, parameter in zip(slot.unit.names, slot.unit.parameters, strict=True):
                if raw_grad(parameter) is not None:
                    put_grad(parameter, None)
                    found.append(name)
    return found
