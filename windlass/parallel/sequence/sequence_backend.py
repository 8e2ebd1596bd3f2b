"""Attention backends of sequence parallelism: `"ulysses"`, `"ring"` and `"ulysses+ring"`.

`use_shard` makes the backend of a batch's shard active for a forward. If `use_shard` is entered while another
backend is active, that backend computes the heads that this rank has in Ulysses (`local_backend_attention`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from windlass.attention.active_backend import BoundMask, get_active_backend, use_backend
from windlass.attention.attention_backend import AttentionBackend, HeadSlice, compute_attention, get_layer_heads
from windlass.attention.attention_mask import AttentionMask
from windlass.attention.backend_registry import register_backend
from windlass.attention.mask_pattern import MaskBand
from windlass.base.errors import ConfigError, ModelError
from windlass.parallel.sequence.attention_dropout import DROPOUT_CONFIG_KEYS, AttentionDropout, combine_seeds
from windlass.parallel.sequence.sequence_attention import SequenceMask, check_tokens, sequence_attention
from windlass.parallel.sequence.sequence_shard import SequenceShard, set_current_shard
from windlass.parallel.sequence.sequence_support import SP_MODES, check_sequence_support, unwrap_peft
from windlass.parallel.sequence.ulysses_heads import UlyssesHeads, swap_heads_for_tokens, swap_tokens_for_heads


def describe_full_mask(shard: SequenceShard, band: MaskBand, device: torch.device | str) -> AttentionMask:
    """Return the mask of the full sequences of a batch, with its padding and packed documents."""
    length = shard.sharding.length
    padding = torch.zeros(shard.num_samples, length, dtype=torch.bool)
    documents = torch.zeros(shard.num_samples, length, dtype=torch.long)
    for rows in shard.mask:
        for number, seen in enumerate(rows.visible_ranges):
            padding[rows.start : rows.stop, slice(*seen.keys)] = True
            if seen.queries == seen.keys:  # keys of one document; otherwise all queries of the row see these keys
                documents[rows.start : rows.stop, slice(*seen.keys)] = number
    has_documents = any(seen.queries != (0, length) for rows in shard.mask for seen in rows.visible_ranges)
    return AttentionMask(
        shard.num_samples,
        length,
        length,
        band,
        padding=None if bool(padding.all()) else padding.to(device),
        sequence_ids=documents.to(device) if has_documents else None,
        device=device,
    )


def local_backend_attention(
    module: nn.Module | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: SequenceMask,
    *,
    scaling: float | None,
    heads: HeadSlice,
    **arguments: Any,
) -> torch.Tensor:
    """Swap tokens for heads, attend over full sequences with the backend of `mask.local`, and swap back. Collective.

    Args:
        query: `[samples, heads, local tokens, features]`; key, value: the same with as many heads or fewer.
        heads: range of the layer's heads that `query` contains.

    Returns:
        `[samples, heads, local tokens, features of values]`.
    """
    assert mask.local is not None
    check_tokens(query, key, value, mask)
    axis, sharding = mask.shard.axis, mask.shard.sharding
    counts = UlyssesHeads(query.shape[1], key.shape[1], axis.size)
    total, ranks = query.shape[1], range(axis.size)
    query, key, value = swap_tokens_for_heads(query, key, value, axis, ranks, sharding.sizes)
    start, stop = counts.query_range(axis.index)
    if start == stop:  # more ranks than heads: nothing to compute, but the backward of the swap is collective
        output = query[..., :1].expand(*query.shape[:3], value.shape[-1])
    else:
        key_heads = torch.tensor(counts.key_head_of(axis.index), device=key.device)
        output = compute_attention(
            mask.local.backend,
            module,
            query,
            key.index_select(1, key_heads),  # the key head of each query head
            value.index_select(1, key_heads),
            mask.local.mask,
            scaling=scaling,
            dropout=0.0,
            heads=HeadSlice(heads.start + start, heads.start + stop, heads.total),
            **arguments,
        )
    return swap_heads_for_tokens(output, axis, ranks, sharding.sizes, total)


_layer_numbers: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()


class SequenceBackend(AttentionBackend):
    """Attention of this rank's tokens to the tokens of all ranks along sp, for one batch.

    Args:
        shard: this rank's part of the sequences of the batch.
    """

    supported_arguments = frozenset({"softcap"})

    def __init__(self, shard: SequenceShard) -> None:
        self.shard = shard

    @property
    def name(self) -> str:  # type: ignore[override]
        """The sequence-parallel mode of the shard."""
        return self.shard.sharding.mode

    def check(self, model: nn.Module) -> None:
        """Raise a ModelError if sequences cannot be sharded for this model."""
        check_sequence_support(unwrap_peft(model), self.shard.axis)

    def make_mask(self, mask: AttentionMask) -> SequenceMask:
        """Return the mask of full sequences: pattern and device from `mask`, padding and documents from the shard.

        Raises:
            ModelError: the pattern is not a band, or another active backend cannot be combined with this one.
        """
        band = mask.pattern
        if not isinstance(band, MaskBand):
            raise ModelError(
                f"the model requests an attention mask that is a {type(band).__name__}; sequence parallelism computes "
                "only causal and bidirectional masks and their sliding windows; set parallel.sp to 1"
            )
        return SequenceMask(self.shard, band, self._bind_local_backend(band, mask.device))

    def _bind_local_backend(self, band: MaskBand, device: torch.device | str) -> BoundMask | None:
        """Return the backend that was active before this one, with its mask for full sequences; None if there was none.

        Raises:
            ModelError: the mode is not "ulysses", or the backend cannot compute local heads.
        """
        local = get_active_backend()
        # a `SequenceBackend` here belongs to an outer forward of another model
        if local is None or isinstance(local, SequenceBackend):
            return None
        if self.name != "ulysses" or not local.computes_local_heads:
            raise ModelError(
                f'the attention backend "{local.name}" is active together with sequence parallelism of the mode '
                f'"{self.name}"; combinations need the mode "ulysses" and a backend with computes_local_heads = True'
            )
        return BoundMask(local, local.make_mask(describe_full_mask(self.shard, band, device)))

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
        """Compute attention of this rank's tokens, with all heads. Collective along sp.

        Raises:
            ModelError: the mask was not made by `make_mask`, the tensors do not fit the shard, or the backend does not
                support an argument or the dropout of this call.
        """
        layer = "a module" if module is None else type(module).__name__
        if not isinstance(mask, SequenceMask):
            raise ModelError(
                f"{layer} got a mask of its own ({type(mask).__name__}) in a forward on sharded sequences; sequence "
                "parallelism needs a model whose layers use transformers' create_causal_mask"
            )
        given = {name: value for name, value in arguments.items() if value is not None}
        if mask.local is not None:
            _check_local_call(layer, mask.local.backend, dropout, given)
            get_layer_heads(mask.local.backend, module, query)  # refuses layers that tensor parallelism shards
            return local_backend_attention(module, query, key, value, mask, scaling=scaling, heads=heads, **given)
        dropped = _layer_dropout(module, dropout, mask) if dropout > 0 else None
        return sequence_attention(query, key, value, mask, scale=scaling, softcap=given.get("softcap"), dropout=dropped)


@contextmanager
def use_shard(shard: SequenceShard | None) -> Iterator[None]:
    """Compute attention over the ranks of `shard` inside the `with` block. With None, compute it over this rank's
    tokens alone.
    """
    with set_current_shard(shard), use_backend(None if shard is None else SequenceBackend(shard)):
        yield


def number_layers(model: nn.Module) -> None:
    """Number the modules of `model`. The number seeds a layer's dropout: layers drop different attention weights."""
    for number, module in enumerate(model.modules()):
        _layer_numbers[module] = number


