"""Tests that each rank gets exactly its devices, its share of the cores, and its environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace

import pytest

from windlass.launch import core_binding, visible_devices
from windlass.launch.launch_errors import LaunchError
from windlass.launch.launch_plan import LaunchPlan
from windlass.launch.program import Program
from windlass.launch.rank_jobs import make_rank_jobs
from windlass.launch.rank_placement import Host, place_ranks


@pytest.mark.parametrize(
    ("environ", "count", "expected"),
    [
        ({}, 2, ["0", "1"]),
        ({"CUDA_VISIBLE_DEVICES": "4,5"}, 2, ["4", "5"]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-8f, MIG-1/2"}, 2, ["GPU-8f", "MIG-1/2"]),
        ({"CUDA_VISIBLE_DEVICES": "3,-1,2"}, 1, ["3"]),
        ({"CUDA_VISIBLE_DEVICES": ""}, 8, []),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, 0, []),
        ({"CUDA_VISIBLE_DEVICES": "6", "SLURM_STEP_GPUS": "2,3"}, 1, ["6"]),
        ({"SLURM_STEP_GPUS": "2,3", "SLURM_JOB_GPUS": "0-7"}, 8, ["2", "3"]),
        ({"SLURM_STEP_GPUS": "2,3"}, 2, ["0", "1"]),  # the step sees only these devices, and numbers them from 0
        ({"SLURM_JOB_GPUS": "4-6"}, 8, ["4", "5", "6"]),
        ({"GPU_DEVICE_ORDINAL": "1", "SLURM_JOB_GPUS": "5"}, 8, ["1"]),
        ({"SLURM_JOB_GPUS": "4-6"}, 0, []),
    ],
)
def test_visible_devices_are_kept(environ: Mapping[str, str], count: int, expected: list[str]) -> None:
    assert visible_devices.available_devices(environ, count) == expected


def test_slots_index_the_visible_devices() -> None:
    assert visible_devices.select_devices((0, 1), ["4", "5", "6"], "here") == ["4", "5"]
    assert visible_devices.select_devices(("6", "GPU-1"), ["GPU-1", "6"], "here") == ["6", "GPU-1"]
    assert visible_devices.select_devices((0, 1), [], "here") is None, "no GPUs: CPU ranks"
    for slot in (2, "0", -1):
        with pytest.raises(LaunchError) as caught:
            visible_devices.select_devices((slot,), ["4", "5"], "node-1")
        assert str(caught.value) == (
            f"device {slot} is requested on node-1, which has 4,5 (2 in all); request fewer, or set "
            "CUDA_VISIBLE_DEVICES"
        )


def jobs(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, count: int, plan: LaunchPlan, node: int = 0
) -> list[dict[str, str]]:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr("windlass.launch.rank_jobs.count_devices", lambda: count)
    return [job.env for job in make_rank_jobs(plan, node, ("m", 1))]


def test_nested_launch_ignores_the_outer_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks started inside a rank do not use the outer store.

    With `deepspeed` started by a rank of torchrun, rank 0 of the inner run hosts the store.
    """
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "outer")
    plan = LaunchPlan(Program(("s",)), (Host("a", (0, 1)),), use_agent_store=False)
    assert not any(name.startswith("TORCHELASTIC") for item in jobs(monkeypatch, None, 0, plan) for name in item)
    kept = jobs(monkeypatch, None, 0, replace(plan, use_agent_store=True))
    assert {(item["TORCHELASTIC_USE_AGENT_STORE"], item["TORCHELASTIC_RUN_ID"]) for item in kept} == {
        ("True", plan.run_id)
    }


