"""Context in which sharded parameters have their full values: `with GatheredParameters(...)`."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Any

import torch
from torch import nn

from windlass.base.collective_activity import WaitScope
from windlass.base.errors import GatherError
from windlass.comm.mesh_shape import DATA_AXES, EXPERT_DATA_AXES
from windlass.comm.rank_group import world_group
from windlass.zero.access.shard_values import is_expert_only, part_param, set_part_param
from windlass.zero.core.parameter_registry import ParameterLocation, find
from windlass.zero.core.sharded_parameter import ShardedParameter, StateDictStub, mark_sharded, mark_unsharded, put_data
from windlass.zero.core.unit import ShardState
from windlass.zero.sharded_init import initial_shard
from windlass.zero.sharded_init.initial_shard import ShardedInit

_open: set[int] = set()  # ids of the parameters that are inside a context


class GatheredParameters:
    """Context in which parameters have their full values. Collective.

    Inside, a sharded parameter holds a private copy of its full value, in the parameter's dtype. At the end of the
    context:

    - With `modifier_rank=None`, changes of the copy are lost.
    - With a rank, the values of that rank are broadcast and set on all ranks, also in the master weights. This includes
      parameters of the engine that are not sharded. After an exception in the context nothing is broadcast.

    Parameters that are neither sharded nor part of an engine are not touched, except while a model is being built under
    `zero.Init`: then the values of `modifier_rank` are broadcast for them too.

    Args:
        params: One parameter, or an iterable of parameters, which may contain duplicates.
        modifier_rank: Global rank whose changes are kept.
        fwd_module: Accepted for compatibility and ignored. Modules that use parameters of other modules are detected
            without it.
        enabled: If False, the context does nothing.

    Raises:
        GatherError: a parameter is inside another `GatheredParameters` already.
        ModelError: a parameter was resized inside the context.
    """

    def __init__(
        self,
        params: nn.Parameter | Iterable[nn.Parameter],
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        given: list[nn.Parameter] = [params] if isinstance(params, nn.Parameter) else list(params)
        # transformers 4.57 takes the parameters from a `state_dict()`, which has stubs for them.
        given = [one.parameter if isinstance(one, StateDictStub) else one for one in given]
        unique = {id(p): p for p in given}.values() if enabled else []
        self._places = [(p, place) for p in unique if (place := find(p)) is not None]
        self._init_shards = [(p, init_shard) for p in unique if (init_shard := initial_shard.find(p)) is not None]
        # `params` may be a set, whose order differs between ranks
        self._places.sort(key=lambda item: item[1].order)
        self._init_shards.sort(key=lambda item: item[1].number)
        placed = {id(p) for p, _ in [*self._places, *self._init_shards]}
        self._whole = [p for p in unique if id(p) not in placed]
        self._rank = modifier_rank
        self._copied: list[tuple[nn.Parameter, ParameterLocation]] = []

    def __enter__(self) -> GatheredParameters:
        again = next((place for p, place in self._places if id(p) in _open), None)
        if again is not None:
            raise GatherError(f"{again.name!r} is inside another GatheredParameters already; leave that first")
        if any(id(p) in _open for p, _ in self._init_shards):
            raise GatherError("a parameter is inside another GatheredParameters already; leave that first")
        for model in {id(place.model): place.model for _, place in self._places}.values():
            model.finish_update()
        for parameter, init_shard in self._init_shards:
            _open.add(id(parameter))
            initial_shard.unshard_parameter(parameter, init_shard)
        sharded = [(p, place) for p, place in self._places if place.unit.reshards]
        copies = []
        for parameter, place in sharded:
            if place.unit.gather_codec is not None:  # gathered values are rounded, and a modifier would write them back
                copies.append(part_param(parameter).to(place.unit.full.device, place.unit.dtype, copy=True))
                _open.add(id(parameter))
                continue
            with place.model.runtime.unsharded([place.unit], experts_only=is_expert_only(place), names=[place.name]):
                copies.append(place.unit.parameter_view(place.unit.full, place.index).detach().clone())
            _open.add(id(parameter))
        for (parameter, place), copy in zip(sharded, copies, strict=True):
            if isinstance(parameter, ShardedParameter):
                mark_unsharded(parameter)
            put_data(parameter, copy)
            place.unit.unmark_freed([place.index])
            place.unit.privately_held.add(place.index)
            self._copied.append((parameter, place))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for parameter, init_shard in self._init_shards:
            self._return(parameter, init_shard, changed=self._rank is not None and kind is None)
        # Parameters of a model under construction that are not sharded yet: they will be sharded from the values of
        # rank 0, so rank 0 needs the changes.
        if self._rank is not None and kind is None and initial_shard.is_building():
            for parameter in self._whole:
                value = parameter.detach().contiguous()
                world_group().broadcast(_bytes(value), self._rank)
                parameter.detach().copy_(value)
        values: list[tuple[nn.Parameter, torch.Tensor]] = []
        resized = [(place, p.shape) for p, place in self._copied if p.shape != place.unit.shapes[place.index]]
        if self._rank is not None and kind is None and not resized:
            for parameter, place in self._places:
                value = parameter.detach().clone(memory_format=torch.contiguous_format)
                data = place.unit.dp_group.mesh.data
                if data.size > 1:
                    with WaitScope("broadcast", [place.name]):
                        data.broadcast(_bytes(value), data.ranks.index(_modifier(place, self._rank)))
                values.append((parameter, value))
        for parameter, place in self._copied:
            _open.discard(id(parameter))
            place.unit.privately_held.discard(place.index)
            place.model.masters.accept_version(parameter)  # changes are discarded, or set in the masters below
            if place.unit.shard_state is ShardState.SHARDED:
                mark_sharded(parameter, place.unit)
            else:
                put_data(parameter, place.unit.parameter_view(place.unit.full, place.index))
        self._copied = []
        for place, shape in resized if kind is None else ():
            place.unit.require_shape(place.index, shape)
        for parameter, value in values:
            set_part_param(parameter, value)

    def _return(self, parameter: nn.Parameter, init_shard: ShardedInit, *, changed: bool) -> None:
        """Shard the values of a parameter constructed under `zero.Init` again."""
        _open.discard(id(parameter))
        if changed:
            assert self._rank is not None
            init_shard.assign(parameter.detach(), init_shard.group.ranks.index(self._rank))
        mark_sharded(parameter, init_shard)


def _modifier(place: ParameterLocation, rank: int) -> int:
    """Return the rank of the parameter's data-parallel group whose changes are kept.

    This is `rank` if it is in the group. Otherwise `rank` holds another part or copy of the parameter, and the rank at
    the same data-parallel position in this group is used.
    """
    data, grid = place.unit.dp_group.mesh.data, place.model.mesh.grid
    if rank in data.ranks:
        return rank
    here, there = (grid.coordinates(one) for one in (data.ranks[data.index], rank))
    shared = EXPERT_DATA_AXES if place.unit.kind.is_expert else DATA_AXES
    return grid.rank(**{axis: there[axis] if axis in shared else here[axis] for axis in here})


def _bytes(value: torch.Tensor) -> Any:
    return value.reshape(-1).view(torch.uint8) if value.numel() else value
