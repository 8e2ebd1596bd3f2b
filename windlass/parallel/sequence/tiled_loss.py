"""The loss of hidden states against a vocabulary, without logits of all tokens.

Logits of 100,000 tokens and a vocabulary of 128,000 take 51 GB in fp32, and their gradient as much; see `tiled`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from windlass.base.errors import ModelError
from windlass.comm.axis import Axis, alone
from windlass.parallel.loss import IGNORED, TokenLosses, mean_of_all, token_losses
from windlass.parallel.sequence.seam import unwrapped
from windlass.parallel.sequence.tiled import Tiling, tiled

ELEMENTS = 2**26
"""Of logits that are there at once, where nobody says how many tokens: 256 MiB in fp32."""


def tokens_at_once(vocabulary: int) -> int:
    """Tokens whose logits are computed together by default."""
    return max(1, ELEMENTS // max(vocabulary, 1))


def tiled_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    chunk: int | None = None,
    *,
    bias: torch.Tensor | None = None,
    ignore_index: int = IGNORED,
    losses: TokenLosses = token_losses,
    sp: Axis | None = None,
    items: torch.Tensor | float | None = None,
) -> torch.Tensor:
    """The mean loss of tokens, `chunk` of them at a time.

    Args:
        hidden: `[..., features]`. Along tp it has to `enter` first, as in front of any layer that is cut.
        weight: `[vocabulary, features]`, or this rank's part of the vocabulary.
        labels: `[...]`, of each token its own: shifted already.
        bias: `[vocabulary]`.
        losses: of logits that are cut along the vocabulary.
        sp: the axis over whose ranks the tokens are spread; the mean is over all of them.
        items: divide by this instead of the count of labels.

    Returns:
        A scalar, the same on all ranks of sp.
    """
    parameters = [weight] if bias is None else [weight, bias]
    head = partial(functional.linear, weight=weight, bias=bias)
    summed = summed_losses(head, hidden, labels, parameters, chunk, losses=losses, ignore_index=ignore_index)
    return mean_of_all(summed, (labels != ignore_index).sum(), alone("sp") if sp is None else sp, items)


def summed_losses(
    head: Callable[[torch.Tensor], torch.Tensor],
    hidden: torch.Tensor,
    labels: torch.Tensor,
    parameters: Sequence[torch.Tensor],
    chunk: int | None = None,
    *,
    losses: TokenLosses = token_losses,
    ignore_index: int = IGNORED,
) -> torch.Tensor:
    """The sum of the losses of all tokens, of the logits that `head` makes of hidden states `[tokens, features]`.

    Args:
        parameters: that `head` uses, the largest first.
    """

    def of_piece(states: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return losses(head(states), targets, ignore_index=ignore_index).sum()

    size = tokens_at_once(parameters[0].shape[0]) if chunk is None else chunk
    flat = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    return tiled(Tiling(of_piece, size, adds=True), flat, parameters)


class DeferredLogits:
    """Logits that are not computed yet: hidden states, and what the model did to the logits that it thinks it has.

    A model may scale its logits, bend them (`tanh`), cast them; whatever looks at several of them at once is refused.
    """

    def __init__(
        self, head: TiledHead, hidden: torch.Tensor, changes: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = ()
    ) -> None:
        self.hidden = hidden
        self._head, self._changes = head, changes

    def summed(self, labels: torch.Tensor, token_losses: TokenLosses, ignore_index: int) -> torch.Tensor:
        """The sum of the losses of all tokens."""
        return self._head.summed(self.hidden, self._changes, labels, token_losses, ignore_index)

    def _changed(self, change: Callable[[torch.Tensor], torch.Tensor]) -> DeferredLogits:
        return DeferredLogits(self._head, self.hidden, (*self._changes, change))

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> DeferredLogits:
        rest = (*args[1:], *(kwargs or {}).values())
        if func in _EACH and isinstance(args[0], DeferredLogits) and not any(_is_many(x) for x in rest):
            return args[0]._changed(lambda logits: func(logits, *args[1:], **(kwargs or {})))
        raise _unknown(getattr(func, "__name__", str(func)))

    def __mul__(self, factor: float) -> DeferredLogits:
        return self._by_number("*", factor, lambda logits: logits * factor)

    __rmul__ = __mul__

    def __truediv__(self, divisor: float) -> DeferredLogits:
        return self._by_number("/", divisor, lambda logits: logits / divisor)

    def _by_number(self, name: str, number: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> DeferredLogits:
        if _is_many(number):
            raise _unknown(name)
        return self._changed(change)

    def tanh(self) -> DeferredLogits:
        return self._changed(torch.tanh)

    def float(self) -> DeferredLogits:
        return self._changed(lambda logits: logits.float())

    def contiguous(self) -> DeferredLogits:
        return self

    def to(self, *args: Any, **kwargs: Any) -> DeferredLogits:
        return self._changed(lambda logits: logits.to(*args, **kwargs))

    def __getitem__(self, key: Any) -> Any:
        raise _unknown("indexing")

    def __getattr__(self, name: str) -> Any:
        raise _UnknownAttribute(str(_unknown(name)))


_EACH = {torch.tanh, torch.mul, torch.div, torch.true_divide}


def _is_many(value: Any) -> bool:
    return isinstance(value, torch.Tensor | DeferredLogits) and not (
        isinstance(value, torch.Tensor) and value.dim() == 0
    )


class _UnknownAttribute(ModelError, AttributeError):
    """For who asks whether there is one."""


def _unknown(what: str) -> ModelError:
    return ModelError(
        f"the model uses its logits ({what}) before their loss, so they can't be computed a part at a time; write "
        "tiled_loss=False"
    )


class TiledHead:
    """What `forward` of the layer that makes logits is while a model trains on labels: no logits are made there, and
    where their loss is wanted, the layer is called again to compute it in parts.

    It is called, so that whoever gathers its weight before, and lets go of it after, does so.
    """

    def __init__(self, head: nn.Module, chunk: int | None) -> None:
        self._head, self._chunk = head, chunk
        self._plain: Callable[[torch.Tensor], torch.Tensor] = head.forward
        self._defers = False
        self._sum: Callable[[torch.Tensor], torch.Tensor] | None = None
        self._given: torch.Tensor | None = None
        self._names: list[str] = []

    def install(self, model: nn.Module, names: list[str]) -> None:
        """Take the place of the layer's forward, in forwards of `model`, whose arguments have these names."""
        self._names = names
        held: Any = self._head
        held.forward = self.forward
        self._head.register_forward_pre_hook(self._note, prepend=True)
        model.register_forward_pre_hook(self._before, with_kwargs=True)
        model.register_forward_hook(self._after, always_call=True)

    def forward(self, hidden: torch.Tensor) -> Any:
        """The layer's forward."""
        if self._sum is not None:
            return self._sum(hidden)
        if not self._defers:
            return self._plain(hidden)
        given = hidden if self._given is None else self._given
        return DeferredLogits(self, given.view_as(given))  # of its own, as a layer's output is

    def summed(
        self,
        hidden: torch.Tensor,
        changes: tuple[Callable[[torch.Tensor], torch.Tensor], ...],
        labels: torch.Tensor,
        losses: TokenLosses,
        ignore_index: int,
    ) -> torch.Tensor:
        """The sum of the losses of all tokens, by a call of the layer."""

        def logits_of(states: torch.Tensor) -> torch.Tensor:
            logits = self._plain(states)
            for change in changes:
                logits = change(logits)
            return logits

        def compute(states: torch.Tensor) -> torch.Tensor:
            parameters = sorted(self._head.parameters(), key=lambda one: -one.dim())
            return summed_losses(
                logits_of, states, labels, parameters, self._chunk, losses=losses, ignore_index=ignore_index
            )

        self._sum = compute
        try:
            found: torch.Tensor = self._head(hidden)
        finally:
            self._sum = None
        return found

    def _note(self, head: nn.Module, args: tuple[Any, ...]) -> None:
        """Hidden states as they come, before other hooks of the layer change them: those run at both calls."""
        self._given = args[0] if self._defers and self._sum is None else None

    def _before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        labels = {**dict(zip(self._names, args, strict=False)), **kwargs}.get("labels")
        self._defers = labels is not None and model.training and torch.is_grad_enabled()

    def _after(self, model: nn.Module, args: Any, output: Any) -> Any:
        self._defers, self._given = False, None
        if isinstance(output, tuple):
            return tuple(value for value in output if not isinstance(value, DeferredLogits))
        if isinstance(getattr(output, "logits", None), DeferredLogits):
            return type(output)(**{name: value for name, value in output.items() if name != "logits"})
        return None


def tile_loss(model: Any, chunk: int | None = None) -> None:
    """Have a causal model of transformers whose loss function is a `ModelLoss` compute its loss `chunk` tokens at a
    time where it trains on labels, in place; its outputs then have no `logits`.

    Raises:
        ModelError: it has no layer that makes logits.
    """
    inner = unwrapped(model)
    head = inner.get_output_embeddings()
    if head is None:
        raise ModelError(f"{type(model).__name__} has no layer that makes logits (get_output_embeddings)")
    TiledHead(head, chunk).install(model, list(inspect.signature(inner.forward).parameters))
