"""What scripts do with their configuration before they call `initialize`."""

from __future__ import annotations

import argparse
from typing import Any

from torch import nn

from windlass.config.source import read
from windlass.optim.muon import muon_groups


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--deepspeed` and `--deepspeed_config`, and their older spellings; the parser."""
    group = parser.add_argument_group("DeepSpeed", "what deepspeed.initialize(args=...) reads")
    group.add_argument("--deepspeed", action="store_true", default=False, help="for the script's own use")
    group.add_argument("--deepspeed_config", type=str, default=None, help="path of the JSON configuration")
    group.add_argument("--deepscale", action="store_true", default=False, help="old spelling of --deepspeed")
    group.add_argument("--deepscale_config", type=str, default=None, help="old spelling of --deepspeed_config")
    return parser


def load_ds_config(config: Any) -> dict[str, Any]:
    """A configuration as a dict: itself, or read from a path, or from base64.

    Raises:
        ConfigError: it is none of these, or no JSON; a ValueError.
    """
    return read(config).data


def set_optimizer_flags(config_class: Any, model: nn.Module) -> None:
    """Where the configuration asks for Muon, write into each parameter's `use_muon` whether it is a hidden matrix."""
    if str(getattr(config_class, "optimizer_name", "")).lower() != "muon":
        return
    for group in muon_groups(model, model.parameters()):
        for parameter in group["params"]:
            parameter.use_muon = group["use_muon"]
