"""Sequence parallelism of an unmodified model of transformers: its inputs are cut before its forward, and its attention
and its loss are those of whole sequences."""

from __future__ import annotations

import inspect
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn

from windlass.base.errors import ModelError
from windlass.comm.axis import Axis
from windlass.parallel.loss import ModelLoss, install_loss
from windlass.parallel.sequence.batch import MARK, share_given, share_of
from windlass.parallel.sequence.cut import Pattern
from windlass.parallel.sequence.dropout import drops, seed_of
from windlass.parallel.sequence.positions import Derive, derived_positions
from windlass.parallel.sequence.refusals import check_model, pattern_sizes
from windlass.parallel.sequence.routers import balance_whole_sequences
from windlass.parallel.sequence.seam import NAME, number_layers, register, unwrapped
from windlass.parallel.sequence.share import Share, sharing
from windlass.parallel.tensor.head import vocabulary_of

GATHERED = ("logits", "last_hidden_state")
"""Outputs `[samples, tokens, ...]` that come whole where a batch came whole and without labels."""


@dataclass
class _Call:
    """A forward that runs: its share, and what ends with it."""

    share: Share
    labelled: bool
    losses: int
    ends: ExitStack = field(default_factory=ExitStack)


class SequenceParallel:
    """Cuts the inputs of one model, and puts its outputs together.

    Attributes:
        axis: sp.
        given: batches come as this rank's part.
        only_training: in eval mode the model runs whole on every rank.
        pattern: how sequences are cut.
        derive: how the model derives positions; None where it counts from 0.
    """

    def __init__(
        self, model: Any, axis: Axis, pattern: Pattern, loss: ModelLoss, *, given: bool, trains: bool, stream: int
    ) -> None:
        self.axis, self.pattern, self.loss = axis, pattern, loss
        self.given, self.only_training, self._stream = given, trains, stream
        signature = inspect.signature(model.forward).parameters
        self._names = [name for name, one in signature.items() if one.kind is not one.VAR_KEYWORD]
        self._takes_anything = len(self._names) < len(signature)
        self.derive = derived_positions(model)
        self._calls: list[_Call | None] = []  # None: a forward on whole sequences
        self._drops = drops(model)

    def __deepcopy__(self, memo: dict[int, Any]) -> SequenceParallel:
        return self  # process groups are not copied; what runs now is empty between forwards

    def share(self, batch: dict[str, Any]) -> dict[str, Any]:
        """This rank's part of a batch, marked with its `Share`; as it is if it was marked before.

        For a forward that is not the model's own (a stage of a pipeline): run it inside `sharing(batch.pop(MARK))`.

        Raises:
            ModelError: it can't be cut.
        """
        if MARK in batch:
            return batch
        if self.given:
            return share_given(batch, self.axis, self.pattern.ulysses, derive=self.derive)
        return share_of(batch, self.pattern, self.axis, shifts=self.loss.shifts, derive=self.derive)

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        """Cut the inputs (a forward pre-hook)."""
        self._calls.append(None)
        if len(args) > len(self._names):
            takes = len(self._names)
            raise ModelError(f"{type(module).__name__} got {len(args)} positional arguments and takes {takes}")
        batch = {**dict(zip(self._names, args, strict=False)), **kwargs}
        if _generates(batch) or (self.only_training and not module.training):
            return None  # whole sequences, on every rank alike
        _check_asked(module, batch)
        batch = self.share(batch)
        share: Share = batch.pop(MARK)
        if module.training and self._drops and share.seed is None:
            share.seed = self._drawn(batch)
        if batch.get("attention_mask") is None:  # else transformers would look for documents in a part of the positions
            ids = batch["input_ids"] if batch.get("input_ids") is not None else batch["inputs_embeds"]
            batch["attention_mask"] = torch.ones(ids.shape[:2], dtype=torch.long, device=ids.device)
        if "use_cache" in self._names:
            batch["use_cache"] = False
        call = _Call(share, batch.get("labels") is not None, self.loss.calls)
        given = batch.get("shift_labels") if batch.get("shift_labels") is not None else batch.get("labels")
        if not self._takes_anything:
            batch.pop("shift_labels", None)
        call.ends.enter_context(sharing(share))
        call.ends.enter_context(self.loss.labelled(given))
        self._calls[-1] = call
        return (), batch

    def _drawn(self, batch: dict[str, Any]) -> int:
        """A seed that ranks along sp have in common, of this rank's state of random numbers. Collective."""
        device = next(value.device for value in batch.values() if isinstance(value, torch.Tensor))
        own = torch.randint(2**31 - 1, (1,)).to(device)
        return seed_of(int(self.axis.all_gather(own)[0]), self._stream)

    def after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """Put outputs together (a forward hook that is always called)."""
        call = self._calls.pop() if self._calls else None
        if call is None:
            return None
        call.ends.close()
        if output is None:  # it failed
            return None
        if call.labelled:
            if self.loss.calls == call.losses and _loss_of(output) is not None:
                raise ModelError(
                    f"{type(module).__name__} computes its loss without model.loss_function, so it is that of this "
                    "rank's tokens alone; call it without labels and compute the loss from what comes back"
                )
            return None
        return self._gathered(call.share, output) if call.share.whole else None

    def _gathered(self, share: Share, output: Any) -> Any:
        def whole(value: Any) -> Any:
            if isinstance(value, torch.Tensor) and value.dim() >= 2 and value.shape[1] == share.tokens:
                return share.gathered(value)
            return value

        if isinstance(output, torch.Tensor):
            return whole(output)
        if isinstance(output, tuple):
            return (whole(output[0]), *output[1:])
        for name in GATHERED:
            if getattr(output, name, None) is not None:
                setattr(output, name, whole(getattr(output, name)))
        return output


