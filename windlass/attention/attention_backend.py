"""The interface of attention backends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import nn

from windlass.attention.attention_mask import AttentionMask
from windlass.base.errors import ConfigError, ModelError


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
        supported_arguments: keyword arguments of `attend` that the backend supports, e.g. `softcap`. Any other argument
            that changes the result raises an error that names it.
        computes_local_heads: `attend` may be called with some heads of a layer, given by `heads`, and full sequences,
            so the backend can be combined with Ulysses sequence parallelism.
        depends_on_head: the computation of a head depends on its index, e.g. through ALiBi slopes. The backend is
            then refused under tensor parallelism, where a layer holds some heads without their indices.
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
                mask functions. A backend that supports only the masks of `make_mask` raises a ModelError for others.
            scaling: factor of the scores; None means `features ** -0.5`.
            dropout: probability of dropping an attention weight.
            heads: the query heads of the layer that `query` holds.
            arguments: other arguments of the layer, only those in `supported_arguments`.

        Returns:
            `[samples, heads, queries, value features]`.
        """
        ...


_MEMBERS = ("name", "supported_arguments", "computes_local_heads", "depends_on_head", "check", "make_mask", "attend")


def require_backend(backend: Any) -> AttentionBackend:
    """Return `backend`.

    Raises:
        ConfigError: the object lacks a part of the interface.
    """
    fix = "subclass windlass.attention.AttentionBackend, which has defaults of all parts except name and attend"
    if isinstance(backend, type):
        raise ConfigError(f"an attention backend is an object, not the class {backend.__name__}; pass an instance")
    missing = [name for name in _MEMBERS if not hasattr(backend, name)]
    if getattr(type(backend), "attend", None) is AttentionBackend.attend:
        missing.append("attend")
    if len(missing) == len(_MEMBERS):
        raise ConfigError(f"{backend!r} is not an attention backend; {fix}")
    if missing:
        name = getattr(backend, "name", type(backend).__name__)
        raise ConfigError(
            f'the attention backend "{name}" ({type(backend).__name__}) does not define {" and ".join(missing)}; {fix}'
        )
    return cast(AttentionBackend, backend)


def compute_attention(
    backend: AttentionBackend,
    module: nn.Module | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Any,
    **arguments: Any,
) -> torch.Tensor:
    """Call `attend` of a backend, and check the shape of its result.

    Raises:
        ModelError: the result is not `[samples, heads, queries, value features]`.
    """
    output = backend.attend(module, query, key, value, mask, **arguments)
    expected = (*query.shape[:3], value.shape[3])
    # With another shape, later reshapes of the layer may still fit and compute wrong values.
    if not isinstance(output, torch.Tensor) or output.shape != expected:
        found = f"shape {tuple(output.shape)}" if isinstance(output, torch.Tensor) else repr(type(output).__name__)
        swapped = isinstance(output, torch.Tensor) and output.dim() == 4 and output.transpose(1, 2).shape == expected
        fix = "return output.transpose(1, 2)" if swapped else "correct attend"
        raise ModelError(
            f'the attention backend "{backend.name}" returned {found} in {type(module).__name__}, but its result has '
            f"to be [samples, heads, queries, value features] {expected}; {fix}"
        )
    return output


def get_layer_heads(backend: AttentionBackend, module: nn.Module | None, query: torch.Tensor) -> HeadSlice:
    """Return the slice of all heads in `query`. Under tensor parallelism these are only this rank's heads.

    Raises:
        ModelError: the layer's config has more heads, and the backend needs the index of each head.
    """
    heads = query.shape[1]
    if backend.depends_on_head:
        total = getattr(getattr(module, "config", None), "num_attention_heads", heads)
        if total != heads:
            raise ModelError(
                f"{type(module).__name__} computes {heads} of {total} attention heads, and the backend "
                f'"{backend.name}" needs the index of each head; set parallel.tp to 1, or use another backend'
            )
    return HeadSlice(0, heads, heads)
