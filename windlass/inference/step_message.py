"""Batch of a step as one int64 tensor, which the leader sends to the other ranks of a model."""

from __future__ import annotations

import json

import torch

from windlass.inference.step_batch import StepBatch


def encode_batch(batch: StepBatch) -> torch.Tensor:
    """Return a batch as int64 `[numbers]` on the CPU: five sizes, the batch's tensors, the ids of its sequences, and
    the bytes of the adapters' names in JSON, if there are any.
    """
    sequences, width = batch.block_table.shape
    names = json.dumps(batch.adapters).encode() if any(batch.adapters) else b""
    sizes = torch.tensor([batch.num_tokens, sequences, width, len(batch.logit_rows), len(names)])
    parts = (
        batch.token_ids,
        batch.positions,
        batch.slots,
        batch.query_start,
        batch.context_lengths,
        batch.block_table.reshape(-1),
        batch.logit_rows,
        torch.tensor(batch.sequence_ids),
        torch.tensor(list(names)),
    )
    return torch.cat([sizes, *(part.cpu().long() for part in parts)])


def decode_batch(message: torch.Tensor) -> StepBatch:
    """Return the batch that `encode_batch` has encoded."""
    tokens, sequences, width, rows, size = message[:5].tolist()
    lengths = (tokens, tokens, tokens, sequences + 1, sequences, sequences * width, rows, sequences, size)
    token_ids, positions, slots, starts, contexts, table, logit_rows, ids, names = message[5:].split(lengths)
    return StepBatch(
        token_ids,
        positions,
        starts.int(),
        contexts.int(),
        table.int().view(sequences, width),
        slots,
        logit_rows,
        ids.tolist(),
        json.loads(bytes(names.tolist())) if size else [None] * sequences,
    )
