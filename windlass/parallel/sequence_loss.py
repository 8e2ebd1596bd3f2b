"""Loss of a language model whose tokens are sharded over ranks. Every rank returns the loss of the full sequence."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch.nn import functional

from windlass.base.errors import ModelError
from windlass.comm.mesh_axis import MeshAxis, single_rank_axis
from windlass.parallel.autograd_collectives import all_reduce

IGNORE_INDEX = -100
"""Label of tokens without a loss."""


class TokenLossFunction(Protocol):
    """Loss of each token.

    Args:
        logits: `[tokens, vocabulary]`, or only the columns of this rank's part of the vocabulary.
        labels: `[tokens]`.

    Returns:
        `[tokens]`, in fp32; 0 where the label is `ignore_index`.
    """

    def __call__(self, logits: torch.Tensor, labels: torch.Tensor, *, ignore_index: int) -> torch.Tensor: ...


class VocabParallelLogits(Protocol):
    """Vocabulary sharded over ranks. Logits may cover the full vocabulary or only this rank's part."""

    def is_local_shard(self, logits: torch.Tensor) -> bool:
        """Return True if the logits cover only this rank's part."""
        ...

    def token_losses(self, logits: torch.Tensor, labels: torch.Tensor, *, ignore_index: int) -> torch.Tensor:
        """Compute the losses as `TokenLossFunction` does, from this rank's part. Collective."""
        ...


class SupportsSummedLoss(Protocol):
    """Logits that are computed in parts together with their loss."""

    def summed_loss(self, labels: torch.Tensor, loss_function: TokenLossFunction, ignore_index: int) -> torch.Tensor:
        """Return the sum of the losses of all tokens."""
        ...


def cross_entropy_per_token(
    logits: torch.Tensor, labels: torch.Tensor, *, ignore_index: int = IGNORE_INDEX
) -> torch.Tensor:
    """Return the cross entropy of each token. The logits `[tokens, vocabulary]` cover the full vocabulary."""
    return functional.cross_entropy(logits.float(), labels, ignore_index=ignore_index, reduction="none")


def shift_targets(labels: torch.Tensor, ignore_index: int = IGNORE_INDEX) -> torch.Tensor:
    """Shift the labels `[samples, tokens]` so that each token has the label of the next token. The last token has
    `ignore_index`."""
    return functional.pad(labels, (0, 1), value=ignore_index)[..., 1:].contiguous()


def compute_sequence_mean(
    loss_sum: torch.Tensor, count: torch.Tensor, sp_axis: MeshAxis, num_items: torch.Tensor | float | None = None
) -> torch.Tensor:
    """Compute the mean loss of the full sequence from the sum over this rank's tokens; equal on all sp ranks.
    Collective.

    The backward sums the gradients over the sp ranks, so that the mean of the ranks' gradients is the gradient of this
    loss.

    Args:
        loss_sum: sum of the losses of this rank's tokens.
        count: number of this rank's tokens with a label. Ranks may have unequal counts, or 0.
        num_items: divisor instead of the sum of all ranks' counts, e.g. for one mean over several micro-batches.

    Returns:
        A scalar; nan, as with torch's mean, if no token of any rank has a loss and `num_items` is None.
    """
    if num_items is None:
        both = all_reduce(torch.stack([loss_sum.float(), count.to(loss_sum.device, torch.float32)]), sp_axis)
        return both[0] / both[1]
    full = all_reduce(loss_sum.float(), sp_axis)
    return full / (num_items.to(full.device) if isinstance(num_items, torch.Tensor) else num_items)


