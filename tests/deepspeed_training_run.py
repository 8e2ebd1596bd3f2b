"""One rank of a DeepSpeed run that saves midway: `tests.deepspeed_training_run OUT STAGE PRECISION`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from tests.dist.test_deepspeed_resume import CLIENT, Net, batch, config_of, groups_of

SAVED_AT, STEPS = 3, 6


def main(out: Path, stage: int, precision: str) -> None:
    """Train, save after `SAVED_AT` steps, and write the losses of the further steps."""
    import deepspeed

    torch.manual_seed(0)
    model = Net()
    config = config_of(stage, precision)
    if precision == "bf16" and stage == 1:
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    if stage == 3:
        config["zero_optimization"]["sub_group_size"] = 60
    engine = deepspeed.initialize(model=model, model_parameters=groups_of(model), config=config)[0]
    losses = []
    for step in range(STEPS):
        if step == SAVED_AT:
            engine.save_checkpoint(str(out), client_state=CLIENT)
        loss = engine(batch(step, engine.global_rank))
        losses.append(float(loss.detach()))
        engine.backward(loss)
        engine.step()
    (out / f"losses_{engine.global_rank}.json").write_text(json.dumps(losses[SAVED_AT:]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
