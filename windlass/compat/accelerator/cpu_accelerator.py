"""CPU accelerator: one memory, one stream, synchronous execution."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from windlass.compat.accelerator.abstract_accelerator import DeepSpeedAccelerator
from windlass.compat.numa_cores import nodes_with_cores
from windlass.observe.memory_usage import resident_bytes


class CPU_Accelerator(DeepSpeedAccelerator):
    """The CPU. Allocated memory means the resident memory of the process."""

    _name = "cpu"
    _communication_backend_name = "gloo"

    def __init__(self) -> None:
        self.max_mem = resident_bytes() or 0

    def is_available(self) -> bool:
        return True

    def is_synchronized_device(self) -> bool:
        return True

    def device_name(self, device_index: int | str | None = None) -> str:
        return "cpu"

    def device(self, device_index: int | str | None = None) -> None:
        return None

    def set_device(self, device_index: int | str) -> None:
        return

    def current_device(self) -> int:
        return int(os.environ.get("LOCAL_RANK", "0"))

    def current_device_name(self) -> str:
        return "cpu"

    def device_count(self) -> int:
        """Return the number of local ranks if `LOCAL_SIZE` is set, else of NUMA nodes with cores (at least 1)."""
        local_size = int(os.environ.get("LOCAL_SIZE", "0"))
        return local_size if local_size > 0 else max(1, len(nodes_with_cores()))

    def synchronize(self, device_index: int | str | None = None) -> None:
        return

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | str | None = None) -> None:
        torch.set_rng_state(new_state)

    def get_rng_state(self, device_index: int | str | None = None) -> torch.Tensor:
        return torch.get_rng_state()

    def manual_seed(self, seed: int) -> torch.Generator:
        return torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> torch.Generator:
        return torch.manual_seed(seed)

    def initial_seed(self) -> int:
        return torch.initial_seed()

    def default_generator(self, device_index: int) -> torch.Generator:
        return torch.default_generator

    @property
    def Stream(self) -> None:
        return None

    @property
    def Event(self) -> None:
        return None

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        return nullcontext()

    def current_stream(self, device_index: int | str | None = None) -> None:
        return None

    def default_stream(self, device_index: int | str | None = None) -> None:
        return None

    def create_graph(self) -> None:
        return None

    def capture_to_graph(self, graph: Any, pool: Any = None, stream: Any = None) -> AbstractContextManager[Any]:
        return nullcontext()

    def replay_graph(self, graph: Any) -> None:
        return

    def get_rss(self) -> int:
        """Return the resident bytes of the process; 0 if the system does not report them."""
        now = resident_bytes() or 0
        self.max_mem = max(self.max_mem, now)
        return now

    def reset_rss(self) -> int:
        """Reset the peak of resident memory to its current value."""
        self.max_mem = resident_bytes() or 0
        return self.max_mem

    def _peak_rss(self) -> int:
        self.get_rss()
        return self.max_mem

    def empty_cache(self) -> None:
        return

    def memory_allocated(self, device_index: int | str | None = None) -> int:
        return self.get_rss()

    def max_memory_allocated(self, device_index: int | str | None = None) -> int:
        return self._peak_rss()

    def reset_max_memory_allocated(self, device_index: int | str | None = None) -> None:
        self.reset_rss()

    def memory_cached(self, device_index: int | str | None = None) -> int:
        return self.get_rss()

    def max_memory_cached(self, device_index: int | str | None = None) -> int:
        return self._peak_rss()

    def reset_max_memory_cached(self, device_index: int | str | None = None) -> None:
        self.reset_rss()

    def memory_stats(self, device_index: int | str | None = None) -> dict[str, Any]:
        return {"allocated_bytes.all.current": self.get_rss(), "allocated_bytes.all.peak": self._peak_rss()}

    def reset_peak_memory_stats(self, device_index: int | str | None = None) -> None:
        self.reset_rss()

    def memory_reserved(self, device_index: int | str | None = None) -> int:
        return self.get_rss()

    def max_memory_reserved(self, device_index: int | str | None = None) -> int:
        return self._peak_rss()

    def total_memory(self, device_index: int | str | None = None) -> int:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def available_memory(self, device_index: int | str | None = None) -> int:
        """Return the bytes that Linux reports as available without swapping; on other systems, the free bytes."""
        try:
            with open("/proc/meminfo", encoding="ascii") as lines:
                found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
        except OSError:
            found = []
        return int(found[0]) * 1024 if found else os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def is_bf16_supported(self) -> bool:
        return True

    def is_fp16_supported(self) -> bool:
        """Return True if the CPU multiplies in fp16 rather than converting to fp32."""
        asked = getattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", None)
        return bool(asked is not None and asked())

    def supported_dtypes(self) -> list[torch.dtype]:
        return [torch.float32, torch.bfloat16, *([torch.float16] if self.is_fp16_supported() else [])]

    def is_triton_supported(self) -> bool:
        return False

    def range_push(self, msg: str, domain: Any = None, category: Any = None) -> None:
        return

    def range_pop(self, domain: Any = None) -> None:
        return

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == "cpu"

    def _torch_pin_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor  # pinning is useless without a device to copy to
