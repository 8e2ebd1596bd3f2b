"""Cross-entropy of logits that are sharded along the vocabulary, without gathering them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from windlass.comm.mesh_axis import MeshAxis


def vocab_parallel_cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    axis: MeshAxis,
    *,
    sizes: Sequence[int] | None = None,
    ignore_index: int = -100,
    z_loss: float = 0.0,
) -> torch.Tensor:
    """Compute the loss of each token; all ranks of the axis get the same result.

    Maxima, sums of exponentials and the labels' logits are reduced over the axis: three numbers of 4 bytes a token. The
    gradient needs no communication (Shoeybi et al., Megatron-LM, arXiv:1909.08053, section 3). The computation is in
    fp32. The backward saves the logits and one number a token.

    Args:
        logits: `[tokens, part of the vocabulary]` of this rank.
        labels: `[tokens]`, indices into the full vocabulary, equal on all ranks.
        axis: mesh axis over which the vocabulary is sharded.
        sizes: size of each rank's part; by default that of this rank.
        ignore_index: label of tokens whose loss and gradient are 0.
        z_loss: add `z_loss * log(Z)^2` to each loss, where Z is the sum of exponentials (Chowdhery et al., PaLM,
            arXiv:2204.02311, section 5).

    Returns:
        `[tokens]`, fp32.
    """
    each = [logits.shape[-1]] * axis.size if sizes is None else list(sizes)
    start = sum(each[: axis.index])
    return _VocabParallelCrossEntropy.apply(axis, logits, labels, start, sum(each), ignore_index, z_loss)  # type: ignore[no-any-return]


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        axis: MeshAxis,
        logits: torch.Tensor,
        labels: torch.Tensor,
        start: int,
        vocabulary: int,
        ignore_index: int,
        z_loss: float,
    ) -> torch.Tensor:
        counts = labels != ignore_index
        torch._assert_async(
            ((labels >= 0) & (labels < vocabulary) | ~counts).all(), "a label is outside the vocabulary"
        )
        wide = logits.float()
        largest = axis.all_reduce(wide.amax(-1), dist.ReduceOp.MAX)
        own = counts & (labels >= start) & (labels < start + logits.shape[-1])
        at = (labels - start).masked_fill(~own, 0).unsqueeze(-1)
        sums = (wide - largest.unsqueeze(-1)).exp_().sum(-1)
        chosen = wide.gather(-1, at).squeeze(-1).masked_fill(~own, 0)
        sums, chosen = axis.all_reduce(torch.stack([sums, chosen])).unbind(0)
        log_sum = sums.log() + largest
        ctx.save_for_backward(logits, log_sum, at, own, counts)
        ctx.z_loss = z_loss
        losses = log_sum - chosen
        if z_loss:
            losses = losses + z_loss * log_sum.square()
        return losses.masked_fill(~counts, 0)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, log_sum, at, own, counts = ctx.saved_tensors
        gradient = gradients[0].float().masked_fill(~counts, 0)
        to_all = gradient * (1 + 2 * ctx.z_loss * log_sum) if ctx.z_loss else gradient
        to_logits = (logits.float() - log_sum.unsqueeze(-1)).exp_().mul_(to_all.unsqueeze(-1))
        to_logits.scatter_add_(-1, at, -(gradient * own).unsqueeze(-1))
        return None, to_logits.to(logits.dtype), None, None, None, None, None
