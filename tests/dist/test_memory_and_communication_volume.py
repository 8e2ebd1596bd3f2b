"""Tests that counted memory and communication equal the formulas exactly."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from tests.dist.equivalence_cases import FROZEN_KNOBS
from tests.dist.equivalence_runs import ADAMW, SGD, Setting, backward_of, ds_config, specimen, start
from tests.dist.harness import run_ranks
from tests.dist.quick_rows import in_shares, share
from tests.models import Place, cast
from tests.oracle import Recipe
from tests.pairwise import pairwise
from windlass.parallel.comm_volumes import StepWorkload, compute_data_parallel_volumes


def reported(name: str, recipe: Recipe, setting: Setting, steps: int) -> list[dict[str, Any]]:
    """Return the engine's report after each step."""
    subject = specimen(name)
    engine = start(subject, ds_config(recipe, setting))
    backward = backward_of(engine, setting.plain_backward)
    reports = []
    for step in range(steps):
        for micro in range(recipe.accumulation):
            batch = cast(subject.batch(Place(step, micro, dist.get_rank())), recipe.dtype)
            subject.train(engine, batch, backward)
            engine.step()
        reports.append(engine.report())
    engine.destroy()
    return reports


def elements(name: str) -> int:
    """Return P, the number of elements of the model's parameters."""
    return sum(p.numel() for p in specimen(name).build().parameters())


def volume(stage: int, accumulation: int) -> int:
    """Return the payload of a step in multiples of P, counting an all-reduce as a reduction and a gather.

    Stage 2 reduces every micro-batch and gathers once. Stage 3 gathers twice and reduces once for each micro-batch.
    """
    return {0: 2, 1: 2, 2: accumulation + 1, 3: 3 * accumulation}[stage]


SPECIMENS = ["four_blocks", "odd_shapes", "attention"]
ROWS = pairwise({"stage": [3, 2, 1, 0], "ranks": [2, 4], "accumulation": [1, 3], "transport": ["shm", "gloo"]})


def reported_in_turn(names: list[str], recipe: Recipe, setting: Setting) -> list[list[dict[str, Any]]]:
    return [reported(name, recipe, setting, 2) for name in names]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(str(value) for value in row.values()))
@in_shares
def test_payload_is_exact(row: dict[str, Any], every: bool) -> None:
    """The payload is exact if the persistence threshold and the limits of prefetch, live elements and reuse are 0."""
    recipe = Recipe(ranks=row["ranks"], accumulation=row["accumulation"], optimizer_params=SGD)
    setting = Setting(stage=row["stage"], zero=FROZEN_KNOBS)
    names = share(SPECIMENS, ROWS.index(row), 3, every)
    for by_name in run_ranks(reported_in_turn, row["ranks"], names, recipe, setting, transport=row["transport"]):
        for name, reports in zip(names, by_name, strict=True):
            expected = volume(row["stage"], row["accumulation"]) * elements(name)
            assert [report["payload_elements"] for report in reports] == [expected] * 2, name


