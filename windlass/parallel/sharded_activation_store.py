"""Store that shards replicated activations over the ranks of a model-parallel group."""

from __future__ import annotations

from itertools import pairwise

import torch

from windlass.comm.point_to_point import exchange_tensors
from windlass.comm.rank_group import RankGroup
from windlass.parallel.activation_store import ActivationStore, ActivationTier, StoredActivation
from windlass.parallel.device_copies import PendingCopy


class ShardedStore:
    """Store that puts this rank's shard in another store and all-gathers the shards in the backward.

    The ranks of the group must run the same calls in the same order on equal values. Ranks of a tensor-parallel model
    do; data-parallel ranks do not.
    """

    is_collective = True

    def __init__(self, group: RankGroup, store: ActivationStore) -> None:
        self._group, self._store = group, store
        self.tier: ActivationTier = store.tier
        self.max_in_flight = store.max_in_flight

    def begin_call(self, unique_bytes: int, shared_bytes: int) -> None:
        self._store.begin_call(-(-unique_bytes // self._group.size), -(-shared_bytes // self._group.size))

    def accepts(self, tensor: torch.Tensor) -> bool:
        return True

    def put(self, flat: torch.Tensor) -> StoredActivation:
        bounds = _shard_bounds(flat.numel(), self._group.size)
        own = flat[bounds[self._group.index] : bounds[self._group.index + 1]].clone()
        return _ShardedActivation(self._group, self._store.put(own), bounds, flat)


class _ShardedActivation:
    """This rank's shard of a tensor."""

    is_source_free = True

    def __init__(self, group: RankGroup, local: StoredActivation, bounds: list[int], like: torch.Tensor) -> None:
        self._group, self._local, self._bounds = group, local, bounds
        self._dtype, self._device = like.dtype, like.device

    def poll(self) -> bool:
        return self._local.poll()

    def wait(self) -> None:
        self._local.wait()

    def fetch(self) -> PendingCopy:
        full = torch.empty(self._bounds[-1], dtype=self._dtype, device=self._device)
        return _GatheredActivation(self._group, self._local.fetch(), self._bounds, full)


class _GatheredActivation:
    """All-gather of the shards. It runs inside `wait`, so that all ranks communicate in the order of the backward."""

    def __init__(self, group: RankGroup, local: PendingCopy, bounds: list[int], full: torch.Tensor) -> None:
        self._group, self._local, self._bounds, self.value = group, local, bounds, full
        self._finished = False

    def poll(self) -> bool:
        return self._finished

    def wait(self) -> None:
        if self._finished:
            return
        self._finished = True
        self._local.wait()
        parts = [self.value[start:stop] for start, stop in pairwise(self._bounds)]
        local = parts[self._group.index].copy_(self._local.value)
        others = [i for i in range(self._group.size) if i != self._group.index]
        sends = [(i, local) for i in others if local.numel()]
        exchange_tensors(self._group, sends, [(i, parts[i]) for i in others if parts[i].numel()])


def _shard_bounds(numel: int, size: int) -> list[int]:
    """Return the bounds of the shards of `numel` elements over `size` ranks. The last shards may be empty."""
    step = -(-numel // size)
    return [min(rank * step, numel) for rank in range(size + 1)]
