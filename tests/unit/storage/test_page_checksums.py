"""Tests that bytes changed on the disk are detected at the read, on every engine, without false alarms."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import pytest
import torch

from tests.unit.storage.conftest import MakeTier
from windlass.base.errors import DamageError, StorageError
from windlass.kernels import reference
from windlass.kernels.kernel_dispatch import can_sum_pages
from windlass.storage import DeferredFailureTier, DiskTier, Extent
from windlass.storage.io_engine import native_module
from windlass.storage.staging_memory import aligned_buffer

PAGE = 4096


def rewrite(tier: DiskTier, extent: Extent, at: int, data: bytes) -> None:
    """Write `data` at byte `at` of an extent directly to the file, so that the tier's checksums stay."""
    for piece in tier._stripes.locate(extent.start + at, extent.start + at + len(data)):
        part = data[piece.start : piece.start + piece.nbytes]
        file = os.open(f"/proc/self/fd/{tier._stripes.descriptors[piece.file]}", os.O_RDWR)  # without O_DIRECT
        try:
            assert os.pwrite(file, part, piece.offset) == len(part)
        finally:
            os.close(file)


def flip(tier: DiskTier, extent: Extent, at: int) -> None:
    """Flip one bit of byte `at`."""
    (piece,) = tier._stripes.locate(extent.start + at, extent.start + at + 1)
    file = os.open(f"/proc/self/fd/{tier._stripes.descriptors[piece.file]}", os.O_RDONLY)
    (byte,) = os.pread(file, 1, piece.offset)
    os.close(file)
    rewrite(tier, extent, at, bytes([byte ^ 4]))


def filled(tier: DiskTier, nbytes: int = 70_000, seed: int = 0) -> tuple[Extent, torch.Tensor]:
    extent = tier.allocate(nbytes, "moments")
    values = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    tier.write(extent, 0, values).wait()
    return extent, values


@pytest.mark.parametrize("at", [0, 4095, 4096, 33_333, 69_999])
def test_flipped_bit_is_detected_and_located(make_tier: MakeTier, engine: str, tmp_path: Path, at: int) -> None:
    tier = make_tier(engine=engine, paths=[tmp_path / "a", tmp_path / "b"])
    tier.allocate(20_000, "other")  # the extent does not begin at the start of the file
    extent, values = filled(tier)
    extent.describe_content = lambda first, last: f"values {first} to {last}"
    flip(tier, extent, at)
    page = at // PAGE * PAGE
    (piece,) = tier._stripes.locate(extent.start + page, extent.start + page + 1)
    with pytest.raises(DamageError) as raised:
        tier.read(extent, 0, torch.empty_like(values)).wait()
    last = min(page + PAGE, 70_000)
    for word in (
        "of moments",
        f"at byte {piece.offset} of the file on {tmp_path / 'ab'[piece.file]} ",
        f"(bytes {page} to {last} of it, of values {page} to {last})",
        "resume from a checkpoint",
    ):
        assert word in str(raised.value)
    with pytest.raises(DamageError):  # a read of any part of the page fails
        tier.read(extent, at, torch.empty(1, dtype=torch.uint8)).wait()


def test_intact_pages_beside_a_damaged_one_are_read(tier: DiskTier) -> None:
    extent, values = filled(tier)
    flip(tier, extent, 5 * PAGE + 7)
    for first, last in ((0, 5 * PAGE), (6 * PAGE, 70_000)):
        into = torch.empty(last - first, dtype=torch.uint8)
        tier.read(extent, first, into).wait()
        assert torch.equal(into, values[first:last])


def test_other_page_corruptions_are_detected(tier: DiskTier) -> None:
    """A lost write, a page of zeros and two swapped pages are detected."""
    extent, old = filled(tier)
    _, new = filled(tier, seed=1)
    tier.write(extent, 0, new).wait()
    other, _ = filled(tier, seed=2)
    for page, data in (
        (3, bytes(old[3 * PAGE : 4 * PAGE].numpy())),
        (5, bytes(PAGE)),
        (7, bytes(new[8 * PAGE : 9 * PAGE].numpy())),
    ):
        tier.write(extent, 0, new).wait()
        rewrite(tier, extent, page * PAGE, data)
        into = torch.empty_like(new)
        with pytest.raises(DamageError, match=rf"bytes {page * PAGE} to {page * PAGE + PAGE} of it"):
            tier.read(extent, 0, into).wait()
    tier.read(other, 0, torch.empty(70_000, dtype=torch.uint8)).wait()
    os.ftruncate(tier._stripes.descriptors[0], other.start)
    with pytest.raises(DamageError, match="short read"):
        tier.read(other, 0, torch.empty(70_000, dtype=torch.uint8)).wait()


def test_partial_write_does_not_hide_page_damage(tier: DiskTier) -> None:
    extent, values = filled(tier)
    flip(tier, extent, 2 * PAGE + 9)
    with pytest.raises(DamageError):  # a new checksum would hide the damage in the page's other bytes
        tier.write(extent, 2 * PAGE + 100, values[:50]).wait()
    with pytest.raises(DamageError):
        tier.read(extent, 2 * PAGE, torch.empty(PAGE, dtype=torch.uint8)).wait()
    tier.write(extent, 2 * PAGE, values[2 * PAGE : 3 * PAGE]).wait()  # a write of the whole page leaves no old bytes
    into = torch.empty_like(values)
    tier.read(extent, 0, into).wait()
    assert torch.equal(into, values)


