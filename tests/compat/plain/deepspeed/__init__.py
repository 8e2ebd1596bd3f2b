"""Stand-in for `deepspeed` in plain PyTorch on one rank: the reference for the losses of the small examples."""

from __future__ import annotations

import json
import math
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler


class _Loader:
    def __init__(self, data: Any, batch: int) -> None:
        self.data_sampler = DistributedSampler(data, 1, 0)
        self._loader = DataLoader(data, batch_size=batch, sampler=self.data_sampler)

    def __iter__(self) -> Any:
        return iter(self._loader)


class _Engine(nn.Module):
    """Engine with AdamW, gradients clipped to the configured norm, and the rates of DeepSpeed's WarmupLR."""

    global_rank = local_rank = 0
    device = torch.device("cpu")

    def __init__(self, model: nn.Module, config: dict[str, Any]) -> None:
        super().__init__()
        self.module = model
        options = config["optimizer"]["params"]
        self._optimizer = torch.optim.AdamW(
            model.parameters(), betas=options["betas"], eps=options["eps"], weight_decay=options["weight_decay"]
        )
        self._clip, self._warm, self._updates = config["gradient_clipping"], config["scheduler"]["params"], 0

    def forward(self, *inputs: Any) -> Any:
        return self.module(*inputs)

    def rate(self) -> float:
        """Return the rate of the next update."""
        made, steps = max(self._updates - 1, 0), self._warm["warmup_num_steps"]
        share = made / steps if self._warm.get("warmup_type") == "linear" else math.log(made + 1) / math.log(steps)
        return float(self._warm["warmup_max_lr"] * min(share, 1.0))

    def get_last_lr(self) -> list[float]:
        return [self.rate()]

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        nn.utils.clip_grad_norm_(self.module.parameters(), self._clip)
        self._optimizer.param_groups[0]["lr"] = self.rate()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._updates += 1

    def fp16_enabled(self) -> bool:
        return False

    bfloat16_enabled = fp16_enabled


def initialize(args: Any, model: nn.Module, model_parameters: Any, training_data: Any, config: Any = None) -> Any:
    """Return an engine, its optimizer, its loader, and the engine again as the schedule."""
    if config is None:
        with open(args.deepspeed_config) as file:
            config = json.load(file)
    engine = _Engine(model, config)
    return engine, engine._optimizer, _Loader(training_data, config["train_batch_size"]), engine


def init_distributed() -> None:
    """Initialize a process group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def add_config_arguments(parser: Any) -> Any:
    """Add DeepSpeed's arguments."""
    parser.add_argument("--deepspeed", action="store_true")
    parser.add_argument("--deepspeed_config", type=str, default=None)
    return parser


def get_accelerator() -> Any:
    """Return an accelerator object for the CPU."""
    return SimpleNamespace(
        set_device=lambda rank: None,
        manual_seed_all=torch.manual_seed,
        device_name=lambda index=None: "cpu",
        communication_backend_name=lambda: "gloo",
    )


comm = dist
accelerator = ModuleType("deepspeed.accelerator")
accelerator.get_accelerator = get_accelerator  # type: ignore[attr-defined]
sys.modules["deepspeed.accelerator"] = accelerator
