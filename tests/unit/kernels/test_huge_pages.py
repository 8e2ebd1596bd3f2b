"""Tests of tensors on huge pages: they are ordinary tensors that keep their memory."""

from __future__ import annotations

import gc

import pytest
import torch

from windlass.kernels.huge_pages import HUGE_PAGE, empty_on_huge_pages


@pytest.mark.parametrize("shape", [(0,), (7,), (3, HUGE_PAGE // 4 + 5), (5, 2, HUGE_PAGE // 4)], ids=str)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
def test_memory_is_writable_and_outlives_other_names(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = empty_on_huge_pages(shape, dtype)
    assert tensor.shape == shape and tensor.dtype == dtype and tensor.is_contiguous()
    assert tensor.data_ptr() % 64 == 0 or tensor.numel() == 0
    view = tensor.fill_(3).flatten()[tensor.numel() // 2 :]
    del tensor
    gc.collect()
    others = [empty_on_huge_pages(shape, dtype).fill_(5) for _ in range(3)]
    assert bool((view == 3).all()) and len(others) == 3


def test_large_tensors_begin_at_a_huge_page() -> None:
    assert empty_on_huge_pages((HUGE_PAGE + 1,), torch.uint8).data_ptr() % HUGE_PAGE == 0