def test_discarded_pages_are_rewritten_without_reading(tier: DiskTier) -> None:
    extent, values = filled(tier)
    flip(tier, extent, 0)
    tier.discard(extent)
    with pytest.raises(StorageError, match="never written"):
        tier.read(extent, 0, torch.empty(1, dtype=torch.uint8))
    tier.write(extent, 10, values[10:]).wait()
    tier.write(extent, 0, values[:10]).wait()
    into = torch.empty_like(values)
    tier.read(extent, 0, into).wait()
    assert torch.equal(into, values)


def test_checksum_covers_the_submitted_data(make_tier: MakeTier, engine: str) -> None:
    """Checksums of pages from unaligned memory are CRC-32C of the data, or CRC-32 on the Python engine."""
    tier = make_tier(engine=engine)
    extent = tier.allocate(3 * PAGE, "values")
    values = torch.randint(0, 256, (3 * PAGE + 1,), dtype=torch.uint8)[1:]
    tier.write(extent, 0, values).wait()
    results = [value & 0xFFFFFFFF for value in extent.page_checksums.tolist()]
    kind = zlib.crc32 if engine == "python" else reference.crc32c
    assert results == [kind(bytes(values[at : at + PAGE].numpy())) for at in range(0, 3 * PAGE, PAGE)]


@pytest.mark.skipif(native_module()[0] is None, reason="without the native module there are no native checksums")
def test_native_checksums_equal_the_reference() -> None:
    module, _ = native_module()
    assert reference.crc32c(b"123456789") == 0xE3069283
    pages = torch.randint(0, 256, (11 * PAGE + 3,), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    pages[: 2 * PAGE] = torch.tensor([0, 255], dtype=torch.uint8).repeat_interleave(PAGE)
    for shift in (0, 3):
        part = pages[shift : shift + 11 * PAGE]
        expected = [reference.crc32c(bytes(part[at : at + PAGE].numpy())) for at in range(0, 11 * PAGE, PAGE)]
        for path in module.checksum_paths():
            for count in (11, 4, 3, 0):
                actual = module.page_checksums(part.data_ptr(), count * PAGE, path)
                assert actual == expected[:count], path
    for address, nbytes, path in ((pages.data_ptr(), 100, ""), (0, PAGE, ""), (pages.data_ptr(), PAGE, "MMX")):
        with pytest.raises(ValueError, match="4096|address 0|MMX"):
            module.page_checksums(address, nbytes, path)


def test_deferred_failure_tier_records_damaged_pages_as_lost(tmp_path: Path) -> None:
    with DeferredFailureTier([tmp_path]) as tier:
        extent, values = filled(tier)
        flip(tier, extent, 50_000)
        into = torch.zeros(17_500, dtype=torch.float32)
        tier.read(extent, 0, into).wait()
        assert bool(into.isnan().all())
        assert isinstance(tier.take_failure(), DamageError) and list(tier.damaged_extents) == [extent]
        tier.discard(extent)
        assert tier.damaged_extents == {}
        tier.write(extent, 0, values).wait()
        tier.read(extent, 0, into.view(torch.uint8)).wait()
        assert torch.equal(into.view(torch.uint8), values) and tier.take_failure() is None


def test_sums_of_the_caller_replace_those_of_the_engine(make_tier: MakeTier, engine: str) -> None:
    tier = make_tier(engine=engine)
    extent, values = filled(tier, 10 * PAGE)
    into = aligned_buffer(10 * PAGE)[0]
    sums = tier.page_sums(extent, into)
    if engine == "python" or not can_sum_pages():
        assert sums is None
        return
    assert sums is not None and tier.page_sums(extent, into[1:]) is None and tier.page_sums(extent, into[64:]) is None
    flip(tier, extent, 7 * PAGE + 5)
    tier.read(extent, 0, into, sums=sums).wait()
    with pytest.raises(DamageError, match=rf"reading .* of moments failed .*bytes {7 * PAGE} to {8 * PAGE} of it"):
        tier.compare(extent, sums)
    into[:] = values.flip(0)
    sums.states.zero_()
    sums.expected.copy_(torch.tensor(native_module()[0].page_checksums(into.data_ptr(), 10 * PAGE)).to(torch.int32))
    tier.compare(extent, sums)  # fills `renewed`
    extent.page_checksums.zero_()
    tier.write(extent, 0, into, sums=sums).wait()
    again = torch.empty_like(values)
    tier.read(extent, 0, again).wait()  # the engine compares with the checksums of `sums`
    assert torch.equal(again, values.flip(0))


def test_deferred_failure_tier_records_damage_that_an_update_found(tmp_path: Path) -> None:
    with DeferredFailureTier([tmp_path]) as tier:
        extent, _ = filled(tier, 3 * PAGE)
        into = aligned_buffer(3 * PAGE)[0]
        if (sums := tier.page_sums(extent, into)) is None:
            assert tier._engine_choice.name == "python" or not can_sum_pages()
            return
        flip(tier, extent, PAGE)
        tier.read(extent, 0, into, sums=sums).wait()
        assert tier.failure is None
        tier.compare(extent, sums)
        assert bool(into.view(torch.float32).isnan().all()) and not sums.is_current
        assert isinstance(tier.take_failure(), DamageError) and list(tier.damaged_extents) == [extent]
