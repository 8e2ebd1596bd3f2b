"""What remains of a tensor of which a rank keeps a part."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def narrow_to_ranges(tensor: torch.Tensor, dim: int, ranges: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Only `ranges` of a tensor along `dim`, contiguous and in memory of its own. A tensor without memory, one element
    seen many times, which stands for values that come later, stays without."""
    parts = [tensor.narrow(dim, start, stop - start) for start, stop in ranges]
    if tensor.numel() > 1 and not any(tensor.stride()):
        shape = list(tensor.shape)
        shape[dim] = sum(stop - start for start, stop in ranges)
        return tensor.new_zeros(()).expand(shape)
    return torch.cat(parts, dim) if len(parts) > 1 else parts[0].clone(memory_format=torch.contiguous_format)
