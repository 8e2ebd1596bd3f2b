"""Tests that every supported combination of the feature matrix trains as plain PyTorch does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from itertools import combinations
from tempfile import gettempdir
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from tests import oracle
from tests.dist.equivalence_runs import FP32_BOUND, RankTrace, Setting, complaints, ds_config, train_rank
from tests.dist.harness import run_ranks
from tests.models import ZOO, Batch, Checkpointed, LoraBlock, Specimen, lora, mlp, mse, rows
from tests.oracle import Recipe, Trace
from tests.pairwise import covering_rows, pairwise
from windlass.config import feature_matrix, load_config
from windlass.config.feature_matrix import FEATURES
from windlass.optim.optimizer_factory import build_optimizer

Row = dict[str, str]
Backward = Callable[..., None]

OFFERED = {
    axis: [name for name, value in values.items() if not value.not_built_reason and not value.requirement]
    for axis, values in FEATURES.items()
}
ROWS = pairwise(OFFERED, lambda row: not feature_matrix.unsupported_pairs(row))

# eps is well above the rounding of a 16-bit gradient, since these optimizers divide by the gradient's size.
OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "elementwise": ("AdamW", {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-4}),
    "onebit": ("OneBitAdam", {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-4}),  # runs end in its uncompressed phase
    "whole_parameter": ("Lamb", {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-4}),
}
SECTIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "loss_scale": 64.0}},
    "autocast": {"torch_autocast": {"enabled": True, "dtype": "bf16"}},
}
KEPT: dict[str, dict[str, Any]] = {
    "host": {"activation_checkpointing": {"cpu_checkpointing": True}},
    "nvme": {"activation_checkpointing": {"nvme_path": gettempdir()}},
}
GROUPS: dict[str, dict[str, int]] = {
    "data": {},
    "mics": {"mics_shard_size": 2},
    "hpz": {"zero_hpz_partition_size": 2},
}


def words(row: Row) -> str:
    """Return a test id: the value of every axis with a choice, prefixed by the axis if the value alone is ambiguous."""
    dumb = ("stage", "accumulation", "checkpointing", "adapters", "overlap")
    chosen = [(axis, value) for axis, value in row.items() if len(OFFERED[axis]) > 1]
    return "-".join((f"{axis} {value}" if axis in dumb else value).replace(" ", "_") for axis, value in chosen)


# ---------------------------------------------------------------------------------------------------- a row as a case


class Kept(Checkpointed):
    """Model with every block under windlass's own checkpointing."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        from windlass import checkpointing

        x = self.inward(x)
        for block in self.blocks:
            x = checkpointing.checkpoint(block, x)
        return mse(x, y)


def checkpointed(reentrant: bool | None, adapters: bool) -> nn.Module:
    """Return blocks under activation checkpointing (None: windlass's own), with frozen bases if they have adapters."""
    model = Kept(False) if reentrant is None else Checkpointed(reentrant)
    if adapters:
        model.blocks = nn.ModuleList(LoraBlock() for _ in range(3))
    return model


def scaled(call: Any, batch: Batch, backward: Backward) -> Tensor:
    """Call plain backward on the scaled loss."""
    loss = call(**batch)
    backward(call.scale(loss))
    return loss.detach()


def autocast(call: Any, batch: Batch, backward: Backward) -> Tensor:
    """Run the forward under autocast, as the oracle does."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = call(**batch)
    backward(loss)
    return loss.detach()


def specimen_of(row: Row) -> Specimen:
    """Return the specimen with the row's adapters and checkpointing."""
    adapters = row["adapters"] == "frozen base"
    if row["checkpointing"] == "none":
        return Specimen("row", lora if adapters else mlp, rows)
    reentrant = {"reentrant": True, "nonreentrant": False}.get(row["checkpointing"])
    return Specimen("row", partial(checkpointed, reentrant, adapters), rows)


def recipe_of(row: Row) -> Recipe:
    """Return the recipe of the row. Rows with groups of two ranks have four ranks, so that there are two groups."""
    optimizer, params = OPTIMIZERS[row["optimizer"]]
    return Recipe(
        ranks=2 if row["parallel"] == "data" else 4,
        accumulation=2 if row["accumulation"] == "many" else 1,
        steps=3 if row["update"] == "delayed" else 2,
        precision="fp32" if row["precision"] == "autocast" else row["precision"],
        optimizer=optimizer,
        optimizer_params=tuple(params.items()),
        delayed_from=0 if row["update"] == "delayed" else None,
    )


def setting_of(row: Row) -> Setting:
    """Return the engine setting of the row."""
    return Setting(
        stage=int(row["stage"]),
        overlap=row["overlap"] == "on",
        plain_backward=row["backward"] == "plain",
        transport=row["transport"],
        zero=(*GROUPS[row["parallel"]].items(), *offload_of(row)),
        config=(
            ("comm", {"transport": row["transport"]}),
            *SECTIONS[row["precision"]].items(),
            *KEPT.get(row["checkpointing"], {}).items(),
        ),
    )


