"""Tests of the parallelism benchmark's arithmetic: communication formulas, ratios, limits, and the longest sequence."""

from __future__ import annotations

import json
import math
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.bench.conftest import load_script

# ------------------------------------------------------------------------------------------------ bytes of axes


def test_meshes_cover_every_axis_and_stage_without_duplicates() -> None:
    from rig.axis_cases import CASES

    from windlass.comm.mesh_shape import AXES

    assert {axis for case in CASES for axis in AXES if case.grid.size(axis) > 1} == set(AXES)
    assert {case.stage for case in CASES} == {0, 1, 2, 3}
    assert all(case.grid.world == case.ranks for case in CASES)
    assert len({case.name for case in CASES}) == len(CASES)


def test_measured_volume_equals_formula_plus_scalars() -> None:
    from rig.axis_cases import Case, compare, formulas, scalars, unequal

    case = Case(2, {"sp": 2}, stage=1)
    moved = formulas(case)
    moved["sp"]["all_reduce"] = 2 * 2 * 8  # 2 micro-batches x 2 passes x 8 bytes: a sum and a count
    lines = compare(case, 0, moved)
    assert unequal(lines) == [] and {line.operation for line in lines} == {
        "gather",
        "reduce",
        "all_to_all",
        "all_reduce",
    }
    assert scalars(case) == {"sp": {"all_reduce": 32}}
    moved["sp"]["all_to_all"] += 1
    moved["tp"] = {"all_reduce": 5}
    differ = unequal(compare(case, 0, moved))
    assert [(line.axis, line.operation) for line in differ] == [("sp", "all_to_all"), ("tp", "all_reduce")]
    del moved["data"]["reduce"]  # a collective that a formula predicts and no rank ran is reported too
    assert ("data", "reduce") in [(line.axis, line.operation) for line in unequal(compare(case, 0, moved))]


