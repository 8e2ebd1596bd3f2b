"""Tensors that report a GPU as their device, for tests of copies between devices on a machine without one."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode

CUDA = torch.device("cuda:0")


class DeviceTensor(torch.Tensor):
    """Tensor in host memory that reports the device cuda:0: a library that is CUDA-aware may use its address."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return CUDA


class EmulatedGpu(TorchFunctionMode):
    """Context in which torch's functions keep tensors on their device, and copies between devices are recorded.

    Attributes:
        copies: names of the operations that have copied between the device and host memory.
        pending: True if an operation has written or allocated memory of the device since the last wait for its stream.
    """

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[str] = []
        self.pending = False
        self._patch = patch.object(torch.cuda, "current_stream", lambda device: self)

    def __enter__(self) -> EmulatedGpu:
        self._patch.start()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patch.stop()

    def synchronize(self) -> None:
        """Wait for the operations of the device's stream."""
        self.pending = False

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor on the device, with operations still in flight that write it."""
        self.pending = True
        return tensor.as_subclass(DeviceTensor)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        given = [value for one in args for value in (one if isinstance(one, (list, tuple)) else [one])]
        ours = [value for value in given if isinstance(value, DeviceTensor)]
        target = kwargs.pop("device", None)
        if name == "to" and isinstance(args[1], (str, torch.device)):
            target, func, args = args[1], torch.Tensor.clone, args[:1]
        on_device = bool(ours) if target is None else torch.device(target).type == "cuda"
        between = [args[1]] if name == "copy_" else ours if target is not None else []
        if any(isinstance(value, DeviceTensor) != on_device for value in between):
            self.copies.append(name)
        with torch._C.DisableTorchFunctionSubclass():
            before = {value.untyped_storage().data_ptr() for value in ours}
            found = func(*args, **kwargs)
            if not on_device or (args and found is args[0]):
                self.pending |= on_device and name.endswith("_")
                return found
            several = isinstance(found, (list, tuple))
            results = [one for one in (found if several else [found]) if isinstance(one, torch.Tensor)]
            self.pending |= any(one.untyped_storage().data_ptr() not in before for one in results)
            results = [one.as_subclass(DeviceTensor) for one in results]
        return found if not results else results if several else results[0]
