"""Sequence parallelism for an unmodified transformers model.

Hooks shard the inputs before the forward. Attention and loss are those of full sequences.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn

from windlass.attention.transformers_dispatch import install_attention
from windlass.base.errors import ModelError
from windlass.comm.mesh_axis import MeshAxis
from windlass.parallel.sequence.attention_dropout import combine_seeds, has_attention_dropout
from windlass.parallel.sequence.batch_sharding import SHARD_KEY, mark_sharded_batch, shard_batch
from windlass.parallel.sequence.position_ids import DerivePositions, find_position_derivation
from windlass.parallel.sequence.sequence_backend import number_layers, use_shard
from windlass.parallel.sequence.sequence_router_loss import install_sequence_router_loss
from windlass.parallel.sequence.sequence_shard import SequenceShard
from windlass.parallel.sequence.sequence_sharding import SequenceShardPattern
from windlass.parallel.sequence.sequence_support import check_sequence_support, resolve_ulysses_degree, unwrap_peft
from windlass.parallel.sequence_loss import ModelLoss, install_loss
from windlass.parallel.tensor.output_head_sharding import get_sharded_vocabulary

GATHERED_OUTPUTS = ("logits", "last_hidden_state", "start_logits", "end_logits")
"""Outputs `[samples, tokens, ...]` that are all-gathered if the caller passed full sequences without labels."""


@dataclass
class _ForwardCall:
    """State of a running forward: its shard, and the contexts that end with it."""

    shard: SequenceShard
    has_labels: bool
    loss_calls: int
    exit_stack: ExitStack = field(default_factory=ExitStack)


class SequenceParallel:
    """Forward hooks that shard the inputs of one model and all-gather its outputs.

    Attributes:
        axis: the mesh axis sp.
        pattern: distribution of the tokens over the ranks.
        loss: loss function of the model, over the tokens of all ranks.
        pre_sharded: True if batches contain this rank's tokens only.
        only_training: True if every rank computes full sequences in eval mode.
        derive: function that derives the model's positions from ids or masks; None if the model counts tokens from 0.
    """

    def __init__(
        self,
        model: Any,
        axis: MeshAxis,
        pattern: SequenceShardPattern,
        loss: ModelLoss,
        *,
        pre_sharded: bool,
        only_training: bool,
        rng_stream: int,
    ) -> None:
        self.axis, self.pattern, self.loss = axis, pattern, loss
        self.pre_sharded, self.only_training, self._rng_stream = pre_sharded, only_training, rng_stream
        signature = inspect.signature(model.forward).parameters
        self._argument_names = [name for name, one in signature.items() if one.kind is not one.VAR_KEYWORD]
        self._accepts_kwargs = len(self._argument_names) < len(signature)
        self.derive = find_position_derivation(model)
        self._active_calls: list[_ForwardCall | None] = []  # None: a forward on full sequences
        self._has_dropout = has_attention_dropout(model)

    def __deepcopy__(self, memo: dict[int, Any]) -> SequenceParallel:
        return self  # process groups cannot be copied; between forwards there is no other state

    def shard_batch(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return this rank's part of a batch, with its `SequenceShard` under `SHARD_KEY`.

        A batch that has the key already is returned unchanged. The hooks of the model accept the result. A forward
        without these hooks must run inside `use_shard(batch.pop(SHARD_KEY))`.

        Raises:
            ModelError: the batch cannot be sharded.
        """
        if SHARD_KEY in batch:
            return batch
        if self.pre_sharded:
            return mark_sharded_batch(batch, self.axis, self.pattern.ulysses_degree, derive=self.derive)
        return shard_batch(
            batch, self.pattern, self.axis, shifts_labels=self.loss.shifts_labels, derive_positions=self.derive
        )

    def pre_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        """Shard the inputs. Registered as a forward pre-hook.

        Raises:
            ModelError: the arguments cannot be sharded, or request outputs that need all tokens.
        """
        self._active_calls.append(None)
        if len(args) > len(self._argument_names):
            takes = len(self._argument_names)
            raise ModelError(
                f"{type(module).__name__} got {len(args)} positional arguments, but its forward takes {takes}; pass "
                "only those"
            )
        batch = {**dict(zip(self._argument_names, args, strict=False)), **kwargs}
        if _is_generating(batch) or (self.only_training and not module.training):
            return None  # every rank computes full sequences
        _check_requested_outputs(module, batch)
        batch = self.shard_batch(batch)
        share: SequenceShard = batch.pop(SHARD_KEY)
        if module.training and self._has_dropout and share.dropout_seed is None:
            share.dropout_seed = self._shared_seed(batch)
        # Without a mask, transformers would take jumps in this rank's positions for boundaries of packed documents.
        if batch.get("attention_mask") is None:
            ids = batch["input_ids"] if batch.get("input_ids") is not None else batch["inputs_embeds"]
            batch["attention_mask"] = torch.ones(ids.shape[:2], dtype=torch.long, device=ids.device)
        if "use_cache" in self._argument_names:
            batch["use_cache"] = False
        call = _ForwardCall(share, batch.get("labels") is not None, self.loss.calls)
        given = batch.get("shift_labels") if batch.get("shift_labels") is not None else batch.get("labels")
        if not self._accepts_kwargs:
            batch.pop("shift_labels", None)
        # Store the call before the contexts are entered: post_forward exits them, also after an error.
        self._active_calls[-1] = call
        call.exit_stack.enter_context(use_shard(share))
        call.exit_stack.enter_context(self.loss.with_labels(given))
        return (), batch

    def _shared_seed(self, batch: dict[str, Any]) -> int:
        """Return a seed, equal on all ranks along sp, from a number that the first rank draws. Collective."""
        device = next(value.device for value in batch.values() if isinstance(value, torch.Tensor))
        own = torch.randint(2**31 - 1, (1,)).to(device)
        return combine_seeds(int(self.axis.all_gather(own)[0]), self._rng_stream)

    def post_forward(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """All-gather the outputs of a forward without labels.

        Registered as a forward hook with `always_call`, so it runs after an error too.

        Raises:
            ModelError: the model computed its loss without `loss_function`.
        """
        call = self._active_calls.pop() if self._active_calls else None
        if call is None:
            return None
        call.exit_stack.close()
        if output is None:  # the forward raised
            return None
        output = _without_pooled_token(output)
        if call.has_labels:
            if self.loss.calls == call.loss_calls and _output_loss(output) is not None:
                raise ModelError(
                    f"{type(module).__name__} computes its loss without model.loss_function, so the loss covers only "
                    "this rank's tokens; call it without labels and compute the loss from its outputs"
                )
            return output
        return self._gather_outputs(call.shard, output) if call.shard.gathers_outputs else output

    def _gather_outputs(self, shard: SequenceShard, output: Any) -> Any:
        def whole(value: Any) -> Any:
            if isinstance(value, torch.Tensor) and value.dim() >= 2 and value.shape[1] == shard.local_tokens:
                return shard.all_gather(value)
            return value

        if isinstance(output, torch.Tensor):
            return whole(output)
        if isinstance(output, tuple):
            return (whole(output[0]), *output[1:])
        for name in GATHERED_OUTPUTS:
            if getattr(output, name, None) is not None:
                setattr(output, name, whole(getattr(output, name)))
        return output


def apply_sequence_parallel(
    model: Any,
    axis: MeshAxis,
    *,
    sp_mode: str = "ulysses",
    ulysses_degree: int | None = None,
    zigzag: bool | None = None,
    pre_sharded: bool = False,
    only_training: bool = False,
    rng_stream: int = 0,
) -> None:
    """Shard the sequences of a causal or bidirectional transformers model over the ranks of `axis`, in place.

    Model and collator need no change: every rank along `axis` calls the model with the same batch of full sequences of
    any length, padded or packed.

    - With labels, the loss is that of full sequences, equal on all ranks; `logits` are those of this rank's tokens. The
      mean over the axis of the parameters' gradients is the gradient of the loss.
    - Without labels, the outputs `GATHERED_OUTPUTS`, such as `logits`, are those of full sequences. The mean over the
      axis of the gradients is then the gradient of a loss that is computed from them. Other outputs (`hidden_states`)
      are those of this rank's tokens, and `pooler_output`, of one token of the sequence, is None.
    - Generation (`past_key_values`, or `logits_to_keep` without labels) computes full sequences on every rank.

    An axis of one rank changes nothing. Apply tensor parallelism before, not after.

    Args:
        axis: the mesh axis sp.
        sp_mode: "ulysses" swaps tokens for heads by all-to-all; "ring" passes keys and values round a ring;
            "ulysses+ring" swaps among `ulysses_degree` neighbouring ranks, and such groups form a ring.
        ulysses_degree: a divisor of the number of ranks. Default: all ranks for "ulysses", 1 for "ring", otherwise the
            largest divisor that also divides the key heads.
        zigzag: on a ring, give each rank one part from each end of the sequence, to balance causal attention. Default:
            True.
        pre_sharded: True if batches contain this rank's tokens only. A batch with `SHARD_KEY` counts as sharded in any
            case.
        only_training: True if every rank computes full sequences in eval mode.
        rng_stream: number of the random stream for dropout. Ranks that compute different heads of the same tokens (tp)
            need different numbers.

    Raises:
        ConfigError: the mode is unknown, or the degree does not divide the number of ranks or contradicts the mode.
        ModelError: the model cannot be sharded along the sequence, or is sharded already.
    """
    if axis.size == 1:
        return
    if sequence_parallel_of(model) is not None:
        raise ModelError(f"sequences of {type(model).__name__} are sharded already; call apply_sequence_parallel once")
    inner = unwrap_peft(model)
    check_sequence_support(inner, axis)
    text = inner.config.get_text_config()
    heads = getattr(text, "num_attention_heads", 1)
    key_heads = getattr(text, "num_key_value_heads", None) or heads
    degree = resolve_ulysses_degree(axis, sp_mode, ulysses_degree, key_heads)
    loss = install_loss(inner, get_sharded_vocabulary(model) or get_sharded_vocabulary(inner))
    loss.sp_axis = axis
    install_sequence_router_loss(inner)
    number_layers(inner)
    install_attention(inner)
    pattern = SequenceShardPattern(axis.size, degree, degree < axis.size and zigzag is not False)
    state = SequenceParallel(
        inner, axis, pattern, loss, pre_sharded=pre_sharded, only_training=only_training, rng_stream=rng_stream
    )
    inner._windlass_sequence = state
    _applied.add(state)
    # The hooks are on peft's wrapper, if there is one: it calls the forward of the inner model without that model's
    # hooks.
    model.register_forward_pre_hook(state.pre_forward, with_kwargs=True)
    model.register_forward_hook(state.post_forward, with_kwargs=True, always_call=True)


_applied: WeakSet[SequenceParallel] = WeakSet()


def derivation_along(group: dist.ProcessGroup) -> DerivePositions | None:
    """Return the function that derives positions for the model whose sequences are sharded over `group`.

    None: the model counts tokens from 0, or no model is sharded over `group`.

    Raises:
        ModelError: several models are sharded over `group`, and they derive positions differently.
    """
    found = {id(one.derive): one.derive for one in _applied if one.axis.group.process_group is group}
    if len(found) > 1:
        raise ModelError(
            "the models whose sequences are sharded over these ranks derive positions in different ways; pass "
            "position_ids in the batches"
        )
    return next(iter(found.values()), None)


def sequence_parallel_of(model: Any) -> SequenceParallel | None:
    """Return the `SequenceParallel` of `model`; None if its sequences are not sharded."""
    found = getattr(unwrap_peft(model), "_windlass_sequence", None)
    return found if isinstance(found, SequenceParallel) else None


def _without_pooled_token(output: Any) -> Any:
    """Return a model's output without `pooler_output`: this rank computed it from its own first token, which may not be
    the first token of the sequence."""
    if not isinstance(output, Mapping) or output.get("pooler_output") is None:
        return output
    return type(output)(**{name: value for name, value in output.items() if name != "pooler_output"})


def _output_loss(output: Any) -> torch.Tensor | None:
    """Return `output.loss`, or the first element of a tuple; None if that is not a scalar tensor."""
    found = output[0] if isinstance(output, tuple) and output else getattr(output, "loss", None)
    return found if isinstance(found, torch.Tensor) and found.dim() == 0 else None


def _is_generating(batch: dict[str, Any]) -> bool:
    """Return True if the call continues a cache, or requests the logits of some tokens without a loss."""
    return batch.get("past_key_values") is not None or (_keeps_some_logits(batch) and batch.get("labels") is None)


def _keeps_some_logits(batch: dict[str, Any]) -> bool:
    keep = batch.get("logits_to_keep")
    return isinstance(keep, torch.Tensor) or bool(keep)


def _check_requested_outputs(module: nn.Module, batch: dict[str, Any]) -> None:
    name = type(module).__name__
    if batch.get("output_attentions"):
        raise ModelError(
            f"{name} got output_attentions, but with sequence parallelism no rank has the weights; leave it out"
        )
    if _keeps_some_logits(batch):
        raise ModelError(f"{name} got logits_to_keep, but the logits of these tokens lie on other ranks; leave it out")
