"""Tests of the size of staging buffers: as requested if memory allows, otherwise a fraction of the free memory."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.base.errors import StorageError
from windlass.storage import free_memory, staging_buffer_bytes, staging_memory

_GIB = 1 << 30


@given(
    st.integers(1, 8 * _GIB), st.integers(1, 8), st.integers(1, 8), st.integers(_GIB, 64 * _GIB), st.floats(0.05, 1.0)
)
def test_buffer_count_is_the_request_or_a_share_of_free_memory(
    wanted: int, count: int, ranks: int, free: int, share: float
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staging_memory, "free_memory", lambda: free)
        try:
            actual = staging_buffer_bytes(wanted, count, ranks=ranks, fraction=share)
        except StorageError as error:
            assert "smaller buffer_count" in str(error)
            assert free * share < min(wanted, 1 << 20) * count * ranks + count * ranks
            return
    assert actual % 4096 == 0
    assert actual < wanted + 4096
    assert (actual - 4096) * count * ranks <= free * share
    assert actual >= wanted or actual * count * ranks >= free * share - count * ranks * 4096


def test_configured_buffer_count_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging_memory, "free_memory", lambda: 0)
    assert staging_buffer_bytes(1, 1, requested=5000) == 8192
    with pytest.raises(StorageError, match="2 staging buffers on each of 3 ranks.*0 bytes"):
        staging_buffer_bytes(1 << 20, 2, ranks=3)


def test_free_memory_is_at_most_that_of_the_host() -> None:
    result = free_memory()
    assert result is None or 0 < result <= (staging_memory._host() or 0) + (1 << 30)


def test_cgroup_free_memory_is_limit_minus_unreclaimable(tmp_path: Path) -> None:
    inner = tmp_path / "job" / "rank"
    inner.mkdir(parents=True)
    for folder, most, used, cache in ((inner, "max", 10, 0), (inner.parent, "1000", 600, 250)):
        (folder / "memory.max").write_text(most)
        (folder / "memory.current").write_text(str(used))
        (folder / "memory.stat").write_text(f"anon 1\ninactive_file {cache}\n")
    names = ("memory.max", "memory.current", "inactive_file")
    assert staging_memory._cgroup_chain_available(tmp_path, "/job/rank", *names) == [None, 650, None]


@pytest.mark.parametrize("nbytes", [0, -1, 1 << 62])
def test_unavailable_buffer_is_refused(nbytes: int) -> None:
    with pytest.raises(StorageError, match="staging buffer"):
        staging_memory.aligned_buffer(nbytes)
