"""Offload of the tensors that a forward saves for its backward.

[Note: offloaded activations] A saved tensor is identified by its storage elements (`tensor_geometry`), not by the
Python object, because autograd saves views of views, and the same hidden states many times. The content of one storage
at one version is offloaded once, independent of how often and in which shape it is saved. When the backward requests a
saved tensor, those offloaded just before it are prefetched, about as many bytes as the requested tensor has. Within one
backward, a tensor that was saved `n` times is cached until its `n`-th request, except if its store is collective, i.e.
reads it from other ranks. The cache holds at most twice the bytes of the largest offloaded tensor.
Parameters, their views and small tensors are never offloaded.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple
from weakref import ReferenceType, WeakValueDictionary, ref

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from windlass.base.backward_callbacks import current_backward_id, queue_end_of_backward
from windlass.base.errors import ModelError
from windlass.parallel.activation_store import ActivationStore, ActivationTier, StoredActivation
from windlass.parallel.device_copies import PendingCopy
from windlass.parallel.tensor_geometry import (
    StorageKey,
    TensorGeometry,
    flatten_elements,
    get_geometry,
    make_identity_key,
)

MIN_OFFLOAD_BYTES = 4096
"""Tensors of fewer bytes than this stay on the device: a transfer would cost more than the freed memory is worth."""


@dataclass
class OffloadCounters:
    """Byte counters. All but `stored_bytes` count since the last `reset`.

    Attributes:
        stored_bytes: bytes in each tier at present.
        offloaded_bytes: bytes put in the store.
        kept_bytes: bytes left on the device, because the tensor is small or of a kind that is not offloaded. Parameters
            and their views are not counted.
        deduplicated_bytes: bytes of tensors that autograd saved again while the store had their content.
        fetched_bytes: bytes copied back.
        prefetched_bytes: bytes whose copy back was started before the request.
    """

    stored_bytes: Counter[ActivationTier] = field(default_factory=Counter)
    offloaded_bytes: int = 0
    kept_bytes: int = 0
    deduplicated_bytes: int = 0
    fetched_bytes: int = 0
    prefetched_bytes: int = 0

    def reset(self) -> None:
        """Set all counters except `stored_bytes` to 0."""
        self.offloaded_bytes = self.kept_bytes = self.deduplicated_bytes = self.fetched_bytes = (
            self.prefetched_bytes
        ) = 0


class OffloadedTensor:
    """Flat tensor in a store. The autograd graph holds it, and it is deleted with the last graph node that refers to
    it.
    """

    def __init__(
        self, flat: torch.Tensor, storage: StorageWeakRef, store: ActivationStore, counters: OffloadCounters
    ) -> None:
        self.nbytes = flat.nbytes
        self.previous: ReferenceType[OffloadedTensor] | None = None  # the tensor that was offloaded before this one
        self._storage = storage  # keeps the storage's id reserved, so that no new storage gets the same identity key
        self._version, self._counters, self._store = flat._version, counters, store
        self._stored: StoredActivation = store.put(flat)
        self._source: torch.Tensor | None = None if store.is_collective or self._stored.is_source_free else flat
        self._mutation_error: ModelError | None = None
        self.save_count = 0  # number of times that autograd saved this tensor
        # id of the last backward that requested this tensor, and number of requests in that backward
        self._uses_in_backward = -1, 0
        self._pending_fetch: PendingCopy | None = None
        self._last_fetched: ReferenceType[torch.Tensor] | None = None
        counters.stored_bytes[store.tier] += self.nbytes
        counters.offloaded_bytes += self.nbytes

    def __del__(self) -> None:
        if hasattr(self, "_last_fetched"):  # absent if the store had no space and __init__ raised
            self._counters.stored_bytes[self._store.tier] -= self.nbytes

    def finish_transfer(self, *, wait: bool) -> bool:
        """Return True if the transfer to the store is complete; with `wait`, wait for it first."""
        if wait:
            self._stored.wait()
        over = self._stored.poll()
        self._release_source()
        return over

    def fetch(self) -> int:
        """Start to copy the tensor back. Return the bytes of the transfer.

        Return 0 without a transfer if the store is collective, or if the tensor is on the device, is being copied back,
        or was requested earlier in this backward.
        """
        if (
            self._store.is_collective
            or self._pending_fetch is not None
            or self._uses_in_backward[0] == current_backward_id()
        ):
            return 0
        if self._find_on_device() is not None:
            return 0
        self._pending_fetch = self._stored.fetch()
        self._counters.prefetched_bytes += self.nbytes
        return self.nbytes

    def count_use(self) -> int:
        """Count a request. Return the number of requests in the current backward."""
        number, times = self._uses_in_backward
        self._uses_in_backward = current_backward_id(), times + 1 if number == current_backward_id() else 1
        return self._uses_in_backward[1]

    def value(self) -> torch.Tensor:
        """Return the flat tensor, on the device.

        Raises:
            StorageError: the tensor cannot be read back.
            ModelError: the tensor was changed in place during its transfer.
        """
        found = self._find_on_device()
        if found is not None:
            return found
        coming, self._pending_fetch = self._pending_fetch or self._stored.fetch(), None
        coming.wait()
        self._counters.fetched_bytes += self.nbytes
        # With a collective store all ranks must make the same fetches, but some ranks may free the value earlier.
        if not self._store.is_collective:
            self._last_fetched = ref(coming.value)
        return coming.value

    def _find_on_device(self) -> torch.Tensor | None:
        """Return the tensor if it is on the device: not yet transferred, or fetched and still referenced."""
        self._release_source()
        if self._mutation_error is not None:
            raise self._mutation_error
        return (
            self._source
            if self._source is not None
            else (self._last_fetched() if self._last_fetched is not None else None)
        )

    def _release_source(self) -> None:
        """Release the tensor on the device once it was copied to the store.

        If the tensor was changed in place before, record an error: the copy may have old, new or mixed values.
        """
        if self._source is None:
            return
        if self._source._version != self._version:
            self._mutation_error = _mutated_error(self._source, self._version)
        if self._stored.is_source_free:
            self._source = None


class PackedTensor(NamedTuple):
    """Object that autograd holds in place of an offloaded tensor."""

    entry: OffloadedTensor
    geometry: TensorGeometry


class PassthroughTensor(NamedTuple):
    """Object that autograd holds for a tensor that is not offloaded. It records the tensor's
    version, since torch does not check the versions of tensors that are saved through hooks.
    """

    tensor: torch.Tensor
    version: int


class SavedTensorOffloader:
    """Pack and unpack hooks of `torch.autograd.graph.saved_tensors_hooks`, for one store.

    Args:
        store: destination of the tensors.
        min_offload_bytes: tensors of fewer bytes stay on the device.
    """

    def __init__(self, store: ActivationStore, min_offload_bytes: int = MIN_OFFLOAD_BYTES) -> None:
        self.store, self.min_offload_bytes = store, min_offload_bytes
        self.counters = OffloadCounters()
        self._by_key: WeakValueDictionary[StorageKey, OffloadedTensor] = WeakValueDictionary()
        self._in_flight: deque[ReferenceType[OffloadedTensor]] = deque()
        self._last_saved: ReferenceType[OffloadedTensor] | None = None
        # Fetched tensors with further requests expected in this backward, by id of their `OffloadedTensor`;
        # oldest first.
        self._cached: dict[int, torch.Tensor] = {}
        self._largest_bytes = 0  # bytes of the largest offloaded tensor
        self._backwards: set[int] = set()

    def pack(self, tensor: torch.Tensor) -> PackedTensor | PassthroughTensor:
        """Offload a tensor that autograd is about to save."""
        geometry = get_geometry(tensor) if self.is_offloadable(tensor) else None
        if geometry is None or geometry.numel * tensor.element_size() < self.min_offload_bytes:
            if not _is_parameter_or_view(tensor):
                self.counters.kept_bytes += tensor.nbytes
            return PassthroughTensor(tensor if tensor.is_leaf else tensor.detach(), tensor._version)
        storage = StorageWeakRef(tensor.untyped_storage())
        key = make_identity_key(tensor, geometry, storage)
        kept = self._by_key.get(key)
        if kept is None:
            kept = self._by_key[key] = self._offload(flatten_elements(tensor, geometry), storage)
        else:
            self.counters.deduplicated_bytes += kept.nbytes
        kept.save_count += 1
        return PackedTensor(kept, geometry)

    def unpack(self, packed: PackedTensor | PassthroughTensor) -> torch.Tensor:
        """Return the tensor of a packed object.

        Raises:
            ModelError: the tensor was changed in place in the meantime.
            StorageError: the tensor cannot be read back.
        """
        if isinstance(packed, PassthroughTensor):
            if packed.tensor._version != packed.version:
                raise _mutated_error(packed.tensor, packed.version)
            return packed.tensor
        kept, geometry = packed
        flat = kept.value()
        self._cache_for_reuse(kept, flat)
        self._prefetch(kept)
        return geometry.restore(flat)

    def begin_call(self, tensors: Iterable[torch.Tensor]) -> None:
        """Announce to the store that a checkpointed call is about to save its inputs `tensors`. Inputs that require no
        gradient count as shared by many calls.
        """
        sizes = {True: 0, False: 0}
        for tensor in tensors:
            geometry = get_geometry(tensor) if self.is_offloadable(tensor) else None
            nbytes = 0 if geometry is None else geometry.numel * tensor.element_size()
            sizes[tensor.requires_grad] += nbytes if nbytes >= self.min_offload_bytes else 0
        self.store.begin_call(sizes[True], sizes[False])

    def is_offloadable(self, tensor: torch.Tensor) -> bool:
        """Return True if `tensor` is of a kind that is offloaded. Its size is not checked."""
        return (
            type(tensor) is torch.Tensor
            and tensor.layout is torch.strided
            and tensor.device.type != "meta"
            and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)
            and not _is_parameter_or_view(tensor)
            and self.store.accepts(tensor)
        )

    def _offload(self, flat: torch.Tensor, storage: StorageWeakRef) -> OffloadedTensor:
        kept = OffloadedTensor(flat, storage, self.store, self.counters)
        self._largest_bytes = max(self._largest_bytes, kept.nbytes)
        kept.previous, self._last_saved = self._last_saved, ref(kept)
        self._in_flight.append(self._last_saved)
        while self._in_flight:
            oldest = self._in_flight[0]()
            if oldest is not None and not oldest.finish_transfer(wait=len(self._in_flight) > self.store.max_in_flight):
                break
            self._in_flight.popleft()
        return kept

    def _cache_for_reuse(self, entry: OffloadedTensor, flat: torch.Tensor) -> None:
        """Cache a tensor that was saved several times (a mask that all layers share) until its last expected
        request."""
        number, times = current_backward_id(), entry.count_use()
        self._cached.pop(id(entry), None)
        if times >= entry.save_count or self.store.is_collective or number < 0:
            return
        if number not in self._backwards:
            self._backwards.add(number)
            queue_end_of_backward(lambda: self._clear_cache(number))
        self._cached[id(entry)] = flat
        while sum(each.nbytes for each in self._cached.values()) > 2 * self._largest_bytes:
            self._cached.pop(next(iter(self._cached)))

    def _clear_cache(self, backward_id: int) -> None:
        self._backwards.discard(backward_id)
        self._cached.clear()

    def _prefetch(self, entry: OffloadedTensor) -> None:
        budget, before = entry.nbytes, entry.previous
        while budget > 0 and before is not None and (other := before()) is not None:
            budget -= other.fetch() or other.nbytes
            before = other.previous


def _is_parameter_or_view(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)


def _mutated_error(tensor: torch.Tensor, version: int) -> ModelError:
    return ModelError(
        f"a tensor of shape {tuple(tensor.shape)} that the backward needs was changed in place: it was saved at "
        f"version {version} and is now at {tensor._version}; write `x = x + y` instead of `x += y` after its use"
    )
