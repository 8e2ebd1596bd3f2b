"""What modules keep beside parameters and buffers (`get_extra_state`), by the names that a plain state dict has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from windlass.base.errors import CheckpointError
from windlass.base.log import logger
from windlass.checkpoint import plain_data

_KEY = "_extra_state"


def collect_extra_states(model: nn.Module) -> dict[str, Any]:
    """All of them, as the modules give them."""
    return {name: module.get_extra_state() for name, module in _modules_with_extra_state(model)}


def collect_plain_extra_states(model: nn.Module) -> dict[str, Any]:
    """Those that a checkpoint can hold, since they are plain data; others are named in a warning."""
    found = collect_extra_states(model)
    for name in list(found):
        try:
            plain_data.encode(found[name], "")
        except CheckpointError as error:
            logger.warning("%r is not saved: %s", name, error)
            del found[name]
    return found


def set_extra_states(model: nn.Module, states: Mapping[str, Any]) -> None:
    """Give modules what `given` has of theirs."""
    for name, module in _modules_with_extra_state(model):
        if name in states:
            module.set_extra_state(states[name])


def extra_state_names(model: nn.Module) -> list[str]:
    """Of modules that keep any."""
    return [name for name, _ in _modules_with_extra_state(model)]


def _modules_with_extra_state(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for prefix, module in model.named_modules(remove_duplicate=False):
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            yield f"{prefix}.{_KEY}" if prefix else _KEY, module
