"""Extra states of modules (`get_extra_state`), by their names in a plain state dict."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from windlass.base.errors import CheckpointError
from windlass.base.log import logger
from windlass.checkpoint import plain_data

_KEY = "_extra_state"


def collect_extra_states(model: nn.Module) -> dict[str, Any]:
    """Return all extra states, as the modules return them."""
    return {name: module.get_extra_state() for name, module in _modules_with_extra_state(model)}


def collect_plain_extra_states(model: nn.Module) -> dict[str, Any]:
    """Return the extra states that are plain data, which a checkpoint can hold. Log a warning for each other state."""
    states = collect_extra_states(model)
    for name in list(states):
        try:
            plain_data.encode(states[name], "")
        except CheckpointError as error:
            logger.warning("%r is not saved: %s", name, error)
            del states[name]
    return states


def set_extra_states(model: nn.Module, states: Mapping[str, Any]) -> None:
    """Set the extra state of each module that has one in `states`."""
    for name, module in _modules_with_extra_state(model):
        if name in states:
            module.set_extra_state(states[name])


def extra_state_names(model: nn.Module) -> list[str]:
    """Return the names of the modules' extra states."""
    return [name for name, _ in _modules_with_extra_state(model)]


def _modules_with_extra_state(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for prefix, module in model.named_modules(remove_duplicate=False):
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            yield f"{prefix}.{_KEY}" if prefix else _KEY, module
