"""Base of updates that communicate by themselves: compressed gradients with error feedback, 1-bit optimizers.

[Note: local gradients] While `takes_local_gradients` of an update is True, the engine reduces no gradient. Each
data-parallel rank keeps its full local gradient of every unit: the mean over its micro-batches of an accumulation
cycle. Local gradients are supported at stages 0 and 1, and for 1-bit optimizers at stage 2. The mean of local gradients
over ranks equals the result of the engine's reduction. Norm, clipping and overflow follow from the local gradients:

- the norm is the root mean square over ranks of the norms of local gradients. It equals the norm of the reduced
  gradient if ranks have equal gradients, and is larger otherwise;
- clipping multiplies the local gradients of all ranks by the same coefficient, computed from that norm;
- a local gradient that is not finite makes the norm not finite, so that all ranks skip the step together.

Master weights and states with one value per element are sharded as with any update. Per-rank states are not sharded
([Note: per-rank states]).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from windlass.base.errors import ModelError
from windlass.optim.cpu_optimizer import StateFormat
from windlass.storage.slot import Tier
from windlass.zero.core.unit import Unit
from windlass.zero.update.elementwise_update import ParameterSegment
from windlass.zero.update.optimizer_step_session import run_pre_step_hooks
from windlass.zero.update.rank_state import RankState, RelayRule
from windlass.zero.update.update_chunk import StateEntry, UpdateChunk
from windlass.zero.update.update_protocol import OrdinaryUpdate, UpdateContext


@dataclass(frozen=True)
class LocalParameter:
    """One parameter in a step of a `SelfReducingUpdate`. All tensors are flat and may be changed in place.

    Attributes:
        name, shape: name and shape of the full parameter.
        gradient: `[numel]`, the local gradient of this rank, clipped and without loss scale.
        rank_states: this rank's per-rank states, `[numel]` each, by their names in `rank_state_rules`; zeros before the
            first step.
        start, stop: range of elements that this rank steps: all at stage 0, the rank's shard (maybe empty) at stage 1.
        values: `[stop - start]`, the master weights, to be updated in place.
        state: states of these elements by name. A tensor has shape `[stop - start]`, or `[]` (a count). Empty before
            the first step.
        options: the hyper-parameters of the parameter's group, such as `lr`.
    """

    name: str
    shape: torch.Size
    gradient: torch.Tensor
    rank_states: Mapping[str, torch.Tensor]
    start: int
    stop: int
    values: torch.Tensor
    state: dict[str, Any]
    options: Mapping[str, Any]


class RankStates(Mapping[str, torch.Tensor]):
    """Per-rank states of one parameter by name. Change their values in place, e.g. by `rank_states["error"] += x`.

    Raises:
        ModelError: `rank_states[key]` is used for a state that the update does not declare, or is given another tensor.
    """

    def __init__(self, update: str, parameter: str, states: Mapping[str, torch.Tensor]) -> None:
        self._update, self._parameter, self._states = update, parameter, dict(states)

    def __iter__(self) -> Iterator[str]:
        return iter(self._states)

    def __len__(self) -> int:
        return len(self._states)

    def __contains__(self, key: object) -> bool:
        return key in self._states

    def get(self, key: str, default: Any = None) -> Any:
        return self._states.get(key, default)

    def __getitem__(self, key: str) -> torch.Tensor:
        if key in self._states:
            return self._states[key]
        raise ModelError(
            f"{self._update} has no per-rank state {key!r} of {self._parameter!r} (it has {sorted(self)}); declare it "
            f'in the class: rank_state_rules = {{"{key}": mean_of_ranks}}, or another rule'
        )

    def __setitem__(self, key: str, value: torch.Tensor) -> None:
        if self[key] is value:  # an in-place operator assigns its result
            return
        raise ModelError(
            f"{self._update} replaces the per-rank state {key!r} of {self._parameter!r}, and the new tensor would be "
            f'dropped; write rank_states["{key}"].copy_(...), with the state in rank_state_rules'
        )


class SelfReducingUpdate(OrdinaryUpdate, ABC):
    """Update that receives local gradients and communicates by itself. Subclasses define `step_parameters`.

    Construction is collective over the data-parallel ranks, so a subclass may create its collectives in `__init__`. The
    optimizer holds groups and hyper-parameters only; its `step` is never called.

    Attributes:
        rank_state_rules: rule for a load on another number of ranks, by the name of the per-rank state.
        group: the data-parallel ranks and their process group.

    Raises:
        ModelError: the optimizer has states already, which contain no per-rank states.
    """

    needs_whole_parameters: ClassVar[bool] = False
    reduces_itself: ClassVar[bool] = True
    steps_whole_units: ClassVar[bool] = True
    rank_state_rules: ClassVar[Mapping[str, RelayRule]] = {}

    def __init__(self, optimizer: torch.optim.Optimizer, context: UpdateContext) -> None:
        if optimizer.state:
            raise ModelError(
                f"{type(optimizer).__name__} has states of {len(optimizer.state)} parameters before initialize, and "
                f"{type(self).__name__} makes its own; pass a new optimizer, or load a windlass checkpoint afterwards"
            )
        self.optimizer, self._masters = optimizer, context.masters
        self.chunks, self.state_offload = context.masters.chunks, context.masters.state_offload
        self.group = context.dp_groups[0].mesh.data
        self._states: defaultdict[Any, dict[str, Any]] = defaultdict(dict)
        self.state_offload.states = self._states
        self._segments: dict[int, list[ParameterSegment]] = {}
        self._rank_states: dict[int, dict[str, torch.Tensor]] = {}  # states `[padded]` by unit index and name
        self.add_chunks(self.chunks)

    @abstractmethod
    def step_parameters(self, parameters: list[LocalParameter]) -> None:
        """Communicate, then update values and states of some parameters of one unit in place. Collective.

        Called with the same parameters in the same order on every data-parallel rank. A parameter without a gradient on
        all ranks is left out; a parameter that only other ranks used has a zero gradient. An error must be raised on
        all ranks or on none, because ranks without the error would wait in the next collective.
        """

    @classmethod
    def rank_state_keys(cls, optimizer: torch.optim.Optimizer, shards_states: bool) -> tuple[str, ...]:
        """See `Update.rank_state_keys`."""
        return tuple(cls.rank_state_rules)

    @property
    def takes_local_gradients(self) -> bool:
        """See `Update.takes_local_gradients`."""
        return True

    def add_chunks(self, chunks: list[UpdateChunk]) -> None:
        """See `Update.add_chunks`."""
        for chunk in chunks:
            segments = self._segments[id(chunk)] = [ParameterSegment(chunk, piece) for piece in chunk.pieces()]
            chunk.state_keys = [segment.tensor for segment in segments]
            for segment in segments:
                segment.detach_memory()  # the tensor is only the key of the state
            unit = chunk.unit
            self._rank_states[unit.index] = {
                key: torch.zeros(unit.layout.padded, dtype=chunk.state_dtype, device=unit.full.device)
                for key in self.rank_state_rules
            }

    def cannot_step(self, dtype: torch.dtype, tier: Tier) -> bool:
        """See `Update.cannot_step`."""
        return tier is not Tier.DEVICE

    def state_entries(self, unit: Unit | None = None) -> Iterator[StateEntry]:
        """See `Update.state_entries`."""
        for chunk in self.chunks if unit is None else self._masters.chunks_of(unit):
            for segment in self._segments[id(chunk)]:
                piece = segment.piece
                yield StateEntry(chunk, segment.tensor, piece.index, piece.start, piece.stop, torch.Size([piece.numel]))

    def rank_states(self) -> Iterator[RankState]:
        """See `Update.rank_states`."""
        trained = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        for chunk in self.chunks:
            unit = chunk.unit
            for key, flat in self._rank_states[unit.index].items():
                for index, parameter in enumerate(unit.parameters):
                    if id(parameter) in trained and unit.layout.numels[index]:
                        yield RankState(
                            unit, index, key, unit.parameter_view(flat, index).view(-1), self.rank_state_rules[key]
                        )

    def forget_unsent(self) -> None:
        """See `Update.forget_unsent`. Sets all per-rank states to zero, their values before the first step.

        Override it in an update with per-rank states that stay valid for other weights, such as a momentum.
        """
        for states in self._rank_states.values():
            for flat in states.values():
                flat.zero_()

    def formats(self) -> dict[int, dict[str, StateFormat]]:
        """See `Update.formats`."""
        return {}

    def run(self, used: dict[int, list[bool]], divisor: float) -> Iterator[list[UpdateChunk]]:
        """See `Update.run`. Collective."""
        run_pre_step_hooks(self.optimizer)
        options: dict[int, dict[str, Any]] = {}
        for group in self.optimizer.param_groups:
            given = {key: value for key, value in group.items() if key != "params"}
            options |= {id(parameter): given for parameter in group["params"]}
        return self._run(used, divisor, options)

    def _run(
        self, used: dict[int, list[bool]], divisor: float, options: dict[int, dict[str, Any]]
    ) -> Iterator[list[UpdateChunk]]:
        batches = [[chunk] for chunk in reversed(self.chunks)]  # the order of units is the same on all ranks
        for batch in self.state_offload.iterate_batches(batches):
            (chunk,) = batch
            if chunk.slot.has_reduced:
                self._step(chunk, used[chunk.unit.index], divisor, options)
            yield batch

    @torch.no_grad()
    def _step(self, chunk: UpdateChunk, used: list[bool], divisor: float, options: dict[int, dict[str, Any]]) -> None:
        unit, local = chunk.unit, chunk.slot.read().to(chunk.state_dtype)
        if divisor != 1.0:
            local.div_(divisor)
        chunk.gradient = local[unit.state_start + chunk.start : unit.state_start + chunk.stop]
        values = chunk.values().to(chunk.state_dtype)  # the master weights, or a copy in another dtype
        segments = {segment.piece.index: segment for segment in self._segments[id(chunk)]}
        parameters = []
        for index, parameter in enumerate(unit.parameters):
            if not used[index] or id(parameter) not in options or not unit.layout.numels[index]:
                continue
            segment = segments.get(index)
            start, stop, offset = (0, 0, 0)
            if segment is not None:
                start, stop, offset = segment.piece.start, segment.piece.stop, segment.piece.offset
            parameters.append(
                LocalParameter(
                    unit.names[index],
                    unit.shapes[index],
                    unit.parameter_view(local, index).view(-1),
                    RankStates(
                        type(self).__name__,
                        unit.names[index],
                        {
                            key: unit.parameter_view(flat, index).view(-1)
                            for key, flat in self._rank_states[unit.index].items()
                        },
                    ),
                    start,
                    stop,
                    values.narrow(0, offset, stop - start),
                    self._states[segment.tensor] if segment is not None else {},
                    options[id(parameter)],
                )
            )
        if parameters:
            self.step_parameters(parameters)
        if values is not chunk.master:
            chunk.values().copy_(values)
