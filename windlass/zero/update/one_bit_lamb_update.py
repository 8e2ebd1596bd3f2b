"""Update of `OneBitLamb` at stage 0: LAMB until `freeze_step`, then one bit for each element ([Note: 1-bit phase]).

Momenta are exchanged as at stage 0 of 1-bit Adam. Every data-parallel rank then has the full common momentum and steps
its replica of each parameter, so data-parallel ranks need no further message for trust ratios. Each tensor-parallel
rank steps its part of a sharded parameter. The trust ratio is that of the full parameter, so in a compressed step these
ranks exchange three numbers for each sharded parameter.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import ClassVar

import torch
import torch.distributed as dist

from windlass.comm.mesh_axis import MeshAxis
from windlass.optim.one_bit_adam import count_step, is_frozen
from windlass.optim.one_bit_lamb import move_lamb_values, take_lamb_momentum
from windlass.parallel.placement import Placement
from windlass.zero.core.unit import Unit
from windlass.zero.update.compressed_phase import CompressedPhase, Options, error_keys, warn_of_late_parameter
from windlass.zero.update.momentum_mask import apply_momentum_mask, check_momentum_masks
from windlass.zero.update.rank_state import RankState
from windlass.zero.update.update_chunk import UpdateChunk
from windlass.zero.update.update_protocol import UpdateContext
from windlass.zero.update.whole_parameter_update import OwnedParameter, WholeParameterUpdate

ELEMENT_STATES = ("exp_avg", "exp_avg_sq", "exp_avg_sq_fresh")


class OneBitLambUpdate(WholeParameterUpdate):
    """Update of `OneBitLamb`.

    States in addition to LAMB's: `coeff_freeze`; from the first compressed step on also `exp_avg_sq_fresh`,
    `variance_steps` and `last_factor`, and for each rank `worker_error` and `server_error`.
    """

    reduces_itself: ClassVar[bool] = True

    def __init__(self, optimizer: torch.optim.Optimizer, context: UpdateContext) -> None:
        super().__init__(optimizer, context)
        check_momentum_masks(optimizer, [chunk.unit for chunk in self.chunks])
        self._masters = context.masters
        keys = self.rank_state_keys(optimizer, context.shards_states)
        self._phase = CompressedPhase(optimizer, context, self.chunks, keys)
        if self.takes_local_gradients:
            self._phase.begin()

    @classmethod
    def element_state_keys(cls) -> tuple[str, ...]:
        """See `Update.element_state_keys`."""
        return ELEMENT_STATES

    @classmethod
    def rank_state_keys(cls, optimizer: torch.optim.Optimizer, shards_states: bool) -> tuple[str, ...]:
        """See `Update.rank_state_keys`."""
        return error_keys(shards_states)

    @property
    def takes_local_gradients(self) -> bool:
        """True in the compressed phase."""
        return is_frozen(self.optimizer)

    def run(self, used: dict[int, list[bool]], divisor: float) -> Iterator[list[UpdateChunk]]:
        """See `Update.run`. Collective."""
        if not self.takes_local_gradients:
            return self._counted(super().run(used, divisor))
        return self._counted(self._run_compressed(used, divisor, self._phase.options()))

    def _counted(self, batches: Iterator[list[UpdateChunk]]) -> Iterator[list[UpdateChunk]]:
        yield from batches
        count_step(self.optimizer)

    def _run_compressed(
        self, used: dict[int, list[bool]], divisor: float, options: Options
    ) -> Iterator[list[UpdateChunk]]:
        local = self._phase.local_messages(used, divisor, options)
        for _ in self._phase.exchange(local, lambda unit: self._momenta(unit, options)):
            pass
        for batch in self.state_offload.iterate_batches(self._batches):
            self._step_batch(batch, used, options)
            yield batch

    def _momenta(self, unit: Unit, options: Options) -> Iterable[tuple[int, int, torch.Tensor, float]]:
        for chunk in self._masters.chunks_of(unit):
            for owned in self._of_chunk[id(chunk)]:
                state, given = self._inner.state.get(owned.tensor), options.get(id(owned.parameter))
                if state and given is not None:
                    yield owned.index, 0, state["exp_avg"].reshape(-1), given["betas"][0]

    @torch.no_grad()
    def _step_batch(self, batch: list[UpdateChunk], used: dict[int, list[bool]], options: Options) -> None:
        """Update the parameters in a list of chunks in two passes, with `combine_parts` between them."""
        # Parameters that are not stepped have a row too, so that all ranks exchange equal numbers of rows.
        parts = [owned for chunk in batch for owned in self._of_chunk[id(chunk)]]
        numbers = torch.zeros(len(parts), 3, dtype=torch.float64, device=batch[0].device)
        for row, owned in enumerate(parts):
            if self._is_stepped(owned, used, options):
                if "exp_avg" not in self._inner.state[owned.tensor]:
                    warn_of_late_parameter(owned.name)
                momentum, given = self._shaped(owned, gradient=True), options[id(owned.parameter)]
                apply_momentum_mask(momentum, given, owned.chunk.unit, owned.index)
                numbers[row] = take_lamb_momentum(self._shaped(owned), momentum, self._inner.state[owned.tensor], given)
        combine_parts(self._axes, [owned.placement for owned in parts], numbers[:, :2], numbers[:, 2], batch)
        for owned, of_whole in zip(parts, numbers.tolist(), strict=True):
            if self._is_stepped(owned, used, options):
                values, state = self._shaped(owned), self._inner.state[owned.tensor]
                move_lamb_values(values, state, options[id(owned.parameter)], of_whole)
                if values.dtype != owned.chunk.values().dtype:
                    self._place(owned, owned.chunk.values()).copy_(values)

    def _is_stepped(self, owned: OwnedParameter, used: dict[int, list[bool]], options: Options) -> bool:
        has_gradient = owned.chunk.gradient is not None and used[owned.chunk.unit.index][owned.index]
        return has_gradient and id(owned.parameter) in options

    def _shaped(self, owned: OwnedParameter, *, gradient: bool = False) -> torch.Tensor:
        """Return a parameter's master weights, or with `gradient` its common momentum, in the dtype of the update."""
        source = owned.chunk.gradient if gradient else owned.chunk.values()
        assert source is not None
        return self._place(owned, source).to(owned.chunk.state_dtype)

    def _place(self, owned: OwnedParameter, flat: torch.Tensor) -> torch.Tensor:
        """Return the view of a parameter in a flat tensor of its unit."""
        start, shape = owned.chunk.unit.layout.offsets[owned.index], owned.stepped_shape
        return flat[start : start + shape.numel()].view(shape)

    def rank_states(self) -> Iterator[RankState]:
        """See `Update.rank_states`. Empty before the first compressed step."""
        return self._phase.rank_states()

    def forget_unsent(self) -> None:
        """See `Update.forget_unsent`."""
        self._phase.forget_unsent()

    def open_rank_states(self, saved: Collection[str]) -> frozenset[str]:
        """See `Update.open_rank_states`."""
        return self._phase.open_rank_states(saved)


def combine_parts(
    axes: Mapping[str, MeshAxis],
    placements: Sequence[Placement],
    sums: torch.Tensor,
    largest: torch.Tensor,
    chunks: Sequence[UpdateChunk],
) -> None:
    """Combine numbers of the parts of parameters into numbers of the full parameters, in place. Collective over the
    ranks with parts of a parameter.

    Args:
        axes: axes of the mesh by name.
        placements: placement of the parameter of each row.
        sums: `[rows, n]`, numbers to sum.
        largest: `[rows]`, numbers whose maximum over the parts is taken.
        chunks: chunks of the parameters, used only for the model's device.
    """
    for name in sorted({axis for placement in placements for axis in placement.sharded_axes}):
        rows = [row for row, placement in enumerate(placements) if name in placement.sharded_axes]
        device = chunks[0].unit.full.device  # device of the collectives, whatever the tier of the states
        sums[rows] = axes[name].all_reduce(sums[rows].to(device)).to(sums.device)
        largest[rows] = axes[name].all_reduce(largest[rows].to(device), dist.ReduceOp.MAX).to(largest.device)
