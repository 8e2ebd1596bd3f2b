"""Activations cut over the ranks of a model-parallel group, all of which have the whole of them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from windlass.comm.exchange import exchange
from windlass.comm.groups import Group
from windlass.parallel.copies import Copy
from windlass.parallel.places import Home, Place, Stay


class CutPlace:
    """Keeps this rank's cut in another place, and collects the others' for the backward.

    The ranks of the group run the same calls in the same order, on equal values: true of a model whose layers are cut
    over them, not of data-parallel ranks.
    """

    collective = True

    def __init__(self, group: Group, inner: Place) -> None:
        self._group, self._inner = group, inner
        self.home: Home = inner.home
        self.under_way = inner.under_way

    def expect(self, own: int, shared: int) -> None:
        self._inner.expect(-(-own // self._group.size), -(-shared // self._group.size))

    def takes(self, tensor: torch.Tensor) -> bool:
        return True

    def put(self, flat: torch.Tensor) -> Stay:
        bounds = _bounds(flat.numel(), self._group.size)
        own = flat[bounds[self._group.index] : bounds[self._group.index + 1]].clone()
        return _Cut(self._group, self._inner.put(own), bounds, flat)


class _Cut:
    """This rank's cut of a tensor."""

    left = True

    def __init__(self, group: Group, own: Stay, bounds: list[int], like: torch.Tensor) -> None:
        self._group, self._own, self._bounds = group, own, bounds
        self._dtype, self._device = like.dtype, like.device

    def poll(self) -> bool:
        return self._own.poll()

    def wait(self) -> None:
        self._own.wait()

    def fetch(self) -> Copy:
        whole = torch.empty(self._bounds[-1], dtype=self._dtype, device=self._device)
        return _Collected(self._group, self._own.fetch(), self._bounds, whole)


class _Collected:
    """The cuts of all ranks, sent when it is waited for: the order of transfers is that of the backward."""

    def __init__(self, group: Group, own: Copy, bounds: list[int], whole: torch.Tensor) -> None:
        self._group, self._own, self._bounds, self.value = group, own, bounds, whole
        self._finished = False

    def poll(self) -> bool:
        return self._finished

    def wait(self) -> None:
        if self._finished:
            return
        self._finished = True
        self._own.wait()
        parts = [self.value[start:stop] for start, stop in pairwise(self._bounds)]
        mine = parts[self._group.index].copy_(self._own.value)
        others = [i for i in range(self._group.size) if i != self._group.index]
        sends = [(i, mine) for i in others if mine.numel()]
        exchange(self._group, sends, [(i, parts[i]) for i in others if parts[i].numel()])


def _bounds(numel: int, size: int) -> list[int]:
    """Where the cuts of `numel` elements over `size` ranks begin and end; the last ones may be empty."""
    step = -(-numel // size)
    return [min(rank * step, numel) for rank in range(size + 1)]


def group_of(process_group: dist.ProcessGroup) -> Group:
    """A process group that somebody else made, as the transfers here take it."""
    return Group(process_group, tuple(dist.get_process_group_ranks(process_group)), dist.get_rank(process_group))


def model_parallel_group(mpu: Any) -> dist.ProcessGroup | None:
    """The process group that a model-parallel unit in Megatron's manner speaks of; None where it has none."""
    for name in ("get_tensor_model_parallel_group", "get_model_parallel_group"):
        found = getattr(mpu, name, None)
        if found is not None:
            group: dist.ProcessGroup = found()
            return group
    return None
