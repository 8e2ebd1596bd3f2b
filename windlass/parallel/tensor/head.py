"""The layer that makes logits, cut by tokens of the vocabulary, and the loss that takes them as they are."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from windlass.comm.axis import Axis
from windlass.parallel.exchanges import enter, show
from windlass.parallel.loss import install_loss
from windlass.parallel.tensor.cross_entropy import token_losses
from windlass.parallel.tensor.inner import language_model
from windlass.parallel.tensor.linear_layers import Linear
from windlass.parallel.tensor.owned import owned
from windlass.parallel.tensor.plan import Cut
from windlass.parallel.tensor.shares import lengths


class CutVocabulary:
    """A vocabulary that is cut over an axis, and what becomes of the logits that a head makes of it.

    Attributes:
        axis: that it is cut over.
        sizes: tokens of each rank.
        kept: logits stay cut in the forward that runs now; else they are put together as soon as they are made.
    """

    def __init__(self, axis: Axis, sizes: list[int]) -> None:
        self.axis, self.sizes, self.kept = axis, sizes, False

    def is_part(self, logits: torch.Tensor) -> bool:
        """Whether these logits are this rank's part."""
        return self.axis.size > 1 and logits.shape[-1] == self.sizes[self.axis.index]

    def whole(self, logits: torch.Tensor) -> torch.Tensor:
        """All ranks' logits, end to end, for computing the same of them on every rank."""
        return owned(show(logits, self.axis, -1, self.sizes))

    def losses(self, logits: torch.Tensor, labels: torch.Tensor, *, ignore_index: int = -100) -> torch.Tensor:
        """The cross-entropy of each token, `[tokens]`, of this rank's part of the logits."""
        return token_losses(logits, labels, self.axis, sizes=self.sizes, ignore_index=ignore_index)


_vocabularies: WeakIdKeyDictionary = WeakIdKeyDictionary()


def vocabulary_of(model: nn.Module) -> CutVocabulary | None:
    """How the logits of a model are cut; None: they are whole."""
    found: CutVocabulary | None = _vocabularies.get(model)
    return found


@contextmanager
def cut_logits(model: nn.Module) -> Iterator[None]:
    """Inside, the model's head leaves logits cut, for who computes the loss outside of the model's forward."""
    vocabulary = vocabulary_of(model)
    if vocabulary is None:
        yield
        return
    before, vocabulary.kept = vocabulary.kept, True
    try:
        yield
    finally:
        vocabulary.kept = before


def adapt_head(layer: Linear, cut: Cut, axis: Axis, model: nn.Module) -> None:
    """Have a layer whose weight is cut make this rank's logits.

    Logits are put together at once, so that all that follows sees them whole, unless the model is trained and given
    labels, and its own forward hands both to `loss_function`, as causal LMs of transformers do: then they stay cut, and
    the loss is computed of the parts. (`.logits` of what such a forward returns is this rank's part.)
    """
    sizes = lengths(cut.shares)
    for name in ("out_features", "nf"):
        if hasattr(layer.module, name):
            setattr(layer.module, name, sizes[axis.index])
    vocabulary = CutVocabulary(axis, sizes)
    layer.module.register_forward_pre_hook(HeadInput(vocabulary))
    layer.module.register_forward_hook(HeadOutput(vocabulary))
    _, inner = language_model(model)
    _vocabularies[model] = _vocabularies[inner] = vocabulary
    if _hands_over(inner):
        install_loss(inner, vocabulary)
        labelled = Labelled(vocabulary)
        inner.register_forward_pre_hook(labelled.before, with_kwargs=True)
        inner.register_forward_hook(labelled.after, always_call=True)


class HeadInput:
    """Before the head: hidden states enter."""

    def __init__(self, vocabulary: CutVocabulary) -> None:
        self._vocabulary = vocabulary

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return enter(args[0], self._vocabulary.axis), *args[1:]


class HeadOutput:
    """After the head: logits are put together, unless they are to stay cut."""

    def __init__(self, vocabulary: CutVocabulary) -> None:
        self._vocabulary = vocabulary

    def __call__(self, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output if self._vocabulary.kept else self._vocabulary.whole(output)


class Labelled:
    """Before and after a model's forward: logits stay cut where it trains on labels."""

    def __init__(self, vocabulary: CutVocabulary) -> None:
        self._vocabulary = vocabulary
        self._before: list[bool] = []

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        labels = kwargs.get("labels")
        if labels is None and args:
            labels = inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments.get("labels")
        self._before.append(self._vocabulary.kept)
        self._vocabulary.kept |= module.training and labels is not None

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        self._vocabulary.kept = self._before.pop()


def _hands_over(model: nn.Module) -> bool:
    """The model's forward hands logits to `loss_function`, and that is the one of causal language models."""
    code = getattr(inspect.unwrap(type(model).forward), "__code__", None)
    if code is None or "loss_function" not in code.co_names or "CrossEntropyLoss" in code.co_names:
        return False
    loss: Any = getattr(model, "loss_function", None)
    return getattr(loss, "__name__", "") == "ForCausalLMLoss"
