"""Update of `DiLoCo` at stage 0.

After `start_step` steps, each rank steps its parameters by AdamW with its local gradients and per-rank states: inner
steps, which send no gradients. The master weights keep the values of the last outer step, equal on all ranks; the
parameters of a rank are the master weights minus its `local_change`. An outer step of a unit sends the changes of all
ranks through the compressed all-reduce of two phases ([Note: error feedback]), and moves the master weights by SGD with
Nesterov momentum on the mean change. A save between two outer steps holds the master weights of the last outer step
and, as per-rank states, the changes of each rank since then.

[Note: overlapped outer steps] With `overlap_steps` T a unit's changes are sent after the step s in which they are due,
and the outer step is taken with their mean after step s + T; inner steps continue meanwhile. The first phase of the
all-reduce ends after step s + T // 2 (s + T if T is 1), at the same step on all ranks. Messages use a separate process
group: the all-reduce of a step's gradient norm would wait behind them otherwise. After the outer step, parameters are
`mixing` times the local ones plus `1 - mixing` times the new master weights, so the next message contains a part of the
changes of the steps in between. A save completes the transfer and contains the mean change as a per-rank state, so
that a resumed run is exact.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch

from windlass.optim.diloco import fragment_due
from windlass.optim.one_bit_adam import applied_steps
from windlass.zero.core.unit import Unit
from windlass.zero.update.compressed_messages import Batch, UnitMessage, batches_of, in_kinds
from windlass.zero.update.compressed_phase import LOCAL_CHANGE, Options, PendingExchange
from windlass.zero.update.elementwise_update import ParameterSegment
from windlass.zero.update.one_bit_adam_update import PART, OneBitAdamUpdate
from windlass.zero.update.update_chunk import UpdateChunk
from windlass.zero.update.update_protocol import UpdateContext

MOMENT, VARIANCE, OUTER = "local_exp_avg", "local_exp_avg_sq", "outer_momentum"
SENT, IN_FLIGHT = "sent", "mean_change"


class DiLoCoUpdate(OneBitAdamUpdate):
    """Update of `DiLoCo`.

    States: `step` and `outer_momentum`, and for each rank `local_exp_avg`, `local_exp_avg_sq`, `local_change` and the
    error feedback. With overlapped outer steps also `sent`, 1 from the send of a parameter's change to its outer step,
    and for each rank `mean_change`: the buffer of the message, and after its transfer the mean change.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, context: UpdateContext) -> None:
        super().__init__(optimizer, context)
        self._second_group = context.second_group
        self._pending: dict[int, PendingExchange] = {}  # exchanges in flight, by the step after which they were sent

    @property
    def _overlap(self) -> int:
        return int(self.optimizer.param_groups[0]["overlap_steps"])

    @classmethod
    def codec_of(cls, optimizer: torch.optim.Optimizer) -> str:
        """Return the name of the codec that encodes the changes sent by outer steps."""
        return str(optimizer.param_groups[0]["codec"])

    @classmethod
    def element_state_keys(cls) -> tuple[str, ...]:
        """See `Update.element_state_keys`."""
        return (OUTER,)

    @classmethod
    def rank_state_keys(cls, optimizer: torch.optim.Optimizer, shards_states: bool) -> tuple[str, ...]:
        """See `Update.rank_state_keys`."""
        in_flight = (IN_FLIGHT,) if optimizer.param_groups[0]["overlap_steps"] else ()
        errors = super().rank_state_keys(optimizer, shards_states)
        return (*errors, MOMENT, VARIANCE, LOCAL_CHANGE, *in_flight)

    @classmethod
    def separates_masters(cls, shards_states: bool) -> bool:
        """See `Update.separates_masters`."""
        return True

    @property
    def takes_local_gradients(self) -> bool:
        """True once `start_step` steps have been applied."""
        return applied_steps(self.optimizer) >= int(self.optimizer.param_groups[0]["start_step"])

    @property
    def publishes_itself(self) -> bool:
        """True once `start_step` steps have been applied."""
        return self.takes_local_gradients

    @property
    def keeps_local_weights(self) -> bool:
        """True once `start_step` steps have been applied."""
        return self.takes_local_gradients

    def publish(self, units: list[Unit]) -> None:
        """See `Update.publish`. Sends nothing."""
        self._publish_local(units)

    def run(self, used: dict[int, list[bool]], divisor: float) -> Iterator[list[UpdateChunk]]:
        """See `Update.run`. Collective in steps that send or receive changes; with `overlap_steps` also in the first
        call.
        """
        # Loading a checkpoint may have changed `overlap_steps` and `codec`.
        self._phase.set_key(IN_FLIGHT, kept=self._overlap > 0)
        if self._overlap:
            self._phase.use_group(self._second_group())
        self._phase.use_codec(self.codec_of(self.optimizer))
        # Steps before `start_step` use the per-rank states too, so checkpoints must contain them.
        self._phase.begin()
        run = self._run_compressed if self.takes_local_gradients else self._run_reduced
        return self._counted(run(used, divisor, self._phase.options()))

    def _step_exactly(
        self, segment: ParameterSegment, values: torch.Tensor, gradient: torch.Tensor, options: Options
    ) -> None:
        """Take a step of AdamW with an averaged gradient, and apply the change to the master weights at once."""
        self._inner_step(segment, gradient.float(), options)
        change = self._own(LOCAL_CHANGE, segment)
        values.sub_(change)
        change.zero_()

    @torch.no_grad()
    def _run_compressed(
        self, used: dict[int, list[bool]], divisor: float, options: Options
    ) -> Iterator[list[UpdateChunk]]:
        step = applied_steps(self.optimizer) + 1
        local = self._phase.local_messages(used, divisor, options, weighted=False)
        moved = (self._moved(messages, options) for messages in local)
        outer: dict[int, torch.Tensor] = {}  # mean changes of the outer steps taken now, by unit index
        if self._overlap:
            for _ in moved:
                pass
            outer = self._move_transfers(step, options)
        else:
            for messages in self._phase.exchange(self._due_messages(moved, step, options)):
                outer |= {message.unit.index: message.flat for message in messages}
                for segment, mean in self._chosen(messages):
                    self._outer_step(segment, mean, options)
        for batch in self.state_offload.iterate_batches(self._batches):
            for chunk in batch:  # changed units without a gradient get one, to count as updated
                if chunk.gradient is None and chunk.unit.index in outer:
                    chunk.gradient = outer[chunk.unit.index][chunk.start : chunk.stop]
            yield batch

    def _due_messages(self, moved: Iterable[Batch], step: int, options: Options) -> Iterator[Batch]:
        """Yield the changes to send after a step, of all units whose outer step is due.

        Args:
            moved: the messages with local gradients, whose memory is reused.
        """
        rest = {unit.index: unit for unit in self._due_units(step)}
        for messages in moved:
            yield [
                self._changed(one.unit, one.flat, options)
                for one in messages
                if rest.pop(one.unit.index, None) is not None
            ]
        for batch in batches_of(in_kinds(list(rest.values()))):
            flats = [torch.zeros(unit.layout.padded, dtype=torch.float32, device=unit.full.device) for unit in batch]
            yield [self._changed(unit, flat, options) for unit, flat in zip(batch, flats, strict=True)]

    def _due_units(self, step: int) -> list[Unit]:
        """Return the units whose changes are sent after step `step`, in the order of messages."""
        group, by_index = self.optimizer.param_groups[0], {chunk.unit.index: chunk.unit for chunk in self.chunks}
        units = [by_index[index] for index in sorted(by_index, reverse=True)]
        return [unit for unit in units if outer_step_due(step, unit, group)]

    def _moved(self, messages: Batch, options: Options) -> Batch:
        """Take an inner step with each gradient in `messages`. Return `messages`, whose memory is reused."""
        for segment, gradient in self._chosen(messages):
            self._inner_step(segment, gradient, options)
        return messages

    def _inner_step(self, segment: ParameterSegment, gradient: torch.Tensor, options: Options) -> None:
        """Take a step of AdamW with this rank's gradient and states."""
        given, state = options[id(segment.parameter)], self._inner.state[segment.tensor]
        (beta1, beta2), lr = given["betas"], float(given["lr"])
        if OUTER not in state:
            self._create_states(segment, state)
        state["step"] += 1
        steps = float(state["step"])
        own = (self._own(key, segment) for key in (MOMENT, VARIANCE, LOCAL_CHANGE))
        parts = (tensor.split(PART) for tensor in (gradient, self._master(segment), *own))
        for part, master, moment, variance, change in zip(*parts, strict=True):  # parts that fit in the CPU cache
            moment.lerp_(part, 1 - beta1)
            variance.mul_(beta2).addcmul_(part, part, value=1 - beta2)
            root = (variance / (1 - beta2**steps)).sqrt_().add_(given["eps"])
            if given["weight_decay"]:  # decay of the local weight, which is `master - change`
                change.lerp_(master.to(change.dtype), lr * given["weight_decay"])
            change.addcdiv_(moment, root, value=lr / (1 - beta1**steps))

    def _create_states(self, segment: ParameterSegment, state: dict[str, torch.Tensor]) -> None:
        """Create the states of a fragment. Moments start from those of AdamW if a checkpoint of it was loaded."""
        state.setdefault("step", torch.zeros((), dtype=torch.float32))
        state[OUTER] = torch.zeros_like(self._master(segment), dtype=segment.chunk.state_dtype)
        for common, own in (("exp_avg", MOMENT), ("exp_avg_sq", VARIANCE)):
            if common in state:
                self._own(own, segment).copy_(state.pop(common))

    # Overlapped outer steps.

    def _move_transfers(self, step: int, options: Options) -> dict[int, torch.Tensor]:
        """Take the outer steps that are due, begin the second phase of the transfer that is half over, and send the
        changes that are due. Collective.

        All ranks do the same in the same step, so that transfers between two ranks keep their order.

        Returns:
            The mean changes of all ranks, by unit index, of the units that took an outer step.
        """
        overlap = self._overlap
        due = self._due_units(step - overlap) if step > overlap else []
        if due:
            if pending := self._pending.pop(step - overlap, None):
                pending.finish()
            for unit in due:
                for segment in self._segments_of(unit):
                    self._late_outer_step(segment, options)
        if pending := self._pending.get(step - overlap // 2) if overlap > 1 else None:
            pending.answer()
        if sent := self._due_units(step):
            self._pending[step] = self._phase.start_exchange(
                [self._changed(unit, self._phase.state(IN_FLIGHT, unit), options) for unit in batch]
                for batch in batches_of(in_kinds(sent))
            )
        return {unit.index: self._phase.state(IN_FLIGHT, unit) for unit in due}

    def _late_outer_step(self, segment: ParameterSegment, options: Options) -> None:
        """Take an outer step with the mean of changes that arrived, and mix the result with the local weights."""
        state = self._inner.state.get(segment.tensor)
        if not state or id(segment.parameter) not in options or not float(state.get(SENT, 0.0)):
            return
        state[SENT].zero_()
        master, change = self._master(segment), self._own(LOCAL_CHANGE, segment)
        local = master.float() - change
        self._outer_step(segment, self._own(IN_FLIGHT, segment), options)
        torch.sub(master.float(), local, out=change)
        change.mul_(options[id(segment.parameter)]["mixing"])

    def finish_transfers(self) -> None:
        """See `Update.finish_transfers`. Collective."""
        for step in sorted(self._pending):
            self._pending[step].finish()
        self._pending = {}

    def forget_unsent(self) -> None:
        """See `Update.forget_unsent`."""
        super().forget_unsent()
        for state in self._inner.state.values():
            if SENT in state:
                state[SENT].zero_()

    def open_rank_states(self, saved: Collection[str]) -> frozenset[str]:
        """See `Update.open_rank_states`."""
        self.finish_transfers()  # collective; every rank loads a checkpoint, so all ranks get here
        self._phase.set_key(IN_FLIGHT, kept=IN_FLIGHT in saved)  # the saved `overlap_steps` is not loaded yet
        return super().open_rank_states(saved)

    def _changed(self, unit: Unit, flat: torch.Tensor, options: Options) -> UnitMessage:
        """Return a message with the changes of a unit's parameters since the unit's last outer step. Reset the changes
        to zero, or mark them as sent if outer steps overlap. Parameters without an inner step are left out.

        Args:
            flat: `[padded]` in float32, memory into which the changes are written.
        """
        chosen = [False] * len(unit.parameters)
        for segment in self._segments_of(unit):
            state = self._inner.state[segment.tensor]
            if id(segment.parameter) in options and OUTER in state:
                chosen[segment.piece.index] = True
                change = self._own(LOCAL_CHANGE, segment)
                self._view(flat, segment).copy_(change)
                if self._overlap:
                    state.setdefault(SENT, torch.zeros((), dtype=torch.float32)).fill_(1.0)
                else:
                    change.zero_()
        return UnitMessage(unit, flat, chosen)

    def _outer_step(self, segment: ParameterSegment, mean: torch.Tensor, options: Options) -> None:
        """Step the master weights by SGD with Nesterov momentum, with the mean change as gradient."""
        given, momentum = options[id(segment.parameter)], self._inner.state[segment.tensor][OUTER]
        momentum.mul_(given["outer_momentum"]).add_(mean)
        move = mean + momentum.float() * given["outer_momentum"]
        self._master(segment).sub_(move, alpha=given["outer_lr"])


def outer_step_due(step: int, unit: Unit, group: dict[str, Any]) -> bool:
    """Return True if a unit's changes are sent after step `step`.

    The unit of a parameter that several pipeline stages share has a different index on each stage. It is therefore sent
    in the steps of unit 0, on all these stages.
    """
    return fragment_due(step, 0 if unit.kind.shared_stages else unit.index, group)
