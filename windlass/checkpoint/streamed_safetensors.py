"""Writing of a safetensors file: one tensor after the other, and each tensor part by part."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from windlass.base.atomic_file import open_new
from windlass.base.errors import CheckpointError
from windlass.checkpoint.checkpoint_directory import disk_errors
from windlass.checkpoint.safetensors_file import TensorEntry, build_header, tensor_bytes


def stream_tensors(
    path: Path, entries: Mapping[str, TensorEntry], parts: Iterable[Iterable[torch.Tensor]], metadata: Mapping[str, str]
) -> None:
    """Write the file durably, with at most one part in memory.

    Args:
        entries: all tensors, in the order in which they are written.
        parts: for each tensor, its consecutive flat parts, of any dtype.
        metadata: metadata in the header.

    Raises:
        CheckpointError: the disk is full, the path cannot be written, or parts do not add up to their tensor.
    """
    head = build_header(entries, metadata)
    needed = len(head) + sum(entry.nbytes for entry in entries.values())
    with disk_errors(path, needed), open_new(path) as file:
        file.write(head)
        for (name, entry), tensor in zip(entries.items(), parts, strict=True):
            left = entry.nbytes
            for part in tensor:
                here = part.detach().to(device="cpu", dtype=entry.dtype).contiguous()
                file.write(tensor_bytes(here))
                left -= here.numel() * here.element_size()
            if left:
                raise CheckpointError(
                    f"{name!r} was declared with shape {entry.shape}, but its parts have another size"
                )
        file.flush()
        os.fsync(file.fileno())