def test_ranks_see_only_the_devices_of_their_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    program = Program(("s",))
    hosts = (Host("a", (0, 1)), Host("b", (1, 3, 0)))
    plan = LaunchPlan(program, hosts, use_devices=True)
    assert [item["CUDA_VISIBLE_DEVICES"] for item in jobs(monkeypatch, None, 2, plan)] == ["0,1"] * 2
    second = jobs(monkeypatch, "7,5,6,4", 4, plan, 1)
    assert [item["CUDA_VISIBLE_DEVICES"] for item in second] == ["5,4,7"] * 3
    assert [(item["RANK"], item["LOCAL_RANK"], item["WORLD_SIZE"]) for item in second] == [
        ("2", "0", "5"),
        ("3", "1", "5"),
        ("4", "2", "5"),
    ]
    assert second[0]["LOCAL_WORLD_SIZE"] == "3" and second[0]["CROSS_RANK"] == second[0]["GROUP_RANK"] == "1"
    with pytest.raises(LaunchError, match="device 3 is requested on b, which has 0,1"):
        jobs(monkeypatch, None, 2, plan, 1)
    assert [item.get("CUDA_VISIBLE_DEVICES") for item in jobs(monkeypatch, None, 0, plan)] == [None, None]
    alone = LaunchPlan(program, (Host("a", (0, 1)),), use_devices=True, virtual_local_rank=True)
    result = jobs(monkeypatch, "5,4", 2, alone)
    assert [(item["CUDA_VISIBLE_DEVICES"], item["LOCAL_RANK"], item["RANK"]) for item in result] == [
        ("5", "0", "0"),
        ("4", "0", "1"),
    ]
    untouched = LaunchPlan(program, (Host("a", (0, 1, 2)),))
    assert [item["CUDA_VISIBLE_DEVICES"] for item in jobs(monkeypatch, "3", 1, untouched)] == ["3"] * 3


@pytest.mark.parametrize(
    ("visible", "count", "slots", "expected"),
    [
        (None, 4, (0, 2, 3), "0,2,3"),
        ("4,5,6,7", 4, (0, 2, 3), "4,6,7"),
        (None, 4, (1,), "1,2,3"),  # two ranks, which may use several devices each
        (None, 4, (0, 1, 2), None),
        (None, 2, (0, 2, 3), None),  # three ranks share two devices
        (None, 0, (0, 2, 3), None),
    ],
)
def test_restarted_ranks_do_not_see_the_devices_of_lost_slots(
    visible: str | None, count: int, slots: tuple[int, ...], expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = LaunchPlan(Program(("s.py",)), (Host("localhost", slots),))
    assert {job.get("CUDA_VISIBLE_DEVICES") for job in jobs(monkeypatch, visible, count, plan)} == {expected}


def test_local_ranks_are_numbered_per_host() -> None:
    result = place_ranks([Host("a", (0, 1, 2)), Host("b", (0,)), Host("c", (5, 7))])
    assert [[(place.rank, place.local_rank) for place in node] for node in result] == [
        [(0, 0), (1, 1), (2, 2)],
        [(3, 0)],
        [(4, 0), (5, 1)],
    ]


@pytest.mark.parametrize(("text", "expected"), [("1,3-5,7", [1, 3, 4, 5, 7]), ("0", [0]), ("2-2", [2])])
def test_lists_of_numbers(text: str, expected: list[int]) -> None:
    assert visible_devices.parse_numbers(text, "--x") == expected


@pytest.mark.parametrize("text", ["", "a", "1,", "3-1", "1-2-3", "-1", "1 2"])
def test_invalid_number_lists_are_refused(text: str) -> None:
    with pytest.raises(LaunchError, match="--x is .* neither a number nor a range"):
        visible_devices.parse_numbers(text, "--x")


def test_cores_are_divided_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [core_binding.core_share([0, 2, 4, 6, 8], 2, rank) for rank in (0, 1)] == [[0, 2], [4, 6]]
    with pytest.raises(LaunchError, match="2 cores for 3 ranks"):
        core_binding.core_share([0, 1], 3, 0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {2, 3, 5}, raising=False)
    assert core_binding.bindable_cores("5,2-3") == [5, 2, 3]
    with pytest.raises(LaunchError, match="core 4 does not exist or is not allowed; this process may use 2,3,5"):
        core_binding.bindable_cores("4")
    with pytest.raises(LaunchError, match="lists a core twice"):
        core_binding.bindable_cores("2,2")