def test_scalar_volume_of_experts_and_stages() -> None:
    from rig.axis_cases import EXPERTS, MICRO_BATCHES, Case, scalars

    each = MICRO_BATCHES * EXPERTS.layers * (EXPERTS.experts // 2) * 8
    assert scalars(Case(2, {"ep": 2})) == {"ep": {"all_to_all": each}}
    assert scalars(Case(2, {"ep": 2}, recompute=True)) == {"ep": {"all_to_all": 2 * each}}
    piped = Case(4, {"pp": 2, "ep": 2})
    assert scalars(piped, 0) == {"pp": {"broadcast": 4}, "ep": {"all_to_all": each // 2}}
    assert scalars(piped, 1) == {"ep": {"all_to_all": each // 2}}


def test_pipeline_messages_are_classified_by_kind() -> None:
    from rig.axis_cases import Case, formulas

    case = Case(2, {"pp": 2})
    assert set(formulas(case, 0)["pp"]) == {"gradients"} and set(formulas(case, 1)["pp"]) == {"activations"}
    both = Case(2, {"pp": 2}, pipeline={"schedule": "interleaved", "virtual_stages": 2})
    assert formulas(both, 0)["pp"]["gradients"] == 2 * formulas(both, 0)["pp"]["activations"]


# ------------------------------------------------------------------------------------------------------- times


def _race(**rounds: list[list[float]]) -> Any:
    from rig.compared_methods import FIELDS, Load
    from rig.method_comparison import Comparison, Outcome

    outcomes = {name: Outcome(name) for name in FIELDS["tp"]}
    for key, of_one in rounds.items():
        outcomes[{"torch": "torch tp", "cut": "torch tp, loss cut"}.get(key, key)].rounds = of_one
    return Comparison("tp", Load(4, 256), outcomes)


def test_ratios_are_per_round_and_relative_to_the_fastest_rival() -> None:
    result = _race(tp=[[1.0, 1.0], [4.0, 4.0]], torch=[[2.0], [8.0]], cut=[[1.5], [7.0]], dp=[[1.0], [2.0]])
    assert result.rival("tp") == "torch tp, loss cut"
    assert result.ratios("tp", "torch tp") == [0.5, 0.5]
    assert result.ratio("tp", "dp") == 1.5 and result.ratio("tp", None) is None
    assert result.ratio("tp", "none") is None and result.rival("dp") is None
    assert result.slower == []


def test_engines_slower_than_torch_are_named() -> None:
    result = _race(tp=[[2.2], [2.2]], torch=[[2.0], [2.0]])
    assert result.slower == ["tp: 1.100 x torch tp"]


def test_differing_losses_are_found_at_any_position() -> None:
    from rig.method_comparison import compare, max_loss_difference

    assert max_loss_difference([1.0, 2.0], [1.0, 2.0]) == 0.0
    assert max_loss_difference([1.0, 2.02], [1.0, 2.0]) == pytest.approx(0.01)
    assert (
        max_loss_difference([1.0, math.nan], [1.0, 2.0]) == math.inf
        and max_loss_difference([1.0], [1.0, 2.0]) == math.inf
    )
    result = _race()
    for name, loss in (("none", 9.0), ("dp", 2.0), ("tp", 2.0 + 1e-4), ("torch tp", 2.0)):
        result.outcomes[name].losses = [loss]
    result.outcomes["torch tp, loss cut"].failure = "does not run"
    compare(result)
    assert result.unequal == ["tp"]  # `none` runs on one rank: its losses are not compared


def test_step_time_is_the_maximum_and_loss_the_mean_over_ranks() -> None:
    from rig.method_comparison import mean_losses, slowest

    results = [{"seconds": [1.0, 2.0], "losses": [None, 4.0]}, {"seconds": [3.0, 1.0], "losses": [2.0, 6.0]}]
    assert slowest(results) == [3.0, 2.0] and mean_losses(results) == [2.0, 5.0]


def test_limit_counts_bubble_update_and_bytes() -> None:
    from rig.compared_methods import DENSE, FIELDS, Load, floor
    from rig.floor import Roofs

    from windlass.comm.mesh_shape import MeshShape
    from windlass.parallel.comm_volumes import count_local_parameters

    load, never = Load(4, 256), 1e30
    elements = DENSE.shape().numel

    def at(axis: str, name: str, **roofs: float) -> float:
        return floor(FIELDS[axis][name], DENSE, load, 100.0, Roofs(**{"memory": never, "adam": never, **roofs}))

    assert at("tp", "none") == at("tp", "tp") == at("sp", "sp ring") == at("tp", "torch tp") == pytest.approx(100)
    assert at("pp", "pp 1f1b") == at("pp", "torch gpipe") == pytest.approx(125)  # (4 micro-batches + 1 idle) / 4
    assert at("tp", "dp", adam=28.0) == pytest.approx(100 + elements)
    assert at("tp", "tp", adam=28.0) == pytest.approx(100 + sum(count_local_parameters(DENSE.shape(), MeshShape(tp=2))))
    assert at("tp", "none", memory=1.0) == pytest.approx(100)
    assert at("tp", "dp", memory=1.0) == pytest.approx(100 + 4 * elements)  # half the gradients, half the parameters
    hidden = 4 * 256 * DENSE.hidden * 4
    passed = at("pp", "pp gpipe", memory=4.0) - 125
    assert passed == pytest.approx(hidden)
    ours, theirs = (at("ep", name, memory=1.0) - 100 for name in ("dp", "torch ddp"))
    assert theirs == pytest.approx(4 * ours)


def test_slow_link_is_a_separate_limit() -> None:
    from rig.compared_methods import DENSE, FIELDS, Load, floor
    from rig.floor import Roofs

    load, roofs = Load(4, 256, link=1), Roofs(1e30, 1e30)
    dp, pp = (floor(FIELDS["link"][name], DENSE, load, 100.0, roofs) for name in ("dp", "pp"))
    # at 1 byte/s communication takes longer than computation, so it alone is the bound
    assert dp == 4 * DENSE.shape().numel and pp == 4 * 256 * DENSE.hidden * 4
    wide = Load(4, 256, link=1 << 60)
    assert floor(FIELDS["link"]["pp"], DENSE, wide, 100.0, roofs) == pytest.approx(125)


def test_a_model_of_another_size_is_timed_and_not_compared() -> None:
    from rig.compared_methods import EXPERTS, FIELDS, Load
    from rig.method_comparison import Comparison, Outcome, compare

    dense = FIELDS["ep"]["dense"].sizes
    assert dense is not None and dense.experts == 0
    per_token = EXPERTS.shape().numel - dense.shape().numel
    idle = (EXPERTS.experts - EXPERTS.chosen) * 3 * EXPERTS.hidden * EXPERTS.intermediate
    # only the sparse model has routers, and experts that a token does not choose
    assert per_token == EXPERTS.layers * (idle + EXPERTS.experts * EXPERTS.hidden)
    result = Comparison("ep", Load(4, 256), {name: Outcome(name, losses=[8.0]) for name in FIELDS["ep"]})
    result.outcomes["dense"].losses = [9.0]
    compare(result)
    assert result.unequal == [] and result.outcomes["dense"].apart is None


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux paces connections")
def test_open_connections_are_paced() -> None:
    from rig.link import pace

    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as made:
        assert pace(1 << 20) >= 1 and made.getsockopt(socket.SOL_SOCKET, 47) == 1 << 20
        with socket.socket(socket.AF_UNIX) as other:
            pace(0)
            assert made.getsockopt(socket.SOL_SOCKET, 47) == -1 and other.fileno() >= 0


def test_link_speeds_are_compared_with_their_limits() -> None:
    from rig.compared_methods import Load
    from rig.method_comparison import Comparison, Outcome, links

    named = {"dp": (6.0, 4.0), "pp": (2.0, 1.0), "torch ddp": (9.0, None), "torch pp": (3.0, None)}
    outcomes = {name: Outcome(name, rounds=[[time]], floor=least) for name, (time, least) in named.items()}
    table = links([Comparison("link", Load(4, 256, link=10 << 20), outcomes)])
    assert [next(iter(column.cells)) for column in table.columns] == ["10", "3.000", "3.000", "4.000"]


def test_tables_and_json_contain_every_engine() -> None:
    from rig.method_comparison import notes, plain, table

    result = _race(dp=[[1.0]], tp=[[2.0]], torch=[[1.0]])
    result.outcomes["torch tp, loss cut"].failure = "a reason"
    for name in ("dp", "tp", "torch tp"):
        result.outcomes[name].busy, result.outcomes[name].apart = [0.5], 1e-7
    assert table(result).row_count == len(result.outcomes)
    assert "absent: torch tp, loss cut: a reason" in notes(result)
    assert any("slower than torch's own: tp: 2.000" in note for note in notes(result))
    again = json.loads(json.dumps(plain(result)))
    assert again["results"]["tp"]["x_rival"] == 2.0 and set(again["results"]) == set(result.outcomes)


def test_requested_parts_are_run() -> None:
    from rig.chosen_names import choose_names

    parts = load_script("parallel_axes").BENCH_PARTS
    assert choose_names("length, bytes", parts, ",") == ["bytes", "length"]
    assert choose_names(",".join(parts), parts, ",") == list(parts)
    with pytest.raises(typer.BadParameter, match=r"steps: there are bytes, tp, sp, pp, ep, link, length"):
        choose_names("tp,steps", parts, ",")


# ----------------------------------------------------------------------------------------------------- lengths


def _points(rows: dict[int, int]) -> list[Any]:
    from rig.techniques import Point

    return [Point(length, peak, peak, 1.0, 2.0) for length, peak in rows.items()]


@given(st.integers(1, 1000), st.integers(0, 200_000), st.integers(1, 400_000))
def test_length_search_ends_near_the_maximum(each: int, fixed: int, cap: int) -> None:
    from rig.techniques import longest, search

    requested: list[int] = []

    def measure(length: int) -> Any:
        requested.append(length)
        return _points({length: fixed + each * length})[0]

    result = search(measure, cap, first=64, most=4096, grain=32)
    assert [point.length for point in result] == sorted(set(requested)) and len(requested) <= 11
    fits, best = (cap - fixed) // each, longest(result, cap)
    if best is None:
        assert fits < 64 and requested == [64]
    else:
        assert best.peak <= cap and min(fits, 4096) - best.length <= max(64, 0.04 * best.length)


def test_length_search_ignores_fits_beyond_a_failure() -> None:
    from rig.techniques import longest

    assert longest(_points({64: 10, 128: 30, 256: 15}), 20).length == 64  # type: ignore[union-attr]
    assert longest(_points({64: 30}), 20) is None


def test_each_option_is_ablated_alone_and_left_out() -> None:
    from dataclasses import fields

    from rig.techniques import ROWS, Techniques

    plain, everything = ROWS["nothing"], ROWS["all"]
    names = [field.name for field in fields(Techniques)]
    assert plain == Techniques() and all(getattr(everything, name) != getattr(plain, name) for name in names)
    alone = {name for row in ROWS.values() for name in _other(row, plain)[:1] if len(_other(row, plain)) == 1}
    without = {_other(row, everything)[0] for row in ROWS.values() if len(_other(row, everything)) == 1}
    # "inputs" works only together with "recompute"
    assert alone == {*names} - {"inputs"} and without == {*names} - {"recompute"}
    assert _other(ROWS["all but recompute"], everything) == ["recompute", "inputs"]


def _other(one: Any, other: Any) -> list[str]:
    return [name for name in vars(one) if getattr(one, name) != getattr(other, name)]


def test_tables_json_and_picture_of_lengths(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from rig import lengths

    results = {"nothing": _points({64: 10 << 20, 128: 30 << 20}), "all": _points({64: 9 << 20, 512: 20 << 20})}
    results["sp 2"] = _points({64: 99 << 20})
    cap = 20 << 20
    assert lengths.table(results, cap).row_count == 3
    written = json.loads(json.dumps(lengths.plain(results, cap)))
    assert [row["longest"] for row in written["rows"].values()] == [64, 512, None]
    assert [lengths.said(points, cap) for points in results.values()] == ["64", ">= 512", "< 64"]
    assert lengths.slope(results["all"]) == (11 << 20) / 448
    assert lengths.draw(results, cap, tmp_path / "new" / "x.png")
    assert (tmp_path / "new" / "x.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_losses_of_rows_are_compared_on_one_length() -> None:
    from dataclasses import replace

    from rig.lengths import losses_apart

    results = {"nothing": _points({64: 1}), "all": _points({64: 1})}
    assert losses_apart(results) == 0.0
    results["all"] = [replace(results["all"][0], loss=2.002)]
    assert losses_apart(results) == pytest.approx(1e-3)
    results["all"] = [replace(results["all"][0], loss=math.nan)]
    assert losses_apart(results) == math.inf


def test_rank_environment_is_set_and_restored() -> None:
    import os

    from rig.lengths import _environment

    before = dict(os.environ)
    with _environment("all"):
        assert os.environ["WINDLASS_EMULATE_DEVICE"] and os.environ["WINDLASS_KEEP_FREED_MEMORY"] == "0"
        assert Path(os.environ["WINDLASS_BENCH_FILES"]).is_dir()
    with _environment("nothing"):
        assert "WINDLASS_EMULATE_DEVICE" not in os.environ
    assert dict(os.environ) == before
