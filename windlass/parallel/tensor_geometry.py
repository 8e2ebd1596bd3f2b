"""Which elements of its storage a tensor is made of: taken out as a flat tensor, put together with equal strides."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

StorageKey = tuple[Any, ...]


@dataclass(frozen=True)
class TensorGeometry:
    """How a tensor lies in memory.

    `dense`: its elements, each counted once, are one run without gaps. Then that run is kept, and every other view of
    it is kept with it. In `core` and `core_stride` the dims that only repeat elements (stride 0) have size 1.
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    unique_size: tuple[int, ...]
    unique_stride: tuple[int, ...]
    dtype: torch.dtype
    is_dense: bool

    @property
    def numel(self) -> int:
        """Elements that have a place of their own in memory."""
        return prod(self.unique_size)

    def restore(self, flat: torch.Tensor) -> torch.Tensor:
        """The tensor again, from its elements `[numel]`: a view of them if dense, else a copy with equal strides."""
        if self.is_dense:
            return flat.as_strided(self.size, self.stride, flat.storage_offset())
        core = torch.empty_strided(self.unique_size, self.unique_stride, dtype=self.dtype, device=flat.device)
        core.copy_(flat.view(self.unique_size))
        return core.as_strided(self.size, self.stride, core.storage_offset())


def get_geometry(tensor: torch.Tensor) -> TensorGeometry | None:
    """How `tensor` lies in memory; None where its elements overlap in any way but by repetition."""
    size, stride = tuple(tensor.size()), tuple(tensor.stride())
    core = tuple(1 if step == 0 else extent for extent, step in zip(size, stride, strict=True))
    core_stride = tuple(step or 1 for step in stride)
    run, reach, dense = 1, 1, True
    for step, extent in sorted((s, e) for s, e in zip(core_stride, core, strict=True) if e > 1):
        if step < reach:
            return None
        dense = dense and step == run
        run *= extent
        reach += (extent - 1) * step
    return TensorGeometry(size, stride, core, core_stride, tensor.dtype, dense)


def flatten_elements(tensor: torch.Tensor, geometry: TensorGeometry) -> torch.Tensor:
    """The elements of `tensor` as `[numel]`, without a graph: a view of its storage if dense, else a copy."""
    bare, start = tensor.detach(), tensor.storage_offset()
    if geometry.is_dense:
        return bare.as_strided((geometry.numel,), (1,), start)
    return bare.as_strided(geometry.unique_size, geometry.unique_stride, start).contiguous().view(-1)


def make_identity_key(tensor: torch.Tensor, geometry: TensorGeometry, storage: StorageWeakRef) -> StorageKey:
    """What tells these elements, as they are now, from all others, for as long as `storage` is held: the number of a
    storage is given away again once it is gone and nobody holds a weak reference to it."""
    place = (storage.cdata, tensor.storage_offset(), geometry.numel, geometry.dtype, tensor._version)
    return place if geometry.is_dense else (*place, geometry.unique_size, geometry.unique_stride)
