"""Tests of a slot on disk: prefetched or kept values serve the next fetch, and overwritten values never do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from windlass.storage import DiskTier, Slot, StagingPool, Tier

CPU = torch.device("cpu")


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[DiskTier]:
    with DiskTier([tmp_path]) as result:
        yield result


def made(tier: DiskTier, numel: int = 1000) -> tuple[Slot, StagingPool]:
    staging = StagingPool(tier, 1 << 20)
    slot = Slot("parameters of a test", numel, torch.float32, Tier.NVME, CPU, disk=tier, staging=staging)
    slot.store(torch.arange(numel, dtype=torch.float32)).wait()
    return slot, staging


def fetched(slot: Slot, numel: int = 1000) -> torch.Tensor:
    into = torch.full((numel,), float("nan"))
    slot.fetch(into).wait()
    return into


def kept(slot: Slot, staging: StagingPool, start: int, stop: int, value: float) -> None:
    values = staging.acquire(stop - start, torch.float32).fill_(value)
    slot.keep_staged(values, start, slot.store(values, start))


def test_prefetched_slot_is_fetched_without_a_second_read(tier: DiskTier) -> None:
    slot, _ = made(tier)
    start = tier.io_rates().disk_read_bytes
    assert slot.prefetch() and torch.equal(fetched(slot), torch.arange(1000.0))
    once = tier.io_rates().disk_read_bytes - start
    assert torch.equal(fetched(slot), torch.arange(1000.0))
    assert tier.io_rates().disk_read_bytes - start == 2 * once > 0
    assert slot.prefetch()
    slot.store(torch.ones(10), 5).wait()  # makes the prefetched values outdated
    assert fetched(slot)[4:16].tolist() == [4.0, *[1.0] * 10, 15.0]


def test_cached_pieces_are_fetched_without_the_disk(tier: DiskTier) -> None:
    slot, staging = made(tier)
    kept(slot, staging, 600, 1000, 2.0)
    kept(slot, staging, 0, 600, 1.0)
    staging.wait_all()
    before = tier.io_rates().disk_read_bytes
    assert slot.prefetch()
    assert torch.equal(fetched(slot), torch.tensor([1.0] * 600 + [2.0] * 400))
    assert tier.io_rates().disk_read_bytes == before
    assert torch.equal(fetched(slot), torch.tensor([1.0] * 600 + [2.0] * 400))  # now read from the disk
    assert tier.io_rates().disk_read_bytes > before


def test_one_cached_piece_is_not_the_full_slot(tier: DiskTier) -> None:
    slot, staging = made(tier)
    kept(slot, staging, 0, 600, 1.0)
    assert fetched(slot)[599:601].tolist() == [1.0, 600.0]


@pytest.mark.parametrize("how", ["store", "forget"])
def test_cached_pieces_are_dropped_on_overwrite(how: str, tier: DiskTier) -> None:
    slot, staging = made(tier)
    kept(slot, staging, 0, 1000, 1.0)
    slot.store(torch.full((10,), 3.0), 0).wait() if how == "store" else slot.drop_staged()
    assert fetched(slot)[9:11].tolist() == ([3.0, 1.0] if how == "store" else [1.0, 1.0])
    staging.wait_all()
    assert staging.has_room(staging.limit)  # every buffer was returned
