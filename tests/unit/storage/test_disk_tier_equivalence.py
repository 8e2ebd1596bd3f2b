"""Tests that a tier equals a bytearray for reads and writes of any size, offset and order, also without waits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from windlass.base.errors import StorageError
from windlass.base.pending import Pending
from windlass.storage import DiskTier, Extent

_DTYPES = (torch.uint8, torch.float32, torch.bfloat16, torch.int64, torch.complex64, torch.bool)
_SIZES = st.one_of(st.integers(0, 200), st.sampled_from([4095, 4096, 4097, 8192, 12_288, 30_000, 65_536]))
_OFFSETS = st.one_of(st.sampled_from([0, 1, 4095, 4096, 8192, 10_000]), st.integers(0, 40_000))
_STEP = st.tuples(st.sampled_from(["write", "read", "wait"]), st.integers(0, 1), _OFFSETS, _SIZES, st.integers(0, 7))


class Model:
    """Model of one extent: its expected bytes, None where nothing was written."""

    def __init__(self, tier: DiskTier, nbytes: int, number: int) -> None:
        self.tier, self.extent = tier, tier.allocate(nbytes, f"extent {number}")
        self.bytes: list[int | None] = [None] * nbytes
        self.fill = 0

    def write(self, offset: int, size: int, shift: int) -> Pending:
        self.fill = self.fill % 251 + 1
        source = _tensor(size, shift)
        source.copy_((torch.arange(size) * 7 + self.fill).to(torch.uint8))
        self.bytes[offset : offset + size] = source.tolist()
        return self.tier.write(self.extent, offset, source)

    def read(self, offset: int, size: int, shift: int) -> tuple[Pending, torch.Tensor, list[int | None]] | None:
        expected = self.bytes[offset : offset + size]
        into = _tensor(size, shift)
        if None in expected:
            with pytest.raises(StorageError, match=f"extent .*{self.extent.nbytes}|have no value"):
                self.tier.read(self.extent, offset, into)
            return None
        return self.tier.read(self.extent, offset, into), into, expected


def _tensor(size: int, shift: int) -> torch.Tensor:
    """Return a tensor of `size` bytes that begins `shift` bytes after an aligned address."""
    return torch.zeros(size + 8, dtype=torch.uint8)[shift : shift + size]


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    steps=st.lists(_STEP, max_size=14),
    sizes=st.tuples(st.integers(1, 70_000), st.integers(1, 9000)),
    paths=st.integers(1, 3),
    block=st.integers(1, 3),
)
def test_tier_equals_a_bytearray(
    tmp_path: Path,
    engine: str,
    steps: list[tuple[str, int, int, int, int]],
    sizes: tuple[int, int],
    paths: int,
    block: int,
) -> None:
    folders = [tmp_path / str(i) for i in range(paths)]
    with DiskTier(folders, block_size=4096 * block, queue_depth=3, engine=engine) as tier:
        models = [Model(tier, nbytes, number) for number, nbytes in enumerate(sizes)]
        under_way, reads = list[Pending](), []
        for what, which, at, long, shift in steps:
            model = models[which]
            offset = at % len(model.bytes)
            size = min(long, len(model.bytes) - offset)
            if what == "write":
                under_way.append(model.write(offset, size, shift))
            elif what == "read" and (actual := model.read(offset, size, shift)) is not None:
                reads.append(actual)
            elif what == "wait" and under_way:
                under_way.pop(at % len(under_way)).wait()
        for pending, into, expected in reads:
            pending.wait()
            assert into.tolist() == expected
        for pending in under_way:
            pending.wait()
            assert pending.poll()


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
def test_any_dtype_and_shape_round_trips_bitwise(tier: DiskTier, dtype: torch.dtype) -> None:
    source = torch.randint(0, 2, (3, 1000, 5), dtype=torch.uint8).to(dtype)
    extent = tier.allocate(source.nbytes, "values")
    back = torch.zeros_like(source)
    tier.write(extent, 0, source).wait()
    tier.read(extent, 0, back).wait()
    assert torch.equal(back, source)
    scalar = torch.zeros((), dtype=dtype)
    tier.read(extent, 0, scalar).wait()
    assert torch.equal(scalar, source[0, 0, 0])


def test_parameters_are_written_and_read_in_place(tier: DiskTier) -> None:
    source, target = torch.nn.Parameter(torch.randn(5000)), torch.nn.Parameter(torch.zeros(5000))
    extent = tier.allocate(source.nbytes, "weights")
    tier.write(extent, 0, source).wait()
    tier.read(extent, 0, target).wait()
    assert torch.equal(source, target)


def test_requests_larger_than_the_queue_run_together(tier: DiskTier) -> None:
    parts = [torch.full((200_000,), i, dtype=torch.uint8) for i in range(6)]
    extents = [tier.allocate(part.nbytes, f"part {i}") for i, part in enumerate(parts)]
    for pending in [tier.write(*pair) for pair in _first(extents, parts)]:
        pending.wait()
    into = [torch.zeros_like(part) for part in parts]
    for pending in [tier.read(*pair) for pair in _first(extents, into)]:
        while not pending.poll():
            pass
    assert all(torch.equal(a, b) for a, b in zip(parts, into, strict=True))
    requested = tier.io_rates(reset=True)
    assert (requested.read_bytes, requested.write_bytes) == (1_200_000, 1_200_000)
    assert requested.disk_write_bytes == 6 * 200_704 == requested.disk_read_bytes
    assert 0 < requested.read_seconds <= requested.busy_seconds
    assert requested.busy_seconds == pytest.approx(requested.read_seconds + requested.write_seconds, abs=1e-3)
    assert requested.rate > 0 and requested.read_rate > 0
    assert tier.io_rates().disk_read_bytes == tier.io_rates().read_bytes == 0


def _first(extents: list[Extent], tensors: list[torch.Tensor]) -> list[tuple[Extent, int, torch.Tensor]]:
    return [(extent, 0, tensor) for extent, tensor in zip(extents, tensors, strict=True)]


def test_unreferenced_tensor_lives_until_it_is_written(tier: DiskTier) -> None:
    extent = tier.allocate(1 << 20, "values")
    pending = tier.write(extent, 0, torch.full((1 << 20,), 3, dtype=torch.uint8))
    for _ in range(20):  # overwrite the source memory if the tier has freed it
        torch.full((1 << 20,), 9, dtype=torch.uint8)
    pending.wait()
    back = torch.zeros(1 << 20, dtype=torch.uint8)
    tier.read(extent, 0, back).wait()
    assert bool((back == 3).all())


def test_freed_space_is_reused_and_never_exposes_old_data(tier: DiskTier) -> None:
    first, second = tier.allocate(50_000, "first"), tier.allocate(50_000, "second")
    tier.write(first, 0, torch.ones(50_000, dtype=torch.uint8))
    tier.free(first)
    again = tier.allocate(20_000, "again")
    assert again.start == first.start
    with pytest.raises(StorageError, match="bytes 0 to 20000 of again.*never written"):
        tier.read(again, 0, torch.zeros(20_000, dtype=torch.uint8))
    with pytest.raises(StorageError, match="first is no longer"):
        tier.read(first, 0, torch.zeros(1))
    tier.write(second, 100, torch.ones(50, dtype=torch.uint8)).wait()
    with pytest.raises(StorageError, match="bytes 0 to 100 of second"):
        tier.read(second, 0, torch.zeros(150, dtype=torch.uint8))


@pytest.mark.parametrize("offset", [-1, 95, 101])
def test_beyond_an_extent_is_refused(tier: DiskTier, offset: int) -> None:
    extent = tier.allocate(100, "small")
    with pytest.raises(StorageError, match="small.*100"):
        tier.write(extent, offset, torch.ones(6, dtype=torch.uint8))


def test_non_contiguous_memory_is_refused(tier: DiskTier) -> None:
    extent = tier.allocate(4096, "values")
    for odd in (torch.ones(8, 8).t(), torch.ones(4, dtype=torch.complex64).conj(), torch.ones(3, device="meta")):
        with pytest.raises(StorageError, match=r"\.contiguous\(\)|resolve_conj|move it to the CPU"):
            tier.write(extent, 0, odd)


def test_buffers_are_aligned_zeroed_and_tracked_until_freed(tier: DiskTier) -> None:
    for _ in range(12):  # more buffers than the tier keeps at once, so that addresses are used again
        buffer = tier.allocate_buffer(100_000)
        assert buffer.numel() == 100_000 and buffer.dtype == torch.uint8 and buffer.data_ptr() % 4096 == 0
        assert not bool(buffer.any())
        extent = tier.allocate(100_000, "values")
        view = buffer[4096:]
        buffer.random_()
        expected = view.clone()
        tier.write(extent, 0, view).wait()
        del buffer, view
        other = torch.zeros(expected.numel(), dtype=torch.uint8)
        tier.read(extent, 0, other).wait()
        assert torch.equal(other, expected)
        tier.free(extent)


def test_measurement_leaves_no_file(tier: DiskTier) -> None:
    extent = tier.allocate(4096, "values")
    tier.write(extent, 0, torch.ones(4096, dtype=torch.uint8)).wait()
    rates = tier.measure_rates(100_000)
    assert (rates.read_bytes, rates.write_bytes) == (102_400, 102_400)
    assert rates.read_rate > 0 and rates.write_rate > 0
    assert tier.io_rates().write_bytes == 4096 and tier.io_rates().read_bytes == 0
    assert tier.allocate(4096, "next").start == 4096
    assert "GB/s" in str(rates)
