"""Hidden states and inputs among the arguments of a module."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from windlass.base.errors import ModelError


def get_input(module: nn.Module, args: tuple[Any, ...]) -> torch.Tensor:
    """Return the input of a sharded layer: its first positional argument.

    Raises:
        ModelError: the input was passed by keyword.
    """
    if not args:
        raise ModelError(
            f"a {type(module).__name__} that tensor parallelism shards was called with its input as a keyword "
            "argument; pass it as the first positional argument"
        )
    found: torch.Tensor = args[0]
    return found


def get_hidden_states(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Return the hidden states of a transformers module's arguments: `hidden_states`, or the first argument.

    Raises:
        ModelError: the hidden states were passed by keyword, under another name.
    """
    if not args and "hidden_states" not in kwargs:
        raise ModelError(
            f"a layer or attention module was called with keyword arguments only ({', '.join(kwargs) or 'none'}), and "
            "tp_sequence_norms and pp need its hidden states; pass them as the first positional argument, or as "
            "hidden_states"
        )
    found: torch.Tensor = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
    return found


def replace_hidden_states(
    args: tuple[Any, ...], kwargs: dict[str, Any], hidden: torch.Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with the hidden states replaced, also where they are passed again, as keys and values."""
    before = get_hidden_states(args, kwargs)
    return (
        tuple(hidden if one is before else one for one in args),
        {name: hidden if one is before else one for name, one in kwargs.items()},
    )
