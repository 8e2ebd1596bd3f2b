"""Shards of parameters that are constructed under `zero.Init`, before the model's units exist.

[Note: sharded construction] Units are not known while a model is constructed, so each parameter is sharded separately.
Each rank gets `ceil(numel / ranks)` elements in memory order; the last ranks may get fewer. `initialize` makes the
units and exchanges the shards between ranks, unit by unit (unit_values.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol
from weakref import ReferenceType, ref

import torch
from torch import nn

from windlass.base.errors import ModelError
from windlass.comm.point_to_point import exchange_tensors
from windlass.comm.rank_group import RankGroup
from windlass.zero.core.sharded_parameter import forget_sharded, mark_sharded, mark_unsharded


class ShardStorage(Protocol):
    """Storage of a shard between uses."""

    def load(self) -> torch.Tensor:
        """Return the shard, flat. The caller must not change it."""
        ...


StoreShard = Callable[[torch.Tensor], ShardStorage]  # stores a flat shard on its tier


class ShardInMemory:
    """Shard in memory.

    Args:
        shard: Flat shard.
        device: Device to which the shard is copied; None: no copy.
    """

    def __init__(self, shard: torch.Tensor, device: torch.device | None = None) -> None:
        self._shard = shard if device is None else shard.to(device)

    def load(self) -> torch.Tensor:
        return self._shard


class ShardedInit:
    """This rank's shard of one parameter constructed under `zero.Init`.

    Args:
        label: Name for error messages, because the parameter's name in the model is not known yet.
        like: Tensor of the parameter's shape, strides, dtype and device.
        group: Ranks over which the parameter is sharded.
        store_shard: Stores this rank's shard on its tier.
        number: Index among the parameters constructed under `zero.Init`, equal on all ranks.
        provides_stub: True if `state_dict()` may contain a stub for the parameter (see `StateDictStub`).
    """

    def __init__(
        self,
        label: str,
        like: torch.Tensor,
        group: RankGroup,
        store_shard: StoreShard,
        number: int = 0,
        provides_stub: bool = False,
    ) -> None:
        self.label, self.group, self._store_shard, self.number, self.allows_stub = (
            label,
            group,
            store_shard,
            number,
            provides_stub,
        )
        self.shape, self.dtype, self.device = like.shape, like.dtype, like.device
        self.stride = like.stride() if is_dense(like) else _row_major(like.shape)
        self.numel = like.numel()
        self._kept: ShardStorage | None = None

    @property
    def row_major(self) -> bool:
        """True if the elements are in memory in the order of their indices."""
        return is_row_major(self.shape, self.stride)

    @property
    def shard(self) -> torch.Tensor:
        """This rank's shard, flat, in memory order."""
        assert self._kept is not None, f"{self.label} has no shard yet"
        return self._kept.load()

    @shard.setter
    def shard(self, value: torch.Tensor) -> None:
        self._kept = self._store_shard(value)

    def span(self, index: int) -> tuple[int, int]:
        """Return the range `[start, stop)` of the elements that the rank at `index` has."""
        return span(self.numel, index, self.group.size)

    def full_value(self) -> torch.Tensor:
        """Gather the full value, with the strides and on the device of the constructed parameter. Collective."""
        flat = gather(self.group, self.shard.to(self.device), self.numel)
        return flat.as_strided(self.shape, self.stride)

    def assign(self, values: torch.Tensor, source: int) -> None:
        """Replace the values by those of the rank at index `source`. Values of other ranks are ignored. Collective.

        The parameter keeps its dtype and strides.

        Args:
            values: Tensor of the parameter's shape.
        """
        flat = None
        if self.group.index == source:
            if values.dtype != self.dtype or values.stride() != self.stride:  # shards are in the order of `stride`
                own = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)
                values = own.copy_(values)
            flat = flat_of(values)
        self.shard = scatter(self.group, source, [(flat, self.numel, self.dtype)], self.device)[0]

    def require_shape(self, shape: torch.Size) -> None:
        """Raise ModelError if the parameter was given another shape."""
        if shape != self.shape:
            raise ModelError(
                f"{self.label} has shape {tuple(self.shape)} and was given shape {tuple(shape)} inside "
                "GatheredParameters; the change is lost. Construct the module with its new size under zero.Init"
            )

    def placeholder(self) -> torch.Tensor:
        """Return an expanded scalar of the parameter's shape, which takes memory for one element only.

        Each placeholder has its own storage, so that two parameters are not mistaken for tied ones.
        """
        return torch.zeros((), dtype=self.dtype, device=self.device).expand(self.shape)

    def cast(self, dtype: torch.dtype) -> None:
        """Convert the shard to another dtype."""
        if dtype != self.dtype:
            self.shard = self.shard.to(dtype)
            self.dtype = dtype

    def gather_parameter(self, parameter: nn.Parameter, together: Sequence[torch.Tensor]) -> bool:
        """Gather `parameter` if this thread is constructing a model under `zero.Init`, and return True; else False.

        See `GatherHandler`. Collective.
        """
        return _builder is not None and _builder(parameter, self, together)

    def name_of(self, parameter: nn.Parameter) -> str:
        """Return the label. See `GatherHandler`."""
        return self.label


