"""The layer that makes logits, cut by tokens of the vocabulary, and the loss that takes them as they are."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from windlass.comm.mesh_axis import MeshAxis
from windlass.parallel.autograd_collectives import copy_to_parallel_region, gather_from_parallel_region
from windlass.parallel.sequence_loss import install_loss
from windlass.parallel.tensor.contiguous_non_view import as_contiguous_non_view
from windlass.parallel.tensor.find_language_model import find_language_model
from windlass.parallel.tensor.linear_layers import LinearLayer
from windlass.parallel.tensor.rank_ranges import count_rank_elements
from windlass.parallel.tensor.tensor_parallel_plan import ModuleShard
from windlass.parallel.tensor.vocab_parallel_cross_entropy import vocab_parallel_cross_entropy


class ShardedVocabulary:
    """A vocabulary that is cut over an axis, and what becomes of the logits that a head makes of it.

    Attributes:
        axis: that it is cut over.
        sizes: tokens of each rank.
        kept: logits stay cut in the forward that runs now; else they are put together as soon as they are made.
    """

    def __init__(self, axis: MeshAxis, sizes: list[int]) -> None:
        self.axis, self.sizes, self.keeps_logits_sharded = axis, sizes, False

    def is_local_shard(self, logits: torch.Tensor) -> bool:
        """Whether these logits are this rank's part."""
        return self.axis.size > 1 and logits.shape[-1] == self.sizes[self.axis.index]

    def gather_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """All ranks' logits, end to end, for computing the same of them on every rank."""
        return as_contiguous_non_view(gather_from_parallel_region(logits, self.axis, -1, self.sizes))

    def token_losses(self, logits: torch.Tensor, labels: torch.Tensor, *, ignore_index: int = -100) -> torch.Tensor:
        """The cross-entropy of each token, `[tokens]`, of this rank's part of the logits."""
        return vocab_parallel_cross_entropy(logits, labels, self.axis, sizes=self.sizes, ignore_index=ignore_index)


_vocabularies: WeakIdKeyDictionary = WeakIdKeyDictionary()


def get_sharded_vocabulary(model: nn.Module) -> ShardedVocabulary | None:
    """How the logits of a model are cut; None: they are whole."""
    found: ShardedVocabulary | None = _vocabularies.get(model)
    return found


@contextmanager
def keep_logits_sharded(model: nn.Module) -> Iterator[None]:
    """Inside, the model's head leaves logits cut, for who computes the loss outside of the model's forward."""
    vocabulary = get_sharded_vocabulary(model)
    if vocabulary is None:
        yield
        return
    before, vocabulary.keeps_logits_sharded = vocabulary.keeps_logits_sharded, True
    try:
        yield
    finally:
        vocabulary.keeps_logits_sharded = before


def shard_output_head(layer: LinearLayer, shard: ModuleShard, axis: MeshAxis, model: nn.Module) -> None:
    """Have a layer whose weight is cut make this rank's logits.

    Logits are put together at once, so that all that follows sees them whole, unless the model is trained and given
    labels, and its own forward hands both to `loss_function`, as causal LMs of transformers do: then they stay cut, and
    the loss is computed of the parts. (`.logits` of what such a forward returns is this rank's part.)
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
    """Before the head: hidden states enter."""

    def __init__(self, vocabulary: ShardedVocabulary) -> None:
        self._vocabulary = vocabulary

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return copy_to_parallel_region(args[0], self._vocabulary.axis), *args[1:]


class OutputHeadGatherHook:
    """After the head: logits are put together, unless they are to stay cut."""

    def __init__(self, vocabulary: ShardedVocabulary) -> None:
        self._vocabulary = vocabulary

    def __call__(self, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output if self._vocabulary.keeps_logits_sharded else self._vocabulary.gather_logits(output)


class LabelledForwardHook:
    """Before and after a model's forward: logits stay cut where it trains on labels."""

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
    """The model's forward hands logits to `loss_function`, and that is the one of causal language models."""
    code = getattr(inspect.unwrap(type(model).forward), "__code__", None)
    if code is None or "loss_function" not in code.co_names or "CrossEntropyLoss" in code.co_names:
        return False
    loss: Any = getattr(model, "loss_function", None)
    return getattr(loss, "__name__", "") == "ForCausalLMLoss"
