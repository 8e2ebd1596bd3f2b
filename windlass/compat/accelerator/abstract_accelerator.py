"""Abstract base class of accelerators: DeepSpeed's methods, and implementations that all devices share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, MutableMapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from windlass.compat.locked_memory import get_active_native_pinned_memory
from windlass.compat.op_builders import OpBuilder, find_builder


class DeepSpeedAccelerator(ABC):
    """Kind of device, with DeepSpeed's methods.

    `device_index` is None for the current device, an int, or an int as a string.
    """

    supports_nvtx_domain = False
    _name: str
    _communication_backend_name: str
    _compile_backend = "inductor"

    # The device itself.

    @abstractmethod
    def is_available(self) -> bool:
        """Return True if this machine has such a device."""

    @abstractmethod
    def is_synchronized_device(self) -> bool:
        """Return True if an operation is complete when its call returns."""

    @abstractmethod
    def device_name(self, device_index: int | str | None = None) -> str:
        """Return the device name: `cuda`, or `cuda:1` with an index."""

    @abstractmethod
    def device(self, device_index: int | str | None = None) -> Any:
        """Return a context manager that makes the device current; None if there is only one device."""

    @abstractmethod
    def set_device(self, device_index: int | str) -> None:
        """Make a device the current one."""

    @abstractmethod
    def current_device(self) -> int:
        """Return the index of the current device."""

    @abstractmethod
    def current_device_name(self) -> str:
        """Return the current device's name: `cuda:1`, or `cpu`, which has no index."""

    @abstractmethod
    def device_count(self) -> int:
        """Return the number of devices visible to this process."""

    @abstractmethod
    def synchronize(self, device_index: int | str | None = None) -> None:
        """Wait for all operations queued on the device."""

    # Random numbers.

    @abstractmethod
    def set_rng_state(self, new_state: torch.Tensor, device_index: int | str | None = None) -> None:
        """Set the state of the random number generator."""

    @abstractmethod
    def get_rng_state(self, device_index: int | str | None = None) -> torch.Tensor:
        """Return the state of the random number generator."""

    @abstractmethod
    def manual_seed(self, seed: int) -> Any:
        """Seed the current device's generator."""

    @abstractmethod
    def manual_seed_all(self, seed: int) -> Any:
        """Seed the generators of all devices of this process."""

    @abstractmethod
    def initial_seed(self) -> int:
        """Return the seed of the random number generator."""

    @abstractmethod
    def default_generator(self, device_index: int) -> torch.Generator:
        """Return the default random number generator of a device."""

    # Streams, events and CUDA graphs.

    @property
    @abstractmethod
    def Stream(self) -> Any: ...

    @property
    @abstractmethod
    def Event(self) -> Any: ...

    @abstractmethod
    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Return a context manager in which operations are queued on `stream`."""

    @abstractmethod
    def current_stream(self, device_index: int | str | None = None) -> Any: ...

    @abstractmethod
    def default_stream(self, device_index: int | str | None = None) -> Any: ...

    @abstractmethod
    def create_graph(self) -> Any: ...

    @abstractmethod
    def capture_to_graph(self, graph: Any, pool: Any = None, stream: Any = None) -> AbstractContextManager[Any]: ...

    @abstractmethod
    def replay_graph(self, graph: Any) -> None: ...

    # Memory, in bytes.

    @abstractmethod
    def empty_cache(self) -> None: ...

    @abstractmethod
    def memory_allocated(self, device_index: int | str | None = None) -> int: ...

    @abstractmethod
    def max_memory_allocated(self, device_index: int | str | None = None) -> int: ...

    @abstractmethod
    def reset_max_memory_allocated(self, device_index: int | str | None = None) -> None: ...

    @abstractmethod
    def memory_cached(self, device_index: int | str | None = None) -> int: ...

    @abstractmethod
    def max_memory_cached(self, device_index: int | str | None = None) -> int: ...

    @abstractmethod
    def reset_max_memory_cached(self, device_index: int | str | None = None) -> None: ...

    @abstractmethod
    def memory_stats(self, device_index: int | str | None = None) -> dict[str, Any]: ...

    @abstractmethod
    def reset_peak_memory_stats(self, device_index: int | str | None = None) -> None: ...

    @abstractmethod
    def memory_reserved(self, device_index: int | str | None = None) -> int: ...

    @abstractmethod
    def max_memory_reserved(self, device_index: int | str | None = None) -> int: ...

    @abstractmethod
    def total_memory(self, device_index: int | str | None = None) -> int: ...

    @abstractmethod
    def available_memory(self, device_index: int | str | None = None) -> int: ...

    # Supported dtypes and features.

    @abstractmethod
    def is_bf16_supported(self) -> bool: ...

    @abstractmethod
    def is_fp16_supported(self) -> bool: ...

    @abstractmethod
    def supported_dtypes(self) -> list[torch.dtype]: ...

    @abstractmethod
    def is_triton_supported(self) -> bool: ...

    # Profiler ranges.

    @abstractmethod
    def range_push(self, msg: str, domain: Any = None, category: Any = None) -> Any: ...

    @abstractmethod
    def range_pop(self, domain: Any = None) -> Any: ...

    @abstractmethod
    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Return True if a tensor is on this kind of device."""

    @abstractmethod
    def _torch_pin_memory(self, tensor: torch.Tensor) -> torch.Tensor: ...

    # Implementations that all devices share.

    def use_host_timers(self) -> bool:
        """Return True if the host clock measures device time."""
        return self.is_synchronized_device()

    def resolves_data_dependency(self) -> bool:
        """Return True if dependent operations need no events between them."""
        return self.is_synchronized_device()

    def handles_memory_backpressure(self) -> bool:
        """Return True if operations cannot be queued beyond the memory that is free."""
        return self.is_synchronized_device()

    def is_fp64_supported(self) -> bool:
        return True

    def prefer_triton_grouped_mm(self) -> bool:
        return False

    def is_current_stream_capturing(self) -> bool:
        return False

    def random(self) -> Any:
        """Return the module `torch.random`."""
        return torch.random

    def lazy_call(self, callback: Callable[[], Any]) -> Any:
        """Call `callback`, now or when the device is first used."""
        return callback()

    def communication_backend_name(self) -> str:
        """Return the torch.distributed backend for this device's tensors."""
        return self._communication_backend_name

    def pin_memory(self, tensor: torch.Tensor, make_copy: bool = True, match_shape: bool = True) -> torch.Tensor:
        """Return a copy of `tensor` in page-locked host memory; on the CPU accelerator, return `tensor` itself.

        With `DS_PIN_MEMORY_BACKEND=native`, windlass locks the copy itself on every accelerator. Without `make_copy`,
        return memory with undefined values, of the tensor's shape or, without `match_shape`, flat.
        """
        native = get_active_native_pinned_memory()
        if native is not None:
            return native.pin(tensor, make_copy, match_shape)
        if make_copy:
            return self._torch_pin_memory(tensor)
        return self.pin_empty(tensor.shape if match_shape else (tensor.numel(),), dtype=tensor.dtype)

    def pin_empty(self, *size: Any, dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
        """Allocate page-locked host memory of a shape; ordinary memory on the CPU accelerator,
        unless `DS_PIN_MEMORY_BACKEND=native`.

        Raises:
            ValueError: `device` is not the host.
        """
        if torch.device(device).type != "cpu":
            raise ValueError(f"pin_empty: device is {device!r}, but only host memory can be pinned; write 'cpu'")
        shape = tuple(size[0]) if len(size) == 1 and isinstance(size[0], Sequence) else size
        empty = torch.empty(shape, dtype=dtype)
        native = get_active_native_pinned_memory()
        return self._torch_pin_memory(empty) if native is None else native.pin(empty, make_copy=False)

    def pin_empty_like(
        self, tensor: torch.Tensor, device: str = "cpu", dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Allocate memory as `pin_empty` does, of a tensor's shape and, by default, dtype."""
        return self.pin_empty(tensor.shape, dtype=dtype or tensor.dtype, device=device)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        native = get_active_native_pinned_memory()
        return tensor.is_pinned() if native is None else native.is_pinned(tensor)

    def unpin_memory(self, tensor: torch.Tensor) -> bool | None:
        """Unlock memory of `DS_PIN_MEMORY_BACKEND=native`. Memory that torch pinned stays locked until freed."""
        native = get_active_native_pinned_memory()
        return None if native is None else native.unpin(tensor)

    def register_host_memory(self, address: int, num_bytes: int) -> bool:
        """Return False: memory that is already allocated cannot be page-locked here."""
        return False

    def unregister_host_memory(self, address: int) -> None:
        """Do nothing, because `register_host_memory` registers nothing."""
        return

    def pin_memory_alignment(self) -> int:
        """Return the alignment of pinned memory in bytes; 1 if any address works."""
        return 1

    def op_builder_dir(self) -> str:
        return "deepspeed.ops.op_builder"

    def create_op_builder(self, class_name: str) -> OpBuilder:
        """Construct an op builder by its class name. A builder that does not exist raises when it is loaded."""
        return find_builder(class_name)()

    def get_op_builder(self, class_name: str) -> type[OpBuilder]:
        """Return an op builder class by its name."""
        return find_builder(class_name)

    def build_extension(self) -> Any:
        """Return torch's `BuildExtension`, the setuptools command."""
        from torch.utils.cpp_extension import BuildExtension

        return BuildExtension

    def export_envs(self) -> list[str]:
        """Return the name prefixes of environment variables to export to ranks on other hosts."""
        return []

    def visible_devices_envs(self) -> list[str]:
        """Return the environment variables that restrict the devices a process sees."""
        return ["CUDA_VISIBLE_DEVICES"]

    def set_visible_devices_envs(
        self, current_env: MutableMapping[str, str], local_accelerator_ids: Sequence[int]
    ) -> None:
        """Set each variable of `visible_devices_envs` in `current_env` to the device indices."""
        for name in self.visible_devices_envs():
            current_env[name] = ",".join(map(str, local_accelerator_ids))

    def get_compile_backend(self) -> str:
        """Return the torch.compile backend."""
        return self._compile_backend

    def set_compile_backend(self, backend: str) -> None:
        """Set the torch.compile backend.

        Raises:
            ValueError: torch has no such backend.
        """
        known = torch._dynamo.list_backends(exclude_tags=())
        if backend not in known:
            raise ValueError(f"compile backend {backend!r} is unknown to torch; choose one of {', '.join(known)}")
        self._compile_backend = backend

    def _tensor_factory(self, dtype: torch.dtype) -> Callable[..., torch.Tensor]:
        def make(*args: Any) -> torch.Tensor:
            """Create a tensor on the current device from values or a shape, as `torch.Tensor(...)` does."""
            shape: Sequence[int] = args or (0,)
            if len(args) == 1 and isinstance(args[0], torch.Size):
                shape = args[0]
            elif len(args) == 1 and not isinstance(args[0], int):
                return torch.as_tensor(args[0], dtype=dtype, device=self.current_device_name()).clone()
            return torch.empty(shape, dtype=dtype, device=self.current_device_name())

        return make

    @property
    def BFloat16Tensor(self) -> Callable[..., torch.Tensor]:
        return self._tensor_factory(torch.bfloat16)

    @property
    def ByteTensor(self) -> Callable[..., torch.Tensor]:
        return self._tensor_factory(torch.uint8)

    @property
    def DoubleTensor(self) -> Callable[..., torch.Tensor]:
        return self._tensor_factory(torch.float64)

    @property
    def FloatTensor(self) -> Callable[..., torch.Tensor]:
        return self._tensor_factory(torch.float32)

    @property
    def HalfTensor(self) -> Callable[..., torch.Tensor]:
        return self._tensor_factory(torch.float16)

    @property
    def IntTensor(self) -> Callable[..., torch.Tensor]:
        return self._tensor_factory(torch.int32)

    @property
    def LongTensor(self) -> Callable[..., torch.Tensor]:
        return self._tensor_factory(torch.int64)
