"""Load-balancing loss of transformers' routers over full sequences, under sequence parallelism.

[Note: balance over sequences] The loss (Fedus et al., "Switch Transformers", equations 4 to 6) multiplies the fraction
of tokens of each expert by its mean probability, both over all tokens of a batch. So the mean of the losses of parts of
a batch is not the loss of the batch. The logits of all ranks are all-gathered first, `[tokens, experts]` for each
layer.
"""

from __future__ import annotations

from typing import Any

import torch

from windlass.base.errors import ModelError
from windlass.parallel.router_loss import RouterLogits, install_router_loss
from windlass.parallel.sequence.sequence_shard import SequenceShard, get_current_shard


def install_sequence_router_loss(model: Any) -> None:
    """Replace the router loss, if there is one, in the Python module that defines `model` by a loss over full
    sequences.
    """
    loss = install_router_loss(model)
    if loss is not None:
        loss.gather_logits = _gather_logits


def _gather_logits(logits: RouterLogits, mask: torch.Tensor | None) -> tuple[RouterLogits, torch.Tensor | None]:
    """All-gather router logits and mask over the sp ranks, if the forward runs on sharded sequences. Collective.

    Raises:
        ModelError: a router's logits are not `[samples x tokens, experts]` of this rank's tokens.
    """
    share = get_current_shard()
    if share is None:
        return logits, mask
    samples = len(logits[0]) // max(1, share.local_tokens)
    return tuple(_gather_router(share, one, samples) for one in logits), None if mask is None else share.all_gather(
        mask
    )


def _gather_router(shard: SequenceShard, logits: torch.Tensor, samples: int) -> torch.Tensor:
    if logits.dim() != 2 or len(logits) != samples * shard.local_tokens:
        raise ModelError(
            f"a router's logits have the shape {list(logits.shape)}, and this rank has {samples} x "
            f"{shard.local_tokens} tokens; the load-balancing loss cannot be computed over the ranks of sp: "
            "set output_router_logits to False"
        )
    return shard.all_gather(logits.unflatten(0, (samples, shard.local_tokens))).flatten(0, 1)
