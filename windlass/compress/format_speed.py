"""Time of the product with one packed matrix for one token, on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from windlass.kernels.coded_formats import CodedWeightFormat
from windlass.kernels.packed_gemm import pack_panels, packed_linear
from windlass.kernels.weight_format import get_weight_format

_COLD_BYTES = 48 << 20  # total size of the copies of a matrix, so that no copy stays in a cache
_MOST_COPIES = 64  # smaller copies than 0.75 MB thus stay in a cache, as do all weights of such a small model
_ROUNDS = 5


def measure_product(rows: int, columns: int, name: str, *, clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the seconds of one product with a matrix `[rows, columns]` in a format, as the inference engine runs it:
    the minimum over several rounds. Up to `_MOST_COPIES` copies are multiplied in turn, so that a large matrix is read
    from memory, not from a cache."""
    form = get_weight_format(name)
    quantizes = name == "int8" or isinstance(form, CodedWeightFormat) and form.bits < 8
    generator = torch.Generator().manual_seed(rows + columns)
    weight = torch.randn(rows, columns, generator=generator) * 0.02
    packed = form.pack(weight)  # packed only once, because packing takes far longer than `pack_panels`
    first = pack_panels(packed, form, (rows, columns), quantize_inputs=quantizes)
    count = min(max(_COLD_BYTES // max(first.nbytes, 1), 1), _MOST_COPIES)
    copies = [first, *(pack_panels(packed, form, (rows, columns), quantize_inputs=quantizes) for _ in range(count - 1))]
    x = torch.randn(1, columns, generator=generator)
    best = float("inf")
    for _ in range(_ROUNDS):
        start = clock()
        for panels in copies:
            packed_linear(x, panels)
        best = min(best, (clock() - start) / len(copies))
    return best
