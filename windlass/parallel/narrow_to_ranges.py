"""Extraction of a rank's part of a tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def narrow_to_ranges(tensor: torch.Tensor, dim: int, ranges: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Return `ranges` of a tensor along `dim`, contiguous and in new memory.

    A placeholder without memory (one element expanded with stride 0) stays an expanded placeholder.
    """
    parts = [tensor.narrow(dim, start, stop - start) for start, stop in ranges]
    if tensor.numel() > 1 and not any(tensor.stride()):
        shape = list(tensor.shape)
        shape[dim] = sum(stop - start for start, stop in ranges)
        return tensor.new_zeros(()).expand(shape)
    return torch.cat(parts, dim) if len(parts) > 1 else parts[0].clone(memory_format=torch.contiguous_format)