def _layer_dropout(module: nn.Module | None, probability: float, mask: SequenceMask) -> AttentionDropout:
    seed, number = mask.shard.dropout_seed, None if module is None else _layer_numbers.get(module)
    if seed is None or number is None:
        raise ModelError(
            f"{type(module).__name__} drops attention weights with probability {probability}, but the model's config "
            "had no dropout when sequence parallelism was applied; set "
            f"{' or '.join(DROPOUT_CONFIG_KEYS)} there before"
        )
    return AttentionDropout(probability, combine_seeds(seed, number))


def _check_local_call(layer: str, local: AttentionBackend, dropout: float, arguments: dict[str, Any]) -> None:
    """Raise a ModelError if `local` does not support an argument or the dropout of a call for this rank's heads."""
    unsupported = sorted(name for name in arguments if name not in local.supported_arguments)
    if unsupported:
        raise ModelError(
            f'{layer} passes {unsupported} to attention; the backend "{local.name}" together with sequence parallelism '
            "does not support that; use another backend, or set parallel.sp to 1"
        )
    if dropout > 0:
        raise ModelError(
            f"{layer} drops attention weights with probability {dropout}; together with sequence parallelism the "
            f'backend "{local.name}" would drop different weights than a single rank. Set the probability to 0'
        )


def _make_backend(mode: str, shard: SequenceShard) -> SequenceBackend:
    backend = SequenceBackend(shard)
    if backend.name != mode:
        raise ConfigError(
            f'the attention backend "{mode}" got a shard of the mode "{backend.name}"; call '
            f'get_backend("{backend.name}", shard=shard)'
        )
    return backend


for _mode in SP_MODES:
    register_backend(_mode, partial(_make_backend, _mode))
