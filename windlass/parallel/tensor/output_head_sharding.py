"""Output head sharded along the vocabulary, and the loss on sharded logits."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from windlass.comm.mesh_axis import MeshAxis
from windlass.parallel.autograd_collectives import copy_to_parallel_region, gather_from_parallel_region
from windlass.parallel.hidden_states import get_input
from windlass.parallel.sequence_loss import install_loss
from windlass.parallel.tensor.contiguous_non_view import as_contiguous_non_view
from windlass.parallel.tensor.find_language_model import find_language_model
from windlass.parallel.tensor.linear_layers import LinearLayer
from windlass.parallel.tensor.rank_ranges import count_rank_elements
from windlass.parallel.tensor.tensor_parallel_plan import ModuleShard


def vocab_parallel_cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    axis: MeshAxis,
    *,
    sizes: Sequence[int] | None = None,
    ignore_index: int = -100,
    z_loss: float = 0.0,
) -> torch.Tensor:
    """Compute the loss of each token, equal on all ranks of the axis. Collective.

    Maxima, sums of exponentials and the labels' logits are reduced over the axis: three numbers of 4 bytes per token.
    The gradient needs no communication (Shoeybi et al., Megatron-LM, arXiv:1909.08053, section 3). The computation is
    in fp32. The logits and four numbers per token are saved for the backward.

    Args:
        logits: `[tokens, part of the vocabulary]` of this rank.
        labels: `[tokens]`, indices into the full vocabulary, equal on all ranks.
        axis: mesh axis over which the vocabulary is sharded.
        sizes: size of each rank's part; by default all parts are as large as this rank's.
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
            ((labels >= 0) & (labels < vocabulary) | ~counts).all(),
            "a label is outside the vocabulary and is not ignore_index; check the labels",
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


class ShardedVocabulary:
    """Vocabulary sharded over an axis, and the state of the logits that the head computes.

    Attributes:
        axis: mesh axis over which the vocabulary is sharded.
        sizes: number of vocabulary entries of each rank.
        keeps_logits_sharded: True if logits stay sharded in the current forward; False: the head gathers them.
    """

    def __init__(self, axis: MeshAxis, sizes: list[int]) -> None:
        self.axis, self.sizes, self.keeps_logits_sharded = axis, sizes, False

    def is_local_shard(self, logits: torch.Tensor) -> bool:
        """Return True if these logits are this rank's part."""
        return self.axis.size > 1 and logits.shape[-1] == self.sizes[self.axis.index]

    def gather_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """All-gather the logits, for a computation that is the same on every rank."""
        return as_contiguous_non_view(gather_from_parallel_region(logits, self.axis, -1, self.sizes))

    def token_losses(self, logits: torch.Tensor, labels: torch.Tensor, *, ignore_index: int = -100) -> torch.Tensor:
        """Compute the cross-entropy of each token, `[tokens]`, from this rank's part of the logits."""
        return vocab_parallel_cross_entropy(logits, labels, self.axis, sizes=self.sizes, ignore_index=ignore_index)


_vocabularies: WeakIdKeyDictionary = WeakIdKeyDictionary()


def get_sharded_vocabulary(model: nn.Module) -> ShardedVocabulary | None:
    """Return the sharded vocabulary of a model, or None if its logits are not sharded."""
    found: ShardedVocabulary | None = _vocabularies.get(model)
    return found


def shard_output_head(layer: LinearLayer, shard: ModuleShard, axis: MeshAxis, model: nn.Module) -> None:
    """Make a layer with a sharded weight compute this rank's logits.

    A hook of the layer all-gathers the logits, so that later code receives them in full. The exception is a model in
    training mode with labels whose own forward passes logits and labels to `loss_function`, as causal language models
    of transformers do: the logits stay sharded, and the loss is computed from the parts. The `.logits` that such a
    forward returns are this rank's part.
    """
    sizes = count_rank_elements(shard.rank_ranges)
    for name in ("out_features", "nf"):
        if hasattr(layer.module, name):
            setattr(layer.module, name, sizes[axis.index])
    vocabulary = ShardedVocabulary(axis, sizes)
    layer.module.register_forward_pre_hook(OutputHeadInputHook(vocabulary))
    layer.module.register_forward_hook(OutputHeadGatherHook(vocabulary))
    _, inner = find_language_model(model)
    _vocabularies[model] = _vocabularies[inner] = vocabulary
    if _uses_causal_lm_loss(inner):
        install_loss(inner, vocabulary)
        labelled = LabelledForwardHook(vocabulary)
        inner.register_forward_pre_hook(labelled.pre_forward, with_kwargs=True)
        inner.register_forward_hook(labelled.post_forward, always_call=True)


class OutputHeadInputHook:
    """Pre-forward hook of the head: pass hidden states through `copy_to_parallel_region`."""

    def __init__(self, vocabulary: ShardedVocabulary) -> None:
        self._vocabulary = vocabulary

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return copy_to_parallel_region(get_input(module, args), self._vocabulary.axis), *args[1:]


class OutputHeadGatherHook:
    """Forward hook of the head: gather the logits, unless they stay sharded."""

    def __init__(self, vocabulary: ShardedVocabulary) -> None:
        self._vocabulary = vocabulary

    def __call__(self, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output if self._vocabulary.keeps_logits_sharded else self._vocabulary.gather_logits(output)


class LabelledForwardHook:
    """Hooks around a model's forward that keep the logits sharded if it trains on labels."""

    def __init__(self, vocabulary: ShardedVocabulary) -> None:
        self._vocabulary = vocabulary
        self._saved_flags: list[bool] = []

    def pre_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        labels = kwargs.get("labels")
        if labels is None and args:
            labels = inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments.get("labels")
        self._saved_flags.append(self._vocabulary.keeps_logits_sharded)
        self._vocabulary.keeps_logits_sharded |= module.training and labels is not None

    def post_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        self._vocabulary.keeps_logits_sharded = self._saved_flags.pop()


def _uses_causal_lm_loss(model: nn.Module) -> bool:
    """Return True if the model's forward passes logits to `loss_function`, and that is the loss of causal language
    models.
    """
    code = getattr(inspect.unwrap(type(model).forward), "__code__", None)
    if code is None or "loss_function" not in code.co_names or "CrossEntropyLoss" in code.co_names:
        return False
    loss: Any = getattr(model, "loss_function", None)
    return getattr(loss, "__name__", "") == "ForCausalLMLoss"
