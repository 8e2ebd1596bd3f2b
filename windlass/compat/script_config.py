"""What scripts do with their configuration before they call `initialize`."""

from __future__ import annotations

from typing import Any

from torch import nn

from windlass.config.config_source import read_source
from windlass.optim.muon import muon_groups


def load_ds_config(config: Any) -> dict[str, Any]:
    """A configuration as a dict: itself, or read from a path, or from base64.

    Raises:
        ConfigError: it is none of these, or no JSON; a ValueError.
    """
    return read_source(config).data


def set_optimizer_flags(config_class: Any, model: nn.Module) -> None:
    """Where the configuration asks for Muon, write into each parameter's `use_muon` whether it is a hidden matrix."""
    if str(getattr(config_class, "optimizer_name", "")).lower() != "muon":
        return
    for group in muon_groups(model, model.parameters()):
        for parameter in group["params"]:
            parameter.use_muon = group["use_muon"]
