"""Module `deepspeed.runtime.activation_checkpointing.offload_activations`: host offload of checkpointed inputs."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch.autograd.graph import saved_tensors_hooks

from windlass.base.errors import ModelError
from windlass.compat.accelerator import get_accelerator
from windlass.parallel.activation_store import HostStore, StoredActivation
from windlass.parallel.device_copies import CompletedCopy, PendingCopy, start_copy_to_device, start_copy_to_host
from windlass.parallel.saved_tensor_offload import PackedTensor, PassthroughTensor, SavedTensorOffloader


class ReenteredError(ModelError, RuntimeError):
    """Error for a context manager that is entered while it is active."""


class RangeError(ModelError, ValueError):
    """Error for a negative count or size."""


@dataclass
class CheckpointActivationOffloadStats:
    """Statistics of one context: number of saved tensors, and of the marked ones that were offloaded, skipped or
    kept."""

    saved_tensors_seen: int = 0
    marked_tensors: int = 0
    offloaded_tensors: int = 0
    restored_tensors: int = 0
    skipped_marked_tensors: int = 0
    kept_last_tensors: int = 0
    offloaded_bytes: int = 0
    restored_bytes: int = 0


class _Held:
    """Placeholder in the autograd graph for a marked tensor. The tensor stays on the device until there are
    `keep_last_count` newer marked tensors."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.nbytes = tensor.nbytes
        self.held_tensor: PassthroughTensor | None = PassthroughTensor(tensor.detach(), tensor._version)
        self.packed_tensor: PackedTensor | PassthroughTensor | None = None
        self.restored = False


BufferKey = tuple[tuple[int, ...], torch.dtype, torch.layout, bool]


class PooledHostStore(HostStore):
    """Store in host memory that reuses the buffers of tensors that are no longer needed.

    Args:
        uses_pinned_memory: allocate buffers by `get_accelerator().pin_memory`.
        max_free_buffers: maximum number of free buffers; further ones are freed.
    """

    def __init__(self, uses_pinned_memory: bool, max_free_buffers: int) -> None:
        super().__init__()
        self._uses_pinned_memory, self._max_free_buffers = uses_pinned_memory, max_free_buffers
        self._free: dict[BufferKey, list[torch.Tensor]] = {}

    def key_of(self, tensor: torch.Tensor) -> BufferKey:
        """Return the key of the buffers that fit a tensor. Buffers are contiguous, so the key has no strides."""
        return tuple(tensor.shape), tensor.dtype, tensor.layout, self._uses_pinned_memory

    def allocate_like(self, tensor: torch.Tensor) -> tuple[torch.Tensor, BufferKey]:
        """Return a contiguous host buffer of the tensor's shape, reused or new, and the key of the buffer."""
        key = self.key_of(tensor)
        if free := self._free.get(key):
            return free.pop(), key
        buffer = torch.empty(tuple(tensor.shape), dtype=tensor.dtype)
        return get_accelerator().pin_memory(buffer, make_copy=False) if self._uses_pinned_memory else buffer, key

    def release(self, key: BufferKey, buffer: torch.Tensor) -> None:
        """Store a free buffer for later tensors, unless `max_free_buffers` buffers are stored already."""
        if sum(map(len, self._free.values())) < self._max_free_buffers:
            self._free.setdefault(key, []).append(buffer)

    def put(self, flat: torch.Tensor) -> StoredActivation:
        buffer, key = self.allocate_like(flat)
        if flat.is_cuda and not buffer.is_pinned():
            buffer.copy_(flat)  # torch copies to pageable memory synchronously
            return _PooledActivation(self, key, CompletedCopy(buffer), flat.device)
        return _PooledActivation(self, key, start_copy_to_host(flat, buffer), flat.device)


