"""Positions that a model derives from ids or masks, computed from full sequences before these are sharded."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from windlass.base.errors import ModelError

DerivePositions = Callable[[Mapping[str, Any]], torch.Tensor]
"""Function from a batch of full sequences to its `position_ids`, `[samples or 1, tokens]`."""

_FROM_IDS, _FROM_EMBEDS = "create_position_ids_from_input_ids", "create_position_ids_from_inputs_embeds"
_MASK_COUNTING_CLASSES = {"OPTLearnedPositionalEmbedding"}  # positions count tokens with mask 1
_TOKEN_COUNTING_CLASSES = {"BioGptLearnedPositionalEmbedding"}  # positions count all tokens from 0


def find_position_derivation(model: nn.Module) -> DerivePositions | None:
    """Return the function by which a model derives positions if it gets no `position_ids`; None: it counts from 0.

    RoBERTa and its relatives count the ids that are not padding, from `padding_idx + 1`. OPT counts the tokens with
    attention mask 1. For an unknown derivation the returned function raises a ModelError.
    """
    for path, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            if type(module) is nn.Embedding or not hasattr(module, "offset"):
                continue
            name = type(module).__name__
            if name in _MASK_COUNTING_CLASSES:
                return _positions_from_mask
            if name not in _TOKEN_COUNTING_CLASSES:
                return _unknown_derivation(path)
        elif (from_ids := _position_function(module)) is not None:
            return _positions_from_ids(path, module, from_ids)
    return None


def _position_function(module: nn.Module) -> Any:
    """Return the function that derives the positions of an embedding module: its method, or a function of the Python
    module that defines its class. None if there is neither.
    """
    own = getattr(module, _FROM_IDS, None)
    if own is not None:
        return own
    takes = inspect.signature(module.forward).parameters
    if not isinstance(getattr(module, "padding_idx", None), int) or "position_ids" not in takes:
        return None
    return vars(sys.modules[type(module).__module__]).get(_FROM_IDS)


def _positions_from_ids(path: str, module: nn.Module, from_ids: Any) -> DerivePositions:
    def derive(batch: Mapping[str, Any]) -> torch.Tensor:
        ids, embeds = batch.get("input_ids"), batch.get("inputs_embeds")
        padding = getattr(module, "padding_idx", None)
        if ids is not None and padding is not None:
            positions: torch.Tensor = from_ids(ids, padding)
            return positions
        from_embeds = getattr(module, _FROM_EMBEDS, None)
        if embeds is None or from_embeds is None:
            raise _needs_position_ids(path)
        takes = len(inspect.signature(from_embeds).parameters)
        found: torch.Tensor = from_embeds(embeds, padding) if takes > 1 else from_embeds(embeds)
        return found

    return derive


def _positions_from_mask(batch: Mapping[str, Any]) -> torch.Tensor:
    mask, ids = batch.get("attention_mask"), batch.get("input_ids")
    if mask is None:
        tokens = ids if ids is not None else batch["inputs_embeds"]
        return torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)
    positions: torch.Tensor = torch.cumsum(mask, dim=1) * mask - 1
    return positions.long()


def _unknown_derivation(path: str) -> DerivePositions:
    def derive(batch: Mapping[str, Any]) -> torch.Tensor:
        raise _needs_position_ids(path)

    return derive


def _needs_position_ids(path: str) -> ModelError:
    return ModelError(
        f"{path} derives positions in an unknown way, from the tokens of this rank alone; pass position_ids"
    )
