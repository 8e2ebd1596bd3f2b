"""Script that trains a small net with lightning, plain or with its DeepSpeed strategy, and writes losses and files.

    lightning_training.py OUT CASES       CASES: JSON, a list of {"name", "stage" or null, ...}; see `Case`

lightning's DeepSpeed strategy requires CUDA. `OnCPU` omits only two of its checks: that the accelerator is CUDA, and
that devices are numbered like local ranks (CPU devices have no numbers).
"""

from __future__ import annotations

import gc
import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy
from lightning.pytorch.utilities.deepspeed import convert_zero_checkpoint_to_fp32_state_dict
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

WORLD_BATCH = 8
WIDTH = 16


@dataclass
class Case:
    """Run of one Trainer.

    Args:
        stage: ZeRO stage; None: lightning's own strategy.
        config: DeepSpeed configuration; None: lightning's default.
        options: options of the strategy.
        sharded: build the net in `configure_model`, at stage 3 under `zero.Init`.
        resume: stop after half of the steps, save, and continue in a new Trainer.
    """

    name: str
    stage: int | None = None
    ranks: int = 1
    config: dict[str, Any] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    sharded: bool = False
    accumulation: int = 1
    clip: float = 1.0
    scheduled: bool = True
    steps: int = 4
    resume: bool = False


class OnCPU(DeepSpeedStrategy):
    """lightning's strategy without its two checks for CUDA."""

    def setup_environment(self) -> None:
        DDPStrategy.setup_environment(self)  # the omitted method of DeepSpeedStrategy ends with this call

    def setup_distributed(self) -> None:
        reset_seed()
        self.set_world_ranks()
        self._init_deepspeed_distributed()


class Net(pl.LightningModule):
    """Network of three linear layers that records its losses."""

    def __init__(self, sharded: bool, scheduled: bool, own_optimizer: bool = True) -> None:
        super().__init__()
        self.sharded, self.scheduled, self.own_optimizer = sharded, scheduled, own_optimizer
        self.net: nn.Module | None = None
        self.losses: list[float] = []
        self.validated: list[float] = []
        if not sharded:
            self.configure_model(now=True)

    def configure_model(self, now: bool = False) -> None:
        if self.net is None and (now or self.sharded):
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(4, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1))

    def loss(self, batch: list[torch.Tensor]) -> torch.Tensor:
        assert self.net is not None
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.losses.append(float(self.trainer.strategy.reduce(loss.detach().clone(), reduce_op="mean")))
        return loss

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        self.validated.append(float(self.trainer.strategy.reduce(self.loss(batch), reduce_op="mean")))

    def configure_optimizers(self) -> Any:
        if not self.own_optimizer:
            return None
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        if not self.scheduled:
            return optimizer
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7), "interval": "step"}]


def loader(case: Case) -> DataLoader[Any]:
    """Return the loader of this rank's samples, in order."""
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(64, 4, generator=generator), torch.randn(64, 1, generator=generator))
    local = DistributedSampler(data, case.ranks, int(os.environ.get("RANK", "0")), shuffle=False)
    return DataLoader(data, batch_size=WORLD_BATCH // case.ranks // case.accumulation, sampler=local)


def trainer_of(case: Case, steps: int, folder: Path) -> pl.Trainer:
    """Return the Trainer as a user writes it, except for `OnCPU`."""
    strategy: Any = "auto"
    if case.stage is not None:
        config = json.loads(json.dumps(case.config)) if case.config is not None else None
        strategy = OnCPU(config=config, **({"stage": case.stage} if config is None else {}), **case.options)
    return pl.Trainer(
        accelerator="cpu",
        devices=case.ranks,
        strategy=strategy,
        max_steps=steps,
        accumulate_grad_batches=case.accumulation,
        gradient_clip_val=case.clip,
        limit_val_batches=2,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
        default_root_dir=str(folder),
    )


def train(case: Case, out: Path) -> dict[str, Any]:
    """Run a case."""
    folder = out / f"{case.name}-{case.ranks}"
    own = case.config is None or "optimizer" not in case.config
    model = Net(case.sharded, case.scheduled, own)
    trainer = trainer_of(case, case.steps // 2 if case.resume else case.steps, folder)
    trainer.fit(model, loader(case))
    results: dict[str, Any] = {"losses": model.losses}
    if case.stage is not None:
        results["engine"] = type(trainer.strategy.deepspeed_engine).__module__
    if case.resume:
        trainer.save_checkpoint(folder / "half.ckpt")
        model = Net(case.sharded, case.scheduled, own)
        trainer = trainer_of(case, case.steps, folder)
        trainer.fit(model, loader(case), ckpt_path=str(folder / "half.ckpt"))
        results["losses"] = results["losses"] + model.losses
        results["steps"] = trainer.global_step
    results["rates"] = [group["lr"] for group in trainer.optimizers[0].param_groups]
    trainer.validate(model, loader(case), verbose=False)
    results["validated"] = model.validated
    return results


def main(out: Path, cases: list[Case]) -> None:
    """Run all cases. Rank 0 writes the results."""
    results = {}
    for case in cases:
        gc.freeze()  # accelerate collects garbage often, and walking through all imports takes long
        results[case.name] = train(case, out)
        folder = out / f"{case.name}-{case.ranks}"
        if case.config is not None and case.config.get("checkpoint") and os.environ.get("RANK", "0") == "0":
            # the conversion function of lightning
            convert_zero_checkpoint_to_fp32_state_dict(folder / "half.ckpt", folder / "whole.ckpt")
    if os.environ.get("RANK", "0") == "0":
        (out / f"results-{cases[0].ranks}{'-plain' if cases[0].stage is None else ''}.json").write_text(
            json.dumps(results)
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Case(**case) for case in json.loads(Path(sys.argv[2]).read_text())])
