"""The loss with which transformers' routers are balanced, of whole sequences where a rank has a part of them.

[Note: balance over sequences] That loss (Fedus et al., "Switch Transformers", equations 4 to 6) multiplies the share of
tokens of each expert by its mean probability, both over all tokens of a batch: the mean of the losses of parts is not
the loss of the whole. The model computes it from its routers' logits in one function of its module, which is replaced
by one that puts the logits of all ranks together first, `[tokens, experts]` for each layer.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

from windlass.base.errors import ModelError
from windlass.parallel.sequence.share import Share, current_share

NAME = "load_balancing_loss_func"


def balance_whole_sequences(model: Any) -> None:
    """Have the module that defines `model` compute its routers' loss over whole sequences; once a module."""
    module = sys.modules[type(model).__module__]
    function = getattr(module, NAME, None)
    if function is not None and not isinstance(function, WholeBalance):
        setattr(module, NAME, WholeBalance(function))


class WholeBalance:
    """Stands for `load_balancing_loss_func` of a module of transformers; without a share it is that.

    Args:
        function: of (gate_logits, num_experts, top_k, attention_mask).
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        functools.update_wrapper(self, function)

    def __call__(
        self,
        gate_logits: Any,
        num_experts: int | None = None,
        top_k: int = 2,
        attention_mask: torch.Tensor | None = None,
        **more: Any,
    ) -> Any:
        """As the function. Collective over sp while a part of a sequence is computed.

        Raises:
            ModelError: a router's logits are not `[samples x tokens, experts]` of this rank's tokens.
        """
        share = current_share()
        if share is not None and isinstance(gate_logits, tuple) and gate_logits:
            samples = len(gate_logits[0]) // max(1, share.tokens)
            gate_logits = tuple(_whole(share, one, samples) for one in gate_logits)
            if attention_mask is not None:
                attention_mask = share.gathered(attention_mask)
        return self.function(gate_logits, num_experts, top_k, attention_mask, **more)


def _whole(share: Share, logits: torch.Tensor, samples: int) -> torch.Tensor:
    if logits.dim() != 2 or len(logits) != samples * share.tokens:
        raise ModelError(
            f"a router's logits have the shape {list(logits.shape)}, and this rank has {samples} x {share.tokens} "
            "tokens; the loss that balances routers can't be computed over the ranks of sp: set output_router_logits "
            "to False"
        )
    return share.gathered(logits.unflatten(0, (samples, share.tokens))).flatten(0, 1)
