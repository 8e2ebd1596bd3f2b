"""One rank of DeepSpeed that resumes from a checkpoint that windlass saved in DeepSpeed's format."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from tests.deepspeed_training_run import SAVED_AT, STEPS
from tests.dist.test_deepspeed_resume import Net, batch, config_of, groups_of


def main(out: Path, stage: int, precision: str) -> None:
    """Load the checkpoint and train. Write the counters and the losses of the further steps."""
    import deepspeed

    torch.manual_seed(5)
    model = Net()
    config = config_of(stage, precision)
    if precision == "bf16" and stage == 1:
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    if stage == 3:
        config["zero_optimization"]["sub_group_size"] = 60
    engine = deepspeed.initialize(model=model, model_parameters=groups_of(model), config=config)[0]
    path, client = engine.load_checkpoint(str(out))
    assert path is not None
    losses = []
    for step in range(SAVED_AT, STEPS):
        loss = engine(batch(step, engine.global_rank))
        losses.append(float(loss.detach()))
        engine.backward(loss)
        engine.step()
    results = {
        "losses": losses,
        "steps": engine.global_steps,
        "samples": engine.global_samples,
        "epoch": client["epoch"],
        "rates": engine.get_lr(),
    }
    (out / f"resumed_{engine.global_rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