def apply_sequence_parallel(
    model: Any,
    axis: Axis,
    *,
    kind: str = "ulysses",
    ulysses_degree: int | None = None,
    balanced: bool | None = None,
    given: bool = False,
    only_training: bool = False,
    stream: int = 0,
) -> None:
    """Cut the sequences that a causal (or bidirectional) model of transformers computes over the ranks of `axis`.

    Model and collator stay as they are: every rank along `axis` calls the model with the same whole batch, of any
    length, padded or packed. With labels the loss is that of whole sequences, the same on all ranks, and `logits` are
    those of this rank's tokens; gradients of parameters are then parts whose mean over the axis is that of the loss.
    Without labels `logits` and `last_hidden_state` are whole, and a loss computed of them counts in the same way. Other
    outputs (`hidden_states`) are of this rank's tokens. Generation (`past_key_values`, or `logits_to_keep` without
    labels) runs whole on every rank. On an axis of one rank nothing changes. A model may be cut over tp before, but
    not after.

    Args:
        axis: sp.
        kind: "ulysses" swaps tokens for heads, "ring" passes keys and values round, "ulysses+ring" does the first among
            `ulysses_degree` neighbours and the second between them.
        ulysses_degree: divides the ranks of the axis; by default as many as keys' heads can be dealt out to.
        balanced: on a ring, whether each rank has a part from either end of the sequence; by default yes.
        given: batches come as this rank's part already (marked ones may always do).
        only_training: in eval mode the model runs whole on every rank.
        stream: of random numbers: ranks that compute other heads of the same tokens (tp) have another one each.

    Raises:
        ConfigError: the kind is unknown, or the degree does not divide the axis.
        ModelError: the model can't be cut so; says why.
    """
    if axis.size == 1:
        return
    if sequence_parallel_of(model) is not None:
        raise ModelError(f"sequences of {type(model).__name__} are cut already")
    inner = unwrapped(model)
    check_model(inner, axis)
    text = inner.config.get_text_config()
    heads = getattr(text, "num_attention_heads", 1)
    key_heads = getattr(text, "num_key_value_heads", None) or heads
    degree = pattern_sizes(axis, kind, ulysses_degree, key_heads)
    loss = install_loss(inner, vocabulary_of(model) or vocabulary_of(inner))
    loss.sp = axis
    balance_whole_sequences(inner)
    register()
    number_layers(inner)
    inner.set_attn_implementation(NAME)
    pattern = Pattern(axis.size, degree, degree < axis.size and balanced is not False)
    state = SequenceParallel(inner, axis, pattern, loss, given=given, trains=only_training, stream=stream)
    inner._windlass_sequence = state
    _applied.add(state)
    model.register_forward_pre_hook(state.before, with_kwargs=True)  # peft calls what it wraps without hooks
    model.register_forward_hook(state.after, with_kwargs=True, always_call=True)


_applied: WeakSet[SequenceParallel] = WeakSet()


def derivation_along(group: dist.ProcessGroup) -> Derive | None:
    """How the model whose sequences are cut over `group` derives positions; None where it counts from 0.

    Raises:
        ModelError: several models do, in ways of their own.
    """
    found = {id(one.derive): one.derive for one in _applied if one.axis.group.process_group is group}
    if len(found) > 1:
        raise ModelError(
            "the models whose sequences are cut over these ranks derive positions in different ways; give the batches "
            "position_ids"
        )
    return next(iter(found.values()), None)


def sequence_parallel_of(model: Any) -> SequenceParallel | None:
    """What cuts the sequences of `model`; None where nothing does."""
    found = getattr(unwrapped(model), "_windlass_sequence", None)
    return found if isinstance(found, SequenceParallel) else None


def _loss_of(output: Any) -> torch.Tensor | None:
    """The loss in what a model returned; a tuple has it first."""
    found = output[0] if isinstance(output, tuple) and output else getattr(output, "loss", None)
    return found if isinstance(found, torch.Tensor) and found.dim() == 0 else None


def _generates(batch: dict[str, Any]) -> bool:
    """Whether a cache goes on, or the next token alone is asked for."""
    return batch.get("past_key_values") is not None or (_keeps_some(batch) and batch.get("labels") is None)


def _keeps_some(batch: dict[str, Any]) -> bool:
    keep = batch.get("logits_to_keep")
    return isinstance(keep, torch.Tensor) or bool(keep)


def _check_asked(module: nn.Module, batch: dict[str, Any]) -> None:
    name = type(module).__name__
    if batch.get("output_attentions"):
        raise ModelError(f"{name} is asked for attention weights (output_attentions), which no rank has")
    if _keeps_some(batch):
        raise ModelError(
            f"{name} is asked for the logits of some tokens (logits_to_keep), which lie on other ranks; leave it out"
        )
