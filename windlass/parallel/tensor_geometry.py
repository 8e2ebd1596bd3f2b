"""Memory layout of a tensor: extract its storage elements as a flat tensor, and restore it with equal strides."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

StorageKey = tuple[Any, ...]


@dataclass(frozen=True)
class TensorGeometry:
    """Layout of a tensor in its storage.

    Attributes:
        size, stride: size and stride of the tensor.
        unique_size, unique_stride: the same, but both 1 in each dimension that only repeats elements (stride 0).
        dtype: dtype of the tensor.
        is_dense: True if the distinct elements are one run of memory without gaps. Then this run is saved, and all
            views of the run share the saved copy.
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    unique_size: tuple[int, ...]
    unique_stride: tuple[int, ...]
    dtype: torch.dtype
    is_dense: bool

    @property
    def numel(self) -> int:
        """Number of distinct elements in memory."""
        return prod(self.unique_size)

    def restore(self, flat: torch.Tensor) -> torch.Tensor:
        """Restore the tensor from its elements `[numel]`: a view of them if dense, else a copy with equal strides."""
        if self.is_dense:
            return flat.as_strided(self.size, self.stride, flat.storage_offset())
        core = torch.empty_strided(self.unique_size, self.unique_stride, dtype=self.dtype, device=flat.device)
        core.copy_(flat.view(self.unique_size))
        return core.as_strided(self.size, self.stride, core.storage_offset())


def get_geometry(tensor: torch.Tensor) -> TensorGeometry | None:
    """Return the layout of `tensor`, or None if its elements overlap other than by repetition (stride 0)."""
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
    """Return the elements of `tensor` as `[numel]`, detached: a view of its storage if dense, else a copy."""
    bare, start = tensor.detach(), tensor.storage_offset()
    if geometry.is_dense:
        return bare.as_strided((geometry.numel,), (1,), start)
    return bare.as_strided(geometry.unique_size, geometry.unique_stride, start).contiguous().view(-1)


def make_identity_key(tensor: torch.Tensor, geometry: TensorGeometry, storage: StorageWeakRef) -> StorageKey:
    """Return a key that identifies these elements in their current version, for as long as `storage` is held.

    The address of a storage is not reused while a weak reference to the storage exists.
    """
    place = (storage.cdata, tensor.storage_offset(), geometry.numel, geometry.dtype, tensor._version)
    return place if geometry.is_dense else (*place, geometry.unique_size, geometry.unique_stride)
