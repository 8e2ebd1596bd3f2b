"""Configuration functions that scripts call before `initialize`."""

from __future__ import annotations

from typing import Any

from torch import nn

from windlass.config.config_source import read_source
from windlass.optim.muon import muon_groups


def load_ds_config(config: Any) -> dict[str, Any]:
    """Return a configuration, given as dict, path or base64, as a dict.

    Raises:
        ConfigError: the argument is none of these, or not JSON. Also a ValueError.
    """
    return read_source(config).data


def set_optimizer_flags(config_class: Any, model: nn.Module) -> None:
    """Set `use_muon` on each parameter if the optimizer is Muon: True for hidden matrices, False for others."""
    if str(getattr(config_class, "optimizer_name", "")).lower() != "muon":
        return
    for group in muon_groups(model, model.parameters()):
        for parameter in group["params"]:
            parameter.use_muon = group["use_muon"]
