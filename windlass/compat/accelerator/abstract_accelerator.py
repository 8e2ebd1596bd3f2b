"""What a device answers: the questions that scripts ask, and the answers that are the same for all."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, MutableMapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from windlass.compat.op_builders import OpBuilder, find_builder


class DeepSpeedAccelerator(ABC):
    """One kind of device. `device_index` is None for the current one, a number, or a number as text."""

    supports_nvtx_domain = False
    _name: str
    _communication_backend_name: str
    _compile_backend = "inductor"

    # the device itself

    @abstractmethod
    def is_available(self) -> bool:
        """Whether this machine has one."""

    @abstractmethod
    def is_synchronized_device(self) -> bool:
        """Whether an operation is finished when its call returns."""

    @abstractmethod
    def device_name(self, device_index: int | str | None = None) -> str:
        """`cuda`, or `cuda:1` with an index."""

    @abstractmethod
    def device(self, device_index: int | str | None = None) -> Any:
        """A context in which the device is the current one; None where there is but one."""

    @abstractmethod
    def set_device(self, device_index: int | str) -> None:
        """Make it the current one."""

    @abstractmethod
    def current_device(self) -> int:
        """The number of the current one."""

    @abstractmethod
    def current_device_name(self) -> str:
        """Its name, with its number."""

    @abstractmethod
    def device_count(self) -> int:
        """How many this process sees."""

    @abstractmethod
    def synchronize(self, device_index: int | str | None = None) -> None:
        """Wait for what was started on it."""

    # random numbers

    @abstractmethod
    def set_rng_state(self, new_state: torch.Tensor, device_index: int | str | None = None) -> None:
        """Go to a state of the generator."""

    @abstractmethod
    def get_rng_state(self, device_index: int | str | None = None) -> torch.Tensor:
        """The state of the generator."""

    @abstractmethod
    def manual_seed(self, seed: int) -> Any:
        """Seed the current device's generator."""

    @abstractmethod
    def manual_seed_all(self, seed: int) -> Any:
        """Seed the generators of all devices of this process."""

    @abstractmethod
    def initial_seed(self) -> int:
        """What the generator was seeded with."""

    @abstractmethod
    def default_generator(self, device_index: int) -> torch.Generator:
        """The generator that is used where none is named."""

    # streams, events, graphs

    @property
    @abstractmethod
    def Stream(self) -> Any: ...

    @property
    @abstractmethod
    def Event(self) -> Any: ...

    @abstractmethod
    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        """A context in which operations are queued on `stream`."""

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

    # memory, in bytes

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

    # what it can

    @abstractmethod
    def is_bf16_supported(self) -> bool: ...

    @abstractmethod
    def is_fp16_supported(self) -> bool: ...

    @abstractmethod
    def supported_dtypes(self) -> list[torch.dtype]: ...

    @abstractmethod
    def is_triton_supported(self) -> bool: ...

    # marks for a profiler

    @abstractmethod
    def range_push(self, msg: str, domain: Any = None, category: Any = None) -> Any: ...

    @abstractmethod
    def range_pop(self, domain: Any = None) -> Any: ...

    @abstractmethod
    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies on this kind of device."""

    @abstractmethod
    def _torch_pin_memory(self, tensor: torch.Tensor) -> torch.Tensor: ...

    # the same for all

    def use_host_timers(self) -> bool:
        """Whether the host's clock measures what the device does."""
        return self.is_synchronized_device()

    def resolves_data_dependency(self) -> bool:
        """Whether operations need no events between them."""
        return self.is_synchronized_device()

    def handles_memory_backpressure(self) -> bool:
        """Whether no more can be queued than memory has room for."""
        return self.is_synchronized_device()

    def is_fp64_supported(self) -> bool:
        return True

    def prefer_triton_grouped_mm(self) -> bool:
        return False

    def is_current_stream_capturing(self) -> bool:
        return False

    def random(self) -> Any:
        """torch's module of random numbers."""
        return torch.random

    def lazy_call(self, callback: Callable[[], Any]) -> Any:
        """Call it, now or when the device is first used."""
        return callback()

    def communication_backend_name(self) -> str:
        """The back end of torch.distributed that sends this device's tensors."""
        return self._communication_backend_name

    def pin_memory(self, tensor: torch.Tensor, make_copy: bool = True, match_shape: bool = True) -> torch.Tensor:
        """`tensor` in page-locked memory where that is of use; without `make_copy` only memory like it."""
        if make_copy:
            return self._torch_pin_memory(tensor)
        return self.pin_empty(tensor.shape if match_shape else (tensor.numel(),), dtype=tensor.dtype)

    def pin_empty(self, *size: Any, dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
        """Page-locked host memory of a shape.

        Raises:
            ValueError: `device` is not the host.
        """
        if torch.device(device).type != "cpu":
            raise ValueError(f"pin_empty takes host memory; device is {device!r}, write 'cpu'")
        shape = tuple(size[0]) if len(size) == 1 and isinstance(size[0], Sequence) else size
        return self._torch_pin_memory(torch.empty(shape, dtype=dtype))

    def pin_empty_like(
        self, tensor: torch.Tensor, device: str = "cpu", dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Page-locked host memory of a tensor's shape."""
        return self.pin_empty(tensor.shape, dtype=dtype or tensor.dtype, device=device)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.is_pinned()

    def unpin_memory(self, tensor: torch.Tensor) -> None:
        """Nothing: memory is let go with its tensor."""
        return

    def register_host_memory(self, address: int, num_bytes: int) -> bool:
        """Never: memory is page-locked by torch, when it is taken."""
        return False

    def unregister_host_memory(self, address: int) -> None:
        """Nothing, since nothing was registered."""
        return

    def pin_memory_alignment(self) -> int:
        """Bytes; 1 where any address will do."""
        return 1

    def op_builder_dir(self) -> str:
        return "deepspeed.ops.op_builder"

    def create_op_builder(self, class_name: str) -> OpBuilder:
        """A builder by its class's name; one that is not there refuses to load."""
        return find_builder(class_name)()

    def get_op_builder(self, class_name: str) -> type[OpBuilder]:
        """The class of a builder by its name."""
        return find_builder(class_name)

    def build_extension(self) -> Any:
        """torch's command for setuptools."""
        from torch.utils.cpp_extension import BuildExtension

        return BuildExtension

    def export_envs(self) -> list[str]:
        """Beginnings of the names of variables that ranks on other hosts need."""
        return []

    def visible_devices_envs(self) -> list[str]:
        """The variables that say which devices a process sees."""
        return ["CUDA_VISIBLE_DEVICES"]

    def set_visible_devices_envs(
        self, current_env: MutableMapping[str, str], local_accelerator_ids: Sequence[int]
    ) -> None:
        """Write them into an environment."""
        for name in self.visible_devices_envs():
            current_env[name] = ",".join(map(str, local_accelerator_ids))

    def get_compile_backend(self) -> str:
        """Of torch.compile."""
        return self._compile_backend

    def set_compile_backend(self, backend: str) -> None:
        """Compile with another back end from now on.

        Raises:
            ValueError: torch has no such back end.
        """
        known = torch._dynamo.list_backends(exclude_tags=())
        if backend not in known:
            raise ValueError(f"compile backend {backend!r} is not known to torch; it has {', '.join(known)}")
        self._compile_backend = backend

    def _tensor_factory(self, dtype: torch.dtype) -> Callable[..., torch.Tensor]:
        def make(*args: Any) -> torch.Tensor:
            """A tensor with these values, or of this shape, on the current device."""
            if len(args) == 1 and not isinstance(args[0], int):
                return torch.as_tensor(args[0], dtype=dtype, device=self.current_device_name()).clone()
            return torch.empty(args, dtype=dtype, device=self.current_device_name())

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
