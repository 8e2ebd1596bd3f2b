"""Tiled MLPs, which compute a tile of tokens at a time to save memory: the activation between the two products of an
MLP is several times larger than a hidden state.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from windlass.base.errors import ModelError
from windlass.parallel.sequence.tiled_function import Tiling, run_tiled


def find_mlps(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Find the modules of `model` with the structure of an MLP.

    An MLP has two linear layers or more and no other weights but norms. Its forward takes only hidden states, and its
    output has as many features as its input.

    Yields:
        `(name, module)` of each MLP. No MLP is inside another.
    """
    inside: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if not (inside and name.startswith(inside)) and _is_mlp(module):
            inside = (*inside, f"{name}.")
            yield name, module


def install_tiled_mlp(module: nn.Module, tile_tokens: int | None = None) -> None:
    """Change `module` in place to compute a tile of tokens at a time. Its class, parameters and hooks stay.

    Args:
        module: maps `[..., tokens, features]` to the same shape and treats tokens independently. Dropout draws its
            numbers tile by tile.
        tile_tokens: number of tokens in a tile, over all samples. Default: the number of features of a token, so that
            the activation between the products has as many elements as the weight of the first product.

    Raises:
        ModelError: the module has no linear layer, or is tiled already.
    """
    before: Any = module.forward
    if isinstance(before, partial) and before.func is _tiled_forward:
        raise ModelError(f"this {type(module).__name__} is tiled already; tile it once")
    linears = [one for one in module.modules() if _is_linear(one)]
    if not linears:
        raise ModelError(f"this {type(module).__name__} has no linear layer to tile; pass an MLP")
    size = _in_out_features(linears[0])[0] if tile_tokens is None else tile_tokens
    held: Any = module
    held.forward = partial(_tiled_forward, module, before, size)


def _tiled_forward(
    module: nn.Module,
    original_forward: Callable[..., torch.Tensor],
    tile_tokens: int,
    *args: torch.Tensor,
    **kwargs: torch.Tensor,
) -> torch.Tensor:
    """Compute the module on tiles, as replacement for its `original_forward`, whose only argument may have any name."""
    if len(args) + len(kwargs) != 1:
        raise TypeError(
            f"a tiled {type(module).__name__} takes hidden states only, and was called with {len(args)} positional "
            f"arguments and {list(kwargs)}; call it with one argument, or do not tile it"
        )
    (hidden,) = (*args, *kwargs.values())
    samples = hidden.shape[:-2].numel()
    each = max(1, tile_tokens // max(samples, 1))
    if hidden.dim() < 2 or hidden.shape[-2] <= each:
        return original_forward(*args, **kwargs)
    along = hidden.dim() - 2
    return run_tiled(
        # The forward may draw random numbers without a module for it (`functional.dropout`).
        Tiling(original_forward, each, dim=along, out_dim=along, preserve_rng_state=True),
        [hidden],
        [*dict.fromkeys(module.parameters())],
    )


def _is_mlp(module: nn.Module) -> bool:
    linears = [one for one in module.children() if _is_linear(one)]
    if len(linears) < 2 or _num_arguments(module) != 1:
        return False
    for one in module.modules():
        weights = dict(one.named_parameters(recurse=False))
        if not _is_linear(one) and any(weight.dim() > 1 for weight in weights.values()):
            return False
        if isinstance(one, nn.modules.batchnorm._BatchNorm | nn.modules.conv._ConvNd | nn.RNNBase | nn.ModuleList):
            return False
    enters, leaves = {_in_out_features(one)[0] for one in linears}, {_in_out_features(one)[1] for one in linears}
    return _in_out_features(linears[0])[0] in leaves and len(enters | leaves) >= 2


def _num_arguments(module: nn.Module) -> int:
    """Return the number of arguments of the module's forward; -1 if it has variable or keyword-only arguments."""
    parameters = inspect.signature(type(module).forward).parameters.values()
    named = [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    if len(named) < len(parameters):
        return -1
    return len(named) - 1  # without self


def _is_linear(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(weight, torch.Tensor) and (isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D")


def _in_out_features(module: nn.Module) -> tuple[int, int]:
    """Return the numbers of input and output features. The weight of transformers' Conv1D is transposed."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    rows, columns = module.weight.shape  # type: ignore[misc]
    return int(rows), int(columns)
