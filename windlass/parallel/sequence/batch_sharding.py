"""Sharding of a batch of full sequences along the sequence dimension."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from windlass.base.errors import ModelError
from windlass.comm.mesh_axis import MeshAxis
from windlass.parallel.sequence.position_ids import DerivePositions
from windlass.parallel.sequence.sequence_shard import SequenceShard
from windlass.parallel.sequence.sequence_sharding import SequenceShardPattern, make_sharding_from_sizes
from windlass.parallel.sequence.visible_ranges import BatchMask, make_document_mask, make_full_mask, make_padding_mask
from windlass.parallel.sequence_loss import shift_targets

SHARD_KEY = "sequence_shard"
"""Key of the `SequenceShard` in a sharded batch."""

SHARDED_KEYS = ("input_ids", "inputs_embeds", "labels", "shift_labels", "attention_mask", "token_type_ids")
"""Keys of tensors `[samples, tokens, ...]`, which are sharded along dimension 1."""

PACKING_KEYS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""Keys that describe packed documents for other attention kernels. They are dropped: the documents follow from
`position_ids`.
"""


def shard_batch(
    batch: Mapping[str, Any],
    pattern: SequenceShardPattern,
    axis: MeshAxis,
    *,
    shifts_labels: bool = True,
    derive_positions: DerivePositions | None = None,
) -> dict[str, Any]:
    """Return this rank's part of a batch of full sequences, with its `SequenceShard` under `SHARD_KEY`.

    Every rank along sp passes the same batch. Without an `attention_mask`, a packed document begins where the positions
    restart, as in transformers.

    Args:
        batch: keyword arguments of a transformers model. Missing `position_ids`, `[samples or 1, tokens]`, are created.
        shifts_labels: True if the loss of a token uses the label of the next token. Labels are then shifted before they
            are sharded, because the token after a rank's last token is on another rank.
        derive_positions: function that derives the positions of a batch without `position_ids`; None: count from 0.

    Returns:
        The batch with tensors of the local tokens, without `PACKING_KEYS`. If the batch has `labels`, `labels` and
        `shift_labels` of the result are equal: the `shift_labels` of the batch, otherwise its labels, shifted if
        `shifts_labels`.

    Raises:
        ModelError: a value of the batch cannot be sharded.
    """
    ids = _token_tensor(batch)
    samples, length = ids.shape[0], ids.shape[1]
    local = {name: value for name, value in batch.items() if name not in PACKING_KEYS}
    _check_batch(local, samples, length, has_packing_keys=len(local) < len(batch))
    if local.get("labels") is not None:
        if local.get("shift_labels") is None:
            local["shift_labels"] = shift_targets(local["labels"]) if shifts_labels else local["labels"]
        local["labels"] = local["shift_labels"]
    derived = derive_positions(local) if derive_positions is not None and local.get("position_ids") is None else None
    if length < axis.size:
        local = _pad_batch(local, length, axis.size)
    positions, mask = local.get("position_ids"), local.get("attention_mask")
    sharding = pattern.shard(max(length, axis.size))
    if derived is not None:  # positions of padding are arbitrary here: they do not separate documents
        local["position_ids"] = torch.nn.functional.pad(derived, (0, sharding.length - length))
    elif positions is None:
        local["position_ids"] = torch.arange(sharding.length, device=ids.device).unsqueeze(0)
    for name in SHARDED_KEYS:
        if local.get(name) is not None:
            local[name] = sharding.local_shard(local[name], axis.index).contiguous()
    local["position_ids"] = sharding.local_shard(local["position_ids"], axis.index, dim=-1).contiguous()
    visibility = _attention_mask(positions, mask, samples, sharding.length)
    local[SHARD_KEY] = SequenceShard(sharding, visibility, axis, full_length=length, gathers_outputs=True)
    return local


def _pad_batch(batch: dict[str, Any], length: int, min_length: int) -> dict[str, Any]:
    """Append padding to which no token of the batch attends. Every rank then has a token: many models fail on empty
    tensors.
    """
    more, long = min_length - length, dict(batch)
    for name in SHARDED_KEYS:
        value = batch.get(name)
        if value is not None:
            filling = -100 if "labels" in name else 0
            long[name] = torch.cat([value, value.new_full((value.shape[0], more, *value.shape[2:]), filling)], dim=1)
    if batch.get("attention_mask") is None:  # the padding becomes a packed document
        device, positions = _token_tensor(batch).device, batch.get("position_ids")
        own = torch.arange(length, device=device).unsqueeze(0) if positions is None else positions
        new = torch.arange(more, device=device, dtype=own.dtype).expand(*own.shape[:-1], more)
        long["position_ids"] = torch.cat([own, new], dim=-1)
    elif batch.get("position_ids") is not None:
        long["position_ids"] = torch.nn.functional.pad(batch["position_ids"], (0, more))
    return long


