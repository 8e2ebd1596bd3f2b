"""Law: DeepSpeed resumes from a checkpoint that windlass saved in its format; its zero_to_fp32 reads the weights."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.deepspeed_training_run import SAVED_AT, STEPS
from tests.dist.harness import run_ranks
from tests.dist.test_deepspeed_resume import CLIENT, engine_for, steps
from tests.parity.test_deepspeed_resume import run_deepspeed

pytestmark = [
    pytest.mark.peer,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed"),
]


def saved(folder: str, stage: int, precision: str) -> dict[str, object]:
    """Train, save in DeepSpeed's format, and continue training."""
    import windlass

    sub_group = {"sub_group_size": 60} if stage == 3 else {}
    engine = engine_for(stage, precision, 0, checkpoint="deepspeed", **sub_group)
    steps(engine, 0, SAVED_AT)
    engine.save_checkpoint(folder, client_state=CLIENT)
    named = dict(engine.module.named_parameters())
    masters = {name: windlass.zero.full_param(p).detach().float().clone() for name, p in named.items()}
    losses = steps(engine, SAVED_AT, STEPS)
    rates = engine.get_lr()
    engine.destroy()
    return {"losses": losses, "masters": masters, "rates": rates, "rank": dist.get_rank()}


LAYOUTS = [(0, "fp32"), (1, "fp32"), (2, "fp32"), (3, "fp32"), (0, "bf16"), (1, "bf16"), (2, "bf16"), (3, "bf16")]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("stage", "precision"), LAYOUTS)
def test_exported_run_resumes_in_deepspeed(stage: int, precision: str, ranks: int, tmp_path: Path) -> None:
    expected = run_ranks(saved, ranks, str(tmp_path), stage, precision)
    run_deepspeed("tests.deepspeed_resume_run", tmp_path, stage, precision, ranks)
    bound = 1e-5 if precision == "fp32" else 2e-2
    for rank, ours in enumerate(expected):
        actual = json.loads((tmp_path / f"resumed_{rank}.json").read_text())
        assert actual["losses"] == pytest.approx(ours["losses"], rel=bound)
        assert (actual["steps"], actual["samples"], actual["epoch"]) == (STEPS, STEPS * 2 * ranks, CLIENT["epoch"])
        assert actual["rates"] == pytest.approx(ours["rates"], rel=1e-12)
    if stage:
        # weights_only=False: the file contains a loss scaler object of DeepSpeed
        optim = next((tmp_path / f"global_step{SAVED_AT}").glob("*optim_states.pt"))
        inner = torch.load(optim, weights_only=False)["optimizer_state_dict"]
        assert inner["loss_scaler"].loss_scale == 1.0 and not inner["loss_scaler"].has_overflow([])
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        weights = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path))
        masters = expected[0]["masters"]
        assert set(weights) == {*masters, "count", "head.weight"}
        for name, value in masters.items():
            assert torch.equal(weights[name].float(), value), name
        assert torch.equal(weights["head.weight"], weights["embed.weight"])
