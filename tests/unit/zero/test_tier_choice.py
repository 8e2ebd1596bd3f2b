"""Laws of the choice of tiers: it fits into memory, and is not slower than any setting written by hand that fits."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from windlass.base.errors import ConfigError
from windlass.storage.slot import Tier
from windlass.storage.tier_rates import TierRates
from windlass.zero.setup.tier_choice import (
    FixedBytes,
    StepTraffic,
    TierMemory,
    UnitBytes,
    choose_tiers,
    step_seconds,
)
from windlass.zero.setup.zero_settings import UnitTiers

RATES = TierRates(1e12, 2e10, 2e10, 2e10, 3e9, 2e9)
DEVICE, HOST, NVME = Tier.DEVICE, Tier.HOST, Tier.NVME
UNIFORM = [
    UnitTiers(param, gradient, state)
    for param in Tier
    for state, gradient in ((DEVICE, DEVICE), (HOST, HOST), (NVME, HOST), (NVME, NVME))
]

sizes = st.integers(1, 1 << 32)


@st.composite
def units(draw: st.DrawFn) -> list[UnitBytes]:
    found = []
    for _ in range(draw(st.integers(1, 9))):
        numel, can_move, kind = draw(sizes), draw(st.booleans()), draw(st.sampled_from(["frozen", "fp32", "bf16"]))
        if kind == "frozen":
            found.append(UnitBytes(2 * numel, can_move=can_move))
        else:
            width = 4 if kind == "fp32" else 2
            found.append(UnitBytes(width * numel, 4 * numel, 4 * numel, 8 * numel, can_move, kind == "fp32"))
    return found


rate = st.floats(1e6, 1e13)
all_rates = st.builds(TierRates, rate, rate, rate, rate, rate, rate)
memories = st.builds(
    TierMemory, st.integers(0, 1 << 38), st.none() | st.integers(0, 1 << 38), st.none() | st.integers(0, 1 << 40)
)
fixed = st.builds(FixedBytes, *(st.integers(0, 1 << 20) for _ in range(5)))
traffic = st.builds(StepTraffic, st.integers(2, 8), st.integers(1, 4))


def counted(of: list[UnitBytes], tiers: list[UnitTiers], given: FixedBytes) -> dict[Tier, int]:
    """Return the bytes of a placement in each tier, counted one unit at a time."""
    used = {DEVICE: given.device, HOST: 0, NVME: 0}
    for unit, at in zip(of, tiers, strict=True):
        if unit.can_move:
            used[at.param] += unit.parameters
        if unit.is_trained:
            used[at.gradient] += unit.gradient
            used[at.state] += unit.states
            serves = unit.shares_masters and at.param is at.state and at.state is not NVME
            used[at.state] += 0 if serves else unit.masters
    if any(unit.can_move and at.param is not DEVICE for unit, at in zip(of, tiers, strict=True)):
        used[DEVICE] += given.device_if_params_offloaded
    if any(at.state is not DEVICE for at in tiers):
        used[DEVICE] += given.device_if_offloaded
        used[HOST] += given.host_if_offloaded
    if any(NVME in (at.param, at.state) for at in tiers):
        used[HOST] += given.host_if_on_disk
    return used


@settings(max_examples=40, deadline=None)
@given(units(), all_rates, memories, fixed, traffic)
@example(  # a unit that cannot move precedes one that moves
    [UnitBytes(2, can_move=False), UnitBytes(2)], RATES, TierMemory(0, None, 2), FixedBytes(), StepTraffic()
)
def test_a_choice_fits_and_is_not_slower_than_any_uniform_setting_that_fits(
    of: list[UnitBytes], rates: TierRates, memory: TierMemory, given: FixedBytes, passes: StepTraffic
) -> None:
    def fits(tiers: list[UnitTiers]) -> bool:
        used = counted(of, tiers, given)
        if memory.host is None:
            return used[DEVICE] + used[HOST] <= memory.device and used[NVME] <= (memory.disk or 0)
        return used[DEVICE] <= memory.device and used[HOST] <= memory.host and used[NVME] <= (memory.disk or 0)

    def of_kind(at: UnitTiers) -> list[UnitTiers]:
        return [
            UnitTiers(
                at.param if unit.can_move else DEVICE,
                at.gradient if unit.is_trained else DEVICE,
                at.state if unit.is_trained else DEVICE,
            )
            for unit in of
        ]

    allowed = [DEVICE, *([HOST] if memory.host is not None else []), *([NVME] if memory.disk is not None else [])]
    by_hand = [of_kind(at) for at in UNIFORM if at.param in allowed and at.state in allowed]
    by_hand = [tiers for tiers in by_hand if fits(tiers)]
    try:
        choice = choose_tiers(of, rates, memory, given, passes)
    except ConfigError as error:
        assert not by_hand and "lacks" in str(error)
        return
    assert fits(list(choice.units))
    used = counted(of, list(choice.units), given)
    if memory.host is None:
        used = {DEVICE: used[DEVICE] + used[HOST], HOST: 0, NVME: used[NVME]}
    assert choice.used == used
    for tiers in by_hand:
        assert choice.seconds <= step_seconds(of, tiers, rates, passes) * (1 + 1e-12)


@settings(max_examples=40, deadline=None)
@given(units(), all_rates, memories, memories)
def test_more_memory_is_never_slower(
    of: list[UnitBytes], rates: TierRates, memory: TierMemory, more: TierMemory
) -> None:
    def plus(first: int | None, second: int | None) -> int | None:
        return None if first is None else first + (second or 0)

    larger = TierMemory(memory.device + more.device, plus(memory.host, more.host), plus(memory.disk, more.disk))
    try:
        before = choose_tiers(of, rates, memory).seconds
    except ConfigError:
        return
    assert choose_tiers(of, rates, larger).seconds <= before


LAYERS = [UnitBytes(2 * 10**8, 4 * 10**8, 4 * 10**8, 8 * 10**8)] * 10
"""Ten layers of 10**8 elements: bf16 parameters, Adam in fp32."""


def test_everything_stays_on_a_device_that_is_large_enough() -> None:
    choice = choose_tiers(LAYERS, RATES, TierMemory(18 * 10**9, 10**12, 10**12))
    assert choice.units == (UnitTiers(),) * 10 and choice.used[DEVICE] == 18 * 10**9


def test_memory_between_two_settings_by_hand_is_used() -> None:
    """Half of the states fit on the device; a setting with all states on the host takes over 1.5 times as long."""
    memory = TierMemory(10 * 10**9, 10**12, None)
    choice = choose_tiers(LAYERS, RATES, memory)
    assert sum(one.state is DEVICE for one in choice.units) >= 5
    by_hand = step_seconds(LAYERS, [UnitTiers(DEVICE, HOST, HOST)] * 10, RATES)
    assert by_hand > 1.5 * choice.seconds


def test_states_overflow_from_host_to_disk() -> None:
    choice = choose_tiers(LAYERS, RATES, TierMemory(4 * 10**9, 8 * 10**9, 10**12))
    assert {one.state for one in choice.units} == {DEVICE, HOST, NVME}
    order = [list(Tier).index(one.state) for one in choice.units]
    assert order == sorted(order, reverse=True)  # the first units are in the slowest tier


def test_nothing_fits_names_the_nearest_placement_and_the_missing_bytes() -> None:
    with pytest.raises(ConfigError) as raised:
        choose_tiers(LAYERS, RATES, TierMemory(10**9, 10**9, None), FixedBytes(device=2 * 10**9))
    text = str(raised.value)
    assert "nearest" in text and "bytes of offload.host_memory" in text and "offload.device_memory" in text
    assert "offload.nvme_path" in text


def test_infinite_links_and_many_units() -> None:
    """On a CPU, host and device are one memory, so nothing is on the host. Many units are placed in groups."""
    rates = replace(RATES, to_device=math.inf, to_host=math.inf)
    choice = choose_tiers(LAYERS * 10, rates, TierMemory(100 * 10**9, None, 10**12))
    assert choice.used[HOST] == 0 and choice.used[DEVICE] <= 100 * 10**9
    assert {one.state for one in choice.units} == {DEVICE, NVME}
    assert choice.used[DEVICE] > 90 * 10**9


@pytest.mark.parametrize("moved", [1, 17, 31, 59])
def test_a_ratio_that_fits_is_found_among_many_units(moved: int) -> None:
    """Only one number of offloaded units fits the limits, and it is inside a group of neighbouring units."""
    layers = [replace(LAYERS[0], can_move=False)] * 60
    each = 16 * 10**8
    memory = TierMemory((60 - moved) * each, moved * each, None)
    choice = choose_tiers(layers, RATES, memory)
    assert [one.state for one in choice.units] == [HOST] * moved + [DEVICE] * (60 - moved)
    on_disk = TierMemory((60 - moved) * each, None, moved * each)
    assert [one.state for one in choose_tiers(layers, RATES, on_disk).units] == [NVME] * moved + [DEVICE] * (60 - moved)
