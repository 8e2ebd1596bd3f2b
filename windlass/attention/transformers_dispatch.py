"""The attention function and the mask function that windlass registers with transformers, under the name "windlass".

Without an active backend both compute the same as transformers' `"sdpa"`; layers with soft caps or sinks use
`EagerBackend`. A model's code decides which layers get which mask, so sliding windows on some layers and bidirectional
attention reach the backend unchanged; see [Note: active backends].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from windlass.attention.active_backend import BoundMask, get_active_backend, make_bound_mask
from windlass.attention.attention_backend import AttentionBackend, compute_attention, get_layer_heads, require_backend
from windlass.attention.attention_mask import AttentionMask
from windlass.attention.backend_registry import get_backend
from windlass.attention.eager_backend import EagerBackend
from windlass.attention.mask_pattern import CAUSAL
from windlass.attention.mask_recognition import RecognizedMask, recognize_mask
from windlass.base.errors import ModelError

ATTENTION_NAME = "windlass"

MASK_ARGUMENTS = frozenset(
    {"local_size", "allow_is_causal_skip", "allow_is_bidirectional_skip", "allow_torch_fix", "dtype", "config"}
)
"""Keyword arguments, passed to mask functions, that repeat `AttentionMask` or only choose the form of a dense mask."""

_IGNORED_ARGUMENTS = {
    *("sliding_window", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"),  # in the mask
    *("position_ids", "cache_position", "position_embeddings", "past_key_values", "use_cache", "deterministic"),
    *("output_attentions", "output_hidden_states", "output_router_logits", "return_dict", "num_items_in_batch"),
    *("labels", "shift_labels", "token_type_ids", "logits_to_keep", "is_causal"),
}
"""Keyword arguments that reach attention functions and do not change the result."""

_eager = EagerBackend()


def register_attention() -> None:
    """Register the attention function and the mask function with transformers."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(ATTENTION_NAME, attention_forward)
    AttentionMaskInterface.register(ATTENTION_NAME, make_transformers_mask)


def install_attention(model: Any, *backends: AttentionBackend | str) -> None:
    """Route the attention of a transformers model through windlass. Without an active backend it computes `"sdpa"`.

    Args:
        backends: backends with which the model will run, or their names; each checks the model before it is changed.
            `use_backend` activates one of them.

    Raises:
        ModelError: the model does not take its attention from transformers' `AttentionInterface`, or a backend
            refuses it.
        ConfigError: no backend of this name is registered, or a backend is incomplete.
    """
    if not hasattr(model, "set_attn_implementation") or not hasattr(model, "config"):
        raise ModelError(
            f"{type(model).__name__} is not a transformers model, so its attention cannot be replaced; call "
            "windlass.attention.attention in its layers"
        )
    check_attention_interface(model, "so its attention cannot be replaced")
    for backend in backends:
        (get_backend(backend) if isinstance(backend, str) else require_backend(backend)).check(model)
    register_attention()
    model.set_attn_implementation(ATTENTION_NAME)


def check_attention_interface(model: Any, consequence: str) -> None:
    """Raise a ModelError if a part of `model` computes attention without transformers' `AttentionInterface`.

    Args:
        consequence: ends the sentence of the message.
    """
    name = type(model).__name__
    if not model._can_set_attn_implementation():
        raise ModelError(
            f"{name} does not call its attention through transformers' AttentionInterface, {consequence}; use a "
            "model class that accepts other attn_implementations"
        )
    for submodule in model.modules():
        if hasattr(submodule, "_can_set_attn_implementation") and not submodule._can_set_attn_implementation():
            raise ModelError(
                f"{type(submodule).__name__} inside {name} does not call its attention through transformers' "
                f"AttentionInterface, {consequence}; use a model whose parts all accept other attn_implementations"
            )


def ignore_argument(name: str) -> None:
    """Accept a keyword argument of attention calls that does not change the result. Unknown arguments raise a
    ModelError."""
    _IGNORED_ARGUMENTS.add(name)


def attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute the attention of a transformers layer with the backend of its mask, else with the active backend.

    Args:
        query: `[samples, heads, queries, features]`.
        key, value: `[samples, key heads, keys, features]`.
        attention_mask: made by `make_transformers_mask`, or by the model itself.

    Returns:
        `[samples, queries, heads, value features]`, and None instead of the weights.

    Raises:
        ModelError: the layer passes an argument that the backend does not support, or the backend returns another
            shape.
    """
    backend, mask = get_active_backend(), attention_mask
    # The mask's backend takes precedence: a recomputation runs after the context of `use_backend` has ended.
    if isinstance(attention_mask, BoundMask):
        backend, mask = attention_mask.backend, attention_mask.mask
    if backend is None:
        if kwargs.get("softcap") is None and kwargs.get("s_aux") is None:
            from transformers.integrations.sdpa_attention import sdpa_attention_forward

            plain: tuple[torch.Tensor, None] = sdpa_attention_forward(
                module, query, key, value, mask, dropout=dropout, scaling=scaling, **kwargs
            )
            return plain
        backend = _eager  # torch's kernels have neither soft caps nor sinks
    output = compute_attention(
        backend,
        module,
        query,
        key,
        value,
        mask,
        scaling=scaling,
        dropout=dropout,
        heads=get_layer_heads(backend, module, query),
        **_select_arguments(module, backend, kwargs),
    )
    return output.transpose(1, 2).contiguous(), None


def make_transformers_mask(
    *,
    batch_size: int,
    kv_length: int,
    q_length: int | None = None,
    q_offset: int | torch.Tensor = 0,
    cache_position: torch.Tensor | None = None,
    kv_offset: int = 0,
    mask_function: Callable[..., torch.Tensor] | None = None,
    attention_mask: torch.Tensor | None = None,
    use_vmap: bool | None = None,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Any:
    """Make the mask that transformers passes to the layers of a model. The arguments are those of its `sdpa_mask`.

    Args:
        q_length, q_offset, device: number of queries, position of the first one, and device of the mask.
        cache_position: `[queries]`, positions of the queries. Older releases (5.0) pass it instead of `q_length`,
            `q_offset` and `device`.
        use_vmap: True if the mask function contains a function that a caller of transformers passed. None (releases
            such as 4.57 do not pass `use_vmap`): it may contain one.

    Raises:
        ModelError: an argument is not known, or the active backend cannot compute the pattern.
    """
    backend = get_active_backend()
    if backend is None:
        from transformers.masking_utils import sdpa_mask

        given = {"mask_function": mask_function, "use_vmap": use_vmap, "cache_position": cache_position}
        kwargs |= {name: value for name, value in given.items() if value is not None}
        if cache_position is None:
            kwargs |= {"q_length": q_length, "q_offset": q_offset, "device": device}
        return sdpa_mask(
            batch_size=batch_size, kv_length=kv_length, kv_offset=kv_offset, attention_mask=attention_mask, **kwargs
        )
    unknown = sorted(name for name, value in kwargs.items() if value is not None and name not in MASK_ARGUMENTS)
    if unknown:
        raise ModelError(
            f'transformers requests an attention mask with {unknown}, which the backend "{backend.name}" does not '
            "receive; this release of transformers needs a newer windlass, or attn_implementation without a backend"
        )
    if cache_position is not None:
        q_length, device = cache_position.shape[0], cache_position.device
        # With as many keys as queries, both begin at the same token. Otherwise the offset stays a tensor on its device.
        q_offset = kv_offset if q_length == kv_length else cache_position[0]
        use_vmap = use_vmap is not False
    elif q_length is None:
        raise ModelError("a mask is requested without q_length and without cache_position; pass one of them")
    parts = (
        RecognizedMask(CAUSAL) if mask_function is None else recognize_mask(mask_function, needs_vmap=bool(use_vmap))
    )
    padding = parts.padding if attention_mask is None else attention_mask
    if attention_mask is not None and parts.padding is not None:
        padding = attention_mask.bool() & parts.padding.bool()
    description = AttentionMask(
        batch_size,
        q_length,
        kv_length,
        parts.pattern,
        q_offset,
        kv_offset,
        None if padding is None else _slice_padding(padding, kv_offset, kv_length),
        parts.sequence_ids,
        parts.position_ids,
        device,
    )
    return make_bound_mask(backend, description)


def _slice_padding(padding: torch.Tensor, kv_offset: int, kv_length: int) -> torch.Tensor:
    """Return the padding of the keys `[kv_offset, kv_offset + kv_length)`; keys beyond the tensor are padding."""
    missing = kv_offset + kv_length - padding.shape[-1]
    if missing > 0:
        padding = nn.functional.pad(padding, (0, missing))
    return padding[:, kv_offset : kv_offset + kv_length]


def _select_arguments(module: nn.Module, backend: AttentionBackend, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that the backend honours.

    Raises:
        ModelError: another argument is given and might change the result.
    """
    selected = {}
    for name, value in kwargs.items():
        if name in backend.supported_arguments:
            selected[name] = value
        elif value is not None and name not in _IGNORED_ARGUMENTS:
            raise ModelError(
                f'{type(module).__name__} passes {name} to attention, which the backend "{backend.name}" does not '
                f"support; it supports {sorted(backend.supported_arguments)}. If {name} does not change the result, "
                f'call windlass.attention.transformers_dispatch.ignore_argument("{name}")'
            )
    return selected
