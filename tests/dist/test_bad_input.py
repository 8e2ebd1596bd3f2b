"""What cannot be trained is refused on every rank with one message that says what, where and what to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests import oracle
from tests.dist.harness import run_ranks
from tests.dist.laws import Setting, ds_config, specimen, start
from tests.models import Place
from tests.oracle import Recipe


def refusal(what: str) -> str:
    import windlass

    model = oracle.build(specimen("mlp"))
    config: dict[str, Any] = ds_config(Recipe(), Setting(stage=2))
    more: dict[str, Any] = {}
    if what == "frozen":
        model.requires_grad_(False)
    elif what == "device":
        model.blocks[1].up.weight = torch.nn.Parameter(torch.empty(32, 16, device="meta"))
    elif what == "triangle":
        config["train_batch_size"] = 7
    elif what == "world":
        del config["train_micro_batch_size_per_gpu"], config["gradient_accumulation_steps"]
        config["train_batch_size"] = 7
    elif what == "key":
        config["zero_optimization"]["stagee"] = 1
    elif what == "optimizer":
        config["optimizer"]["type"] = "AdamV"
    elif what == "one_bit":
        config["optimizer"] = {"type": "OneBitAdam", "params": {"lr": 1e-3}}
    elif what == "two_rates":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        more = {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}
        config["scheduler"] = {"type": "StepLR", "params": {"step_size": 1}}
    else:
        assert what == "config"
        config = {}
    try:
        windlass.initialize(model=model, config=config or None, **more).__getitem__(0).destroy()
    except windlass.WindlassError as error:
        return f"{type(error).__name__}: {error}"
    return ""


WORDS = {
    "frozen": ("ModelError", "requires_grad"),
    "device": ("ModelError", "blocks.1.up.weight", "meta"),
    "triangle": ("ConfigError", "train_batch_size", "7", "2"),
    "world": ("ConfigError", "train_batch_size", "7", "2"),
    "key": ("ConfigError", "stagee", "stage"),
    "optimizer": ("ConfigError", "AdamV", "Adam"),
    "one_bit": ("ConfigError", "OneBitAdam"),
    "config": ("ConfigError", "config"),
}


@pytest.mark.parametrize("what", WORDS)
def test_refused_by_name_on_every_rank(what: str) -> None:
    for said in run_ranks(refusal, 2, what):
        for word in WORDS[what]:
            assert word in said


def nan_loss(setting: Setting) -> list[str]:
    """NaN in one rank's data: every rank learns of it, and no weight is lost."""
    subject = specimen("mlp")
    engine = start(subject, ds_config(Recipe(), setting))
    rank = torch.distributed.get_rank()
    batch = subject.batch(Place(0, 0, rank))
    if rank == 1:
        batch["x"][0, 0] = float("nan")
    said = ""
    try:
        subject.train(engine, batch, engine.backward)
        engine.step()
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    import windlass

    finite = all(bool(windlass.zero.full_param(p).isfinite().all()) for p in engine.module.parameters())
    engine.destroy()
    return [said, str(finite)]


def test_a_nan_leaves_the_weights_finite_and_is_told(stage: int) -> None:
    for said, finite in run_ranks(nan_loss, 2, Setting(stage=stage)):
        assert said.startswith("LossError") and "nan" in said.lower()
        assert finite == "True"
