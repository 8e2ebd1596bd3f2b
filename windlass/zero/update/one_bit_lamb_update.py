"""Update of `OneBitLamb` at stage 0: LAMB until `freeze_step`, then one bit for each element ([Note: 1-bit phase]).

Momenta travel as at stage 0 of 1-bit Adam. Every rank then has the whole common momentum, and steps its replica of each
parameter, so that trust ratios need no further message.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import ClassVar

import torch

from windlass.optim.one_bit_adam import count_step, is_frozen
from windlass.optim.one_bit_lamb import compressed_lamb_step
from windlass.zero.core.unit import Unit
from windlass.zero.update.compressed_phase import CompressedPhase, Options
from windlass.zero.update.rank_state import RankState
from windlass.zero.update.update_chunk import UpdateChunk
from windlass.zero.update.update_protocol import UpdateContext
from windlass.zero.update.whole_parameter_update import WholeParameterUpdate


class OneBitLambUpdate(WholeParameterUpdate):
    """Update of `OneBitLamb`, whose states beside LAMB's exist from the first compressed step, but for `coeff_freeze`.

    These are `exp_avg_sq_fresh`, `variance_steps` and `last_factor`, and for each rank `worker_error` and
    `server_error`.
    """

    reduces_itself: ClassVar[bool] = True

    def __init__(self, optimizer: torch.optim.Optimizer, context: UpdateContext) -> None:
        super().__init__(optimizer, context)
        self._masters = context.masters
        self._phase = CompressedPhase(optimizer, context, self.chunks)
        if self.takes_local_gradients:
            self._phase.begin()

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
            for chunk in batch:
                if chunk.gradient is not None:
                    self._step_chunk(chunk, used[chunk.unit.index], options)
            yield batch

    def _momenta(self, unit: Unit, options: Options) -> Iterable[tuple[int, int, torch.Tensor, float]]:
        for chunk in self._masters.chunks_of(unit):
            for owned in self._of_chunk[id(chunk)]:
                state, given = self._inner.state.get(owned.tensor), options.get(id(owned.parameter))
                if state and given is not None:
                    yield owned.index, 0, state["exp_avg"].reshape(-1), given["betas"][0]

    @torch.no_grad()
    def _step_chunk(self, chunk: UpdateChunk, used: list[bool], options: Options) -> None:
        unit = chunk.unit
        for owned in self._of_chunk[id(chunk)]:
            if not used[owned.index] or id(owned.parameter) not in options:
                continue
            assert chunk.gradient is not None
            place = slice(unit.layout.offsets[owned.index], unit.layout.offsets[owned.index] + owned.parameter.numel())
            shape, master = unit.shapes[owned.index], chunk.values()[place]
            values = master.to(chunk.state_dtype)
            momentum = chunk.gradient[place].to(chunk.state_dtype).view(shape)
            state = self._inner.state[owned.tensor]
            compressed_lamb_step(values.view(shape), momentum, state, options[id(owned.parameter)])
            if values is not master:
                master.copy_(values)

    def rank_states(self) -> Iterator[RankState]:
        """See `Update.rank_states`. None before the first compressed step."""
        return self._phase.rank_states()

    def open_rank_states(self, saved: Collection[str]) -> frozenset[str]:
        """See `Update.open_rank_states`."""
        return self._phase.open_rank_states(saved)
