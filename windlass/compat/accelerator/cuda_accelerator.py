"""CUDA accelerator: DeepSpeed's accelerator API on `torch.cuda`."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from windlass.compat.accelerator.abstract_accelerator import DeepSpeedAccelerator
from windlass.compat.pinned_memory import track_pinned_memory


def _device_number(device_index: int | str | None) -> int | None:
    return None if device_index is None else int(device_index)


class CUDA_Accelerator(DeepSpeedAccelerator):
    """GPUs driven by CUDA or ROCm."""

    _name = "cuda"
    _communication_backend_name = "nccl"

    def is_available(self) -> bool:
        return torch.cuda.is_available()

    def is_synchronized_device(self) -> bool:
        return False

    def device_name(self, device_index: int | str | None = None) -> str:
        return "cuda" if device_index is None else f"cuda:{int(device_index)}"

    def device(self, device_index: int | str | None = None) -> Any:
        number = _device_number(device_index)
        return torch.cuda.device(torch.cuda.current_device() if number is None else number)

    def set_device(self, device_index: int | str) -> None:
        torch.cuda.set_device(int(device_index))

    def current_device(self) -> int:
        return torch.cuda.current_device()

    def current_device_name(self) -> str:
        return f"cuda:{torch.cuda.current_device()}"

    def device_count(self) -> int:
        return torch.cuda.device_count()

    def synchronize(self, device_index: int | str | None = None) -> None:
        torch.cuda.synchronize(_device_number(device_index))

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | str | None = None) -> None:
        number = _device_number(device_index)
        torch.cuda.set_rng_state(new_state, "cuda" if number is None else number)

    def get_rng_state(self, device_index: int | str | None = None) -> torch.Tensor:
        number = _device_number(device_index)
        return torch.cuda.get_rng_state("cuda" if number is None else number)

    def manual_seed(self, seed: int) -> None:
        torch.cuda.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.cuda.manual_seed_all(seed)

    def initial_seed(self) -> int:
        return torch.cuda.initial_seed()

    def default_generator(self, device_index: int) -> torch.Generator:
        torch.cuda.init()
        generator: torch.Generator = torch.cuda.default_generators[device_index]
        return generator

    @property
    def Stream(self) -> type[torch.cuda.Stream]:
        return torch.cuda.Stream

    @property
    def Event(self) -> type[torch.cuda.Event]:
        return torch.cuda.Event

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def current_stream(self, device_index: int | str | None = None) -> torch.cuda.Stream:
        return torch.cuda.current_stream(_device_number(device_index))

    def default_stream(self, device_index: int | str | None = None) -> torch.cuda.Stream:
        return torch.cuda.default_stream(_device_number(device_index))

    def is_current_stream_capturing(self) -> bool:
        return bool(torch.cuda.is_current_stream_capturing())

    def create_graph(self) -> torch.cuda.CUDAGraph:
        return torch.cuda.CUDAGraph()

    def capture_to_graph(self, graph: Any, pool: Any = None, stream: Any = None) -> AbstractContextManager[Any]:
        return torch.cuda.graph(graph, pool, stream)

    def replay_graph(self, graph: Any) -> None:
        graph.replay()

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()

    def memory_allocated(self, device_index: int | str | None = None) -> int:
        return torch.cuda.memory_allocated(_device_number(device_index))

    def max_memory_allocated(self, device_index: int | str | None = None) -> int:
        return torch.cuda.max_memory_allocated(_device_number(device_index))

    def reset_max_memory_allocated(self, device_index: int | str | None = None) -> None:
        torch.cuda.reset_peak_memory_stats(_device_number(device_index))

    def memory_cached(self, device_index: int | str | None = None) -> int:
        return torch.cuda.memory_reserved(_device_number(device_index))

    def max_memory_cached(self, device_index: int | str | None = None) -> int:
        return torch.cuda.max_memory_reserved(_device_number(device_index))

    def reset_max_memory_cached(self, device_index: int | str | None = None) -> None:
        torch.cuda.reset_peak_memory_stats(_device_number(device_index))

    def memory_stats(self, device_index: int | str | None = None) -> dict[str, Any]:
        return dict(torch.cuda.memory_stats(_device_number(device_index)))

    def reset_peak_memory_stats(self, device_index: int | str | None = None) -> None:
        torch.cuda.reset_peak_memory_stats(_device_number(device_index))

    def memory_reserved(self, device_index: int | str | None = None) -> int:
        return torch.cuda.memory_reserved(_device_number(device_index))

    def max_memory_reserved(self, device_index: int | str | None = None) -> int:
        return torch.cuda.max_memory_reserved(_device_number(device_index))

    def total_memory(self, device_index: int | str | None = None) -> int:
        number = _device_number(device_index)
        properties = torch.cuda.get_device_properties(torch.cuda.current_device() if number is None else number)
        return int(properties.total_memory)

    def available_memory(self, device_index: int | str | None = None) -> int:
        """Return the bytes free in the driver, plus the bytes cached but unused in torch's allocator."""
        number = _device_number(device_index)
        idle = torch.cuda.memory_reserved(number) - torch.cuda.memory_allocated(number)
        return torch.cuda.mem_get_info(number)[0] + idle

    def is_bf16_supported(self) -> bool:
        return bool(torch.cuda.is_bf16_supported())

    def is_fp16_supported(self) -> bool:
        return torch.version.hip is not None or bool(torch.cuda.get_device_capability()[0] >= 7)

    def supported_dtypes(self) -> list[torch.dtype]:
        narrow = [(torch.float16, self.is_fp16_supported()), (torch.bfloat16, self.is_bf16_supported())]
        return [torch.float32, *(dtype for dtype, has in narrow if has)]

    def is_triton_supported(self) -> bool:
        return torch.version.hip is not None or bool(torch.cuda.get_device_capability()[0] >= 8)

    def lazy_call(self, callback: Any) -> Any:
        return torch.cuda._lazy_call(callback)

    def range_push(self, msg: str, domain: Any = None, category: Any = None) -> Any:
        return torch.cuda.nvtx.range_push(msg)

    def range_pop(self, domain: Any = None) -> Any:
        return torch.cuda.nvtx.range_pop()

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == "cuda"

    def export_envs(self) -> list[str]:
        return ["NCCL", "LD_LIBRARY", "PATH"]

    def _torch_pin_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        track_pinned_memory(tensor.nbytes)
        return tensor.pin_memory()
