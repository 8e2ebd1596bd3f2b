"""The loss of a language model whose tokens lie on several ranks: of the whole sequence, on every rank."""

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
"""The label of tokens that have no loss."""


class TokenLossFunction(Protocol):
    """The loss of each token.

    Args:
        logits: `[tokens, vocabulary]`, or this rank's part of the vocabulary.
        labels: `[tokens]`.

    Returns:
        `[tokens]`, in fp32; 0 where the label is `ignore_index`.
    """

    def __call__(self, logits: torch.Tensor, labels: torch.Tensor, *, ignore_index: int) -> torch.Tensor: ...


class VocabParallelLogits(Protocol):
    """A vocabulary that is cut over ranks, whose logits may come whole or as this rank's part."""

    def is_local_shard(self, logits: torch.Tensor) -> bool:
        """Whether these logits are this rank's part."""
        ...

    def token_losses(self, logits: torch.Tensor, labels: torch.Tensor, *, ignore_index: int) -> torch.Tensor:
        """As `TokenLosses`, of this rank's part."""
        ...


class SupportsSummedLoss(Protocol):
    """Logits that are computed where their loss is, a part at a time."""

    def summed_loss(self, labels: torch.Tensor, loss_function: TokenLossFunction, ignore_index: int) -> torch.Tensor:
        """The sum of the losses of all tokens."""
        ...


def cross_entropy_per_token(
    logits: torch.Tensor, labels: torch.Tensor, *, ignore_index: int = IGNORE_INDEX
) -> torch.Tensor:
    """Cross entropy of each token, of the logits `[tokens, vocabulary]` of the whole vocabulary."""
    return functional.cross_entropy(logits.float(), labels, ignore_index=ignore_index, reduction="none")


def shift_targets(labels: torch.Tensor, ignore_index: int = IGNORE_INDEX) -> torch.Tensor:
    """For each token of `[samples, tokens]` the label of the next one; the last has none."""
    return functional.pad(labels, (0, 1), value=ignore_index)[..., 1:].contiguous()


def compute_sequence_mean(
    loss_sum: torch.Tensor, count: torch.Tensor, sp_axis: MeshAxis, num_items: torch.Tensor | float | None = None
) -> torch.Tensor:
    """The loss of the whole sequence from the sum over this rank's tokens; the same on all ranks of sp. Collective.

    Its backward adds up what all ranks of sp descend, so that the mean of gradients over them is that of this loss.

    Args:
        summed: of the losses of the tokens of this rank.
        count: how many of them have one. Ranks may have unequal counts, or none.
        items: divide by this number instead of the count of all ranks (several micro-batches have one mean).

    Returns:
        A scalar; nan where no token of any rank has a loss, as of torch's mean.
    """
    if num_items is None:
        both = all_reduce(torch.stack([loss_sum.float(), count.to(loss_sum.device, torch.float32)]), sp_axis)
        return both[0] / both[1]
    whole = all_reduce(loss_sum.float(), sp_axis)
    return whole / (num_items.to(whole.device) if isinstance(num_items, torch.Tensor) else num_items)


class ModelLoss:
    """What `model.loss_function` is set to: the mean loss over all tokens of all ranks of sp.

    Takes what transformers passes. Parts of it are given by who cuts the model: `sp`, the axis over which sequences are
    cut; `vocabulary`, where logits may be a rank's part of it; `shifts`, whether a token's label is that of the next.
    """

    def __init__(self, *, shifts_labels: bool = True, unsupported_reason: str | None = None) -> None:
        self.sp_axis: MeshAxis = single_rank_axis("sp")
        self.vocabulary: VocabParallelLogits | None = None
        self.shifts_labels = shifts_labels
        self._unsupported_reason = unsupported_reason
        self.calls = 0
        self._labels: torch.Tensor | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelLoss:
        return self  # as are the hooks that tell it labels; process groups can't be copied

    @contextmanager
    def with_labels(self, labels: torch.Tensor | None) -> Iterator[None]:
        """Inside, the labels of this rank's tokens are these, shifted where they have to be; None: as passed."""
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
        """The loss of `logits` `[samples, tokens, vocabulary]`.

        Args:
            labels: `[samples, tokens]`; the label of each token, which is shifted here where the model does that.
            shift_labels: the same, shifted already; goes before `labels`.
            num_items_in_batch: divide by this instead of the count of labels; of all ranks of sp together.

        Raises:
            ModelError: there are no labels.
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
    """Make the loss function of a transformers model a `ModelLoss`, or find the one that it is.

    Args:
        vocabulary: where logits may be this rank's part of it; takes the place of any loss function that knew of it.

    Raises:
        ModelError: the model has a loss function that somebody set.
    """
    found = getattr(model, "_loss_function", None)
    if found is not None and not isinstance(found, ModelLoss) and vocabulary is None:
        raise ModelError(
            f"{type(model).__name__} has a loss function of its own ({_function_name(found)}), which would see a part of the "
            "tokens alone; delete model.loss_function, or compute the loss from the logits that the model returns "
            "without labels"
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
        unsupported_reason=f"the loss of {name} ({kind}) is not one of tokens and can't be added up over ranks; call the model "
        "without labels and compute it from what comes back"
    )


def _function_name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", type(function).__name__)
