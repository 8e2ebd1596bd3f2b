"""Loss that computes a tile of logits at a time, so that the logits of all tokens never exist at once.

Logits of 100,000 tokens and a vocabulary of 128,000 take 51 GB in fp32, and their gradient as much. See
`tiled_function`.
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
from windlass.comm.mesh_axis import MeshAxis, single_rank_axis
from windlass.parallel.sequence.sequence_support import unwrap_peft
from windlass.parallel.sequence.tiled_function import Tiling, run_tiled
from windlass.parallel.sequence_loss import (
    IGNORE_INDEX,
    TokenLossFunction,
    compute_sequence_mean,
    cross_entropy_per_token,
)

MAX_LOGIT_ELEMENTS = 2**26
"""Logits in a default tile: 256 MiB in fp32."""


def get_default_tile_tokens(vocabulary: int) -> int:
    """Return the default number of tokens in a tile."""
    return max(1, MAX_LOGIT_ELEMENTS // max(vocabulary, 1))


def tiled_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    tile_tokens: int | None = None,
    *,
    bias: torch.Tensor | None = None,
    ignore_index: int = IGNORE_INDEX,
    loss_function: TokenLossFunction = cross_entropy_per_token,
    sp_axis: MeshAxis | None = None,
    num_items: torch.Tensor | float | None = None,
) -> torch.Tensor:
    """Compute the mean loss of tokens, a tile at a time. Collective along `sp_axis`.

    Args:
        hidden: `[..., features]`. Under tensor parallelism, pass it through the input hook of a column-parallel layer
            first.
        weight: `[vocabulary, features]`, or this rank's part of the vocabulary.
        labels: `[...]`, shifted: index i has the label of token i, which is token i + 1.
        tile_tokens: tokens in a tile; None: `get_default_tile_tokens`.
        bias: `[vocabulary]`.
        ignore_index: label of tokens without a loss.
        loss_function: maps logits and labels to the loss of each token. It gets sharded logits if `weight` is a part of
            the vocabulary.
        sp_axis: axis over which the tokens are sharded; the mean is over the tokens of all its ranks.
        num_items: divisor of the sum; by default the number of labels on all ranks that are not `ignore_index`.

    Returns:
        A scalar, the same on all ranks of sp.
    """
    parameters = [weight] if bias is None else [weight, bias]
    head = partial(functional.linear, weight=weight, bias=bias)
    summed = compute_tiled_loss_sum(
        head, hidden, labels, parameters, tile_tokens, loss_function=loss_function, ignore_index=ignore_index
    )
    return compute_sequence_mean(
        summed, (labels != ignore_index).sum(), single_rank_axis("sp") if sp_axis is None else sp_axis, num_items
    )


def compute_tiled_loss_sum(
    head: Callable[[torch.Tensor], torch.Tensor],
    hidden: torch.Tensor,
    labels: torch.Tensor,
    parameters: Sequence[torch.Tensor],
    tile_tokens: int | None = None,
    *,
    loss_function: TokenLossFunction = cross_entropy_per_token,
    ignore_index: int = IGNORE_INDEX,
) -> torch.Tensor:
    """Return the sum of the losses of all tokens.

    Args:
        head: computes logits from hidden states `[tokens, features]`.
        hidden: `[..., features]`.
        labels: `[...]`, shifted.
        parameters: parameters of `head`, first the weight `[vocabulary, features]`.
    """

    def of_piece(states: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return loss_function(head(states), targets, ignore_index=ignore_index).sum()

    size = get_default_tile_tokens(parameters[0].shape[0]) if tile_tokens is None else tile_tokens
    flat = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    return run_tiled(Tiling(of_piece, size, sums_outputs=True), flat, parameters)


class DeferredLogits:
    """Placeholder for logits: hidden states, and the elementwise functions that the model applied to its logits.

    A model may scale its logits, apply `tanh` and cast them. Any other use raises a ModelError.
    """

    def __init__(
        self,
        head: TiledLossHead,
        hidden: torch.Tensor,
        transforms: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (),
    ) -> None:
        self.hidden = hidden
        self._head, self._transforms = head, transforms

    def summed_loss(self, labels: torch.Tensor, loss_function: TokenLossFunction, ignore_index: int) -> torch.Tensor:
        """Return the sum of the losses of all tokens."""
        return self._head.summed_loss(self.hidden, self._transforms, labels, loss_function, ignore_index)

    def _with_transform(self, change: Callable[[torch.Tensor], torch.Tensor]) -> DeferredLogits:
        return DeferredLogits(self._head, self.hidden, (*self._transforms, change))

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> DeferredLogits:
        rest = (*args[1:], *(kwargs or {}).values())
        if (
            func in _ELEMENTWISE
            and isinstance(args[0], DeferredLogits)
            and not any(_has_many_elements(x) for x in rest)
        ):
            return args[0]._with_transform(lambda logits: func(logits, *args[1:], **(kwargs or {})))
        raise _unsupported_use(getattr(func, "__name__", str(func)))

    def __mul__(self, factor: float) -> DeferredLogits:
        return self._scaled("*", factor, lambda logits: logits * factor)

    __rmul__ = __mul__

    def __truediv__(self, divisor: float) -> DeferredLogits:
        return self._scaled("/", divisor, lambda logits: logits / divisor)

    def _scaled(self, name: str, number: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> DeferredLogits:
        if _has_many_elements(number):
            raise _unsupported_use(name)
        return self._with_transform(change)

    def tanh(self) -> DeferredLogits:
        return self._with_transform(torch.tanh)

    def float(self) -> DeferredLogits:
        return self._with_transform(lambda logits: logits.float())

    def contiguous(self) -> DeferredLogits:
        return self

    def to(self, *args: Any, **kwargs: Any) -> DeferredLogits:
        return self._with_transform(lambda logits: logits.to(*args, **kwargs))

    def __getitem__(self, key: Any) -> Any:
        raise _unsupported_use("indexing")

    def __getattr__(self, name: str) -> Any:
        raise _UnknownAttribute(str(_unsupported_use(name)))


_ELEMENTWISE = {torch.tanh, torch.mul, torch.div, torch.true_divide}


def _has_many_elements(value: Any) -> bool:
    return isinstance(value, torch.Tensor | DeferredLogits) and not (
        isinstance(value, torch.Tensor) and value.dim() == 0
    )


class _UnknownAttribute(ModelError, AttributeError):
    """Error for an attribute that placeholders lack; an AttributeError too, so that `hasattr` returns False."""


def _unsupported_use(what: str) -> ModelError:
    return ModelError(
        f"the model uses its logits ({what}) before the loss, so the loss cannot be tiled; write tiled_loss=False"
    )


class TiledLossHead:
    """Replacement of the output head's forward while a model trains on labels.

    The first call of the head returns a placeholder. The loss function calls the head again, and the second call
    computes the loss a tile at a time. The second call is a call of the module, too, so that the hooks that unshard and
    reshard the head's weight run.
    """

    def __init__(self, head: nn.Module, tile_tokens: int | None) -> None:
        self._head, self._tile_tokens = head, tile_tokens
        self._original_forward: Callable[[torch.Tensor], torch.Tensor] = head.forward
        self._is_deferring = False
        self._compute_sum: Callable[[torch.Tensor], torch.Tensor] | None = None
        self._raw_hidden: torch.Tensor | None = None
        self._argument_names: list[str] = []

    def install(self, model: nn.Module, names: list[str]) -> None:
        """Replace the forward of the head.

        Args:
            model: the transformers model, or a wrapper of it.
            names: argument names of the transformers model's forward, in order.
        """
        self._argument_names = names
        held: Any = self._head
        held.forward = self.forward
        self._head.register_forward_pre_hook(self._record_input, prepend=True)
        model.register_forward_pre_hook(self._pre_forward, with_kwargs=True)
        model.register_forward_hook(self._post_forward, always_call=True)

    def forward(self, hidden: torch.Tensor) -> Any:
        """Return logits, a placeholder for them, or in a call by `summed_loss` the sum of the losses."""
        if self._compute_sum is not None:
            return self._compute_sum(hidden)
        if not self._is_deferring:
            return self._original_forward(hidden)
        given = hidden if self._raw_hidden is None else self._raw_hidden
        # A new tensor: hooks of modules register different gradient hooks on the input and the output of the head.
        return DeferredLogits(self, given.view_as(given))

    def summed_loss(
        self,
        hidden: torch.Tensor,
        transforms: tuple[Callable[[torch.Tensor], torch.Tensor], ...],
        labels: torch.Tensor,
        loss_function: TokenLossFunction,
        ignore_index: int,
    ) -> torch.Tensor:
        """Return the sum of the losses of all tokens, computed in a call of the head."""

        def logits_of(states: torch.Tensor) -> torch.Tensor:
            logits = self._original_forward(states)
            for change in transforms:
                logits = change(logits)
            return logits

        def compute(states: torch.Tensor) -> torch.Tensor:
            parameters = sorted(self._head.parameters(), key=lambda one: -one.dim())
            return compute_tiled_loss_sum(
                logits_of,
                states,
                labels,
                parameters,
                self._tile_tokens,
                loss_function=loss_function,
                ignore_index=ignore_index,
            )

        self._compute_sum = compute
        try:
            found: torch.Tensor = self._head(hidden)
        finally:
            self._compute_sum = None
        return found

    def _record_input(self, head: nn.Module, args: tuple[Any, ...]) -> None:
        """Record the hidden states before other hooks change them: those hooks run again in the head's second call."""
        self._raw_hidden = args[0] if self._is_deferring and self._compute_sum is None else None

    def _pre_forward(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        labels = {**dict(zip(self._argument_names, args, strict=False)), **kwargs}.get("labels")
        self._is_deferring = labels is not None and model.training and torch.is_grad_enabled()

    def _post_forward(self, model: nn.Module, args: Any, output: Any) -> Any:
        self._is_deferring, self._raw_hidden = False, None
        if isinstance(output, tuple):
            return tuple(value for value in output if not isinstance(value, DeferredLogits))
        if isinstance(getattr(output, "logits", None), DeferredLogits):
            return type(output)(**{name: value for name, value in output.items() if name != "logits"})
        return None


def install_tiled_loss(model: Any, tile_tokens: int | None = None) -> None:
    """Change a causal transformers model in place: when it trains on labels, it computes its loss a tile at a time.

    The model's loss function has to be a `ModelLoss`. The outputs then have no `logits`.

    Args:
        tile_tokens: tokens in a tile; None: `get_default_tile_tokens`.

    Raises:
        ModelError: the model has no layer that computes logits.
    """
    inner = unwrap_peft(model)
    head = inner.get_output_embeddings()
    if head is None:
        raise ModelError(
            f"{type(model).__name__} has no layer that computes logits (get_output_embeddings); leave tiled_loss off"
        )
    TiledLossHead(head, tile_tokens).install(model, list(inspect.signature(inner.forward).parameters))
