"""Linear layers as products of two smaller ones, and their ranks in a model's configuration.

[Note: ranks in the configuration] transformers cannot build these layers. So `config.json` has an entry
`windlass_low_rank` with the rank of each layer, which `windlass.LLM` and `windlass.from_pretrained` apply to the empty
model; transformers would fill these layers with random values, with a warning.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import nn

from windlass.base.errors import ModelError

RANKS_ENTRY = "windlass_low_rank"


class FactorPair(nn.Sequential):
    """Two linear layers instead of one, whose `weight` and `bias` some models read, e.g. for their dtype."""

    @property
    def weight(self) -> torch.Tensor:
        """Product of the two weights, computed at every access."""
        first, second = (cast(Any, one).weight for one in self)
        product: torch.Tensor = second @ first
        return product

    @property
    def bias(self) -> torch.Tensor | None:
        """Bias of the second layer."""
        bias: torch.Tensor | None = cast(Any, self[1]).bias
        return bias


def factor_pair(layer: nn.Linear, rank: int) -> FactorPair:
    """Return the two layers that replace a linear layer, `in -> rank -> out`. The second one has the bias of the layer;
    the weights are on the meta device."""
    with torch.device("meta"):
        first = nn.Linear(layer.in_features, rank, bias=False, dtype=layer.weight.dtype)
        second = nn.Linear(rank, layer.out_features, bias=False, dtype=layer.weight.dtype)
    second.bias = layer.bias
    return FactorPair(first, second).train(layer.training)


def record_ranks(model: Any, ranks: Mapping[str, int]) -> None:
    """Add the ranks of layers to the configuration of a transformers model, which `save_pretrained` writes. Other
    models stay as they are."""
    if hasattr(getattr(model, "config", None), "to_json_string"):
        setattr(model.config, RANKS_ENTRY, {**(getattr(model.config, RANKS_ENTRY, None) or {}), **ranks})


def apply_ranks(model: nn.Module, entry: Mapping[str, int]) -> None:
    """Replace each linear layer that an entry `windlass_low_rank` names by two layers, under all names of the layer.
    Their weights are on the meta device.

    Raises:
        ModelError: the model has no such linear layer, or a rank is not between 1 and the smaller side of the layer.
    """
    places = list(model.named_modules(remove_duplicate=False))
    for name, rank in sorted(entry.items()):  # a layer comes before its factors, which may be in the entry too
        layer: nn.Module | None
        try:
            layer = model.get_submodule(name)
        except AttributeError:
            layer = None
        if type(layer) is not nn.Linear:
            raise ModelError(
                f"{RANKS_ENTRY} names {name!r}, and {type(model).__name__} has no linear layer of this name; save the "
                "model again"
            )
        if not isinstance(rank, int) or not 1 <= rank <= min(layer.in_features, layer.out_features):
            raise ModelError(
                f"{RANKS_ENTRY} has the rank {rank!r} of {name!r}, a layer of {layer.in_features} x "
                f"{layer.out_features}; save the model again"
            )
        pair = factor_pair(layer, rank)
        for one in [place for place, module in places if module is layer] or [name]:  # a new factor is not in `places`
            model.set_submodule(one, pair)
