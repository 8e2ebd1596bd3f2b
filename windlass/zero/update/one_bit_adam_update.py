"""Update of `OneBitAdam` at stages 0 to 2.

[Note: 1-bit phase] Until `freeze_step` the engine reduces gradients, and this is the elementwise update of AdamW, bit
for bit. Afterwards the variance is constant and gradients stay on their ranks ([Note: local gradients]), also at stage
2, where a rank then keeps whole gradients.

Stage 0 is the algorithm of the paper (arXiv:2102.02888, algorithm 1): each rank adds its gradient to the common
momentum, `b1 m + (1 - b1) g`, and a compressed all-reduce of two phases with error feedback makes the new common
momentum. All ranks step their replicas of the master weights with it.

At stages 1 and 2 a rank sends the owners of shards its gradient, `(1 - b1) g`, with error feedback. The owner keeps the
momentum of its elements, `b1 m` plus the mean of the messages, and steps its master weights exactly. It sends the
difference between these and the parameters, which all ranks hold alike: the parameters of all ranks move by the decoded
difference, and the rest stays in the next difference, so that it needs no error feedback of its own (DoubleSqueeze,
arXiv:1905.05957; DORE, arXiv:1910.07561, sends such differences). The rounding of 16-bit parameters is a part of it.
`ShardedModel.finish_update` makes parameters equal to the master weights again.

The frozen variance has the bias correction of its last step, and the momentum that of its own. Elements whose frozen
variance is 0 have never had a gradient, and are not updated: the sign of nothing would be divided by eps.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import partial
from typing import Any, ClassVar

import torch

from windlass.comm.rank_group import RankGroup
from windlass.optim.one_bit_adam import count_step, is_frozen
from windlass.zero.core.unit import Unit
from windlass.zero.update.compressed_messages import CompressedMessages, UnitMessage, batches_of, owner_rows
from windlass.zero.update.elementwise_update import ElementwiseUpdate, ParameterSegment
from windlass.zero.update.rank_state import RankState, RelayRule, mean_of_ranks
from windlass.zero.update.update_chunk import UpdateChunk
from windlass.zero.update.update_protocol import UpdateContext

CODEC = "sign"
WORKER_ERROR, SERVER_ERROR = "worker_error", "server_error"


class OneBitAdamUpdate(ElementwiseUpdate):
    """Update of `OneBitAdam`; see [Note: 1-bit phase].

    States beside AdamW's: `variance_steps` (the steps that the variance has seen), and for each rank `worker_error`
    and, at stage 0, `server_error`. They exist from the first compressed step.
    """

    reduces_itself: ClassVar[bool] = True
    keeps_replicas: ClassVar[bool] = True

    def __init__(self, optimizer: torch.optim.Optimizer, context: UpdateContext) -> None:
        super().__init__(optimizer, context)
        self._shards = context.shards_states
        self._messages = CompressedMessages(context.dp_groups[0], CODEC, context.timeout)
        self._errors: dict[str, dict[int, torch.Tensor]] = {}  # by key and unit: flat [padded]
        self._held_errors: tuple[str, ...] = self._error_keys if self.takes_local_gradients else ()
        self._changes: dict[int, torch.Tensor] = {}  # by unit: difference of this rank's span to the parameters

    @property
    def group(self) -> RankGroup:
        """The data-parallel ranks."""
        return self._messages.group

    @property
    def takes_local_gradients(self) -> bool:
        """True in the compressed phase."""
        return is_frozen(self.optimizer)

    @property
    def publishes_itself(self) -> bool:
        """True in the compressed phase of stages 1 and 2."""
        return self._shards and self.group.size > 1 and self.takes_local_gradients

    def run(self, used: dict[int, list[bool]], divisor: float) -> Iterator[list[UpdateChunk]]:
        """See `Update.run`. Collective in the compressed phase."""
        if not self.takes_local_gradients:
            return self._counted(super().run(used, divisor))
        for hook in list(self.optimizer._optimizer_step_pre_hooks.values()):
            hook(self.optimizer, (), {})
        options: dict[int, dict[str, Any]] = {}
        for group in self.optimizer.param_groups:
            given = {key: value for key, value in group.items() if key != "params"}
            options |= {id(parameter): given for parameter in group["params"]}
        return self._counted(self._run_compressed(used, divisor, options))

    def _counted(self, batches: Iterator[list[UpdateChunk]]) -> Iterator[list[UpdateChunk]]:
        yield from batches
        count_step(self.optimizer)

    def _run_compressed(
        self, used: dict[int, list[bool]], divisor: float, options: dict[int, dict[str, Any]]
    ) -> Iterator[list[UpdateChunk]]:
        self._exchange(used, divisor, options)
        self._changes = {}
        for batch in self.state_offload.iterate_batches(self._batches):
            for chunk in batch:
                self._masters.drop_lowered_params(chunk)
                if chunk.slot.has_reduced:
                    self._step_chunk(chunk, used[chunk.unit.index], options)
            yield batch

    @torch.no_grad()
    def _exchange(self, used: dict[int, list[bool]], divisor: float, options: dict[int, dict[str, Any]]) -> None:
        """Turn local gradients into the new momentum (stage 0) or its new part (stages 1 and 2). Collective."""
        self._held_errors = self._error_keys
        slots = {chunk.unit.index: chunk.slot for chunk in self.chunks if chunk.slot.has_reduced}
        for units in batches_of([slots[index].unit for index in sorted(slots, reverse=True)]):
            messages = []
            for unit in units:
                flat = slots[unit.index].read().float()
                chosen = [
                    flag and id(parameter) in options
                    for flag, parameter in zip(used[unit.index], unit.parameters, strict=True)
                ]
                for index, parameter in enumerate(unit.parameters):
                    if chosen[index]:
                        beta = options[id(parameter)]["betas"][0]
                        unit.parameter_view(flat, index).mul_((1 - beta) / divisor)
                messages.append(UnitMessage(unit, flat, chosen))
            if not self._shards:
                self._add_momentum(messages, options)
            self._messages.average_to_owners(messages, [self._error(WORKER_ERROR, unit) for unit in units])
            if not self._shards:
                self._messages.send_from_owners(messages, [self._error(SERVER_ERROR, unit) for unit in units])
            for message in messages:
                slots[message.unit.index].shard = message.unit.local_span(message.flat)

    def _add_momentum(self, messages: list[UnitMessage], options: dict[int, dict[str, Any]]) -> None:
        """Add the common momentum to the gradients of this rank, at stage 0: every rank has all of it."""
        by_unit = {message.unit.index: message for message in messages}
        for chunk in self.chunks:
            message = by_unit.get(chunk.unit.index)
            for segment in self._of_chunk[id(chunk)] if message is not None else ():
                assert message is not None
                state = self._inner.state.get(segment.tensor)
                if state and message.chosen[segment.piece.index]:
                    span = message.unit.layout.offsets[segment.piece.index] + segment.piece.start
                    beta = options[id(segment.parameter)]["betas"][0]
                    message.flat.narrow(0, span, segment.piece.numel).add_(state["exp_avg"], alpha=beta)

    @torch.no_grad()
    def _step_chunk(self, chunk: UpdateChunk, used: list[bool], options: dict[int, dict[str, Any]]) -> None:
        assert chunk.gradient is not None
        received, values = chunk.gradient.to(chunk.state_dtype), chunk.values().to(chunk.state_dtype)
        for segment in self._of_chunk[id(chunk)]:
            piece = segment.piece
            if used[piece.index] and id(segment.parameter) in options:
                place = slice(piece.offset, piece.offset + piece.numel)
                self._step_segment(segment, values[place], received[place], options[id(segment.parameter)])
        if values is not chunk.master:
            chunk.values().copy_(values)
        if self._shards and self.group.size > 1:
            self._note_change(chunk)

    def _step_segment(
        self, segment: ParameterSegment, values: torch.Tensor, received: torch.Tensor, options: dict[str, Any]
    ) -> None:
        """Update a fragment with the momentum (stage 0) or the mean of messages (stages 1 and 2) in `received`."""
        state = self._inner.state[segment.tensor]
        if "exp_avg" not in state:  # its first gradient came after the freeze, so its variance is 0
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(values), torch.zeros_like(values)
        if "variance_steps" not in state:
            state["variance_steps"] = torch.tensor(float(state["step"]))
        state["step"] += 1
        beta1, beta2 = options["betas"]
        momentum, variance = state["exp_avg"], state["exp_avg_sq"]
        if self._shards:
            momentum.mul_(beta1).add_(received)
        else:
            momentum.copy_(received)
        steps, seen = float(state["step"]), float(state["variance_steps"])
        lr = float(options["lr"])
        denominator = (variance.to(values.dtype) / (1 - beta2**seen if seen else 1.0)).sqrt_().add_(options["eps"])
        change = momentum.to(values.dtype) / denominator
        change.masked_fill_(variance == 0, 0.0)
        values.mul_(1 - lr * options["weight_decay"]).sub_(change, alpha=lr / (1 - beta1**steps))

    def _note_change(self, chunk: UpdateChunk) -> None:
        """Compute the difference between a chunk's master weights and the parameters, while the chunk is in memory."""
        unit = chunk.unit
        if unit.index not in self._changes:
            span = unit.state_stop - unit.state_start
            self._changes[unit.index] = torch.zeros(span, dtype=torch.float32, device=unit.full.device)
        change = self._changes[unit.index][chunk.start : chunk.stop]
        change.copy_(chunk.values()).sub_(unit.local_span(unit.full)[chunk.start : chunk.stop])

    @torch.no_grad()
    def publish(self, units: list[Unit]) -> None:
        """See `Update.publish`. Collective."""
        trained = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        for batch in batches_of(units):
            messages = []
            for unit in batch:
                flat = torch.zeros(unit.layout.padded, dtype=torch.float32, device=unit.full.device)
                change = self._changes.pop(unit.index, None)
                if change is not None:  # else this rank's update failed, and the others still wait for its message
                    unit.local_span(flat).copy_(change)
                messages.append(UnitMessage(unit, flat, [id(p) in trained for p in unit.parameters]))
            self._messages.send_from_owners(messages)
            for message in messages:
                for rank in range(self.group.size):
                    values = message.views(message.unit.full, rank, self.group.size)
                    moves = message.views(message.flat, rank, self.group.size)
                    for value, move in zip(values, moves, strict=True):
                        value.add_(move) if value.dtype == move.dtype else value.copy_(value.float().add_(move))

    def _error(self, key: str, unit: Unit) -> torch.Tensor:
        """Return the error feedback of a unit, zeros at first."""
        kept = self._errors.setdefault(key, {})
        if unit.index not in kept:
            kept[unit.index] = torch.zeros(unit.layout.padded, dtype=torch.float32, device=unit.full.device)
        return kept[unit.index]

    @property
    def _error_keys(self) -> tuple[str, ...]:
        return (WORKER_ERROR,) if self._shards else (WORKER_ERROR, SERVER_ERROR)

    def rank_states(self) -> Iterator[RankState]:
        """See `Update.rank_states`. None before the first compressed step."""
        trained = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        units = {chunk.unit.index: chunk.unit for chunk in self.chunks}
        for key in self._held_errors:
            for unit in units.values():
                for index, parameter in enumerate(unit.parameters):
                    if id(parameter) in trained and unit.layout.numels[index]:
                        values = unit.parameter_view(self._error(key, unit), index).view(-1)
                        relay: RelayRule = mean_of_ranks if key == WORKER_ERROR else partial(owner_rows, unit, index)
                        yield RankState(unit, index, key, values, relay)

    def open_rank_states(self, saved: Collection[str]) -> frozenset[str]:
        """See `Update.open_rank_states`. A checkpoint from before the freeze has none."""
        self._errors, self._held_errors = {}, tuple(key for key in self._error_keys if key in saved)
        return frozenset({SERVER_ERROR}) if self._shards else frozenset()
