"""Tests of the arithmetic of the benchmark of chosen tiers."""

from __future__ import annotations

from tests.unit.bench.conftest import load_script


def test_limits_are_the_needs_with_a_reserve_and_the_middle_between_two() -> None:
    bench = load_script("tier_choice")
    need = bench.Need
    limits = bench.limits_of({"near": need(1000, 0), "far": need(400, 600), "disk": need(400, 200)})
    assert limits == {
        "as near": need(1100, 0),
        "less than near": need(770, 660),  # the host memory of "as far"
        "as far": need(440, 660),
        "less than far": need(440, 440),
        "as disk": need(440, 220),
    }
    assert need(440, 660).fits(limits["as far"]) and not need(441, 660).fits(limits["as far"])


def test_a_row_meets_its_target_within_the_noise_and_within_the_limit() -> None:
    bench = load_script("tier_choice")

    def row(seconds: float, device: int = 90, target: float = 1.0) -> bool:
        times = {"auto": seconds, "near": 1.0}
        met: bool = bench.Row("as near", bench.Need(100, 0), bench.Need(device, 0), "near", times, target).meets
        return met

    assert row(1.02) and not row(1.04) and not row(0.5, device=101)
    assert row(0.8, target=bench.BETWEEN) and not row(0.9, target=bench.BETWEEN)