_sharded_inits: dict[int, tuple[ReferenceType[nn.Parameter], ShardedInit]] = {}
_builder: Callable[[nn.Parameter, ShardedInit, Sequence[torch.Tensor]], bool] | None = None


def set_builder(builder: Callable[[nn.Parameter, ShardedInit, Sequence[torch.Tensor]], bool] | None) -> None:
    """Set the function that gathers a parameter used while a model is being built; None: no function."""
    global _builder
    _builder = builder


def is_building() -> bool:
    """Return True while a model is being built under a `zero.Init` that shards parameters."""
    return _builder is not None


def find(parameter: nn.Parameter) -> ShardedInit | None:
    """Return this rank's shard of `parameter`.

    None if the parameter was not constructed under `zero.Init`, is not sharded yet, or after `finish_parameter`.
    """
    entry = _sharded_inits.get(id(parameter))
    return entry[1] if entry is not None and entry[0]() is parameter else None


def shard_parameter(parameter: nn.Parameter, init_shard: ShardedInit) -> None:
    """Mark `parameter` as sharded and free its full values. `init_shard` has this rank's shard."""
    identity = id(parameter)

    def gone(reference: ReferenceType[nn.Parameter]) -> None:
        entry = _sharded_inits.get(identity)
        if entry is not None and entry[0] is reference:
            del _sharded_inits[identity]
            forget_sharded(identity)

    _sharded_inits[identity] = ref(parameter, gone), init_shard
    mark_sharded(parameter, init_shard)


def unshard_parameter(parameter: nn.Parameter, init_shard: ShardedInit) -> None:
    """Give `parameter` a private copy of its full values, and keep the shard. Collective."""
    full = init_shard.full_value()
    mark_unsharded(parameter)
    parameter.data = full


def finish_parameter(parameter: nn.Parameter) -> None:
    """Free the shard of `parameter`, which becomes part of a unit or gets full values. The caller sets its data."""
    del _sharded_inits[id(parameter)]
    mark_unsharded(parameter)


def scatter(
    group: RankGroup, source: int, items: list[tuple[torch.Tensor | None, int, torch.dtype]], device: torch.device
) -> list[torch.Tensor]:
    """Scatter flat tensors of the rank at index `source`, and return this rank's shard of each. Collective.

    Args:
        group: Ranks over which the tensors are sharded.
        source: Index in `group` of the rank that sends.
        items: `(flat tensor, number of elements, dtype)`; on the other ranks the tensor is ignored and may be None.
        device: Device on which the shards are received.
    """
    parts, sends, receives = [], [], []
    for flat, numel, dtype in items:
        start, stop = span(numel, group.index, group.size)
        if group.index == source:
            assert flat is not None
            parts.append(flat[start:stop].clone())
            for index in range(group.size):
                first, last = span(numel, index, group.size)
                if index != source and first < last:
                    sends.append((index, flat[first:last]))
        else:
            parts.append(torch.empty(stop - start, dtype=dtype, device=device))
            if start < stop:
                receives.append((source, parts[-1]))
    exchange_tensors(group, sends, receives)
    return parts


def gather(group: RankGroup, own: torch.Tensor, numel: int) -> torch.Tensor:
    """Gather a flat tensor of `numel` elements from the ranks' shards, on the device of `own`. Collective."""
    flat = torch.empty(numel, dtype=own.dtype, device=own.device)
    parts = [flat[slice(*span(numel, index, group.size))] for index in range(group.size)]
    parts[group.index].copy_(own)
    others = [index for index in range(group.size) if index != group.index]
    sends = [(index, own) for index in others if own.numel()]
    exchange_tensors(group, sends, [(index, parts[index]) for index in others if parts[index].numel()])
    return flat


def span(numel: int, index: int, count: int) -> tuple[int, int]:
    """Return the range `[start, stop)` of `numel` elements that the rank at `index` of `count` ranks has."""
    size = -(-numel // count)
    return min(index * size, numel), min((index + 1) * size, numel)


def flat_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of `tensor` flat.

    This is a view in memory order if they are contiguous in memory, else a copy in the order of their indices.
    """
    plain = tensor.detach()
    return plain.as_strided((plain.numel(),), (1,)) if is_dense(plain) else plain.contiguous().view(-1)


def is_dense(tensor: torch.Tensor) -> bool:
    """Return True if the elements are contiguous in memory, in any order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return tensor.numel() == 0
            expected *= size
    return True


def is_row_major(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Return True if the elements are in memory in the order of their indices."""
    pairs = zip(shape, stride, _row_major(shape), strict=True)
    return 0 in shape or all(size == 1 or have == want for size, have, want in pairs)


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
