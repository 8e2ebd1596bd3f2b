"""Update of `ZeroOneAdam` at stages 0 to 2.

[Note: local steps] After `var_freeze_step` the variance is constant.

Stage 0 is the algorithm of the paper (arXiv:2202.06009, algorithm 1). Between synchronizations each rank updates its
parameters with its local momentum, and nothing is sent. The master weights keep the values of the last synchronization,
equal on all ranks; without weight decay, the parameters of a rank are the master weights minus its `local_change`. A
synchronization sends the changes, times the root of the variance, through the compressed all-reduce. The mean of these
messages, divided by the root, is subtracted from the master weights. Divided by the sum of the learning rates since the
last synchronization (`summed_rates`), the mean is the new common momentum. `max_update`, times that sum, bounds the
change of parameters and of master weights. The changes in messages are not bounded.

Weight decay of local steps is not a part of the changes, since it would become a part of the momentum. Every step
shrinks the local weight `x` by the same factor on all ranks. With the master weight `w`, `x = (1 - d) w - c`, where
`d` is `summed_decay`; the change `c` and `summed_rates` shrink too. So the decay needs no message.

At stages 1 and 2 no rank has the full variance, so the parameters do not change between synchronizations while each
rank sums its gradients (`summed`). A synchronization sends the owners the mean of these gradients over steps and ranks,
and an owner takes one step with the mean for each summed step.

A save between two synchronizations contains the master weights of the last synchronization and, as per-rank states, the
changes (at stages 1 and 2, the summed gradients) of each rank since then. So a resumed run continues from the same
values.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch

from windlass.optim.one_bit_adam import applied_steps, corrects_bias
from windlass.optim.zero_one_adam import StepKind, kind_of_step, steps_since_sync
from windlass.zero.core.unit import Unit
from windlass.zero.update.compressed_messages import Batch
from windlass.zero.update.compressed_phase import LOCAL_CHANGE, SERVER_ERROR, SUMMED, WORKER_ERROR, Options
from windlass.zero.update.elementwise_update import ElementwiseUpdate, ParameterSegment
from windlass.zero.update.one_bit_adam_update import OneBitAdamUpdate
from windlass.zero.update.update_chunk import UpdateChunk

LOCAL_MOMENTUM, RATES, DECAY = "local_momentum", "summed_rates", "summed_decay"
_GATHERED = (StepKind.LOCAL, StepKind.SYNC)


class ZeroOneAdamUpdate(OneBitAdamUpdate):
    """Update of `ZeroOneAdam`; see [Note: 0/1 schedule] and [Note: local steps].

    States in addition to those of `OneBitAdam`: on each rank `local_change` and `local_momentum` at stage 0, `summed`
    at stages 1 and 2. At stage 0 also `summed_rates`, the sum of the learning rates since the last synchronization, and
    `summed_decay`, the fraction by which the master weights decayed since then.
    """

    _lacks_changes = False

    @classmethod
    def rank_state_keys(cls, optimizer: torch.optim.Optimizer, shards_states: bool) -> tuple[str, ...]:
        """See `Update.rank_state_keys`."""
        local = (SUMMED,) if shards_states else (LOCAL_CHANGE, LOCAL_MOMENTUM)
        return (*super().rank_state_keys(optimizer, shards_states), *local)

    @classmethod
    def separates_masters(cls, shards_states: bool) -> bool:
        """See `Update.separates_masters`. At stage 0 the parameters of ranks differ between synchronizations."""
        return True

    @property
    def kind(self) -> StepKind:
        """Kind of the running step, or else of the next step."""
        group = self.optimizer.param_groups[0]
        return kind_of_step(applied_steps(self.optimizer) + 1, group)

    @property
    def takes_local_gradients(self) -> bool:
        """True unless the next step updates the variance."""
        return self.kind not in (StepKind.EXACT, StepKind.VARIANCE)

    @property
    def publishes_itself(self) -> bool:
        """True if the parameters are not copies of the master weights after the next step."""
        if self._shards:
            return self._phase.group.size > 1 and self.takes_local_gradients
        return self.kind in _GATHERED

    @property
    def keeps_local_weights(self) -> bool:
        """True at stage 0 after `var_freeze_step`."""
        return not self._shards and self.kind in _GATHERED

    def run(self, used: dict[int, list[bool]], divisor: float) -> Iterator[list[UpdateChunk]]:
        """See `Update.run`. Collective in compressed steps and in synchronizations."""
        kind = self.kind
        if kind is StepKind.EXACT and corrects_bias(self.optimizer):
            return self._counted(ElementwiseUpdate.run(self, used, divisor))
        options = self._phase.options()
        if kind in (StepKind.EXACT, StepKind.VARIANCE):
            return self._counted(self._run_reduced(used, divisor, options))
        if kind is StepKind.COMPRESSED:
            return self._counted(self._run_compressed(used, divisor, options))
        if applied_steps(self.optimizer) == self.optimizer.param_groups[0]["var_freeze_step"]:
            # At stage 0 the stored compression errors are of gradients; from now on messages contain parameter changes.
            self._phase.forget(WORKER_ERROR, SERVER_ERROR)
        if self._lacks_changes and not self._shards:
            self._begin_changes()
        return self._counted((self._run_summed if self._shards else self._run_local)(used, divisor, options))

    def _run_compressed(
        self, used: dict[int, list[bool]], divisor: float, options: Options
    ) -> Iterator[list[UpdateChunk]]:
        for _ in self._phase.exchange(self._phase.local_messages(used, divisor, options)):
            pass
        yield from self._step_chunks(used, options)

    def _run_summed(self, used: dict[int, list[bool]], divisor: float, options: Options) -> Iterator[list[UpdateChunk]]:
        """Sum this rank's gradients; in a synchronization, exchange the mean and take the step. Stages 1 and 2."""
        syncs = self.kind is StepKind.SYNC
        steps = steps_since_sync(applied_steps(self.optimizer) + 1, self.optimizer.param_groups[0])
        fetched = (SUMMED, WORKER_ERROR) if syncs else (SUMMED,)
        local = self._phase.local_messages(used, divisor, options, fetched=fetched)
        summed = (self._added(messages, steps if syncs else 0) for messages in local)
        for _ in self._phase.exchange(summed) if syncs else summed:
            pass
        self._repeats = steps
        if syncs:
            yield from self._step_chunks(used, options)
        else:
            # This step fetches no master weights, and fetching them copies in-place changes of parameters.
            self._masters.copy_all_edits(list({chunk.unit.index: chunk.unit for chunk in self.chunks}.values()))
            self._changes = {}

    @torch.no_grad()
    def _added(self, messages: Batch, steps: int) -> Batch:
        """Add local gradients to their sums.

        If `steps` is not 0, write the means over `steps` steps to the messages and reset the sums.
        """
        for message in messages:
            summed = self._phase.fetch(SUMMED, message.unit)
            for index in (index for index, chosen in enumerate(message.chosen) if chosen):
                total = message.unit.parameter_view(summed, index)
                total.add_(message.unit.parameter_view(message.flat, index))
                if steps:
                    torch.div(total, steps, out=message.unit.parameter_view(message.flat, index))
                    total.zero_()
            self._phase.put(SUMMED, message.unit, summed)
        return messages

    def _step_segment(
        self, segment: ParameterSegment, values: torch.Tensor, received: torch.Tensor, options: Options
    ) -> None:
        if self._reduced_divisor is not None:
            self._step_exactly(segment, values, received / self._reduced_divisor, options)
            return
        momentum, beta1 = self._opened(segment, values)["exp_avg"], options[id(segment.parameter)]["betas"][0]
        for _ in range(self._repeats if self.kind is StepKind.SYNC else 1):
            momentum.mul_(beta1).add_(received)
            self._mask(segment, momentum, options)
            self._move(segment, values, options)

    # Local steps at stage 0.

    def _run_local(self, used: dict[int, list[bool]], divisor: float, options: Options) -> Iterator[list[UpdateChunk]]:
        syncs = self.kind is StepKind.SYNC
        local = self._phase.local_messages(used, divisor, options)
        moved = (self._moved(messages, options, syncs=syncs) for messages in local)
        for messages in self._phase.exchange(moved) if syncs else moved:
            for segment, mean in self._chosen(messages) if syncs else ():
                self._take_common_step(segment, mean, options)
        yield from self.state_offload.iterate_batches(self._batches)

    @torch.no_grad()
    def _moved(self, messages: Batch, options: Options, *, syncs: bool) -> Batch:
        """Take a local step with each gradient; in a synchronization, replace the gradient by the message to send."""
        for segment, gradient in self._chosen(messages):
            self._take_local_step(segment, gradient, options, syncs=syncs)
        return messages

    def _take_local_step(
        self, segment: ParameterSegment, gradient: torch.Tensor, options: Options, *, syncs: bool
    ) -> None:
        """Add a step to this rank's change. In a synchronization, replace `gradient` by the message to send (the change
        times the root of the variance), and reset the change.
        """
        given, state = options[id(segment.parameter)], self._opened(segment, self._master(segment))
        change, momentum = self._own(LOCAL_CHANGE, segment), self._own(LOCAL_MOMENTUM, segment)
        rates, decayed = (state.setdefault(key, torch.zeros(())) for key in (RATES, DECAY))
        if not float(rates):
            momentum.copy_(state["exp_avg"])
        momentum.mul_(given["betas"][0]).add_(gradient)
        self._mask(segment, momentum, options)
        state["step"] += 1
        rate, decay = self._rate(segment, options), float(given["lr"]) * given["weight_decay"]
        root = self._denominator(segment, change, options)
        move = (momentum / root).masked_fill_(state["exp_avg_sq"] == 0, 0.0)
        change.mul_(1 - decay).add_(move, alpha=rate)
        rates.mul_(1 - decay).add_(rate)  # sum of the coefficients of the momenta in `change`
        decayed.mul_(1 - decay).add_(decay)
        if syncs:
            torch.mul(change, root, out=gradient)
            change.zero_()

    def _take_common_step(self, segment: ParameterSegment, mean: torch.Tensor, options: Options) -> None:
        """Apply the mean of all ranks' changes and the weight decay to the master weights. Set the common momentum."""
        state, master = self._inner.state[segment.tensor], self._master(segment)
        self._mask(segment, mean, options)
        rates = float(state[RATES])
        move = (mean / self._denominator(segment, mean, options)).masked_fill_(state["exp_avg_sq"] == 0, 0.0)
        decay = master.to(move.dtype) * float(state[DECAY])
        master.sub_(decay.add_(self._bounded(segment, move, options)))
        if rates:  # if all learning rates were 0, momenta cannot be computed from the changes
            state["exp_avg"].copy_(mean / rates)
        state[RATES].zero_()
        state[DECAY].zero_()

    def _bounded(self, segment: ParameterSegment, change: torch.Tensor, options: Options) -> torch.Tensor:
        """Return a change since the last synchronization, clamped to the bound of its steps; see [Note: bounded steps].

        `change` is not modified, so that messages and momenta do not depend on the bound.
        """
        bound = self._bound(segment, options)
        if bound is None:
            return change
        bound *= float(self._inner.state[segment.tensor].get(RATES, 0.0))
        return change.clamp(-bound, bound)

    def _local_change(self, segment: ParameterSegment, options: Options) -> torch.Tensor:
        change, state = super()._local_change(segment, options), self._inner.state.get(segment.tensor, {})
        if self._lacks_changes or id(segment.parameter) not in options or DECAY not in state:
            return change
        master, decayed = self._master(segment), float(state[DECAY])
        bounded = self._bounded(segment, change, options)
        return bounded + master.to(change.dtype) * decayed if decayed else bounded

    def forget_unsent(self) -> None:
        """See `Update.forget_unsent`."""
        super().forget_unsent()
        self._begin_changes()

    def open_rank_states(self, saved: Collection[str]) -> frozenset[str]:
        """See `Update.open_rank_states`."""
        # True: the rates are loaded without their changes, so `run` resets them.
        self._lacks_changes = LOCAL_CHANGE not in saved
        return super().open_rank_states(saved)

    def _begin_changes(self) -> None:
        """Reset summed rates and decay, so that the next local step begins with the common momentum."""
        self._lacks_changes = False
        for state in self._inner.state.values():
            if RATES in state:
                state[RATES].zero_()
                state[DECAY].zero_()

    @torch.no_grad()
    def publish(self, units: list[Unit]) -> None:
        """See `Update.publish`. At stage 0 each rank sets only its own parameters."""
        if self._shards:
            super().publish(units)
            return
        self._publish_local(units)
