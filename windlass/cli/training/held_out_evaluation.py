"""Held-out bits per byte of a model during training, measured over all ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from windlass.cli.training.loss_agreement import all_reduce_sum
from windlass.data.held_out import IGNORE_INDEX, HeldOutSet


def held_out_bits_per_byte(engine: Any, held_out: HeldOutSet, micro_batch: int) -> float:
    """Return the negative log likelihood of the held-out text in bits, divided by its bytes. Collective.

    The figure is comparable between tokenizers, unlike a loss or a perplexity per token.
    """
    device, (readers, reader) = engine.device, engine.data_loading_ranks
    nats = torch.zeros((), dtype=torch.float64)
    training = engine.module.training
    engine.eval()
    with torch.no_grad():
        for inputs, labels in held_out.batches(micro_batch, reader, readers):
            logits = _evaluate_logits(engine, torch.from_numpy(inputs).to(device))
            if logits is None:  # only the last stage of a pipeline has logits
                continue
            targets = torch.from_numpy(labels).to(device)
            loss = F.cross_entropy(
                logits.float().flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=IGNORE_INDEX
            )
            nats += loss.double().cpu()
    engine.train(training)
    together = engine.mesh.grid.size("sp", "tp")  # ranks along these axes measured the same samples
    return held_out.bits_per_byte(all_reduce_sum([float(nats)], device)[0] / together)


def _evaluate_logits(engine: Any, ids: torch.Tensor) -> torch.Tensor | None:
    """Return the logits `[micro, seq, vocabulary]`; None on all pipeline stages but the last."""
    if engine.mesh.pp.size == 1:
        logits: torch.Tensor = engine(input_ids=ids).logits
        return logits
    found = engine.eval_batch(iter([{"input_ids": ids}]), compute_loss=False, num_micro_batches=1)
    return None if found is None else found[0]