class _PooledActivation:
    """Tensor in a buffer of the pool, which gets the buffer back when this object is deleted."""

    def __init__(self, store: PooledHostStore, key: BufferKey, copy: PendingCopy, device: torch.device) -> None:
        self._store, self._key, self._copy, self._device = store, key, copy, device
        self._fetches: list[ReferenceType[PendingCopy]] = []

    @property
    def is_source_free(self) -> bool:
        return self._copy.poll()

    def poll(self) -> bool:
        return self._copy.poll()

    def wait(self) -> None:
        self._copy.wait()

    def fetch(self) -> PendingCopy:
        self._copy.wait()
        fetched = start_copy_to_device(self._copy.value, self._device)
        if fetched.value is self._copy.value:  # no copy was made; the buffer may be reused before the caller frees it
            return CompletedCopy(fetched.value.clone())
        self._fetches.append(ref(fetched))
        return fetched

    def __del__(self) -> None:
        # A buffer that a copy still uses is not reused, but freed with the copy. Fetches that were deleted need no
        # check: the current stream waits for them.
        fetches = [fetch for reference in self._fetches if (fetch := reference()) is not None]
        if self._copy.poll() and all(fetch.poll() for fetch in fetches):
            self._store.release(self._key, self._copy.value)


class CheckpointHiddenStatesOffload(saved_tensors_hooks):
    """Context manager that offloads tensors saved by autograd to host memory, if they are marked.

    Other tensors are unchanged.

    While it is active, the first argument of each checkpointed layer of transformers is marked. On a device that shares
    the host's memory, nothing is moved.

    Args:
        use_pin_memory: allocate host memory by `get_accelerator().pin_memory`.
        use_streams: overlap copies with computation; False: wait for each copy.
        min_offload_bytes: smaller tensors stay on the device.
        max_fwd_stash_count: maximum number of copies to the host in flight.
        max_cpu_buffer_pool_count: maximum number of free host buffers that are kept for later tensors.
        keep_last_count: number of newest marked tensors that stay on the device, because the backward needs them first.

    Raises:
        RangeError: a count or size is negative.
    """

    def __init__(
        self,
        use_pin_memory: bool = True,
        use_streams: bool = True,
        min_offload_bytes: int = 1024,
        max_fwd_stash_count: int = 2,
        max_cpu_buffer_pool_count: int = 64,
        keep_last_count: int = 1,
    ) -> None:
        for name, value in (
            ("keep_last_count", keep_last_count),
            ("max_fwd_stash_count", max_fwd_stash_count),
            ("max_cpu_buffer_pool_count", max_cpu_buffer_pool_count),
            ("min_offload_bytes", min_offload_bytes),
        ):
            if value < 0:
                raise RangeError(f"{name} = {value} is negative; write 0 or more")
        self.use_pin_memory, self.use_streams, self.keep_last_count = use_pin_memory, use_streams, keep_last_count
        place = PooledHostStore(use_pin_memory, max_cpu_buffer_pool_count)
        self._buffer_key, self._empty_cpu_like = place.key_of, place.allocate_like
        place.max_in_flight = max_fwd_stash_count if use_streams else 0
        self._keeper = SavedTensorOffloader(place, max(min_offload_bytes, 1))
        self._marks: Counter[int] = Counter()
        self._newest: deque[ReferenceType[_Held]] = deque()
        self.stats = CheckpointActivationOffloadStats()
        super().__init__(self._pack, self._unpack)

    def mark(self, tensor: torch.Tensor) -> None:
        """Mark a tensor, to be offloaded the next time autograd saves it."""
        self._marks[id(tensor)] += 1
        self.stats.marked_tensors += 1

    def reset(self) -> None:
        """Clear marks and counts. Tensors that a graph still holds stay readable."""
        self._marks.clear()
        self._newest.clear()
        self.stats = CheckpointActivationOffloadStats()

    def __enter__(self) -> None:
        """Enter the context and reset the counts.

        Raises:
            ReenteredError: the context is active already.
        """
        if self in _active():
            raise ReenteredError("CheckpointHiddenStatesOffload is not re-entrant: nest a second object instead")
        self.reset()
        super().__enter__()
        _active().append(self)
        _patch.acquire()

    def __exit__(self, *error: object) -> None:
        _patch.release()
        _active().remove(self)
        self._marks.clear()
        self._newest.clear()
        super().__exit__(*error)

    def _unmark(self, tensor: torch.Tensor) -> bool:
        """Remove one mark. Return False if there is none."""
        if self._marks[id(tensor)] < 1:
            del self._marks[id(tensor)]
            return False
        self._marks[id(tensor)] -= 1
        return True

    def _pack(self, tensor: torch.Tensor) -> Any:
        self.stats.saved_tensors_seen += 1
        if not self._unmark(tensor):
            return tensor
        if not self._keeper.is_offloadable(tensor) or tensor.nbytes < self._keeper.min_offload_bytes:
            self.stats.skipped_marked_tensors += 1
            return tensor
        held = _Held(tensor)
        self._newest.append(ref(held))
        while len(self._newest) > self.keep_last_count:
            self._send(self._newest.popleft()())
        return held

    def _send(self, held: _Held | None) -> None:
        """Start the copy to the host. Do nothing if the graph is already freed (`held` is None)."""
        if held is None or held.held_tensor is None:
            return
        held.packed_tensor, held.held_tensor = self._keeper.pack(self._keeper.unpack(held.held_tensor)), None
        if isinstance(held.packed_tensor, PassthroughTensor):  # a layout that cannot be offloaded
            self.stats.skipped_marked_tensors += 1
            return
        self.stats.offloaded_tensors += 1
        self.stats.offloaded_bytes += held.nbytes

    def _unpack(self, packed: Any) -> torch.Tensor:
        if not isinstance(packed, _Held):
            found: torch.Tensor = packed
            return found
        first, packed.restored = not packed.restored, True
        if packed.held_tensor is not None:
            self.stats.kept_last_tensors += first
            return self._keeper.unpack(packed.held_tensor)
        assert packed.packed_tensor is not None
        found = self._keeper.unpack(packed.packed_tensor)
        if first and isinstance(packed.packed_tensor, PackedTensor):
            self.stats.restored_tensors += 1
            self.stats.restored_bytes += packed.nbytes
        return found


