"""Tests of update chunks on disk: states are read, kept and created, within the staging limit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.unit.kernels.rule_cases import RULES
from tests.unit.storage.test_page_checksums import flip
from windlass.base.device_memory import DeviceMemoryLedger
from windlass.base.errors import DamageError
from windlass.kernels.kernel_dispatch import apply_updates, can_sum_pages
from windlass.kernels.update_tensors import UpdateTensors
from windlass.storage.disk_tier import DiskTier
from windlass.storage.slot import Tier
from windlass.storage.staging_pool import StagingPool
from windlass.zero.core.unit_layout import ALIGN, UnitLayout
from windlass.zero.update.optimizer_state_offload import OptimizerStateOffload, StateOffloadCallbacks
from windlass.zero.update.update_chunk import UpdateChunk, make_chunks

N = 24


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[DiskTier]:
    with DiskTier([tmp_path]) as disk:
        yield disk


def residence_of(tier: DiskTier, numel: int = N, keys: int = 2) -> tuple[OptimizerStateOffload, UpdateChunk]:
    """Return an offload, and a chunk on disk with `keys` state keys, none of which has optimizer states yet."""
    residence = OptimizerStateOffload(
        torch.device("cpu"),
        DeviceMemoryLedger(),
        tier,
        StagingPool(tier, 1 << 30),
        pin=False,
        callbacks=StateOffloadCallbacks(state_name_of=lambda chunk, state_key: "weight"),
    )
    unit = SimpleNamespace(names=["weight"], state_start=0, layout=UnitLayout((numel,), 1))
    slot: Any = SimpleNamespace(unit=unit, holds=False, stepped=None, names_in=lambda first, last: ["'weight'"])
    chunk = UpdateChunk(slot, 0, numel, Tier.NVME)
    chunk.master = torch.arange(float(numel))
    chunk.state_keys = [nn.Parameter(torch.empty(0)) for _ in range(keys)]
    for tenant in chunk.state_keys:
        residence.states[tenant] = {}
    residence.store(chunk)
    return residence, chunk


def read(residence: OptimizerStateOffload, chunk: UpdateChunk) -> tuple[torch.Tensor, list[dict[str, torch.Tensor]]]:
    with residence.resident([chunk], changes=False):
        states = [{key: value.clone() for key, value in residence.states[t].items()} for t in chunk.state_keys]
        return chunk.values().clone(), states


def test_late_states_keep_existing_states(tier: DiskTier) -> None:
    residence, chunk = residence_of(tier)
    with residence.resident([chunk]):
        residence.states[chunk.state_keys[1]]["mean"] = torch.full((N,), 2.0)
    with residence.resident([chunk]):
        residence.states[chunk.state_keys[0]]["mean"] = torch.full((N,), 1.0)
    master, states = read(residence, chunk)
    assert torch.equal(master, torch.arange(float(N)))
    assert [state["mean"].unique().tolist() for state in states] == [[1.0], [2.0]]


def test_removed_states_keep_the_others(tier: DiskTier) -> None:
    residence, chunk = residence_of(tier)
    with residence.resident([chunk]):
        for number, tenant in enumerate(chunk.state_keys):
            residence.states[tenant] |= {
                "mean": torch.full((N,), number + 1.0),
                "square": torch.full((N,), number + 3.0),
            }
    with residence.resident([chunk]):
        del residence.states[chunk.state_keys[0]]["mean"]
    _, states = read(residence, chunk)
    assert [{k: v.unique().tolist() for k, v in state.items()} for state in states] == [
        {"square": [3.0]},
        {"mean": [2.0], "square": [4.0]},
    ]


def test_read_only_chunk_is_not_written_back(tier: DiskTier) -> None:
    residence, chunk = residence_of(tier)
    read(residence, chunk)  # also waits until earlier writes are done
    before = tier.io_rates().disk_write_bytes
    with residence.resident([chunk], changes=False):
        chunk.values().zero_()
    assert chunk.master is None and tier.io_rates().disk_write_bytes == before
    assert torch.equal(read(residence, chunk)[0], torch.arange(float(N)))


def test_describe_state_reads_nothing(tier: DiskTier) -> None:
    residence, chunk = residence_of(tier)
    with residence.resident([chunk]):
        residence.states[chunk.state_keys[0]] |= {
            "mean": torch.ones(N, dtype=torch.bfloat16),
            "step": torch.tensor(3.0),
        }
    read(residence, chunk)
    before = tier.io_rates().disk_read_bytes
    result = residence.describe_state(chunk, chunk.state_keys[0])
    assert tier.io_rates().disk_read_bytes == before
    assert (result["mean"].device.type, result["mean"].dtype, result["mean"].shape) == ("meta", torch.bfloat16, (N,))
    assert result["step"].item() == 3
    assert residence.describe_state(chunk, chunk.state_keys[1]) == {}


def like(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(N, dtype=dtype, device="meta")


def test_refilled_chunk_is_contiguous(tier: DiskTier) -> None:
    residence, chunk = residence_of(tier)
    with residence.overwritten(chunk, {tenant: {"mean": like(), "square": like()} for tenant in chunk.state_keys}):
        assert torch.equal(chunk.values(), torch.arange(float(N)))
        for number, tenant in enumerate(chunk.state_keys):
            state = residence.states[tenant]
            assert not state["mean"].any() and state["mean"].device.type == "cpu"
            base = chunk.values().untyped_storage().data_ptr()
            assert {value.untyped_storage().data_ptr() for value in state.values()} == {base}
            state["mean"].fill_(number + 1)
            state["square"].fill_(number + 3)
    _, states = read(residence, chunk)
    assert [{k: v.unique().tolist() for k, v in state.items()} for state in states] == [
        {"mean": [1.0], "square": [3.0]},
        {"mean": [2.0], "square": [4.0]},
    ]


def test_refilled_chunk_has_exactly_the_given_states(tier: DiskTier) -> None:
    residence, chunk = residence_of(tier)
    first, second = chunk.state_keys
    with residence.resident([chunk]):
        residence.states[first] |= {"old": torch.ones(N), "kept": torch.full((N,), 5.0), "step": torch.tensor(2.0)}
        residence.states[second] |= {"kept": torch.full((N,), 6.0)}
    with residence.overwritten(
        chunk, {first: {"kept": like(), "new": like(torch.uint8)}, second: {"kept": like(torch.uint8)}}
    ):
        residence.states[first]["new"].fill_(7)
    _, states = read(residence, chunk)
    assert set(states[0]) == {"kept", "new", "step"} and set(states[1]) == {"kept"}
    assert states[0]["kept"].unique().tolist() == [5.0] and states[0]["new"].unique().tolist() == [7]
    assert states[1]["kept"].dtype == torch.uint8 and not states[1]["kept"].any()


def test_prefetch_follows_step_order_and_limit(tier: DiskTier) -> None:
    """Chunks are read ahead in the order of the step and within the staging limit.

    A small chunk late in the step must not take the memory that earlier chunks need.
    """
    staging = StagingPool(tier, 1 << 20)
    residence = OptimizerStateOffload(
        torch.device("cpu"), DeviceMemoryLedger(), tier, staging, pin=False, callbacks=StateOffloadCallbacks()
    )
    chunks = []
    for numel in (100_000, 100_000, 100_000, 4_000):  # 400 kB each, the last 16 kB
        slot: Any = SimpleNamespace(
            unit=SimpleNamespace(names=["weight"], state_start=0, layout=UnitLayout((numel,), 1)),
            holds=False,
            stepped=None,
        )
        chunk = UpdateChunk(slot, 0, numel, Tier.NVME)
        chunk.master = torch.zeros(numel)
        residence.store(chunk)
        chunks.append(chunk)
    staging.wait_all()

    def under_way() -> list[int]:
        return [number for number, chunk in enumerate(chunks) if id(chunk) in residence._fetched]

    residence.read_ahead(chunks[:2])
    assert under_way() == [0], "the second would leave less than a quarter of the memory"
    residence.read_ahead(chunks[3:])
    assert under_way() == [0]
    for _ in residence.iterate_batches([[chunk] for chunk in chunks]):
        assert sum(buffer.numel() for buffer in staging._lent.values()) <= staging.limit
    staging.wait_all()
    residence.read_ahead(chunks[3:])
    assert under_way() == [3], "in the next step there may be room again"
    residence.discard_read_ahead()


PAGES = 9_000  # elements: master weights and two states, in fp32, take 27 pages
sums_pages = pytest.mark.skipif(not can_sum_pages(), reason="only native updates sum pages")


def stepped_chunk(tier: DiskTier) -> tuple[OptimizerStateOffload, UpdateChunk]:
    """Return an offload, and a chunk of one parameter with several pages on disk, after one step of AdamW."""
    residence, chunk = residence_of(tier, PAGES, keys=1)
    residence.states[chunk.state_keys[0]] |= {"exp_avg": torch.zeros(PAGES), "exp_avg_sq": torch.zeros(PAGES)}
    chunk.master = torch.linspace(0, 1, PAGES)
    residence.store(chunk)
    step(residence, chunk)
    assert residence._staging is not None
    residence._staging.wait_all()
    return residence, chunk


def step(residence: OptimizerStateOffload, chunk: UpdateChunk, after: float | None = None) -> list[torch.Tensor]:
    """Update a chunk in one pass with its checksums. Return copies of its master weights and states.

    Args:
        after: value to which the first master weight is set after the update. None: it is not changed.
    """
    copies = []
    for _ in residence.iterate_batches([[chunk]], sums_pages=True):
        sums, state = residence.page_sums(chunk), residence.states[chunk.state_keys[0]]
        assert sums is not None
        tensors = UpdateTensors(chunk.values(), torch.ones(PAGES), (state["exp_avg"], state["exp_avg_sq"]))
        apply_updates(RULES["adamw"](1), [tensors], page_sums=[sums])
        if after is not None:
            chunk.values()[0] = after
        copies = [chunk.values().clone(), *(value.clone() for value in state.values())]
    return copies


@sums_pages
@pytest.mark.parametrize("after", [None, 7.0])
def test_update_with_checksums_is_read_back(tier: DiskTier, after: float | None) -> None:
    residence, chunk = stepped_chunk(tier)
    expected = step(residence, chunk, after)
    for _ in residence.iterate_batches([[chunk]], sums_pages=True):  # without an update all pages keep their checksums
        assert torch.equal(chunk.values(), expected[0])
    with residence.resident([chunk]):
        assert residence.page_sums(chunk) is None
        found = [chunk.values(), *residence.states[chunk.state_keys[0]].values()]
        assert all(map(torch.equal, found, expected))
        chunk.values().add_(1)
    with residence.resident([chunk], changes=False):
        assert torch.equal(chunk.values(), expected[0] + 1)


@sums_pages
@pytest.mark.parametrize(("page", "name"), [(1, "the master weight of 'weight'"), (12, "exp_avg of 'weight'")])
def test_damage_found_by_an_update_is_located(tier: DiskTier, page: int, name: str) -> None:
    residence, chunk = stepped_chunk(tier)
    record = residence.record_of(chunk)
    assert record is not None
    flip(tier, record.extent, page * 4096 + 9)
    with pytest.raises(DamageError, match=rf"bytes {page * 4096} to {page * 4096 + 4096} of it, of {name}"):
        step(residence, chunk)


@sums_pages
def test_damage_is_found_before_a_change_without_checksums(tier: DiskTier) -> None:
    residence, chunk = stepped_chunk(tier)
    record = residence.record_of(chunk)
    assert record is not None
    flip(tier, record.extent, 0)
    with pytest.raises(DamageError, match=r"the master weight of 'weight'"):
        for _ in residence.iterate_batches([[chunk]], sums_pages=True):
            residence.compare_pages(chunk)


@given(st.integers(0, 5000), st.integers(1, 2000))
def test_chunk_sizes_of_a_unit_are_balanced(span: int, limit: int) -> None:
    slot: Any = SimpleNamespace(unit=SimpleNamespace(state_start=7, state_stop=7 + span, state_tier=Tier.NVME))
    chunks = make_chunks([slot], limit)
    assert [chunk.start for chunk in chunks] == [0, *(chunk.stop for chunk in chunks[:-1])]
    assert chunks[-1].stop == span
    most = -(-limit // ALIGN) * ALIGN
    assert all(chunk.numel <= most for chunk in chunks)
    assert all(chunk.start % ALIGN == 0 for chunk in chunks)
    assert max(c.numel for c in chunks) - min(c.numel for c in chunks) < ALIGN * len(chunks)
