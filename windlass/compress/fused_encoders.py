"""Exclusion of torch's fused evaluation of encoder layers: it would read weights as stored, without compression."""

from __future__ import annotations

from torch import nn

from windlass.compress.compressed_layers import CompressedLayer

# attributes by which torch's encoders choose the fused evaluation, and the values that exclude it
_CHOICES = (
    (nn.TransformerEncoderLayer, "activation_relu_or_gelu", 0),
    (nn.TransformerEncoder, "use_nested_tensor", False),
)
_KEPT = "_windlass_fused_encoder"  # attribute of an encoder, which stores the value that the exclusion replaced


def exclude_fused_encoders(model: nn.Module) -> None:
    """Exclude the fused evaluation of torch's encoders with compressed layers, in place, so that these layers run.

    Torch fuses only layers that are marked as ReLU or GELU, so an encoder layer is marked as having another activation.
    Its computation stays the same.
    """
    for module in model.modules():
        for kind, attribute, excluded in _CHOICES:
            if (
                isinstance(module, kind)
                and _KEPT not in module.__dict__
                and any(isinstance(one, CompressedLayer) for one in module.modules())
            ):
                module.__dict__[_KEPT] = getattr(module, attribute)
                setattr(module, attribute, excluded)


def restore_fused_encoders(model: nn.Module) -> None:
    """Undo `exclude_fused_encoders`."""
    for module in model.modules():
        for kind, attribute, _ in _CHOICES:
            if isinstance(module, kind) and _KEPT in module.__dict__:
                setattr(module, attribute, module.__dict__.pop(_KEPT))
