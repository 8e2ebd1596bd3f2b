"""Differences between a CPU and an accelerator: the rank's device, and synchronization."""

from __future__ import annotations

import os
import time

import torch


def local_device() -> torch.device:
    """Return the device of this rank: the GPU `LOCAL_RANK` modulo the number of GPUs; the CPU without CUDA."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


def local_world_size() -> int:
    """Return the number of ranks on this host; 1 without a launcher."""
    return max(1, int(os.environ.get("LOCAL_WORLD_SIZE") or 1))


def multiplies_fast(dtype: torch.dtype, device: torch.device) -> bool:
    """Return False if torch has no fast products of matrices of a 16-bit `dtype` on this CPU.

    They take some 4 to 40 times as long as those of float32 there, for example bf16 on AVX2.
    """
    name = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}.get(dtype)
    if device.type != "cpu" or name is None:
        return True
    is_supported = getattr(torch.ops.mkldnn, name, None)  # torch may be built without oneDNN, as on macOS
    return is_supported is not None and bool(is_supported())


def synchronize(device: torch.device) -> None:
    """Wait for all work queued on `device`. A CPU has none."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def synchronized_time(device: torch.device) -> float:
    """Return `time.perf_counter()` in seconds, after all work queued on `device`."""
    synchronize(device)
    return time.perf_counter()