class ModelLoss:
    """Replacement for `model.loss_function`: the mean loss over the tokens of all sp ranks.

    It takes the arguments that transformers passes. The code that shards the model sets the attributes.

    Attributes:
        sp_axis: axis over which sequences are sharded.
        vocabulary: the sharded vocabulary, if logits may cover only this rank's part; else None.
        shifts_labels: True if the loss of a token uses the label of the next token.
        calls: number of calls so far.
    """

    def __init__(self, *, shifts_labels: bool = True, unsupported_reason: str | None = None) -> None:
        self.sp_axis: MeshAxis = single_rank_axis("sp")
        self.vocabulary: VocabParallelLogits | None = None
        self.shifts_labels = shifts_labels
        self._unsupported_reason = unsupported_reason
        self.calls = 0
        self._labels: torch.Tensor | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelLoss:
        return self  # hooks that set the labels refer to this object, and process groups cannot be copied

    @contextmanager
    def with_labels(self, labels: torch.Tensor | None) -> Iterator[None]:
        """Use `labels`, already shifted where necessary, instead of the labels of the call inside this context. None:
        use the labels of the call.
        """
        before, self._labels = self._labels, labels
        try:
            yield
        finally:
            self._labels = before

    def __call__(
        self,
        logits: torch.Tensor | SupportsSummedLoss,
        labels: torch.Tensor | None = None,
        vocab_size: int | None = None,
        num_items_in_batch: torch.Tensor | float | None = None,
        ignore_index: int = IGNORE_INDEX,
        shift_labels: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Compute the loss of `logits` `[samples, tokens, vocabulary]`. Collective along `sp_axis`.

        Args:
            labels: `[samples, tokens]`; shifted here if the model type requires it.
            shift_labels: labels that are already shifted; they take precedence over `labels`.
            num_items_in_batch: number of labels on all sp ranks together, used as divisor; None: counted here.

        Raises:
            ModelError: there are no labels, or the model's loss is not computed per token.
        """
        self.calls += 1
        target = self._labels if self._labels is not None else shift_labels
        if target is None:
            if labels is None:
                raise ModelError("the loss needs labels; pass labels=, or shift_labels=")
            target = shift_targets(labels, ignore_index) if self.shifts_labels else labels
        target = target.to(logits.device) if isinstance(logits, torch.Tensor) else target
        count = (target != ignore_index).sum()
        if isinstance(logits, torch.Tensor):
            flat = logits.reshape(-1, logits.shape[-1])
            summed = self._token_losses(flat, target.reshape(-1), ignore_index=ignore_index).sum()
        else:
            summed = logits.summed_loss(target, self._token_losses, ignore_index)
        return compute_sequence_mean(summed, count, self.sp_axis, num_items_in_batch)

    def _token_losses(self, logits: torch.Tensor, labels: torch.Tensor, *, ignore_index: int) -> torch.Tensor:
        if self._unsupported_reason is not None:
            raise ModelError(self._unsupported_reason)
        if self.vocabulary is not None and self.vocabulary.is_local_shard(logits):
            return self.vocabulary.token_losses(logits, labels, ignore_index=ignore_index)
        return cross_entropy_per_token(logits, labels, ignore_index=ignore_index)


def install_loss(model: Any, vocabulary: VocabParallelLogits | None = None) -> ModelLoss:
    """Set the loss function of a transformers model to a `ModelLoss`, or return the one that is already set.

    Args:
        vocabulary: the sharded vocabulary, if logits may cover only this rank's part. Then a custom loss function is
            replaced, too.

    Raises:
        ModelError: the model has a custom loss function, and `vocabulary` is None.
    """
    found = getattr(model, "_loss_function", None)
    if found is not None and not isinstance(found, ModelLoss) and vocabulary is None:
        raise ModelError(
            f"{type(model).__name__} has a loss function of its own ({_function_name(found)}), which would receive "
            "only a part of the tokens; delete model.loss_function, or compute the loss from the logits that the "
            "model returns without labels"
        )
    loss = found if isinstance(found, ModelLoss) else _build_loss(model)
    loss.vocabulary = vocabulary if vocabulary is not None else loss.vocabulary
    model.loss_function = loss
    return loss


def _build_loss(model: Any) -> ModelLoss:
    name, kind = type(model).__name__, getattr(model, "loss_type", None)
    shifts: dict[str | None, bool] = {"ForCausalLM": True, None: True, "ForMaskedLM": False}
    if kind in shifts:
        return ModelLoss(shifts_labels=shifts[kind])
    return ModelLoss(
        unsupported_reason=f"the loss of {name} ({kind}) is not computed per token and cannot be summed over ranks; "
        "call the model without labels and compute the loss from its outputs"
    )


def _function_name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", type(function).__name__)
