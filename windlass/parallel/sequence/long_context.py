"""Long sequences on few devices: what takes memory for each token is computed in parts, again, or kept elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from windlass.base.errors import ModelError
from windlass.parallel.activation_checkpoint_api import checkpoint, checkpoint_to_tier
from windlass.parallel.activation_store import ActivationTier
from windlass.parallel.sequence.sequence_support import unwrap_peft
from windlass.parallel.sequence.tiled_loss import install_tiled_loss
from windlass.parallel.sequence.tiled_mlp import find_mlps, install_tiled_mlp
from windlass.parallel.sequence_loss import install_loss
from windlass.parallel.tensor.linear_sharding import ColumnInputHook
from windlass.parallel.tensor.output_head_sharding import get_sharded_vocabulary


def apply_long_context(
    model: Any,
    *,
    tiled_mlp: bool | int = True,
    tiled_loss: bool | int = True,
    recompute: bool = True,
    activation_tier: ActivationTier | None = None,
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
    inner = unwrap_peft(model)
    name = type(inner).__name__
    if activation_tier is not None and not recompute:
        raise ModelError(
            f'{name}: inputs of layers can\'t wait at "{activation_tier}" with recompute=False, which keeps none'
        )
    if not hasattr(inner, "get_output_embeddings"):
        raise ModelError(f"{name} is no model of transformers; use tile_mlp and tiled_loss on its parts")
    mlps = [module for _, module in find_mlps(model)] if tiled_mlp else []
    if tiled_mlp and not mlps:
        raise ModelError(f"{name} has no module made as an MLP is; use tile_mlp on those it has, and tiled_mlp=False")
    if any(_gathers_sequence(module) for module in mlps):
        raise ModelError(
            f"{name} has norms that are cut along the sequence over tp, so its MLPs gather tokens themselves and "
            "can't be computed for some of them; write tiled_mlp=False"
        )
    if recompute and not getattr(inner, "supports_gradient_checkpointing", False):
        raise ModelError(f"{name} can't be computed again layer by layer (supports_gradient_checkpointing)")
    kept = checkpoint if activation_tier is None else checkpoint_to_tier(activation_tier, nvme_path=nvme_path)
    if tiled_loss:
        install_loss(inner, get_sharded_vocabulary(model) or get_sharded_vocabulary(inner))
        install_tiled_loss(model, None if tiled_loss is True else tiled_loss)
    for module in mlps:
        install_tiled_mlp(module, None if tiled_mlp is True else tiled_mlp)
    if recompute:
        inner._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=kept)


def _gathers_sequence(module: nn.Module) -> bool:
    """Whether a layer inside gets a part of the tokens and computes with all of them."""
    hooks = [hook for one in module.modules() for hook in one._forward_pre_hooks.values()]
    return any(isinstance(hook, ColumnInputHook) and hook._sequence_sharding is not None for hook in hooks)
