"""Runs saved in one layout and resumed in another: the rows of the matrix, and the check of one row.

A step always has the same micro-batches, which any number of ranks share. So a run is the same in every layout, up to
the order in which gradients are summed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch.distributed as dist

from tests import oracle
from tests.dist.equivalence_runs import Setting, ds_config, specimen
from tests.dist.harness import run_ranks
from tests.dist.test_offload import LATE, offload_to
from tests.dist.test_offload_resume import Counting
from tests.models import Place, cast
from tests.oracle import Recipe

GLOBAL = 12  # micro-batches of a step on all ranks together, divisible by 1 to 4 ranks
BEFORE, AFTER = 2, 2  # steps before and after the save
SCHEDULE = {"type": "WarmupLR", "params": {"warmup_min_lr": 1e-4, "warmup_num_steps": 5, "warmup_type": "linear"}}
TIERS = {"device": ("none", "none"), "host": ("cpu", "cpu"), "disk": ("nvme", "nvme")}
CUTS: dict[str, tuple[tuple[str, Any], ...]] = {
    "all": (),
    "hpz": (("zero_hpz_partition_size", 2),),
    "mics": (("mics_shard_size", 2),),
}


@dataclass(frozen=True)
class Layout:
    """Number of ranks, ZeRO stage, tier, transport, and sharding group (`cut`, a key of `CUTS`) of a run."""

    ranks: int
    stage: int
    tier: str = "device"
    transport: str = "gloo"
    cut: str = "all"

    def setting(self, folder: str) -> Setting:
        """Return the setting for `ds_config`. Some parameters are split over chunks, and some chunks hold several."""
        state, param = TIERS[self.tier]
        away = offload_to(state, param if self.stage == 3 else "none", folder)
        return Setting(self.stage, zero=(*away, *CUTS[self.cut], ("sub_group_size", 100)))


def allowed(ranks: int, stage: int, tier: str, cut: str = "all") -> bool:
    """Return True if the layout exists.

    At stage 0 nothing is sharded, so nothing can be offloaded. hpZ and MiCS run on 4 ranks at stage 3, hpZ only on the
    device tier.
    """
    if cut != "all" and (ranks != 4 or stage != 3 or (cut == "hpz" and tier != "device")):
        return False
    return stage > 0 or tier == "device"


LAYOUTS = [
    Layout(ranks, stage, tier)
    for ranks, stage, tier in product((1, 2, 3, 4), (0, 1, 2, 3), TIERS)
    if allowed(ranks, stage, tier)
]


@dataclass(frozen=True)
class Row:
    """Run that changes its layout in the middle."""

    first: Layout
    second: Layout
    model: str = "mlp"
    optimizer: str = "AdamW"
    precision: str = "fp32"
    micro_batches: int = GLOBAL

    @property
    def bound(self) -> float:
        """Allowed difference of losses: layouts sum in different orders, which changes losses more in 16 bits."""
        rounds = "rounds" in specimen(self.model).traits or self.optimizer == "Muon"  # Muon iterates in bf16
        return 1e-6 if self.precision == "fp32" and not rounds else 2e-2


PARAMS: dict[str, tuple[tuple[str, Any], ...]] = {
    "Adam": (("lr", 1e-3), ("weight_decay", 0.01), ("adam_w_mode", False)),
    "AdamW": (("lr", 1e-3), ("weight_decay", 0.01)),
    "Adagrad": (("lr", 1e-3),),
    "Lamb": (("lr", 1e-3),),
    "Muon": (("lr", 1e-3),),
}


def engine_for(row: Row, layout: Layout, folder: str, seed: int) -> Any:
    import windlass

    params = PARAMS.get(row.optimizer, ())
    recipe = Recipe(
        ranks=layout.ranks,
        accumulation=row.micro_batches // layout.ranks,
        precision=row.precision,
        optimizer=row.optimizer,
        optimizer_params=params,
    )
    config = {
        **ds_config(recipe, layout.setting(folder)),
        "scheduler": SCHEDULE,
        "comm": {"transport": layout.transport},
    }
    if row.precision == "fp16":
        config["fp16"] = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 3}
    more: dict[str, Any] = {}
    if row.optimizer == "stranger":
        del config["optimizer"]
        more["optimizer"] = lambda parameters: Counting(parameters, lr=1e-3)
    model = oracle.build(specimen(row.model), seed + dist.get_rank())
    return windlass.initialize(model=model, config=config, **more)[0]


def steps(engine: Any, row: Row, first: int, last: int) -> list[float]:
    """Train from step `first` to `last`. Return the mean loss of each step over all ranks."""
    subject, dtype = specimen(row.model), Recipe(precision=row.precision).dtype
    rank, world = dist.get_rank(), dist.get_world_size()
    means = []
    for step in range(first, last):
        local = []
        for number in range(rank, row.micro_batches, world):
            local.append(
                float(subject.train(engine, cast(subject.batch(Place(step, number, 0)), dtype), engine.backward))
            )
            engine.step()
        result: list[list[float]] = [[]] * world
        dist.all_gather_object(result, local)
        means.append(sum(map(sum, result)) / row.micro_batches)
    return means


def comparable_state(engine: Any) -> dict[str, Any]:
    """Return the values that must be equal in every layout."""
    return {
        "fingerprint": engine.fingerprint(),
        "steps": (engine.global_steps, engine.skipped_steps, engine.global_samples),
        "scale": engine.loss_scale(),
        "rates": engine.get_lr(),
        "within a step": engine.micro_steps % engine.gradient_accumulation_steps(),
    }


def save_and_continue(row: Row, folder: str) -> dict[str, Any]:
    """Train, save, and continue without interruption."""
    engine = engine_for(row, row.first, folder, 0)
    steps(engine, row, 0, BEFORE)
    engine.save_checkpoint(folder)
    saved = comparable_state(engine)
    losses = steps(engine, row, BEFORE, BEFORE + AFTER)
    engine.destroy()
    return {"saved": saved, "losses": losses}


def load_and_continue(row: Row, folder: str) -> dict[str, Any]:
    """Load the checkpoint in the other layout into a model with other weights, and continue."""
    engine = engine_for(row, row.second, folder, 50)
    engine.load_checkpoint(folder)
    loaded = comparable_state(engine)
    losses = steps(engine, row, BEFORE, BEFORE + AFTER)
    engine.destroy()
    return {"saved": loaded, "losses": losses}


def each(take: Callable[[Row, str], dict[str, Any]], rows: list[tuple[Row, str]]) -> list[dict[str, Any]]:
    """Return the result of every row on these ranks."""
    results = []
    for row, folder in rows:
        try:
            results.append(take(row, folder))
        except Exception as error:
            error.add_note(f"under {row}")
            raise
    return results


def over_ranks(
    take: Callable[[Row, str], dict[str, Any]], rows: list[tuple[Row, str]], layout_of: Callable[[Row], Layout]
) -> dict[Row, dict[str, Any]]:
    """Run `each` on these rows, in one world per number of ranks. Return the results of rank 0, after a check that
    all ranks saved equal states."""
    results: dict[Row, dict[str, Any]] = {}
    for ranks in sorted({layout_of(row).ranks for row, _ in rows}):
        these = [(row, folder) for row, folder in rows if layout_of(row).ranks == ranks]
        outcome = run_ranks(each, ranks, take, these, env=LATE, timeout=60.0 + 30.0 * len(these))
        for other in outcome[1:]:
            assert [item["saved"] for item in other] == [item["saved"] for item in outcome[0]], "ranks do not agree"
        results.update(dict(zip([row for row, _ in these], outcome[0], strict=True)))
    return results


def complaints(row: Row, wanted: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """Return the differences between the resumed run and the uninterrupted one, as texts."""
    text = [f"{key}: {found['saved'][key]}, not {value}" for key, value in wanted["saved"].items()
            if found["saved"][key] != value]  # fmt: skip
    for step, (have, want) in enumerate(zip(found["losses"], wanted["losses"], strict=True)):
        if not abs(have - want) <= row.bound * max(1.0, abs(want)):
            text.append(f"loss {step} after the save is {have!r}, not {want!r}")
    return text


def hold(rows: list[Row], folder: Any) -> None:
    """Assert that every resumed run equals the uninterrupted one. Rows that differ only in the second layout share one
    saved run."""
    begun = list(dict.fromkeys(replace(row, second=row.first) for row in rows))
    places = {row: f"{folder}/{number}" for number, row in enumerate(begun)}
    expected = over_ranks(save_and_continue, list(places.items()), lambda row: row.first)
    numbered = [(row, places[replace(row, second=row.first)]) for row in rows]
    actual = over_ranks(load_and_continue, numbered, lambda row: row.second)
    text = []
    for row in rows:
        if wrong := complaints(row, expected[replace(row, second=row.first)], actual[row]):
            text.append(f"{row}: {'; '.join(wrong[:3])}")
    assert not text, f"{len(text)} of {len(rows)}:\n" + "\n".join(text[:8])
