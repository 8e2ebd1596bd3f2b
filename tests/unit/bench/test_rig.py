"""Tests of the training benchmark's harness: grouping, turns, floors and comparisons."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st


@given(st.lists(st.integers(1, 50), min_size=1, max_size=12), st.integers(1, 120))
def test_groups_contain_each_engine_once_beside_the_base_within_the_budget(sizes: list[int], budget: int) -> None:
    from rig.plan import BASE, groups

    needs = {BASE: 10, **{f"e{i}": size for i, size in enumerate(sizes)}}
    result = groups(list(needs), needs, budget)
    assert sorted(e for group in result for e in group if e != BASE) == sorted(e for e in needs if e != BASE)
    for group in result:
        assert group[0] == BASE and group.count(BASE) == 1
        assert sum(needs[e] for e in group) <= budget or len(group) == 2


def test_groups_fill_the_budget() -> None:
    from rig.plan import groups

    assert groups(["none", "a", "b", "c"], {"none": 1, "a": 2, "b": 2, "c": 2}, 5) == [
        ["none", "a", "b"],
        ["none", "c"],
    ]


def test_a_rival_joins_each_group_that_has_an_engine_compared_with_it() -> None:
    from rig.plan import groups

    needs = dict.fromkeys(["none", "rival", "other", "a", "b", "c"], 1)
    rivals = {"a": "rival", "b": "rival", "c": "rival", "other": "absent"}
    assert groups(list(needs), needs, 4, rivals) == [["none", "other", "a", "rival"], ["none", "b", "rival", "c"]]
    assert groups(["none", "rival", "other"], needs, 4, rivals) == [["none", "rival", "other"]]


def test_growing_sizes_end_with_the_requested_size() -> None:
    from rig.growth import sizes_up_to
    from rig.job import Size

    assert [(s.hidden, s.layers) for s in sizes_up_to(Size())] == [(256, 4), (512, 8), (768, 12)]
    assert [(s.hidden, s.layers) for s in sizes_up_to(Size(64, 1))] == [(64, 1)] * 3


def test_engines_alternate_between_rounds() -> None:
    from rig.plan import turn

    assert [turn("abc", number) for number in range(3)] == [list("abc"), list("cba"), list("abc")]


def test_floor_counts_the_required_traffic_of_each_stage() -> None:
    from rig.floor import Roofs, floor

    roofs = Roofs(memory=4.0, adam=28.0)  # one element a second: 4 bytes of memory, 28 of AdamW

    def at(engine: str, ranks: int = 2) -> float | None:
        return floor(engine, 100, ranks, 1000.0, roofs)

    assert at("none") == 1000 + 100
    assert at("windlass-0-shm") == 1000 + 100 + 150
    assert at("windlass-1-shm") == at("windlass-2-shm") == at("windlass-3-shm") == 1000 + 50 + 150
    assert at("windlass-2-gloo") == 1000 + 50 + 150 + 2 * 4 * 50
    assert at("windlass-3-gloo") == 1000 + 50 + 150 + 3 * 4 * 50
    assert at("windlass-3", ranks=1) == 1000 + 100
    assert at("ddp") is None


def _result(engine: str, losses: list[float], seconds: float, peak: int = 0) -> Any:
    from rig.measure import Result

    return Result(
        engine,
        parameters=100,
        memory_kind="bytes",
        memory=[peak, peak - 1],
        first_losses=losses,
        rounds=[[seconds, seconds], [2 * seconds, 2 * seconds]],
        base_rounds=[[1.0, 1.0], [2.0, 2.0]],
        compute=[0.5],
        between=[0.0],
        floor=seconds / 2,
        floor_ratio=0.5,
    )


def _measured(**seconds: float) -> Any:
    from rig.job import Size
    from rig.measure import Measured, _compare

    results = {name.replace("_", "-"): value for name, value in seconds.items()}
    result = Measured(
        Size(), 2, {name: _result(name, [3.0, 2.0], value, peak=1400) for name, value in results.items()}, "ddp"
    )
    _compare(result)
    return result


def test_ratios_are_of_the_same_round() -> None:
    measured = _measured(none=1.0, ddp=1.25)
    assert measured.results["ddp"].ratios == [1.25, 1.25]  # both engines take twice as long in round 2
    assert measured.results["ddp"].share_of_floor == 0.5 / 1.25
    assert measured.results["ddp"].bytes_per_parameter == 14.0


@pytest.mark.parametrize("apart", [0.0, 0.9e-5, 1.1e-5, float("inf")])
def test_differing_loss_is_found_at_any_position(apart: float) -> None:
    from rig.measure import _compare
    from rig.show import equality_line

    measured = _measured(none=1.0, ddp=1.25, windlass_2_shm=1.0)
    measured.results["none"].first_losses = [9.0, 9.0]  # runs on one rank: its losses are compared with no other run
    measured.results["windlass-2-shm"].losses = [1.0 + apart]
    measured.results["ddp"].losses = [1.0]
    _compare(measured)
    assert measured.unequal == (["windlass-2-shm"] if apart > 1e-5 else [])
    assert ("NOT equal (windlass-2-shm)" in equality_line(measured)) == (apart > 1e-5)


def test_missed_targets_are_reported_for_the_target_workload_only() -> None:
    from dataclasses import replace

    from rig.targets import missed

    measured = _measured(none=1.0, ddp=1.2, fsdp3=2.0, windlass_2_shm=1.03, windlass_1_shm=1.01, windlass_3_gloo=1.5)
    measured.results["windlass-3-gloo"].rival_rounds = [[2.0, 2.0], [4.0, 4.0]]
    assert missed(measured) == [
        "windlass-2-shm: 1.030 x none, target 1.020",
        "windlass-2-shm: 14.0 bytes a parameter, target 13.0",
        "windlass-3-gloo: 0.750 x fsdp3, target 0.600",
    ]
    assert missed(replace(measured, ranks=4)) == []


def test_tables_and_json_hold_every_engine() -> None:
    import json

    from rig.show import notes, plain, table

    measured = _measured(none=1.0, ddp=1.2, windlass_0_shm=1.0)
    measured.results["ddp"].failure = "a reason that is far too long for a cell of the table"
    assert table(measured).row_count == 3
    assert any("failed: ddp: a reason" in note for note in notes(measured))
    again = json.loads(json.dumps(plain(measured)))
    assert set(again["results"]) == set(measured.results)
    assert again["results"]["windlass-0-shm"]["ratio"] == 1.0


def test_targets_name_engines_of_the_default_run() -> None:
    from rig.targets import AGAINST, MEMORY, SPEED

    from tests.unit.bench.conftest import load_script

    engines = load_script("cpu_train").default_engines()
    assert {*SPEED, *AGAINST, *MEMORY, *(rival for rival, _ in AGAINST.values())} <= set(engines)
