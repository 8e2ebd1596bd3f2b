"""Long sequences on few devices: tiled MLPs and losses, recomputed layers, and offloaded layer inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from windlass.base.errors import ConfigError, ModelError
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
    """Reduce the memory for each token of an unmodified transformers model, in place. Results stay the same.

    Apply tensor and sequence parallelism before this call.

    Args:
        tiled_mlp: number of tokens that an MLP computes at a time; True: as many as a token has features; False: MLPs
            are not tiled.
        tiled_loss: number of tokens for which logits and loss are computed at a time, if the model trains on labels;
            True: as many as fit in 256 MiB of fp32 logits; False: the loss is not tiled. With a tiled loss the outputs
            have no logits.
        recompute: save only the inputs of each layer, and recompute the layer in the backward.
        activation_tier: tier of the saved inputs, "device", "cpu" or "nvme"; None: the configured tier.
        nvme_path: folders for "nvme".

    Raises:
        ModelError: the model is not one of transformers; it has no MLP, or its MLPs gather tokens; it has no layer that
            computes logits; it has its own loss function; its layers cannot be recomputed; or `activation_tier` is set
            without `recompute`.
        ConfigError: the tier is unknown, "nvme" has no folder, or another tier has one.
        StorageError: no files can be created in the folders.
    """
    inner = unwrap_peft(model)
    name = type(inner).__name__
    if activation_tier is not None and not recompute:
        raise ModelError(
            f"{name}: activation_tier = {activation_tier!r} offloads the saved inputs of layers, and "
            "recompute=False saves none; write recompute=True"
        )
    if activation_tier is None and nvme_path is not None:
        raise ConfigError(
            f'apply_long_context: nvme_path {nvme_path!r} needs activation_tier="nvme"; pass both or neither'
        )
    if not hasattr(inner, "get_output_embeddings"):
        raise ModelError(f"{name} is not a transformers model; use install_tiled_mlp and tiled_loss on its parts")
    mlps = [module for _, module in find_mlps(model)] if tiled_mlp else []
    if tiled_mlp and not mlps:
        raise ModelError(
            f"{name} has no module that is recognized as an MLP; use install_tiled_mlp on its MLPs, and tiled_mlp=False"
        )
    if any(_gathers_sequence(module) for module in mlps):
        raise ModelError(
            f"{name} has norms that are sharded along the sequence over tp, so its MLPs all-gather the tokens and "
            "cannot be tiled; write tiled_mlp=False"
        )
    if recompute and not getattr(inner, "supports_gradient_checkpointing", False):
        raise ModelError(
            f"{name} cannot recompute its layers (supports_gradient_checkpointing is False); write recompute=False"
        )
    kept = checkpoint if activation_tier is None else checkpoint_to_tier(activation_tier, nvme_path=nvme_path)
    if tiled_loss:
        install_loss(inner, get_sharded_vocabulary(model) or get_sharded_vocabulary(inner))
        install_tiled_loss(model, None if tiled_loss is True else tiled_loss)
    for module in mlps:
        install_tiled_mlp(module, None if tiled_mlp is True else tiled_mlp)
    if recompute:
        inner._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=kept)


def _gathers_sequence(module: nn.Module) -> bool:
    """Return True if a layer of the module all-gathers the sequence over tp."""
    hooks = [hook for one in module.modules() for hook in one._forward_pre_hooks.values()]
    return any(isinstance(hook, ColumnInputHook) and hook.sequence_sharding is not None for hook in hooks)