@pytest.mark.parametrize(
    ("stage", "replicas"),
    [*((stage, 1) for stage in range(4)), pytest.param(1, 2, marks=pytest.mark.slow), (2, 2), (3, 2)],
)
def test_bytes_of_the_data_axis_equal_the_formulas(stage: int, replicas: int) -> None:
    """The formulas of `parallel.comm_volumes`, with the padded size, give the bytes that a rank receives."""
    recipe = Recipe(ranks=4, accumulation=3, optimizer_params=SGD)
    zero = FROZEN_KNOBS + ((("mics_shard_size", 4 // replicas),) if replicas > 1 else ())
    setting = Setting(stage=stage, transport="gloo", zero=zero)
    for reports in run_ranks(reported, 4, "four_blocks", recipe, setting, 2, transport="gloo"):
        for report in reports:
            padded = elements("four_blocks") + report["padding_elements"]
            work = StepWorkload(1, micro_batches=3, zero_stage=stage, parameter_bytes=4)
            text = compute_data_parallel_volumes("data", padded, 4, replicas, work)
            expected = {item.operation: item.nbytes for item in text if item.nbytes}
            assert report["bytes_moved"] == expected


@pytest.mark.parametrize("accumulation", [1, 3])
def test_default_options_never_send_more(accumulation: int, stage: int, transport: str) -> None:
    recipe = Recipe(accumulation=accumulation)
    setting = Setting(stage=stage, transport=transport, persistence=100_000)
    expected = volume(stage, accumulation) * elements("four_blocks")
    for reports in run_ranks(reported, 2, "four_blocks", recipe, setting, 3, transport=transport):
        for report in reports:
            assert 0 < report["payload_elements"] <= expected


def test_one_rank_sends_nothing(stage: int) -> None:
    for reports in run_ranks(reported, 1, "mlp", Recipe(ranks=1), Setting(stage=stage), 2):
        assert [report["payload_elements"] for report in reports] == [0, 0]


LINE = 16  # largest padding, in elements, before a parameter and at the end of each rank's shard


def at_rest(report: dict[str, Any]) -> dict[str, int]:
    """Return the bytes of each slot, summed over tiers."""
    sizes: dict[str, int] = {}
    for (slot, _), size in report["slots"].items():
        sizes[slot] = sizes.get(slot, 0) + size
    return sizes


@pytest.mark.parametrize("grad_bytes", [2, 4])
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_bytes_between_steps_are_exact(stage: int, ranks: int, grad_bytes: int) -> None:
    """The bytes of all slots between steps equal the formulas.

    Slots are 16-bit parameters (2P), gradients of 2 or 4 bytes, and fp32 masters with two AdamW moments (12P). With
    16-bit gradients the sum is 4P + 12P/N, 2P + 14P/N and 16P/N at stages 1, 2 and 3. Parameters, gradients and masters
    have bounded padding. Moments have none, so over all ranks each moment takes 4P.
    """
    dtype = {2: "bf16", 4: "fp32"}[grad_bytes]
    recipe = Recipe(ranks=ranks, precision="bf16", optimizer="AdamW", optimizer_params=ADAMW)
    setting = Setting(stage=stage, config=(("data_types", {"grad_accum_dtype": dtype}),))
    results = [reports[-1] for reports in run_ranks(reported, ranks, "four_blocks", recipe, setting, 2)]
    full = elements("four_blocks")
    names = len(list(specimen("four_blocks").build().parameters()))
    for report in results:
        padded = full + report["padding_elements"]
        assert report["padding_elements"] < LINE * (names + ranks * len(report["units"]))
        sizes = at_rest(report)
        assert sizes["param"] == 2 * padded // (ranks if stage == 3 else 1)
        assert sizes["grad"] == grad_bytes * padded // (ranks if stage >= 2 else 1)
        assert sizes["master"] == 4 * padded // ranks
        assert set(sizes) == {"param", "grad", "master", "exp_avg", "exp_avg_sq"}
        assert report["gathered_elements"] == 0
    for moment in ("exp_avg", "exp_avg_sq"):
        sizes_by_rank = [at_rest(report)[moment] for report in results]
        assert sum(sizes_by_rank) == 4 * full
        assert max(sizes_by_rank) <= sizes["master"]


@pytest.mark.parametrize("ranks", [2, 4])
def test_fp32_parameters_are_sharded_between_steps_at_stage_3(ranks: int, transport: str) -> None:
    setting = Setting(stage=3, transport=transport)
    for reports in run_ranks(reported, ranks, "four_blocks", Recipe(ranks=ranks), setting, 1, transport=transport):
        sizes, padding = at_rest(reports[0]), reports[0]["padding_elements"]
        assert sizes["param"] == 4 * (elements("four_blocks") + padding) // ranks
        assert "master" not in sizes, "an fp32 shard is its own master"
