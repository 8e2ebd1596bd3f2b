"""Update of `OneBitLamb` at stages 1 and 2, where a parameter's states are sharded.

Gradients are sent as by `OneBitAdam` at these stages ([Note: 1-bit phase]). The trust ratio needs norms of the full
parameter: of weight and update, and in compressed steps of the update with and without weight decay. Compressed steps
also need the largest ratio of frozen to current denominator. So a step has two passes over this rank's fragments, with
small all-reduces between them: the first pass updates momenta and variances and sums squares, the second one updates
the master weights. Squares are summed in float64, fragment by fragment, and the norms are rounded to float32, so that
the first `freeze_step` steps equal those of LAMB bit for bit (sums in another order differ by about 1e-16 of their
value, which the rounding removes in all but about one of 10^8 norms). Master weights and states on NVMe are read twice
in a step. Parameters that are sharded over tensor-parallel ranks need further all-reduces, over those ranks.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist

from windlass.optim.lamb import ratio_of_norms, sum_of_squares
from windlass.optim.one_bit_adam import MOMENTUM_MASK
from windlass.optim.one_bit_lamb import lamb_denominator, next_factor
from windlass.zero.update.compressed_phase import Options
from windlass.zero.update.elementwise_update import ParameterSegment
from windlass.zero.update.one_bit_adam_update import PART, OneBitAdamUpdate
from windlass.zero.update.one_bit_lamb_update import ELEMENT_STATES, combine_parts
from windlass.zero.update.update_chunk import UpdateChunk
from windlass.zero.update.update_protocol import UpdateContext

COEFFICIENT, FRESH, FACTOR = "coeff_freeze", "exp_avg_sq_fresh", "last_factor"
_WEIGHT, _UPDATE, _PLAIN = range(3)


class ShardedOneBitLambUpdate(OneBitAdamUpdate):
    """Update of `OneBitLamb` at stages 1 and 2.

    States are those of `OneBitLambUpdate` without `server_error`. Scalar states of a parameter are equal on all ranks
    that have a fragment of it.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, context: UpdateContext) -> None:
        super().__init__(optimizer, context)
        self._axes = context.axes

    @classmethod
    def element_state_keys(cls) -> tuple[str, ...]:
        """See `Update.element_state_keys`."""
        return ELEMENT_STATES

    def run(self, used: dict[int, list[bool]], divisor: float) -> Iterator[list[UpdateChunk]]:
        """See `Update.run`. Collective."""
        options = self._phase.options()
        if not self.takes_local_gradients:
            return self._counted(self._step_all(used, options, divisor))
        return self._counted(self._run_compressed(used, divisor, options))

    def _run_compressed(
        self, used: dict[int, list[bool]], divisor: float, options: Options
    ) -> Iterator[list[UpdateChunk]]:
        for _ in self._phase.exchange(self._phase.local_messages(used, divisor, options)):
            pass
        yield from self._step_all(used, options, None)

    @torch.no_grad()
    def _step_all(
        self, used: dict[int, list[bool]], options: Options, divisor: float | None
    ) -> Iterator[list[UpdateChunk]]:
        """Update all chunks in two passes, and yield each batch in the second one. Collective.

        Args:
            divisor: divisor of the reduced gradients; None: the chunks' gradients are means of compressed messages.
        """
        self._changes = {}
        self.has_stepped = True  # the first pass changes states, and no batch is yielded before its end
        rows = self._rows()
        squares = torch.zeros(len(rows), 3, dtype=torch.float64)
        largest = torch.zeros(len(rows), dtype=torch.float64)
        for batch in self.state_offload.iterate_batches(self._batches):
            for chunk, segment, values in self._stepped_segments(batch, used, options):
                assert chunk.gradient is not None
                received = chunk.gradient.narrow(0, segment.piece.offset, segment.piece.numel).to(values.dtype)
                row = rows[chunk.unit.index, segment.piece.index]
                if divisor is None:
                    self._take_message(segment, values, received, options)
                    largest[row] = max(float(largest[row]), self._largest_ratio(segment, options))
                else:
                    self._take_gradient(segment, values, received / divisor, options)
                squares[row] += self._squares(segment, values, options)
        group = self._phase.group
        device = self.chunks[0].device if self.chunks else torch.device("cpu")
        squares = group.all_reduce(squares.to(device)).cpu()
        if divisor is None:
            largest = group.all_reduce(largest.to(device), dist.ReduceOp.MAX).cpu()
        units = {chunk.unit.index: chunk.unit for chunk in self.chunks}
        placements = [units[unit].placements[index] for unit, index in rows]
        combine_parts(self._axes, placements, squares, largest, self.chunks)
        for batch in self.state_offload.iterate_batches(self._batches):
            for chunk in batch:
                self._masters.drop_lowered_params(chunk)
            for chunk, segment, values in self._stepped_segments(batch, used, options):
                row = rows[chunk.unit.index, segment.piece.index]
                ratio = float(largest[row]) if divisor is None else None
                self._move_by_ratio(segment, values, squares[row], ratio, options)
                if values.data_ptr() != self._master(segment).data_ptr():
                    self._master(segment).copy_(values)
            for chunk in batch:
                if self.publishes_itself and chunk.slot.has_reduced:
                    self._note_change(chunk)
            yield batch

    def _rows(self) -> dict[tuple[int, int], int]:
        """Return each parameter's row in the exchanged tensors, by unit and parameter index.

        Equal on all ranks of a pipeline stage.
        """
        units = {chunk.unit.index: chunk.unit for chunk in self.chunks}
        names = [(unit, index) for unit in sorted(units) for index in range(len(units[unit].parameters))]
        return {name: number for number, name in enumerate(names)}

    def _stepped_segments(
        self, batch: list[UpdateChunk], used: dict[int, list[bool]], options: Options
    ) -> Iterator[tuple[UpdateChunk, ParameterSegment, torch.Tensor]]:
        """Yield each fragment to step, with its chunk and its master weights in the state dtype (maybe a copy)."""
        for chunk in batch:
            for segment in self._of_chunk[id(chunk)] if chunk.gradient is not None else ():
                if used[chunk.unit.index][segment.piece.index] and id(segment.parameter) in options:
                    yield chunk, segment, self._master(segment).to(chunk.state_dtype)

    def _take_gradient(
        self, segment: ParameterSegment, values: torch.Tensor, gradient: torch.Tensor, options: Options
    ) -> None:
        state, (beta1, beta2) = self._inner.state[segment.tensor], options[id(segment.parameter)]["betas"]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(values), torch.zeros_like(values)
        state.setdefault(COEFFICIENT, torch.zeros((), dtype=torch.float32))  # states of `Lamb` have no coefficient
        state["step"] += 1
        state["exp_avg"].mul_(beta1).add_(gradient, alpha=1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)

    def _take_message(
        self, segment: ParameterSegment, values: torch.Tensor, mean: torch.Tensor, options: Options
    ) -> None:
        """Update the momentum and `exp_avg_sq_fresh` of a fragment with the mean of the messages."""
        (beta1, beta2), state = options[id(segment.parameter)]["betas"], self._opened(segment, values)
        if FRESH not in state:
            state[FRESH] = state["exp_avg_sq"].clone()
            state[FACTOR] = torch.ones((), dtype=torch.float32)
            state.setdefault(COEFFICIENT, torch.ones((), dtype=torch.float32))
        state["step"] += 1
        momentum = state["exp_avg"].mul_(beta1)
        if options[id(segment.parameter)].get(MOMENTUM_MASK) is not None:
            decayed = momentum.clone()
            momentum.add_(mean)
            self._mask(segment, momentum, options)
            mean = momentum - decayed
        else:
            momentum.add_(mean)
        gradient = mean / (1 - beta1)
        state[FRESH].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)

    def _largest_ratio(self, segment: ParameterSegment, options: Options) -> float:
        """Return the largest ratio, in a fragment, of the update's denominator from the frozen variance to that from
        the current variance.
        """
        state, given = self._inner.state[segment.tensor], options[id(segment.parameter)]
        frozen, current = (lamb_denominator(state[key], given) for key in ("exp_avg_sq", FRESH))
        return float((frozen / current).max())

    def _plain(
        self, momentum: torch.Tensor, variance: torch.Tensor, options: Options, segment: ParameterSegment
    ) -> torch.Tensor:
        """Return the update without weight decay, for a slice of a fragment."""
        plain = momentum / lamb_denominator(variance, options[id(segment.parameter)])
        # in compressed steps, do not move elements that had no gradient before the freeze: their frozen variance is 0
        if self.takes_local_gradients:
            plain.masked_fill_(variance == 0, 0.0)
        return plain

    def _cached_parts(self, segment: ParameterSegment, values: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
        """Yield matching slices of momentum, variance and weight, each small enough for the CPU's cache."""
        state = self._inner.state[segment.tensor]
        yield from zip(*(t.split(PART) for t in (state["exp_avg"], state["exp_avg_sq"], values)), strict=True)

    def _squares(self, segment: ParameterSegment, values: torch.Tensor, options: Options) -> torch.Tensor:
        """Return the sums of squares of weight, update, and update without weight decay: `[3]`, float64, on the CPU."""
        sums, decay = torch.zeros(3, dtype=torch.float64), options[id(segment.parameter)]["weight_decay"]
        for momentum, variance, part in self._cached_parts(segment, values):
            plain = self._plain(momentum, variance, options, segment)
            update = plain.add(part, alpha=decay) if decay else plain
            sums += torch.stack([sum_of_squares(one) for one in (part, update, plain)]).cpu()
        return sums

    def _move_by_ratio(
        self,
        segment: ParameterSegment,
        values: torch.Tensor,
        squares: torch.Tensor,
        largest: float | None,
        options: Options,
    ) -> None:
        """Update the weights of a fragment in place, and the states of its trust ratio.

        Args:
            squares: see `_squares`, of the full parameter.
            largest: see `_largest_ratio`, of the full parameter; None before the compressed phase.
        """
        state, given = self._inner.state[segment.tensor], options[id(segment.parameter)]
        weight, update, plain = squares.sqrt()
        (beta1, beta2), size, decay = given["betas"], float(given["lr"]), given["weight_decay"]
        coefficient: torch.Tensor = state[COEFFICIENT]
        if largest is None:
            ratio = ratio_of_norms(weight, update, given["min_coeff"], given["max_coeff"])
            coefficient.mul_(given["coeff_beta"]).add_(ratio, alpha=1 - given["coeff_beta"])
            seen = float(state["step"])
        else:
            share = min(1.0, float(plain / update)) if decay and update else 1.0
            state[FACTOR] = next_factor(torch.tensor(largest * share + 1 - share), state[FACTOR], given)
            ratio, seen = coefficient * state[FACTOR], float(state["variance_steps"])
        if given["bias_correction"]:
            size *= (1 - beta2**seen) ** 0.5 / (1 - beta1 ** float(state["step"]))
        for momentum, variance, part in self._cached_parts(segment, values):
            move = self._plain(momentum, variance, options, segment)
            if decay:
                move.add_(part, alpha=decay)
            part.sub_(move.mul_(ratio * size))  # the same operations as in `Lamb`, for bitwise equal results
