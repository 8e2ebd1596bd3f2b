"""Registry of user-defined optimizers and of the updates that step them."""

from __future__ import annotations

from typing import Any

import torch

from windlass.base.errors import ConfigError
from windlass.config.optimizer_section import OPTIMIZER_PARAMETERS, UNSUPPORTED_OPTIMIZERS
from windlass.config.registered_optimizers import add_optimizer, find_registered_optimizer

_FLAGS = ("needs_whole_parameters", "reduces_itself")
_updates: dict[type[torch.optim.Optimizer], type[Any]] = {}


def register_update(name: str, optimizer: type[torch.optim.Optimizer], update: type[Any] | None = None) -> None:
    """Make an optimizer class available as `optimizer.type`, and choose the update that steps it.

    Call it before `windlass.initialize`, on every rank. Afterwards `"optimizer": {"type": name, "params": {...}}` of
    the configuration constructs `optimizer(groups, **params)`. Repeating a registration has no effect.

    Args:
        name: name that no other optimizer has, ignoring case.
        optimizer: class whose constructor takes parameters or groups first. Its keyword arguments are the allowed
            `params`.
        update: class with the protocol of `windlass.zero.update.update_protocol.Update`. It also steps instances of
            `optimizer`, and of its subclasses, that the caller passes to `initialize`. None: `optimizer.step` is
            called on full parameters, as for any class without an update.

    Raises:
        ConfigError: the name is taken, another update is registered for the class, `optimizer` is not an optimizer
            class, or `update` lacks the protocol.
    """
    if not (isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer)):
        raise ConfigError(
            f"register_update({name!r}): {optimizer!r} is not a subclass of torch.optim.Optimizer; pass one"
        )
    missing = [flag for flag in _FLAGS if not isinstance(getattr(update, flag, None), bool)]
    if update is not None and (not isinstance(update, type) or missing):
        raise ConfigError(
            f"register_update({name!r}): {update!r} is not an update class with the class attributes "
            f"{' and '.join(missing or _FLAGS)}, True or False; derive it from SelfReducingUpdate, or write the "
            "protocol of windlass.zero.update.update_protocol.Update"
        )
    undefined = sorted(getattr(update, "__abstractmethods__", ()))
    if undefined:
        raise ConfigError(
            f"register_update({name!r}): {update!r} does not define {' and '.join(undefined)}; define it in the class"
        )
    before = find_registered_optimizer(name)
    if before is optimizer and _updates.get(optimizer) is update:
        return
    if before is not None or _is_known(name) or optimizer in _updates:
        owner = before.__name__ if before is not None else name if _is_known(name) else _updates[optimizer].__name__
        raise ConfigError(
            f"register_update({name!r}): the name or the class {optimizer.__name__} is taken by {owner}; register a "
            "new class under a new name"
        )
    add_optimizer(name, optimizer)
    if update is not None:
        _updates[optimizer] = update


def find_registered_update(optimizer: torch.optim.Optimizer) -> type[Any] | None:
    """Return the update class registered for the class of `optimizer` or its nearest base; None if there is none."""
    return next((_updates[owner] for owner in type(optimizer).__mro__ if owner in _updates), None)


def _is_known(name: str) -> bool:
    known = {*OPTIMIZER_PARAMETERS, *UNSUPPORTED_OPTIMIZERS}
    known |= {key for key, owner in vars(torch.optim).items() if isinstance(owner, type)}
    return name.lower() in {one.lower() for one in known}
