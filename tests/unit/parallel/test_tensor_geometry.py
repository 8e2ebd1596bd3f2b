"""Tests that any view is restored from its flat elements with equal values, shape and strides."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef

from windlass.parallel.tensor_geometry import flatten_elements, get_geometry, make_identity_key

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]


@st.composite
def views(draw: Any) -> torch.Tensor:
    """Draw a tensor that was sliced, permuted and expanded."""
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    count = 1
    for extent in shape:
        count *= extent
    tensor = torch.arange(count).view(shape).to(draw(st.sampled_from(DTYPES)))
    for _ in range(draw(st.integers(0, 3))):
        dim = draw(st.integers(0, tensor.dim() - 1))
        kind = draw(st.sampled_from(["slice", "permute", "expand"]))
        if kind == "slice":
            start, step = draw(st.integers(0, tensor.shape[dim] - 1)), draw(st.integers(1, 2))
            tensor = tensor.narrow(dim, start, tensor.shape[dim] - start)
            tensor = tensor[(slice(None),) * dim + (slice(None, None, step),)]
        elif kind == "permute":
            tensor = tensor.permute(draw(st.permutations(range(tensor.dim()))))
        elif tensor.dim() < 5:
            tensor = tensor.unsqueeze(0).expand(draw(st.integers(1, 3)), *tensor.shape)
    return tensor


@given(views())
def test_view_round_trips(tensor: torch.Tensor) -> None:
    geometry = get_geometry(tensor)
    assert geometry is not None
    flat = flatten_elements(tensor, geometry)
    assert flat.is_contiguous() and flat.numel() == geometry.numel <= tensor.numel()
    back = geometry.restore(flat.clone())
    assert torch.equal(back, tensor) and back.stride() == tensor.stride() and back.dtype == tensor.dtype
    assert geometry.is_dense == (flat.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr())


def test_overlapping_elements_are_not_offloaded() -> None:
    assert get_geometry(torch.arange(10.0).unfold(0, 4, 2)) is None


def test_identity_key_distinguishes_storage_range_and_version() -> None:
    x = torch.arange(24.0).view(4, 6)
    storage = StorageWeakRef(x.untyped_storage())

    def key(tensor: torch.Tensor) -> Any:
        geometry = get_geometry(tensor)
        assert geometry is not None
        return make_identity_key(tensor, geometry, storage)

    assert key(x) == key(x.view(24)) == key(x.t()) == key(x.expand(3, 4, 6))
    others = [key(x), key(x[:2]), key(x[2:]), key(x[:, :2]), key(x[:, 2:4]), key(x.view(torch.int32))]
    assert key(x[:, :2]) != key(x[:2, :4]), "as many elements from the same place"
    before = key(x)
    x.add_(1)
    assert len({*others, key(x)}) == 7 and key(x) != before
