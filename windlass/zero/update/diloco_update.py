"""Update of `DiLoCo` at stage 0.

Each rank moves its own parameters with AdamW and states of its own, and nothing is sent. The master weights keep the
values of the last outer step, equal on all ranks; the parameters of a rank are these minus its `local_change`. An outer
step of a unit sends the changes of all ranks through the compressed all-reduce of two phases ([Note: error feedback]),
and moves the master weights by SGD with Nesterov momentum on their mean. A save between two outer steps holds the
weights of the last one, and what each rank has changed since as states of the rank.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from windlass.optim.diloco import fragment_due
from windlass.optim.one_bit_adam import applied_steps
from windlass.zero.core.unit import Unit
from windlass.zero.update.compressed_messages import UnitMessage
from windlass.zero.update.compressed_phase import LOCAL_CHANGE, Options
from windlass.zero.update.elementwise_update import ParameterSegment
from windlass.zero.update.one_bit_adam_update import OneBitAdamUpdate
from windlass.zero.update.update_chunk import UpdateChunk

MOMENT, VARIANCE, OUTER = "local_exp_avg", "local_exp_avg_sq", "outer_momentum"


class DiLoCoUpdate(OneBitAdamUpdate):
    """Update of `DiLoCo`.

    States: `step` and `outer_momentum`, and for each rank `local_exp_avg`, `local_exp_avg_sq`, `local_change` and the
    error feedback.
    """

    @classmethod
    def codec_of(cls, optimizer: torch.optim.Optimizer) -> str:
        """Return the name of the codec of changes."""
        return str(optimizer.param_groups[0]["codec"])

    @classmethod
    def rank_state_keys(cls, shards_states: bool) -> tuple[str, ...]:
        """Return the names of per-rank states beside the error feedback."""
        return (MOMENT, VARIANCE, LOCAL_CHANGE)

    @classmethod
    def separates_masters(cls, shards_states: bool) -> bool:
        """See `Update.separates_masters`."""
        return True

    @property
    def takes_local_gradients(self) -> bool:
        """Always True."""
        return True

    @property
    def publishes_itself(self) -> bool:
        """Always True."""
        return True

    @property
    def keeps_local_weights(self) -> bool:
        """Always True."""
        return True

    def publish(self, units: list[Unit]) -> None:
        """See `Update.publish`. Sends nothing."""
        self._publish_local(units)

    @torch.no_grad()
    def _run_compressed(
        self, used: dict[int, list[bool]], divisor: float, options: Options
    ) -> Iterator[list[UpdateChunk]]:
        step, group = applied_steps(self.optimizer) + 1, self.optimizer.param_groups[0]
        for messages in self._phase.local_messages(used, divisor, options, weighted=False):
            for message in messages:
                for segment in self._segments_of(message.unit):
                    if message.chosen[segment.piece.index]:
                        self._inner_step(segment, self._view(message.flat, segment), options)
            due = [self._changed(one, options) for one in messages if fragment_due(step, one.unit.index, group)]
            self._phase.exchange(due)
            for message in due:
                for segment in self._segments_of(message.unit):
                    if message.chosen[segment.piece.index]:
                        self._outer_step(segment, self._view(message.flat, segment), options)
        yield from self.state_offload.iterate_batches(self._batches)

    def _inner_step(self, segment: ParameterSegment, gradient: torch.Tensor, options: Options) -> None:
        """Take a step of AdamW with this rank's gradient and states."""
        given, state = options[id(segment.parameter)], self._inner.state[segment.tensor]
        (beta1, beta2), lr = given["betas"], float(given["lr"])
        moment, variance = self._own(MOMENT, segment), self._own(VARIANCE, segment)
        change = self._own(LOCAL_CHANGE, segment)
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state[OUTER] = torch.zeros_like(self._master(segment), dtype=segment.chunk.state_dtype)
        state["step"] += 1
        steps = float(state["step"])
        moment.mul_(beta1).add_(gradient, alpha=1 - beta1)
        variance.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        move = moment / (variance / (1 - beta2**steps)).sqrt_().add_(given["eps"])
        move.mul_(lr / (1 - beta1**steps))
        change.add_(move.add_(self._master(segment).float() - change, alpha=lr * given["weight_decay"]))

    def _changed(self, message: UnitMessage, options: Options) -> UnitMessage:
        """Return the message of a unit's changes since its last outer step, of all parameters that took a step."""
        chosen = [False] * len(message.unit.parameters)
        for segment in self._segments_of(message.unit):
            if id(segment.parameter) in options and self._inner.state.get(segment.tensor):
                chosen[segment.piece.index] = True
                change = self._own(LOCAL_CHANGE, segment)
                self._view(message.flat, segment).copy_(change)
                change.zero_()
        return UnitMessage(message.unit, message.flat, chosen)

    def _outer_step(self, segment: ParameterSegment, mean: torch.Tensor, options: Options) -> None:
        """Move the master weights by SGD with Nesterov momentum."""
        given, momentum = options[id(segment.parameter)], self._inner.state[segment.tensor][OUTER]
        momentum.mul_(given["outer_momentum"]).add_(mean)
        move = mean + momentum.float() * given["outer_momentum"]
        self._master(segment).sub_(move, alpha=given["outer_lr"])
