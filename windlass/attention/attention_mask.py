"""Description of an attention mask, independent of the form that a backend needs."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

import torch

from windlass.attention.mask_pattern import CAUSAL, MaskPattern, MaskPredicate
from windlass.base.errors import ModelError


@dataclass(frozen=True, eq=False)
class AttentionMask:
    """Visible pairs of queries and keys: a pattern of positions, without padding and without pairs of different
    documents.

    Attributes:
        batch_size, q_length, kv_length: sizes of the dense mask.
        pattern: pairs of positions that are visible.
        q_offset, kv_offset: positions of the first query and of the first key, as with a cache of keys.
        padding: `[batch_size, kv_length]`, bool; False hides a key from all queries. None: no padding.
        sequence_ids: `[batch_size, q_length]`, number of the packed document of each token; requires as many queries as
            keys. None: one document in each sample.
        position_ids: `[batch_size, q_length]`, positions inside packed documents, to which the pattern applies;
            requires as many queries as keys, and a band or chunks as the pattern. None: positions in the whole row. A
            band may use either, because it depends only on differences of positions.
        device: device of the dense mask.

    Raises:
        ModelError: a tensor has another shape; `sequence_ids` or `position_ids` come with unequal numbers of queries
            and keys, or `position_ids` with a `MaskPredicate`.
    """

    batch_size: int
    q_length: int
    kv_length: int
    pattern: MaskPattern = CAUSAL
    q_offset: int | torch.Tensor = 0
    kv_offset: int = 0
    padding: torch.Tensor | None = None
    sequence_ids: torch.Tensor | None = None
    position_ids: torch.Tensor | None = None
    device: torch.device | str = "cpu"

    def __post_init__(self) -> None:
        square = [self.batch_size, self.q_length]
        requested = {"padding": [self.batch_size, self.kv_length], "sequence_ids": square, "position_ids": square}
        for name, shape in requested.items():
            tensor = getattr(self, name)
            if tensor is not None and list(tensor.shape) != shape:
                raise ModelError(
                    f"{name} of an attention mask has the shape {list(tensor.shape)}; pass one of shape {shape}"
                )
        for name in ("sequence_ids", "position_ids"):
            if getattr(self, name) is not None and self.q_length != self.kv_length:
                raise ModelError(
                    f"an attention mask of {self.q_length} queries and {self.kv_length} keys has {name}; packed "
                    "documents need queries and keys of the same tokens"
                )
        if self.position_ids is not None and isinstance(self.pattern, MaskPredicate):
            raise ModelError(
                "an attention mask with a MaskPredicate has position_ids, which apply to bands and chunks alone; leave "
                "position_ids out, and look them up in the predicate's function"
            )

    def to_dense(self) -> torch.Tensor:
        """Return the mask as a bool tensor `[batch_size, 1, q_length, kv_length]`; True is visible.

        The tensor may take memory for all pairs. The values equal those of transformers' `sdpa_mask`.
        """
        queries = torch.arange(self.q_length, device=self.device) + self.q_offset
        keys = torch.arange(self.kv_length, device=self.device) + self.kv_offset
        samples = torch.arange(self.batch_size, device=self.device)
        if isinstance(self.pattern, MaskPredicate):
            seen = _evaluate_predicate(self.pattern, samples, queries, keys)
        else:
            rows = samples[:, None, None, None]
            if self.position_ids is None:
                seen = self.pattern.visible(rows, queries[:, None], keys)
            else:
                places = self.position_ids
                seen = self.pattern.visible(rows, places[:, None, :, None], places[:, None, None, :])
        if self.sequence_ids is not None:
            seen = seen & (self.sequence_ids[:, None, :, None] == self.sequence_ids[:, None, None, :])
        if self.padding is not None:
            seen = seen & (self.padding != 0)[:, None, None, :]
        return seen.expand(self.batch_size, 1, self.q_length, self.kv_length)


def _evaluate_predicate(
    predicate: MaskPredicate, samples: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor
) -> torch.Tensor:
    if not predicate.needs_vmap:
        head = torch.zeros((), dtype=torch.long, device=queries.device)
        return predicate.function(samples[:, None, None, None], head, queries[:, None], keys)
    from transformers.masking_utils import sdpa_mask  # makes vmap work where a mask indexes with scalars

    if "q_length" in inspect.signature(sdpa_mask).parameters:
        positions = {"q_length": len(queries), "q_offset": queries[:1], "device": queries.device}
    else:  # older releases of transformers
        positions = {"cache_position": queries}
    dense: torch.Tensor = sdpa_mask(
        batch_size=len(samples),
        kv_length=len(keys),
        kv_offset=keys[:1],
        mask_function=predicate.function,
        allow_is_causal_skip=False,
        use_vmap=True,
        **positions,
    )
    return dense