def offload_of(row: Row) -> list[tuple[str, Any]]:
    """Return the offload sections of the row."""
    devices = {"host": {"device": "cpu"}, "nvme": {"device": "nvme", "nvme_path": gettempdir()}}
    sections = {"offload_optimizer": row["state_tier"], "offload_param": row["param_tier"]}
    results: dict[str, dict[str, Any]] = {n: dict(devices[tier]) for n, tier in sections.items() if tier != "device"}
    if row["update"] == "delayed":
        results["offload_optimizer"]["delayed_update"] = True
    return list(results.items())


def described(row: Row) -> Row:
    """Return the features that the matrix finds in the engine's configuration for this row."""
    config = load_config(ds_config(recipe_of(row), setting_of(row)))
    facts = {axis: row[axis] for axis in ("adapters", "backward")}
    if row["checkpointing"] not in KEPT:
        facts["checkpointing"] = row["checkpointing"]
    return feature_matrix.describe_features(config, **facts)


def train_row(row: Row) -> RankTrace:
    """Train the row under the engine on this rank."""
    subject = specimen_of(row)
    if (row["precision"], row["backward"]) == ("fp16", "plain"):
        subject = replace(subject, train=scaled)
    from windlass import checkpointing

    try:
        with patch.dict(ZOO, {subject.name: subject}):
            return train_rank(subject.name, recipe_of(row), setting_of(row))
    finally:
        checkpointing.reset()


# ---------------------------------------------------------------------------------------------------- plain PyTorch


def expected(row: Row) -> Trace:
    """Return the oracle's trace of the row, which depends on few of the row's axes."""
    return _expected(row["adapters"], row["checkpointing"], row["precision"] == "autocast", recipe_of(row))


@cache
def _expected(adapters: str, checkpointing: str, under_autocast: bool, recipe: Recipe) -> Trace:
    subject = specimen_of({"adapters": adapters, "checkpointing": checkpointing})
    if under_autocast:
        subject = replace(subject, train=autocast)
    return oracle.train(subject, recipe, partial(build_optimizer, recipe.optimizer, dict(recipe.optimizer_params)))


def first_losses(losses: list[list[float]]) -> Tensor:
    """Return the losses of the first step, [ranks, micro-batches], which depend on the initial weights only."""
    return torch.tensor(losses, dtype=torch.float64)


# --------------------------------------------------------------------------------------------------- the law


# `make test` trains every pair of values of these axes, and few pairs of other axes. Tests of one feature cover more:
# tiers in test_offload and test_delayed_update, precisions in test_training_equivalence, checkpointing in
# test_activations, groups in test_sharded_init and test_performance_options.
_EVERY_PAIR = {"stage", "optimizer", "update"}
_QUICK = covering_rows(ROWS, lambda a, b: {a, b} <= _EVERY_PAIR, lambda row: recipe_of(row).ranks)


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=() if quick else pytest.mark.slow) for row, quick in zip(ROWS, _QUICK, strict=True)],
    ids=words,
)
def test_a_row_trains_as_plain_pytorch(row: Row) -> None:
    recipe, requested = recipe_of(row), expected(row)
    # A device with memory of its own makes the tiers differ. Copies complete as late as possible.
    away = offload_of(row) or row["checkpointing"] in KEPT
    env = {"WINDLASS_EMULATE_DEVICE": "64M", "WINDLASS_EMULATE_LATE": "1"} if away else {}
    actual = run_ranks(train_row, recipe.ranks, row, env=env)
    text = complaints(actual, requested, recipe, exact=row["precision"] == "fp32")
    assert not text, "\n  ".join(["", *text[:12]])
    # Before the first update all sums have the oracle's order, so fp32's bound holds in any precision.
    first = first_losses([trace.losses[0] for trace in actual])
    torch.testing.assert_close(first, first_losses(requested.losses[0]), rtol=FP32_BOUND, atol=0)


def test_first_losses_distinguish_precisions() -> None:
    """First losses differ between precisions. The bounds on later 16-bit losses are too wide to show that."""
    base = next(row for row in ROWS if row["parallel"] == "data")
    traces = [expected({**base, "precision": precision}) for precision in OFFERED["precision"]]
    for a, b in combinations(traces, 2):
        apart = first_losses(a.losses[0]) / first_losses(b.losses[0]) - 1
        assert float(apart.abs().max()) > 10 * FP32_BOUND


@pytest.mark.parametrize("row", ROWS, ids=words)
def test_row_matches_its_configuration(row: Row) -> None:
    assert described(row) == row


def test_rows_cover_every_supported_pair() -> None:
    assert not feature_matrix.uncovered_pairs([described(row) for row in ROWS])
