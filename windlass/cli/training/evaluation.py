"""Measures the held-out bits per byte of a model under training, over all ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from windlass.cli.training.agreement import sum_over_ranks
from windlass.data.held_out import IGNORED, HeldOut


def bits_per_byte(engine: Any, held_out: HeldOut, micro_batch: int, rank: int, world_size: int) -> float:
    """The negative log likelihood of the whole held-out text, in bits, over its bytes. Collective.

    Comparable between tokenizers, unlike a loss or a perplexity per token.
    """
    device = engine.device
    nats = torch.zeros((), dtype=torch.float64)
    training = engine.module.training
    engine.eval()
    with torch.no_grad():
        for inputs, labels in held_out.batches(micro_batch, rank, world_size):
            logits = engine(input_ids=torch.from_numpy(inputs).to(device)).logits  # [micro, seq, vocab]
            targets = torch.from_numpy(labels).to(device)
            loss = F.cross_entropy(
                logits.float().flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=IGNORED
            )
            nats += loss.double().cpu()
    engine.train(training)
    return held_out.bits_per_byte(sum_over_ranks([float(nats)], device)[0])
