"""The loss with which transformers' routers are balanced, of whole sequences where a rank has a part of them.

[Note: balance over sequences] That loss (Fedus et al., "Switch Transformers", equations 4 to 6) multiplies the share of
tokens of each expert by its mean probability, both over all tokens of a batch: the mean of the losses of parts is not
the loss of the whole. So the logits of all ranks are put together first, `[tokens, experts]` for each layer.
"""

from __future__ import annotations

from typing import Any

import torch

from windlass.base.errors import ModelError
from windlass.parallel.router_loss import Logits, router_loss_of
from windlass.parallel.sequence.share import Share, current_share


def balance_whole_sequences(model: Any) -> None:
    """Have the module that defines `model` compute its routers' loss over whole sequences; once a module."""
    loss = router_loss_of(model)
    if loss is not None:
        loss.join = _joined


def _joined(logits: Logits, mask: torch.Tensor | None) -> tuple[Logits, torch.Tensor | None]:
    """Of all ranks of sp, while a part of a sequence is computed; collective over them.

    Raises:
        ModelError: a router's logits are not `[samples x tokens, experts]` of this rank's tokens.
    """
    share = current_share()
    if share is None:
        return logits, mask
    samples = len(logits[0]) // max(1, share.tokens)
    return tuple(_whole(share, one, samples) for one in logits), None if mask is None else share.gathered(mask)


def _whole(share: Share, logits: torch.Tensor, samples: int) -> torch.Tensor:
    if logits.dim() != 2 or len(logits) != samples * share.tokens:
        raise ModelError(
            f"a router's logits have the shape {list(logits.shape)}, and this rank has {samples} x {share.tokens} "
            "tokens; the loss that balances routers can't be computed over the ranks of sp: set output_router_logits "
            "to False"
        )
    return share.gathered(logits.unflatten(0, (samples, share.tokens))).flatten(0, 1)
