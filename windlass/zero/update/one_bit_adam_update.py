"""Update of `OneBitAdam` at stages 0 to 2.

[Note: 1-bit phase] Until `freeze_step` the engine reduces gradients, and this is the elementwise update of AdamW, bit
for bit. In the compressed phase afterwards, the variance is constant and gradients stay on their ranks
([Note: local gradients]), also at stage 2, where a rank then keeps full gradients.

Stage 0 is the algorithm of the paper (arXiv:2102.02888, algorithm 1): each rank adds its gradient to the common
momentum, `b1 m + (1 - b1) g`, and a compressed all-reduce of two phases with error feedback makes the new common
momentum. All ranks step their replicas of the master weights with it.

At stages 1 and 2 a rank sends the owners of shards its gradient, `(1 - b1) g`, with error feedback. The owner keeps the
momentum of its elements, `b1 m` plus the mean of the messages, and steps its master weights exactly. The owner then
sends the difference between its master weights and the parameters, and the parameters of all ranks, which are equal,
move by the decoded difference. Compression errors, and the rounding of 16-bit parameters, are a part of the next
difference, so this direction needs no error feedback (DoubleSqueeze, arXiv:1905.05957; DORE, arXiv:1910.07561, sends
such differences). `ShardedModel.finish_update`, and every step that `sync_interval` divides, copy the master weights to
the parameters of all ranks.

The momentum has the bias correction of the current step, and the frozen variance has that of its last update. With
`bias_correction` False this class also takes the steps before `freeze_step`, because torch's AdamW has no such option.
Elements whose frozen variance is 0 have never had a gradient, and only their weight decay is applied: a message would
give them a nonzero momentum, which would be divided by eps.

[Note: bounded steps] A message gives all elements of a block one magnitude. If an element's variance was computed from
few gradients, this magnitude divided by the variance's root may move the element by many times the learning rate. In
Adam the variance includes every gradient of the momentum, so steps stay near the learning rate. `max_update` bounds the
quotient on the rank that steps the element. Messages of gradients and momenta are not bounded, so the error feedback
contains only errors of the messages.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import ClassVar

import torch

from windlass.optim.one_bit_adam import corrects_bias, count_step, is_frozen, is_sync_due
from windlass.storage.slot import Tier
from windlass.zero.core.unit import Unit
from windlass.zero.update.compressed_messages import Batch
from windlass.zero.update.compressed_phase import (
    LOCAL_CHANGE,
    CompressedPhase,
    Options,
    error_keys,
    warn_of_late_parameter,
)
from windlass.zero.update.elementwise_update import ElementwiseUpdate, ParameterSegment
from windlass.zero.update.momentum_mask import apply_momentum_mask, check_momentum_masks
from windlass.zero.update.rank_state import RankState
from windlass.zero.update.update_chunk import UpdateChunk
from windlass.zero.update.update_protocol import UpdateContext

PART = 1 << 17  # elements that are stepped at once, so that temporary tensors stay in a cache


class OneBitAdamUpdate(ElementwiseUpdate):
    """Update of `OneBitAdam`; see [Note: 1-bit phase].

    States in addition to AdamW's: `variance_steps` (number of steps that updated the variance) and, for each rank,
    `worker_error` and at stage 0 `server_error`. The per-rank states exist from the first compressed step on.
    """

    reduces_itself: ClassVar[bool] = True

    def __init__(self, optimizer: torch.optim.Optimizer, context: UpdateContext) -> None:
        super().__init__(optimizer, context)
        check_momentum_masks(optimizer, [chunk.unit for chunk in self.chunks])
        self._shards = context.shards_states
        self._phase = CompressedPhase(
            optimizer, context, self.chunks, self.rank_state_keys(optimizer, self._shards), self.codec_of(optimizer)
        )
        self._zeros: dict[ParameterSegment, tuple[tuple[int, int], bool]] = {}
        self._changes: dict[int, torch.Tensor] = {}  # master weights minus parameters of this rank's span, by unit
        self._reduced_divisor: float | None = None  # divisor of reduced gradients; None: no reduced gradients
        if self.takes_local_gradients:
            self._phase.begin()

    @classmethod
    def codec_of(cls, optimizer: torch.optim.Optimizer) -> str | None:
        """Return the name of the codec of messages; None: see `CompressedPhase`."""
        return None

    @classmethod
    def rank_state_keys(cls, optimizer: torch.optim.Optimizer, shards_states: bool) -> tuple[str, ...]:
        """See `Update.rank_state_keys`."""
        return error_keys(shards_states)

    @classmethod
    def separates_masters(cls, shards_states: bool) -> bool:
        """See `Update.separates_masters`."""
        return shards_states

    @property
    def takes_local_gradients(self) -> bool:
        """True in the compressed phase."""
        return is_frozen(self.optimizer)

    @property
    def publishes_itself(self) -> bool:
        """True in the compressed phase of stages 1 and 2, on more than one data-parallel rank."""
        return self._shards and self._phase.group.size > 1 and self.takes_local_gradients

    @property
    def equalizes_replicas(self) -> bool:
        """True at stages 1 and 2 after a step that `sync_interval` divides."""
        return self._shards and is_sync_due(self.optimizer)

    def run(self, used: dict[int, list[bool]], divisor: float) -> Iterator[list[UpdateChunk]]:
        """See `Update.run`. Collective in the compressed phase."""
        if self.takes_local_gradients:
            return self._counted(self._run_compressed(used, divisor, self._phase.options()))
        if not corrects_bias(self.optimizer):
            return self._counted(self._run_reduced(used, divisor, self._phase.options()))
        return self._counted(super().run(used, divisor))

    def _counted(self, batches: Iterator[list[UpdateChunk]]) -> Iterator[list[UpdateChunk]]:
        yield from batches
        count_step(self.optimizer)

    def _run_reduced(
        self, used: dict[int, list[bool]], divisor: float, options: Options
    ) -> Iterator[list[UpdateChunk]]:
        """Update momentum, variance and values with gradients that the engine reduced."""
        self._reduced_divisor = divisor
        try:
            yield from self._step_chunks(used, options)
        finally:
            self._reduced_divisor = None

    def _run_compressed(
        self, used: dict[int, list[bool]], divisor: float, options: Options
    ) -> Iterator[list[UpdateChunk]]:
        momenta = None if self._shards else lambda unit: self._momenta(unit, options)
        for _ in self._phase.exchange(self._phase.local_messages(used, divisor, options), momenta):
            pass
        yield from self._step_chunks(used, options)

    def _step_chunks(self, used: dict[int, list[bool]], options: Options) -> Iterator[list[UpdateChunk]]:
        """Update each batch of chunks with the values in the gradient slots, and yield it.

        These values are reduced gradients, or results of an exchange of compressed messages.
        """
        self._changes = {}
        for batch in self.state_offload.iterate_batches(self._batches):
            for chunk in batch:
                self._masters.drop_lowered_params(chunk)
                if chunk.slot.has_reduced:
                    self._step_chunk(chunk, used[chunk.unit.index], options)
            yield batch

    def _momenta(self, unit: Unit, options: Options) -> Iterable[tuple[int, int, torch.Tensor, float]]:
        """Yield the fragments of the common momentum, with their factor beta1.

        Called only at stage 0, where every rank has the full momentum.
        """
        for chunk in self._masters.chunks_of(unit):
            for segment in self._of_chunk[id(chunk)]:
                state, given = self._inner.state.get(segment.tensor), options.get(id(segment.parameter))
                if state and given is not None:
                    yield segment.piece.index, segment.piece.start, state["exp_avg"], given["betas"][0]

    @torch.no_grad()
    def _step_chunk(self, chunk: UpdateChunk, used: list[bool], options: Options) -> None:
        assert chunk.gradient is not None
        received, values = chunk.gradient.to(chunk.state_dtype), chunk.values().to(chunk.state_dtype)
        for segment in self._of_chunk[id(chunk)]:
            piece = segment.piece
            if used[piece.index] and id(segment.parameter) in options:
                place = slice(piece.offset, piece.offset + piece.numel)
                self._step_segment(segment, values[place], received[place], options)
        if values is not chunk.master:
            chunk.values().copy_(values)
        if self.publishes_itself:
            self._note_change(chunk)

    def _step_segment(
        self, segment: ParameterSegment, values: torch.Tensor, received: torch.Tensor, options: Options
    ) -> None:
        """Update a fragment.

        Args:
            received: momentum (stage 0) or mean of messages (stages 1 and 2) in the compressed phase; otherwise the
                reduced gradient, not yet divided by `_reduced_divisor`.
        """
        if self._reduced_divisor is not None:
            self._step_exactly(segment, values, received / self._reduced_divisor, options)
            return
        given, momentum = options[id(segment.parameter)], self._opened(segment, values)["exp_avg"]
        if self._shards:
            momentum.mul_(given["betas"][0]).add_(received)
        else:
            momentum.copy_(received)
        self._mask(segment, momentum, options)
        self._move(segment, values, options)

    def _mask(self, segment: ParameterSegment, values: torch.Tensor, options: Options) -> None:
        """Set the elements of a fragment's momentum or message to zero that the mask of its group excludes."""
        piece, unit = segment.piece, segment.chunk.unit
        apply_momentum_mask(values, options[id(segment.parameter)], unit, piece.index, piece.start)

    def _step_exactly(
        self, segment: ParameterSegment, values: torch.Tensor, gradient: torch.Tensor, options: Options
    ) -> None:
        """Update momentum, variance and values of a fragment with its reduced gradient."""
        state, (beta1, beta2) = self._opened(segment, values), options[id(segment.parameter)]["betas"]
        state["exp_avg"].mul_(beta1).add_(gradient, alpha=1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        state["variance_steps"] += 1
        self._move(segment, values, options)

    def _opened(self, segment: ParameterSegment, values: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the states of a fragment. States that are missing are created."""
        state: dict[str, torch.Tensor] = self._inner.state[segment.tensor]
        if "exp_avg" not in state:
            self._create_state(segment, state, values)
        if "variance_steps" not in state:
            state["variance_steps"] = torch.tensor(float(state["step"]))
        return state

    def _create_state(self, segment: ParameterSegment, state: dict[str, torch.Tensor], values: torch.Tensor) -> None:
        if self._reduced_divisor is None:  # the first gradient came after the freeze, so the variance is 0
            warn_of_late_parameter(segment.name)
        state["step"] = torch.zeros((), dtype=torch.float32)
        state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(values), torch.zeros_like(values)

    def _move(self, segment: ParameterSegment, values: torch.Tensor, options: Options) -> None:
        """Count a step of a fragment, and update its values with its momentum and variance."""
        state, given = self._inner.state[segment.tensor], options[id(segment.parameter)]
        state["step"] += 1
        rate, decay = self._rate(segment, options), 1 - float(given["lr"]) * given["weight_decay"]
        momenta, variances, parts = (t.split(PART) for t in (state["exp_avg"], state["exp_avg_sq"], values))
        masks = self._may_have_zeros(segment)
        bound = self._bound(segment, options) if self._reduced_divisor is None else None
        for momentum, variance, part in zip(momenta, variances, parts, strict=True):
            change = momentum.to(values.dtype) / self._root(segment, variance.to(values.dtype), options)
            if masks:
                change.masked_fill_(variance == 0, 0.0)
            if bound is not None:
                change.clamp_(-bound, bound)
            part.mul_(decay).sub_(change, alpha=rate)

    def _rate(self, segment: ParameterSegment, options: Options) -> float:
        """Return the learning rate of a fragment with the bias correction of its momentum."""
        given, lr = options[id(segment.parameter)], float(options[id(segment.parameter)]["lr"])
        if not given.get("bias_correction", True):
            return lr
        return float(lr / (1 - given["betas"][0] ** float(self._inner.state[segment.tensor]["step"])))

    def _bound(self, segment: ParameterSegment, options: Options) -> float | None:
        """Return the bound of |momentum| / `_root` for a fragment; None: no bound.

        See [Note: bounded steps].
        """
        given = options[id(segment.parameter)]
        limit = given.get("max_update")
        if limit is None or not given.get("bias_correction", True):
            return limit
        return float(limit * (1 - given["betas"][0] ** float(self._inner.state[segment.tensor]["step"])))

    def _may_have_zeros(self, segment: ParameterSegment) -> bool:
        """Return False if no element of a fragment's variance is 0. On the device tier the result is cached until the
        variance changes; on other tiers it is always True.
        """
        variance = self._inner.state[segment.tensor]["exp_avg_sq"]
        # On other tiers the variance's memory is refilled without a change of address or version.
        if segment.chunk.tier is not Tier.DEVICE:
            return True
        known = variance.data_ptr(), variance._version
        if segment not in self._zeros or self._zeros[segment][0] != known:
            self._zeros[segment] = known, bool((variance == 0).any())
        return self._zeros[segment][1]

    def _denominator(self, segment: ParameterSegment, values: torch.Tensor, options: Options) -> torch.Tensor:
        """Return the root of the variance with the bias correction of its last step, plus eps."""
        return self._root(segment, self._inner.state[segment.tensor]["exp_avg_sq"].to(values.dtype), options)

    def _root(self, segment: ParameterSegment, variance: torch.Tensor, options: Options) -> torch.Tensor:
        """Return `_denominator` for some elements of a fragment, given their variance."""
        state, given = self._inner.state[segment.tensor], options[id(segment.parameter)]
        seen = float(state["variance_steps"])
        correction = 1 - given["betas"][1] ** seen if seen and given.get("bias_correction", True) else 1.0
        return (variance / correction).sqrt_().add_(given["eps"])

    def _note_change(self, chunk: UpdateChunk) -> None:
        """Store the master weights of a chunk minus its parameters, for `publish`, while the chunk is in memory."""
        unit = chunk.unit
        if unit.index not in self._changes:
            span = unit.state_stop - unit.state_start
            self._changes[unit.index] = torch.zeros(span, dtype=torch.float32, device=unit.full.device)
        change = self._changes[unit.index][chunk.start : chunk.stop]
        change.copy_(chunk.values()).sub_(unit.local_span(unit.full)[chunk.start : chunk.stop])

    def publish(self, units: list[Unit]) -> None:
        """See `Update.publish`. Collective."""
        self._phase.send_changes(units, self._changes)

    # Fragments of units, for updates with local steps at stage 0, where every rank has all of them in memory.

    def _segments_of(self, unit: Unit) -> Iterable[ParameterSegment]:
        for chunk in self._masters.chunks_of(unit):
            yield from self._of_chunk[id(chunk)]

    def _view(self, flat: torch.Tensor, segment: ParameterSegment) -> torch.Tensor:
        """Return the view of a fragment in `flat`, a flat tensor of the fragment's unit."""
        layout, piece = segment.chunk.unit.layout, segment.piece
        return flat.narrow(0, layout.offsets[piece.index] + piece.start, piece.numel)

    def _chosen(self, messages: Batch) -> Iterator[tuple[ParameterSegment, torch.Tensor]]:
        """Yield the fragments that take part in messages, each with the view of its values in the message."""
        for message in messages:
            for segment in self._segments_of(message.unit):
                if message.chosen[segment.piece.index]:
                    yield segment, self._view(message.flat, segment)

    def _own(self, key: str, segment: ParameterSegment) -> torch.Tensor:
        return self._view(self._phase.state(key, segment.chunk.unit), segment)

    def _master(self, segment: ParameterSegment) -> torch.Tensor:
        piece = segment.piece
        return segment.chunk.values().narrow(0, piece.offset, piece.numel)

    def _local_change(self, segment: ParameterSegment, options: Options) -> torch.Tensor:
        """Return the master weights minus this rank's parameters, after local steps."""
        return self._own(LOCAL_CHANGE, segment)

    @torch.no_grad()
    def _publish_local(self, units: list[Unit]) -> None:
        """Set this rank's parameters to the master weights minus `_local_change`."""
        options = self._phase.options()
        for unit in units:
            for segment in self._segments_of(unit):
                change, out = self._local_change(segment, options), self._view(unit.full, segment)
                parts = (tensor.split(PART) for tensor in (out, self._master(segment), change))
                for target, master, moved in zip(*parts, strict=True):
                    if target.dtype == master.dtype == moved.dtype:
                        torch.sub(master, moved, out=target)
                    else:
                        target.copy_(master.float() - moved)

    def rank_states(self) -> Iterator[RankState]:
        """See `Update.rank_states`. Empty before the first compressed step."""
        return self._phase.rank_states()

    def forget_unsent(self) -> None:
        """See `Update.forget_unsent`."""
        self._phase.forget_unsent()

    def open_rank_states(self, saved: Collection[str]) -> frozenset[str]:
        """See `Update.open_rank_states`."""
        self._zeros.clear()  # the load may refill memory without a change of address or version
        return self._phase.open_rank_states(saved)
