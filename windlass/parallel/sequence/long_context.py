"""Long sequences on few devices: what takes memory for each token is computed in parts, again, or kept elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from windlass.base.errors import ModelError
from windlass.parallel.activations import checkpoint, checkpoint_at
from windlass.parallel.loss import install_loss
from windlass.parallel.places import Home
from windlass.parallel.sequence.seam import unwrapped
from windlass.parallel.sequence.tiled_loss import tile_loss
from windlass.parallel.sequence.tiled_mlp import find_mlps, tile_mlp
from windlass.parallel.tensor.head import vocabulary_of
from windlass.parallel.tensor.linear_cut import ColumnInput


def apply_long_context(
    model: Any,
    *,
    tiled_mlp: bool | int = True,
    tiled_loss: bool | int = True,
    recompute: bool = True,
    offload: Home | None = None,
    nvme_path: str | Sequence[str] | None = None,
) -> None:
    """Make an unmodified model of transformers take less memory for each token, in place. Results stay the same.

    After a model is cut over tp or sp, if it is.

    Args:
        tiled_mlp: compute MLPs for so many tokens at a time (True: as many as a token has features).
        tiled_loss: compute logits and their loss for so many tokens at a time (True: 256 MiB of logits) where the model
            trains on labels; its outputs then have no logits.
        recompute: keep the inputs of each layer alone, and compute the layer again in the backward.
        offload: where these inputs wait: "cpu" or "nvme", whatever the configuration says of others.
        nvme_path: folders for "nvme".

    Raises:
        ModelError: the model has no MLP, or one that gathers tokens; no layer that makes logits; no layers that can be
            computed again.
        ConfigError: "nvme" has no folder, or inputs that are not kept are to wait somewhere.
    """
    inner = unwrapped(model)
    name = type(inner).__name__
    if offload is not None and not recompute:
        raise ModelError(f'{name}: inputs of layers can\'t wait at "{offload}" with recompute=False, which keeps none')
    if not hasattr(inner, "get_output_embeddings"):
        raise ModelError(f"{name} is no model of transformers; use tile_mlp and tiled_loss on its parts")
    mlps = [module for _, module in find_mlps(model)] if tiled_mlp else []
    if tiled_mlp and not mlps:
        raise ModelError(f"{name} has no module made as an MLP is; use tile_mlp on those it has, and tiled_mlp=False")
    if any(_gathers_tokens(module) for module in mlps):
        raise ModelError(
            f"{name} has norms that are cut along the sequence over tp, so its MLPs gather tokens themselves and "
            "can't be computed for some of them; write tiled_mlp=False"
        )
    if recompute and not getattr(inner, "supports_gradient_checkpointing", False):
        raise ModelError(f"{name} can't be computed again layer by layer (supports_gradient_checkpointing)")
    kept = checkpoint if offload is None else checkpoint_at(offload, nvme_path=nvme_path)
    if tiled_loss:
        install_loss(inner, vocabulary_of(model) or vocabulary_of(inner))
        tile_loss(model, None if tiled_loss is True else tiled_loss)
    for module in mlps:
        tile_mlp(module, None if tiled_mlp is True else tiled_mlp)
    if recompute:
        inner._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=kept)


def _gathers_tokens(module: nn.Module) -> bool:
    """Whether a layer inside gets a part of the tokens and computes with all of them."""
    hooks = [hook for one in module.modules() for hook in one._forward_pre_hooks.values()]
    return any(isinstance(hook, ColumnInput) and hook._sequence is not None for hook in hooks)
