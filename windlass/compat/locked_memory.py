"""Module `deepspeed.utils.pin_memory`: host memory locked by `mlock`, with the environment variable that selects it.

With `DS_PIN_MEMORY_BACKEND=native`, `get_accelerator().pin_memory` locks ordinary host memory, also without a GPU.
Locked memory is never swapped out; torch's own pinning is for copies to a GPU.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Callable
from typing import Any
from weakref import finalize

import torch
from torch._subclasses.fake_tensor import FakeTensor

from windlass.base.errors import WindlassError
from windlass.compat import op_builders
from windlass.compat.pinned_memory import track_pinned_memory

BACKEND_VARIABLE = "DS_PIN_MEMORY_BACKEND"

_libc = ctypes.CDLL(None, use_errno=True)


class MemoryLockError(WindlassError, RuntimeError):
    """Error for host memory that cannot be locked."""


class LockedMemoryHandle:
    """Allocator of locked host memory. The memory is freed with its tensor and all views of it."""

    def __init__(self) -> None:
        self._sizes: dict[int, int] = {}  # bytes of each locked allocation, by address

    def new_cpu_locked_tensor(self, num_elem: int, example_tensor: torch.Tensor) -> torch.Tensor:
        """Allocate locked host memory `[num_elem]` of the example's dtype.

        Raises:
            MemoryLockError: the limit of locked memory is reached.
        """
        nbytes = num_elem * example_tensor.element_size()
        if not nbytes:
            return torch.empty(0, dtype=example_tensor.dtype)
        memory = mmap.mmap(-1, nbytes)
        tensor = torch.frombuffer(memory, dtype=example_tensor.dtype, count=num_elem)
        address = tensor.data_ptr()
        if _libc.mlock(ctypes.c_void_p(address), ctypes.c_size_t(nbytes)) != 0:
            raise MemoryLockError(
                f"{nbytes} bytes of host memory could not be locked ({os.strerror(ctypes.get_errno())}); raise "
                f"`ulimit -l`, or unset {BACKEND_VARIABLE}"
            )
        self._sizes[address] = nbytes
        finalize(memory, self._sizes.pop, address, None)  # runs when the last view of the memory is deleted
        track_pinned_memory(nbytes)
        return tensor

    def free_cpu_locked_tensor(self, tensor: torch.Tensor) -> bool:
        """Unlock the memory of a tensor. Return False if it is not locked."""
        return self.free_cpu_locked_tensor_by_ptr(tensor.data_ptr())

    def free_cpu_locked_tensor_by_ptr(self, address: int) -> bool:
        """Unlock the allocation at an address. Return False if there is none. The tensor stays usable."""
        nbytes = self._sizes.pop(address, None)
        if nbytes is None:
            return False
        _libc.munlock(ctypes.c_void_p(address), ctypes.c_size_t(nbytes))
        return True

    def find(self, address: int) -> int | None:
        """Return the start of the locked allocation that contains an address; None if there is none."""
        return next((start for start, size in self._sizes.items() if start <= address < start + size), None)


pin_handle = LockedMemoryHandle


class NativePinnedMemory:
    """Allocator of locked host memory for `get_accelerator().pin_memory`.

    Raises:
        MemoryLockError: the op `pin_memory` cannot be loaded.
    """

    def __init__(self) -> None:
        try:
            self._handle: Any = _find_builder()().load().pin_handle()
        except Exception as error:
            raise MemoryLockError(
                f"{BACKEND_VARIABLE}=native needs the op pin_memory, which failed to load ({error}); unset the variable"
            ) from error

    def pin(self, tensor: torch.Tensor, make_copy: bool = True, match_shape: bool = True) -> torch.Tensor:
        """Return locked memory of the tensor's shape (flat without `match_shape`), by default with its values."""
        locked: torch.Tensor = self._handle.new_cpu_locked_tensor(tensor.numel(), tensor)
        if make_copy:
            locked.copy_(tensor.reshape(-1))
        pinned = locked.view(tensor.shape) if match_shape else locked
        pinned.ds_pinned = True  # type: ignore[attr-defined]
        return pinned

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Return True if a tensor is in locked memory; False for a tensor without elements."""
        if tensor.device.type == "meta" or isinstance(tensor, FakeTensor) or not tensor.numel():
            return False
        return self._handle.find(tensor.data_ptr()) is not None

    def unpin(self, tensor: torch.Tensor) -> bool:
        """Unlock the allocation of a tensor, which stays usable. Return False if it is not locked."""
        start = self._handle.find(tensor.data_ptr())
        if start is None:
            return False
        tensor.__dict__.pop("ds_pinned", None)
        freed: bool = self._handle.free_cpu_locked_tensor_by_ptr(start)
        return freed


_shared_native_pins: NativePinnedMemory | None = None


def get_native_pinned_memory() -> NativePinnedMemory:
    """Return the allocator of this process, which is created at the first call."""
    global _shared_native_pins
    if _shared_native_pins is None:
        _shared_native_pins = NativePinnedMemory()
    return _shared_native_pins


def get_active_native_pinned_memory() -> NativePinnedMemory | None:
    """Return the allocator if `DS_PIN_MEMORY_BACKEND` is `native`, else None."""
    selected = os.environ.get(BACKEND_VARIABLE, "torch").strip().lower() == "native"
    return get_native_pinned_memory() if selected else None


def _find_builder() -> Callable[[], Any]:
    """Return the class `PinMemoryBuilder`, or the class that a script has assigned in its place."""
    module: Any = sys.modules.get("deepspeed.ops.op_builder") or op_builders
    found: Callable[[], Any] = module.PinMemoryBuilder
    return found


def _replace_shared(value: NativePinnedMemory | None) -> None:
    global _shared_native_pins
    _shared_native_pins = value


LIVE: dict[str, Callable[[Any], None]] = {"_shared_native_pins": _replace_shared}
"""Setters of the globals that scripts may assign; see [Note: live names]."""
