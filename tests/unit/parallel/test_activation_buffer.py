"""Tests of the activation buffer: regions never overlap, memory is allocated once, and a small buffer is reported."""

from __future__ import annotations

import logging

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from windlass.base.log import logger
from windlass.parallel.activation_buffer import ALIGNMENT, ActivationBuffer, BufferRegion

CPU = torch.device("cpu")


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3000)), max_size=40), st.randoms())
def test_live_regions_never_overlap(moves: list[tuple[bool, int]], random: object) -> None:
    buffer = ActivationBuffer(CPU, 5)
    alive: list[tuple[BufferRegion, int]] = []
    for number, (come, nbytes) in enumerate(moves):
        if come:
            buffer.begin_call(nbytes, 0)
            region = buffer.allocate(nbytes)
            if region is not None:
                region.memory.fill_(number % 251)
                alive.append((region, number % 251))
            del region
        elif alive:
            alive.pop(random.randrange(len(alive)))  # type: ignore[attr-defined]
        assert all(bool((each.memory == mark).all()) for each, mark in alive)
        assert buffer.num_regions == len(alive)


def rounds(buffer: ActivationBuffer, calls: int, nbytes: int) -> list[BufferRegion | None]:
    """Begin `calls` checkpointed calls and allocate `nbytes` bytes in each. Return the regions."""
    results = []
    for _ in range(calls):
        buffer.begin_call(nbytes, 0)
        results.append(buffer.allocate(nbytes))
    return results


def test_buffer_is_allocated_once_and_reused() -> None:
    buffer = ActivationBuffer(CPU, 4)
    addresses = set()
    for _ in range(3):
        regions = rounds(buffer, 4, 1000)
        assert None not in regions and buffer.nbytes == 4 * 1024
        addresses.add(tuple(region.memory.data_ptr() for region in regions if region))
        while regions:
            regions.pop()
        assert buffer.num_regions == 0
    assert len(addresses) == 1
    assert all(address % 64 == 0 and ALIGNMENT % 64 == 0 for address in addresses.pop())


def test_a_buffer_grows_while_it_is_empty() -> None:
    buffer = ActivationBuffer(CPU, 2)
    rounds(buffer, 2, 100)
    assert buffer.nbytes == 1024
    assert None not in rounds(buffer, 2, 5000) and buffer.nbytes == 2 * 5120


def test_tensor_mistaken_for_shared_gets_space_the_next_time() -> None:
    buffer = ActivationBuffer(CPU, 2)

    def once() -> int:
        results: list[BufferRegion | None] = []
        for _ in range(2):
            buffer.begin_call(512, 512)
            results += [buffer.allocate(512), buffer.allocate(512)]
        return results.count(None)

    assert (once(), once()) == (1, 0)


def test_checkpoints_beyond_the_configured_number_warn_once(caplog: pytest.LogCaptureFixture) -> None:
    logger.addHandler(caplog.handler)
    try:
        with caplog.at_level(logging.WARNING, "windlass"):
            result = rounds(ActivationBuffer(CPU, 2), 4, 1000)
    finally:
        logger.removeHandler(caplog.handler)
    assert [region is None for region in result] == [False, False, True, True]
    assert len(caplog.records) == 1
    assert "checkpoint 3" in caplog.text and "number_checkpoints" in caplog.text