get_checkpoint_hidden_states_offloading_ctx_manager = CheckpointHiddenStatesOffload

_local = threading.local()


def _active() -> list[CheckpointHiddenStatesOffload]:
    """Return the active contexts of this thread, innermost last."""
    found: list[CheckpointHiddenStatesOffload] = _local.__dict__.setdefault("active", [])
    return found


class _Patch:
    """Patch of `__call__` of transformers' checkpointed layers, installed while any context is active."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._layer: Any = None
        self._own: Callable[..., Any] | None = None

    def acquire(self) -> None:
        """Add a user, and install the patch for the first."""
        with self._lock:
            self._users += 1
            if self._users > 1:
                return
            try:
                from transformers import GradientCheckpointingLayer
            # Without transformers, or with a version that lacks the class, scripts mark tensors themselves.
            except ImportError:
                return
            self._layer, self._own = GradientCheckpointingLayer, GradientCheckpointingLayer.__dict__.get("__call__")
            GradientCheckpointingLayer.__call__ = _marking(GradientCheckpointingLayer.__call__)

    def release(self) -> None:
        """Remove a user, and uninstall the patch after the last."""
        with self._lock:
            self._users -= 1
            if self._users or self._layer is None:
                return
            layer, own, self._layer = self._layer, self._own, None
            if own is None:
                del layer.__call__
            else:
                layer.__call__ = own


def _marking(call: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `call`, so that the first argument is marked if the layer is checkpointed."""

    def marked_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        contexts = _active()
        states = args[0] if args else None
        checkpointed = self.training and torch.is_grad_enabled() and getattr(self, "gradient_checkpointing", False)
        if not contexts or not checkpointed or not isinstance(states, torch.Tensor):
            return call(self, *args, **kwargs)
        contexts[-1].mark(states)
        try:
            return call(self, *args, **kwargs)
        finally:
            contexts[-1]._unmark(states)  # ids are reused: a mark must not outlive its tensor

    return marked_call


_patch = _Patch()
