"""Tests of checksums that native updates compare and renew: any layout in memory, any rule, no false alarms."""

from __future__ import annotations

import pytest
import torch

from tests.unit.kernels.rule_cases import RULES
from windlass.kernels.kernel_dispatch import apply_updates, compare_pages, list_kernel_paths
from windlass.kernels.page_sums import PageState, PageSums
from windlass.kernels.reference import crc32c
from windlass.kernels.update_tensors import UpdateTensors, count_scales
from windlass.storage.staging_memory import aligned_buffer

PAGE = 4096
NATIVE = list_kernel_paths()[:-1]
pytestmark = pytest.mark.skipif(not NATIVE, reason="without the native module no update sums pages")


def checksums(memory: torch.Tensor) -> torch.Tensor:
    """Return the checksum of each page of `memory`, computed by the kernel. The comparison with zeros is ignored."""
    sums = PageSums(memory, torch.zeros(memory.numel() // PAGE, dtype=torch.int32))
    compare_pages(sums)
    return sums.renewed


def test_checksums_equal_the_reference() -> None:
    pages = Record([600], torch.float32).buffer
    expected = [crc32c(bytes(page.numpy())) for page in pages.split(PAGE)]
    assert [value & 0xFFFFFFFF for value in checksums(pages).tolist()] == expected


class Record:
    """Buffer with the tensors of several parameters in sequence, as in the record of a chunk."""

    def __init__(self, sizes: list[int], state: torch.dtype, gap: int = 64) -> None:
        seed = torch.Generator().manual_seed(0)
        forms = [(n, torch.float32) for n in sizes]
        forms += [(n, state) for n in sizes for _ in range(2)]
        forms += [(count_scales(n), torch.float32) for n in sizes for _ in range(2) if state == torch.uint8]
        ends = [0]
        for numel, dtype in forms:
            ends.append(ends[-1] + -(-numel * dtype.itemsize // gap) * gap)
        self.buffer = aligned_buffer(-(-ends[-1] // PAGE) * PAGE)[0]
        views = [
            self.buffer[at : at + numel * dtype.itemsize].view(dtype)
            for at, (numel, dtype) in zip(ends, forms, strict=False)
        ]
        for view in views:
            values = torch.rand(view.numel(), generator=seed)
            view.copy_(values.mul(255) if view.dtype == torch.uint8 else values)
        count = len(sizes)
        self.updates = [
            UpdateTensors(
                views[n],
                torch.randn(views[n].numel(), generator=seed).bfloat16(),
                tuple(views[count + 2 * n :][:2]),
                tuple(views[3 * count + 2 * n :][:2]),
            )
            for n in range(count)
        ]
        self.sums = PageSums(self.buffer, checksums(self.buffer))


@pytest.mark.parametrize("path", NATIVE)
@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16, torch.uint8])
def test_sums_are_renewed_and_values_equal_those_without_sums(path: str, state: torch.dtype) -> None:
    sizes = [70_000, 5, 900, 2_048, 40_000]
    record, plain = Record(sizes, state), Record(sizes, state)
    # Two calls, whose tensors share pages. One parameter is skipped.
    for number, indices in enumerate(([0, 2, 4], [1])):
        for one, sums in ((record, [record.sums]), (plain, [])):
            rule = RULES["adamw"](number + 1)
            apply_updates(rule, [one.updates[n] for n in indices], 2.0, path=path, threads=2, page_sums=sums)
    assert torch.equal(record.buffer, plain.buffer)
    compare_pages(record.sums)
    assert record.sums.states.unique().tolist() == [PageState.INTACT] and record.sums.first_damaged() is None
    assert torch.equal(record.sums.renewed, checksums(record.buffer))
    assert record.sums.is_current


@pytest.mark.parametrize("rule", ["lion", "lamb", "sgd-momentum"])
def test_sums_of_other_rules(rule: str) -> None:
    record = Record([50_000, 3_000], torch.float32)
    made = RULES[rule](2)
    count = len(made.signed_states)
    updates = [UpdateTensors(u.parameter, u.gradient, u.states[:count]) for u in record.updates]
    apply_updates(made, updates, page_sums=[record.sums], path=NATIVE[0])
    compare_pages(record.sums)
    assert record.sums.first_damaged() is None
    assert torch.equal(record.sums.renewed, checksums(record.buffer))


def test_every_flipped_bit_is_found_in_its_page() -> None:
    sizes = [9_000, 300, 5_000]
    pages = Record(sizes, torch.float32).buffer.numel() // PAGE
    for page in range(pages):
        record = Record(sizes, torch.float32)
        record.buffer.numpy()[page * PAGE + 37 * page % PAGE] ^= 1
        apply_updates(RULES["adamw"](1), record.updates[::2], page_sums=[record.sums], path=NATIVE[0])
        compare_pages(record.sums)
        assert record.sums.first_damaged() == page
        assert int((record.sums.states == PageState.DAMAGED).sum()) == 1


def test_memory_outside_and_several_records() -> None:
    """One call updates two records, each with its own `PageSums`, and tensors in other memory without checksums."""
    first, second, other = (Record([5_000], torch.float32) for _ in range(3))
    updates = [*first.updates, *second.updates, *other.updates]
    apply_updates(RULES["adamw"](1), updates, page_sums=[second.sums, first.sums], path=NATIVE[0])
    assert torch.equal(first.buffer, other.buffer) and torch.equal(first.sums.renewed, second.sums.renewed)
    assert other.sums.states.unique().tolist() == [PageState.UNREAD]


def test_an_operation_of_torch_makes_the_sums_void() -> None:
    record = Record([5_000], torch.float32)
    record.updates[0].parameter.mul_(1.0)
    assert not record.sums.is_current


def test_unusable_memory_is_refused() -> None:
    record = Record([5_000], torch.float32)
    record.sums.memory = record.buffer[1:]
    with pytest.raises(ValueError, match="whole pages of 4096"):
        compare_pages(record.sums)