def mark_sharded_batch(
    batch: Mapping[str, Any], axis: MeshAxis, ulysses_degree: int, *, derive: DerivePositions | None = None
) -> dict[str, Any]:
    """Return `batch`, which contains this rank's tokens only, with its `SequenceShard` under `SHARD_KEY`. Collective.

    The parts of the ranks must be consecutive. The batch needs `position_ids`. Labels must be shifted
    already, whether their key is `shift_labels` or `labels`.

    Args:
        derive: function that derives the model's positions. Positions equal to the derived ones do not separate
            documents. None: the model counts tokens from 0.

    Raises:
        ModelError: the batch has no `position_ids`.
    """
    ids = _token_tensor(batch)
    local = {name: value for name, value in batch.items() if name not in PACKING_KEYS}
    positions, mask = local.get("position_ids"), local.get("attention_mask")
    if positions is None:
        raise ModelError(
            "a batch of local tokens has no position_ids, and they cannot be derived; let UlyssesSPDataLoaderAdapter "
            "shard the batches, as transformers' Trainer does from version 5.0 on, or pass position_ids"
        )
    sizes = axis.all_gather(torch.tensor([ids.shape[1]], device=ids.device)).tolist()
    if positions.dim() == 2:
        positions = axis.all_gather(positions.contiguous(), 1, sizes)
    if mask is not None:
        mask = axis.all_gather(mask.contiguous(), 1, sizes)
        mask = None if bool((mask != 0).all()) else mask  # without padding, only positions separate documents
    if mask is None and derive is not None and positions.dim() == 2 and "input_ids" in local:
        full = derive({"input_ids": axis.all_gather(ids.contiguous(), 1, sizes)})
        positions = None if bool((full == positions).all()) else positions
    visibility = _attention_mask(positions, mask, ids.shape[0], sum(sizes))
    local[SHARD_KEY] = SequenceShard(
        make_sharding_from_sizes(sizes, ulysses_degree), visibility, axis, full_length=sum(sizes), gathers_outputs=False
    )
    return local


def _token_tensor(batch: Mapping[str, Any]) -> torch.Tensor:
    for name in ("input_ids", "inputs_embeds"):
        found = batch.get(name)
        if isinstance(found, torch.Tensor) and found.dim() >= 2:
            return found
    raise ModelError(
        f"a batch with the keys {sorted(batch)} has neither input_ids nor inputs_embeds of shape [samples, tokens, "
        "...]; sequence parallelism needs one of them"
    )


def _attention_mask(positions: torch.Tensor | None, mask: torch.Tensor | None, samples: int, length: int) -> BatchMask:
    if mask is not None:
        return make_padding_mask(mask)
    if positions is not None and positions.dim() == 2:
        return make_document_mask(positions, samples)
    return make_full_mask(samples, length)


def _check_batch(batch: Mapping[str, Any], samples: int, length: int, *, has_packing_keys: bool) -> None:
    if has_packing_keys and batch.get("position_ids") is None:
        raise ModelError(
            f"the batch describes packed documents by one of {', '.join(PACKING_KEYS)} alone; pass position_ids that "
            "restart with each document"
        )
    mask = batch.get("attention_mask")
    if mask is not None and (not isinstance(mask, torch.Tensor) or mask.dim() != 2):
        shape = list(mask.shape) if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise ModelError(
            f"attention_mask is {shape}; with sequence parallelism it has to be a padding mask [samples, tokens]. "
            "Describe packed documents by position_ids that restart"
        )
    for name, value in batch.items():
        if not isinstance(value, torch.Tensor):
            continue
        along = value.shape[-1:] if name == "position_ids" else value.shape[1:2]
        if name in SHARDED_KEYS or name == "position_ids":
            if along != (length,):
                raise ModelError(
                    f"{name} has the shape {list(value.shape)}, but the sequences have {length} tokens; give one value "
                    "for each token"
                )
        elif value.dim() >= 2 and value.shape[:2] == (samples, length):
            raise ModelError(
                f"{name} has the shape {list(value.shape)} of one value per token, and sequence parallelism does not "
                f"recognize the key; leave it out. It shards {', '.join((*SHARDED_KEYS, 'position_ids'))}"
            )
