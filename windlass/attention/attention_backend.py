"""The interface of attention backends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from windlass.attention.attention_mask import AttentionMask
from windlass.base.errors import ModelError


@dataclass(frozen=True)
class HeadSlice:
    """Heads `[start, stop)` of a layer of `total` query heads: the heads that one call of `attend` computes."""

    start: int
    stop: int
    total: int


@runtime_checkable
class AttentionBackend(Protocol):
    """Implementation of attention. Subclass it to inherit the defaults of the optional parts.

    Attributes:
        name: name of the backend, for messages.
        supported_arguments: keyword arguments of `attend` that the backend honours, e.g. `softcap`. Any other argument
            that changes the result raises an error that names it.
        computes_local_heads: `attend` may be called with some heads of a layer, given by `heads`, and whole sequences,
            so the backend can be combined with Ulysses sequence parallelism.
        depends_on_head: heads differ in more than their tensors, as slopes of ALiBi do. Such a backend is refused under
            tensor parallelism, where a layer holds some heads without their indices.
    """

    name: str
    supported_arguments: frozenset[str] = frozenset()
    computes_local_heads: bool = False
    depends_on_head: bool = False

    def check(self, model: nn.Module) -> None:
        """Raise a ModelError that names the layer if the backend cannot compute the attention of `model`."""
        return None

    def make_mask(self, mask: AttentionMask) -> Any:
        """Return the mask in the form that `attend` takes. Called once per forward and kind of mask.

        Raises:
            ModelError: the backend cannot compute this pattern.
        """
        return mask

    def attend(
        self,
        module: nn.Module | None,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: Any,
        *,
        scaling: float | None,
        dropout: float,
        heads: HeadSlice,
        **arguments: Any,
    ) -> torch.Tensor:
        """Compute attention.

        Args:
            module: the attention layer, if there is one.
            query: `[samples, heads, queries, features]`.
            key: `[samples, key heads, keys, features]`; the number of query heads is a multiple of the key heads.
            value: `[samples, key heads, keys, value features]`.
            mask: returned by `make_mask`; or the tensor (or None) that the model made itself, without transformers'
                mask functions. A backend that needs its own form raises a ModelError for it.
            scaling: factor of the scores; None means `features ** -0.5`.
            dropout: probability of dropping an attention weight.
            heads: the query heads of the layer that `query` holds.
            arguments: other arguments of the layer, only those in `supported_arguments`.

        Returns:
            `[samples, heads, queries, value features]`.
        """
        ...


def get_layer_heads(backend: AttentionBackend, module: nn.Module | None, query: torch.Tensor) -> HeadSlice:
    """Return the heads of `query`, which are all heads of the layer.

    Raises:
        ModelError: the layer's config has more heads, and the backend needs the index of each head.
    """
    heads = query.shape[1]
    if backend.depends_on_head:
        total = getattr(getattr(module, "config", None), "num_attention_heads", heads)
        if total != heads:
            raise ModelError(
                f"{type(module).__name__} computes {heads} of {total} attention heads, and the backend "
                f'"{backend.name}" needs the index of each head; it cannot be combined with tensor parallelism'
            )
    return HeadSlice(0, heads, heads)
