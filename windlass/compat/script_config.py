"""Configuration functions that scripts call before `initialize`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from windlass.config.config_source import read_source
from windlass.optim.muon import muon_groups


def load_ds_config(config: Any) -> dict[str, Any]:
    """Return a configuration, which is a dict, a path or base64, as a dict.

    Raises:
        ConfigError: the argument is none of these, or not JSON. The error is also a ValueError.
    """
    return read_source(config).data


def set_optimizer_flags(config_class: Any, model: nn.Module) -> None:
    """Set `use_muon` on each parameter if the optimizer is Muon: True for hidden matrices, False for others."""
    _mark_matrices(getattr(config_class, "optimizer_name", ""), model)


def mark_muon_matrices(config_dict: Mapping[str, Any], model: nn.Module) -> None:
    """Set `use_muon` as `set_optimizer_flags` does, by the optimizer that a configuration names."""
    section = config_dict.get("optimizer")
    _mark_matrices(section.get("type") if isinstance(section, Mapping) else "", model)


def _mark_matrices(optimizer_name: Any, model: nn.Module) -> None:
    if str(optimizer_name).lower() != "muon":
        return
    for group in muon_groups(model, model.parameters()):
        for parameter in group["params"]:
            parameter.use_muon = group["use_muon"]
