"""Tests of a tier that continues after a failure: each failure is recorded once, and failed reads return NaN."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from windlass.base.errors import StorageError
from windlass.storage import DeferredFailureTier


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.float64,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.float8_e4m3fnuz,
        torch.float8_e5m2fnuz,
        torch.float8_e8m0fnu,
    ],
)
def test_failed_read_gives_nan_and_is_recorded_once(dtype: torch.dtype, tmp_path: Path) -> None:
    with DeferredFailureTier([tmp_path]) as tier:
        extent, values = tier.allocate(40_000, "values"), torch.ones(4000).to(dtype)
        tier.write(extent, 0, values).wait()
        os.ftruncate(tier._stripes.descriptors[0], 0)
        reading = tier.read(extent, 0, values)
        reading.wait()
        reading.wait()
        while not reading.poll():
            pass
        assert bool(values.double().isnan().all())
        results = tier.take_failure()
        assert (
            results is not None
            and "reading" in str(results)
            and "of values" in str(results)
            and "short read" in str(results)
        )
        assert tier.take_failure() is None


def test_unwritten_extent_is_a_failure_and_invalid_request_an_error(tmp_path: Path) -> None:
    tier = DeferredFailureTier([tmp_path])
    extent, values = tier.allocate(4096, "values"), torch.zeros(4)
    tier.read(extent, 0, values).wait()
    assert "never written" in str(tier.take_failure()) and bool(values.isnan().all())
    tier.free(extent)
    with pytest.raises(StorageError, match="values is no longer on this disk tier"):
        tier.read(extent, 0, values)
    tier.close()
    with pytest.raises(StorageError, match="closed"):
        tier.write(extent, 0, values)


def test_extent_without_space_fails_at_every_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    with DeferredFailureTier([tmp_path]) as tier:
        monkeypatch.setattr(os, "fstatvfs", lambda file: SimpleNamespace(f_bavail=1, f_frsize=4096))
        extent, values = tier.allocate(40_000, "moments"), torch.zeros(10)
        assert "no space for moments" in str(tier.take_failure())
        tier.write(extent, 0, values).wait()
        assert "moments" in str(tier.take_failure())
        tier.read(extent, 0, values).wait()
        assert bool(values.isnan().all()) and tier.take_failure() is not None
        tier.free(extent)
        tier.reserve(1 << 30)
        assert "all offloaded tensors" in str(tier.take_failure())
