"""Tests of the memory of packed weights: joined in one process, shared by several."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from windlass.base.shared_weights_file import (
    create_shared_weights,
    inherited_shared_weights,
    shared_descriptors,
    shared_weights_environment,
)
from windlass.kernels import panel_memory
from windlass.kernels.huge_pages import HUGE_PAGE
from windlass.kernels.packed_gemm import pack_weight, packed_linear
from windlass.kernels.panel_memory import SharedWeights, joined_panels, share_parameters, take_panels

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="files without a name are Linux's")

_CHILD = """
import sys, torch
from windlass.base.shared_weights_file import inherited_shared_weights
from windlass.kernels.panel_memory import SharedWeights, take_panels
def never(target):
    raise AssertionError("packed again")
with SharedWeights(inherited_shared_weights()).active():
    first, second = take_panels(5000, never), take_panels(300, never)
assert first.eq(7).all() and second.eq(9).all()
first.fill_(1)  # stays in this process
"""


def test_the_second_process_maps_what_the_first_has_packed() -> None:
    file = create_shared_weights()
    assert file is not None
    with SharedWeights(file).active():
        first = take_panels(5000, lambda target: target.fill_(7))
        take_panels(300, lambda target: target.fill_(9))
    environment = {**os.environ, **shared_weights_environment(file), "PYTHONPATH": str(Path(__file__).parents[3])}
    subprocess.run([sys.executable, "-c", _CHILD], env=environment, pass_fds=[file], check=True)
    assert first.eq(7).all()
    assert shared_descriptors(environment) == (file,) and inherited_shared_weights() is None
    os.close(file)


def test_a_region_that_was_not_finished_is_filled_again() -> None:
    file = create_shared_weights()
    assert file is not None

    def fail(target: torch.Tensor) -> None:
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError), SharedWeights(file).active():
        take_panels(100, lambda target: target.fill_(1))
        take_panels(100, fail)
    with SharedWeights(file).active():
        kept, again = take_panels(100, fail), take_panels(100, lambda target: target.fill_(2))
    assert kept.eq(1).all() and again.eq(2).all()
    os.close(file)


@pytest.mark.parametrize("mapped", [1 << 30, 4096, 3 * 4096])
def test_regions_share_file_descriptors(mapped: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each mapping holds a descriptor, of which a process often may have 1024."""
    monkeypatch.setattr(panel_memory, "_MAPPED_BYTES", mapped)
    file = create_shared_weights()
    assert file is not None
    sizes = [300, 5000, 1, 4096] * 10
    before = len(os.listdir("/proc/self/fd"))
    for first in (0, 100):  # the second pass fills nothing
        with SharedWeights(file).active():
            regions = [
                take_panels(size, lambda target, value=first + number: target.fill_(value))
                for number, size in enumerate(sizes)
            ]
        if mapped == 1 << 30:
            assert len(os.listdir("/proc/self/fd")) - before < 10
        for number, (region, size) in enumerate(zip(regions, sizes, strict=True)):
            assert region.untyped_storage().nbytes() == size and region.eq(number).all()
    os.close(file)


@pytest.mark.parametrize("form", ["fp32", "bf16", "int8"])
def test_shared_weights_give_the_same_bits(form: str) -> None:
    file = create_shared_weights()
    assert file is not None
    weight, x = torch.randn(96, 80), torch.randn(5, 80)
    expected = packed_linear(x, pack_weight(weight, form))
    table = torch.nn.Embedding(64, 96)
    before = table.weight.detach().clone()
    for _ in range(2):
        with SharedWeights(file).active():
            panels = pack_weight(weight, form)
            share_parameters(table.parameters(), at_least=1000)
        assert torch.equal(packed_linear(x, panels), expected)
        assert torch.equal(table.weight, before)
    os.close(file)


def test_joined_panels_follow_one_another() -> None:
    large = 65 << 20  # more than the rest of the chunk
    with joined_panels():
        first, second = (
            take_panels(5000, lambda target: target.fill_(7)),
            take_panels(300, lambda target: target.fill_(9)),
        )
        third = take_panels(large, lambda target: target[:: 1 << 20].fill_(5))
    other = take_panels(300, lambda target: target.fill_(1))
    assert second.data_ptr() - first.data_ptr() == 5056  # whole cache lines
    assert first.data_ptr() % HUGE_PAGE == third.data_ptr() % HUGE_PAGE == 0
    assert (
        third.untyped_storage().data_ptr() != first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    )
    assert first.eq(7).all() and second.eq(9).all() and third[:: 1 << 20].eq(5).all() and other.numel() == 300
    with joined_panels():  # memory of its own
        assert take_panels(300, lambda target: target.fill_(2)).eq(2).all() and second.eq(9).all()


@pytest.mark.parametrize("form", ["fp32", "int8", "int8_g32", "int4_g128_zp", "int3_g128", "ternary", "binary_g128"])
def test_joined_and_shared_weights_give_the_same_bits(form: str) -> None:
    weights, x = [torch.randn(96, 256), torch.randn(40, 256)], torch.randn(5, 256)
    expected = [packed_linear(x, pack_weight(weight, form)) for weight in weights]
    file = create_shared_weights()
    assert file is not None
    with joined_panels():
        joined = [pack_weight(weight, form) for weight in weights]
    for _ in range(2):
        with SharedWeights(file).active(), joined_panels():
            shared = [pack_weight(weight, form) for weight in weights]
        for panels in (joined, shared):
            for one, result in zip(panels, expected, strict=True):
                assert torch.equal(packed_linear(x, one), result)
    os.close(file)
