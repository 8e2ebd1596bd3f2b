"""Context in which sharded parameters have their full values: `with GatheredParameters(...)`."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import nn

from windlass.base.collective_activity import WaitScope
from windlass.base.errors import GatherError, ModelError
from windlass.comm.mesh_shape import DATA_AXES, EXPERT_DATA_AXES
from windlass.comm.rank_group import RankGroup, world_group
from windlass.zero.access.shard_values import is_expert_only, set_part_param
from windlass.zero.core.sharded_parameter import ShardedParameter, StateDictStub, mark_sharded, mark_unsharded, put_data
from windlass.zero.core.unit import ShardState
from windlass.zero.parameter_registry import ParameterLocation, find
from windlass.zero.sharded_init import initial_shard
from windlass.zero.sharded_init.initial_shard import ShardedInit

T = TypeVar("T")
_open: set[int] = set()  # ids of the sharded parameters that are inside a context


class GatheredParameters:
    """Context in which parameters have their full values. Collective.

    Inside, a sharded parameter holds a private copy of its full value, in the parameter's dtype. At the end of the
    context:

    - With `modifier_rank=None`, changes of the copy are lost.
    - With a rank, the values of that rank are broadcast and set on all ranks, also in the master weights, even for
      parameters of the engine that are not sharded. Master weights of unchanged elements are not rounded. Parameters
      keep their dtype and strides. After an exception in the context nothing is broadcast.
    - Under tp and ep, a parameter is only this rank's part of the full parameter. Changes of a part come from the rank
      that has this part at the data-parallel position of `modifier_rank`, so all these ranks must make their changes.

    The backward of an operation that saves a gathered parameter itself, such as `(p * p).sum()`, has to run inside the
    context too. `full_param` has no such limit.

    Parameters that are neither sharded nor part of an engine are not touched, except while a model is being built under
    `zero.Init`: then the values of `modifier_rank` are broadcast for them too.

    Args:
        params: One parameter, or an iterable of parameters, which may contain duplicates.
        modifier_rank: Global rank whose changes are kept.
        fwd_module: Accepted for compatibility and ignored. Modules that use parameters of other modules are detected
            without it.
        enabled: If False, the context does nothing.

    Raises:
        GatherError: a sharded parameter is inside another `GatheredParameters` already.
        ModelError: a parameter was resized inside the context. Its change is lost. With a `modifier_rank`, all ranks
            that have the parameter raise if any rank resized it, and the other parameters are set. Without one, only
            the rank that resized it raises.
        ModelError: the parameters are not on the rank `modifier_rank`.
    """

    def __init__(
        self,
        params: nn.Parameter | Iterable[nn.Parameter],
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        given: list[nn.Parameter] = [params] if isinstance(params, nn.Parameter) else list(params)
        # transformers 4.57 passes values of a `state_dict()`, which has stubs for sharded parameters.
        given = [one.parameter if isinstance(one, StateDictStub) else one for one in given]
        unique = {id(p): p for p in given}.values() if enabled else []
        self._places = [(p, place) for p in unique if (place := find(p)) is not None]
        self._init_shards = [(p, init_shard) for p in unique if (init_shard := initial_shard.find(p)) is not None]
        # `params` may be a set, whose order differs between ranks
        self._places.sort(key=lambda item: item[1].order)
        self._init_shards.sort(key=lambda item: item[1].number)
        placed = {id(p) for p, _ in [*self._places, *self._init_shards]}
        self._whole = [p for p in unique if id(p) not in placed]
        # ids of the parameters whose data this context replaces
        self._ids = {id(p) for p, _ in self._init_shards} | {id(p) for p, place in self._places if place.unit.reshards}
        self._rank = modifier_rank
        if modifier_rank is not None and (placed or initial_shard.is_building()):
            for group in (world_group(), *(init_shard.group for _, init_shard in self._init_shards)):
                if modifier_rank not in group.ranks:
                    raise ModelError(
                        f"modifier_rank is {modifier_rank!r}, which is none of the global ranks "
                        f"{reprlib.repr(group.ranks)} of these parameters; pass one of them, or None to change nothing"
                    )
        self._copied: list[tuple[nn.Parameter, ParameterLocation]] = []

    def __enter__(self) -> GatheredParameters:
        again = next((place for p, place in self._places if id(p) in _open), None)
        if again is not None:
            raise GatherError(f"{again.name!r} is inside another GatheredParameters already; leave that context first")
        if any(id(p) in _open for p, _ in self._init_shards):
            raise GatherError(
                "a parameter built under zero.Init is inside another GatheredParameters already; leave that context "
                "first"
            )
        _open.update(self._ids)
        try:
            self._gather()
        except BaseException:
            self._release()
            raise
        return self

    def _gather(self) -> None:
        """Give the sharded parameters private copies of their full values. Collective."""
        for model in {id(place.model): place.model for _, place in self._places}.values():
            model.finish_update()
        for _, place in self._places:
            kinds = ["parameters"] if place.unit.reshards else []
            if self._rank is not None:  # the end of the context sets the parameters and the master weights
                kinds = ["parameters", "master_weights"]
            place.model.state_offloader.require_on_device(place.name, place.unit, *kinds)
        for parameter, init_shard in self._init_shards:
            initial_shard.unshard_parameter(parameter, init_shard)
        sharded = [(p, place) for p, place in self._places if place.unit.reshards]
        copies = []
        for _, place in sharded:
            unit, alone = place.unit, is_expert_only(place)
            with place.model.runtime.exact_values(unit, experts_only=alone, names=[place.name]) as values:
                copies.append(values[place.index].detach().clone())
        for (parameter, place), copy in zip(sharded, copies, strict=True):
            if isinstance(parameter, ShardedParameter):
                mark_unsharded(parameter)
            put_data(parameter, copy)
            place.unit.unmark_freed([place.index])
            place.unit.privately_held.add(place.index)
            self._copied.append((parameter, place))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        values: list[tuple[nn.Parameter, torch.Tensor]] = []
        init_shapes = [(init_shard, p.shape) for p, init_shard in self._init_shards]
        shapes = [(place, p.shape) for p, place in self._places]
        try:
            if kind is None and self._rank is not None:
                init_shapes = self._assign_init_shards(self._rank)
                self._broadcast_unsharded(self._rank)
                values, shapes = self._broadcast(self._rank)
        finally:
            self._release()
        if kind is not None:
            return
        for parameter, place in self._places:
            # A parameter of a unit that is never resharded still has the size and the dtype that the script gave it.
            is_cast = self._rank is not None and parameter.dtype != place.unit.dtype
            if is_cast or parameter.shape != place.unit.shapes[place.index]:
                put_data(parameter, place.unit.views()[place.index])
        for parameter, value in values:
            # Elements that the script left as they were must not be rounded to the param_dtype.
            set_part_param(parameter, value, keeps_unchanged=True)
        for init_shard, shape in init_shapes:
            init_shard.require_shape(shape)
        for place, shape in shapes:
            place.unit.require_shape(place.index, shape)

    def _assign_init_shards(self, rank: int) -> list[tuple[ShardedInit, torch.Size]]:
        """Shard the values that `rank` gave to parameters constructed under `zero.Init`. Collective.

        Returns:
            The parameters that some rank resized, with the new shape, equal on all ranks. Their changes are lost.
        """
        given = _exchanged([(init_shard.group, p.shape) for p, init_shard in self._init_shards])
        resized = []
        for (parameter, init_shard), of_ranks in zip(self._init_shards, given, strict=True):
            if others := [shape for shape in of_ranks if shape != init_shard.shape]:
                resized.append((init_shard, others[0]))
            else:
                init_shard.assign(parameter.detach(), init_shard.group.ranks.index(rank))
        return resized

    def _broadcast_unsharded(self, rank: int) -> None:
        """Broadcast parameters of a model under construction that are not sharded yet. Collective.

        They will be sharded from the values of rank 0, so rank 0 needs the changes.
        """
        for parameter in self._whole if initial_shard.is_building() else ():
            value = parameter.detach().contiguous()
            world_group().broadcast(_bytes(value), rank)
            parameter.detach().copy_(value)

    def _broadcast(
        self, rank: int
    ) -> tuple[list[tuple[nn.Parameter, torch.Tensor]], list[tuple[ParameterLocation, torch.Size]]]:
        """Return the parameters of engines with the values of `rank`. Collective.

        Returns:
            A list of parameters with their values, and a list of the parameters that some rank resized, with the new
            shape. All ranks that have a parameter find it in the same list, so they start the same collectives.
        """
        given = _exchanged([(place.unit.dp_group.mesh.data, (p.shape, p.dtype)) for p, place in self._places])
        values, resized = [], []
        for (parameter, place), of_ranks in zip(self._places, given, strict=True):
            own = place.unit.shapes[place.index]
            if others := [shape for shape, _ in of_ranks if shape != own]:
                resized.append((place, others[0]))
                continue
            data = place.unit.dp_group.mesh.data
            source = data.ranks.index(_modifier(place, rank))
            # The script may have given the parameter another dtype, e.g. that of the master weights.
            value = torch.empty(own, dtype=of_ranks[source][1], device=place.unit.full.device)
            if data.index == source:
                value.copy_(parameter.detach())
            if data.size > 1:
                with WaitScope("broadcast", [place.name]):
                    data.broadcast(_bytes(value), source)
            values.append((parameter, value))
        return values, resized

    def _release(self) -> None:
        """Drop the private copies, and shard the parameters again."""
        _open.difference_update(self._ids)
        for parameter, init_shard in self._init_shards:
            if not isinstance(parameter, ShardedParameter):
                put_data(parameter, init_shard.placeholder())
                mark_sharded(parameter, init_shard)
        for parameter, place in self._copied:
            place.unit.privately_held.discard(place.index)
            # Changes are discarded, or set in the masters afterwards, so they are not to be detected as edits.
            place.model.masters.accept_version(parameter)
            put_data(parameter, place.unit.views()[place.index])  # also restores the shape of a resized one
            if place.unit.shard_state is ShardState.SHARDED:
                mark_sharded(parameter, place.unit)
        self._copied = []


def _exchanged(local: list[tuple[RankGroup, T]]) -> list[tuple[T, ...]]:
    """Return for each `(group, value)` the values of all ranks of its group, in the order of the group. Collective."""
    exchanged: dict[int, Iterator[tuple[T, ...]]] = {}
    for group, _ in local:
        if id(group) not in exchanged:
            of_ranks = group.all_gather_object([value for other, value in local if other is group])
            exchanged[id(group)] = zip(*of_ranks, strict=True)
    return [next(exchanged[id(group)]) for group, _ in local]


def _modifier(place: ParameterLocation, rank: int) -> int:
    """Return the global rank in the parameter's data-parallel group whose changes are kept.

    This is `rank` if it is in the group; else the rank of the group at the same data-parallel position as `rank`.
    """
    data, grid = place.unit.dp_group.mesh.data, place.model.mesh.grid
    if rank in data.ranks:
        return rank
    here, there = (grid.coordinates(one) for one in (data.ranks[data.index], rank))
    shared = EXPERT_DATA_AXES if place.unit.kind.is_expert else DATA_AXES
    return grid.rank(**{axis: there[axis] if axis in shared else here[axis] for axis in here})


def _bytes(value: torch.Tensor) -> Any:
    return value.reshape(-1).view(torch.uint8) if value.numel() else value
