"""Tests of the staging pool: buffers return after their transfers end, and stay within the limit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from windlass.base.errors import StorageError
from windlass.base.pending import DONE, FinishingPending
from windlass.storage import DiskTier, StagingPool

KIB = 1 << 10


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[DiskTier]:
    with DiskTier([tmp_path]) as result:
        yield result


class Under:
    """Transfer that ends when the test decides."""

    def __init__(self, error: Exception | None = None) -> None:
        self.over, self.waited, self.error = False, False, error

    def poll(self) -> bool:
        if self.over and self.error is not None:
            raise self.error
        return self.over

    def wait(self) -> None:
        self.waited = self.over = True
        if self.error is not None:
            raise self.error


def test_returned_buffer_is_reused(tier: DiskTier) -> None:
    staging = StagingPool(tier, 1 << 20)
    first = staging.acquire(1000, torch.float32)
    assert first.shape == (1000,) and first.dtype == torch.float32
    address = first.data_ptr()
    staging.release(first)
    assert staging.acquire(4000, torch.uint8).data_ptr() == address


def test_buffer_in_transfer_is_not_reused(tier: DiskTier) -> None:
    staging, transfer = StagingPool(tier, 1 << 20), Under()
    first = staging.acquire(64 * KIB, torch.uint8)
    staging.release(first, transfer)
    second = staging.acquire(64 * KIB, torch.uint8)
    assert second.data_ptr() != first.data_ptr()
    transfer.over = True
    assert staging.acquire(64 * KIB, torch.uint8).data_ptr() == first.data_ptr()


def test_buffers_of_sizes_that_are_not_needed_again_are_freed(tier: DiskTier) -> None:
    """The pool frees buffers for records without states, because only `initialize` writes such records."""
    staging, transfer = StagingPool(tier, 1 << 20), Under()
    staging.release(staging.acquire(64 * KIB, torch.uint8))
    written, kept = staging.acquire(128 * KIB, torch.uint8), staging.acquire(64 * KIB, torch.uint8)
    staging.release(written, transfer)
    staging.free_returned()
    transfer.over = True
    staging.release(kept)
    staging.wait_all()
    peak = staging.peak
    for _ in range(3):
        staging.acquire(64 * KIB, torch.uint8)
    assert staging.peak == peak == 192 * KIB


def test_at_the_limit_the_oldest_transfer_is_waited_for(tier: DiskTier) -> None:
    staging = StagingPool(tier, 128 * KIB)
    transfers = [Under(), Under()]
    for transfer in transfers:
        staging.release(staging.acquire(64 * KIB, torch.uint8), transfer)
    assert not staging.has_room(64 * KIB)
    staging.acquire(64 * KIB, torch.uint8)
    assert [transfer.waited for transfer in transfers] == [True, False]
    assert staging.peak == 128 * KIB


def test_large_buffer_is_not_used_for_a_small_request(tier: DiskTier) -> None:
    """A large buffer is not lent for a small request: a later large request would have to allocate another one."""
    staging = StagingPool(tier, 1 << 20)
    large = staging.acquire(512 * KIB, torch.uint8)
    address = large.data_ptr()
    staging.release(large)
    del large
    assert staging.acquire(64 * KIB, torch.uint8).data_ptr() != address
    assert staging.acquire(400 * KIB, torch.uint8).data_ptr() == address
    assert staging.peak == 576 * KIB


def test_small_buffers_are_freed_for_a_large_one(tier: DiskTier) -> None:
    staging = StagingPool(tier, 256 * KIB)
    small = [staging.acquire(64 * KIB, torch.uint8) for _ in range(4)]
    for buffer in small:
        staging.release(buffer, DONE)
    del small, buffer
    assert staging.has_room(256 * KIB)
    staging.acquire(256 * KIB, torch.uint8)
    assert staging.peak == 256 * KIB


def test_concurrent_requests_may_exceed_the_limit(tier: DiskTier) -> None:
    staging = StagingPool(tier, 64 * KIB)
    held = [staging.acquire(64 * KIB, torch.uint8) for _ in range(3)]
    assert len({buffer.data_ptr() for buffer in held}) == 3 and not staging.has_room(1)


@pytest.mark.parametrize("met", ["take", "room", "settle"])
def test_failed_transfer_is_raised_once_and_its_buffer_freed(met: str, tier: DiskTier) -> None:
    staging = StagingPool(tier, 64 * KIB)
    failing = Under(StorageError("the disk is gone"))
    failing.over = True
    staging.release(staging.acquire(64 * KIB, torch.uint8), failing)
    calls = {
        "take": lambda: staging.acquire(1, torch.uint8),
        "room": lambda: staging.has_room(1),
        "settle": staging.wait_all,
    }
    with pytest.raises(StorageError, match="the disk is gone"):
        calls[met]()
    assert staging.has_room(64 * KIB)
    staging.wait_all()


def test_settle_waits_for_all_transfers(tier: DiskTier) -> None:
    staging, ended = StagingPool(tier, 1 << 20), []
    for number in range(3):
        staging.release(
            staging.acquire(10, torch.uint8), FinishingPending(None, lambda: None, lambda n=number: ended.append(n))
        )
    staging.wait_all()
    assert ended == [0, 1, 2]


def test_watched_transfer_is_awaited_and_its_failure_raised(tier: DiskTier) -> None:
    staging, well, failing = StagingPool(tier, 1 << 20), Under(), Under(StorageError("the disk is gone"))
    staging.track(well)
    assert staging.has_room(1) and not well.waited
    staging.wait_all()
    assert well.waited
    staging.track(failing)
    failing.over = True
    with pytest.raises(StorageError, match="the disk is gone"):
        staging.has_room(1)
    assert staging.has_room(1)
