"""The attention seam of transformers: one function and one maker of masks, under a name that a model's config asks for.

`windlass_sequence` is torch's attention wherever no forward on a part of a sequence runs (generation, a model that is
called by itself), and attention over sp inside one. A model's own code decides which layers get which mask, so windows
on some layers and attention in both directions come as they are; of the mask only its pattern is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch

from windlass.base.errors import ModelError
from windlass.parallel.sequence.attention_dropout import DROPOUT_CONFIG_KEYS, AttentionDropout, combine_seeds
from windlass.parallel.sequence.attention_mask import BIDIRECTIONAL, CAUSAL, MaskBand
from windlass.parallel.sequence.sequence_attention import SequenceMask, sequence_attention
from windlass.parallel.sequence.sequence_shard import get_current_shard

ATTENTION_NAME = "windlass_sequence"

_layer_numbers: WeakKeyDictionary[torch.nn.Module, int] = WeakKeyDictionary()

_UNSUPPORTED_ARGUMENTS = {
    "position_bias": "adds a bias for the distance of tokens to its scores",
    "s_aux": "has attention sinks",
    "alibi": "adds a bias for the distance of tokens to its scores",
}


def register_attention() -> None:
    """Make the name known to transformers."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(ATTENTION_NAME, attention_forward)
    AttentionMaskInterface.register(ATTENTION_NAME, make_sequence_mask)


def unwrap_peft(model: Any) -> Any:
    """The model of transformers inside peft's wrapper, or the model itself."""
    return model.get_base_model() if hasattr(type(model), "get_base_model") else model


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls in every attention layer.

    Args:
        query: `[samples, heads, tokens, features]`; key, value: the same with as many heads or fewer.
        attention_mask: made by `make_mask`.

    Returns:
        `[samples, tokens, heads, features]`, and no weights.

    Raises:
        ModelError: the layer asks for what can't be computed on a part of a sequence.
    """
    if not isinstance(attention_mask, SequenceMask):
        if get_current_shard() is not None:
            raise ModelError(
                f"{type(module).__name__} got a mask of its own ({type(attention_mask).__name__}) where the sequence "
                "is cut over ranks; a model whose layers don't use transformers' create_causal_mask can't be cut so"
            )
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        plain: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return plain
    for name, what in _UNSUPPORTED_ARGUMENTS.items():
        if kwargs.get(name) is not None:
            raise ModelError(f"{type(module).__name__} {what} ({name}), which attention over sp does not do")
    dropped = _layer_dropout(module, dropout, attention_mask) if dropout > 0 else None
    output = sequence_attention(
        query, key, value, attention_mask, scale=scaling, softcap=kwargs.get("softcap"), dropout=dropped
    )
    return output.transpose(1, 2).contiguous(), None


def number_layers(model: torch.nn.Module) -> None:
    """Layers of `model` are told apart by what they drop."""
    for number, module in enumerate(model.modules()):
        _layer_numbers[module] = number


def _layer_dropout(module: torch.nn.Module, probability: float, mask: SequenceMask) -> AttentionDropout:
    seed, number = mask.shard.dropout_seed, _layer_numbers.get(module)
    if seed is None or number is None:
        raise ModelError(
            f"{type(module).__name__} drops attention weights with probability {probability}, and the model's config "
            f"said of none when its sequences were cut; set {' or '.join(DROPOUT_CONFIG_KEYS)} there before"
        )
    return AttentionDropout(probability, combine_seeds(seed, number))


def make_sequence_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., torch.Tensor] | None = None,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    **kwargs: Any,
) -> Any:
    """What transformers calls for each kind of mask that a model's forward makes; arguments are those of `sdpa_mask`.

    Raises:
        ModelError: the pattern is neither causal, nor in both directions, nor a sliding window of these.
    """
    share = get_current_shard()
    if share is None:
        from transformers.masking_utils import sdpa_mask

        more = {} if mask_function is None else {"mask_function": mask_function}
        return sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            attention_mask=attention_mask,
            local_size=local_size,
            use_vmap=use_vmap,
            **more,
            **kwargs,
        )
    return SequenceMask(share, CAUSAL if mask_function is None else _infer_band(mask_function, local_size, use_vmap))


def _infer_band(mask_function: Callable[..., torch.Tensor], window: int | None, is_custom: bool) -> MaskBand:
    """The band that a mask function draws: asked at places around the edges of those that are known."""
    known = [CAUSAL, BIDIRECTIONAL]
    near = [0, 1, 2]
    if window is not None:
        known += [MaskBand(0, window - 1), MaskBand(-window, window), MaskBand(1 - window, window - 1)]
        near += [window - 1, window, window + 1, 2 * window, 2 * window + 1]
    places = torch.tensor(sorted({place for place in near if place >= 0}))
    one = torch.zeros(1, 1, 1, 1, dtype=torch.long)
    if not is_custom:
        try:
            drawn = mask_function(one, one, places.view(1, 1, -1, 1), places.view(1, 1, 1, -1))
        except (IndexError, RuntimeError):  # it looks into tensors of this batch
            drawn = None
        if drawn is not None:
            drawn = drawn.expand(1, 1, len(places), len(places))[0, 0]
            distance = places[:, None] - places
            for band in known:
                if torch.equal(drawn, band.allows(distance)):
                    return band
    raise ModelError(
        "the model asks for an attention mask that is neither causal, nor in both directions, nor a sliding window"
        f"{'' if window is None else f' (local size {window})'}; such a one can't be computed on a part of the sequence"
    )
