"""Further features of DeepSpeed's tutorials, each in a few lines, in one small training.

deepspeed tour.py --stage 3 --checkpoint_activations --schedule OneCycle --autocast --monitor_path logs
"""

import argparse
import os

import deepspeed
import torch
import torch.nn as nn
import torch.nn.functional as F
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import RepeatingLoader, logger
from torch.utils.data import Dataset

WIDTH = 32


def get_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--stage", type=int, default=1)
    parser.add_argument("--steps", type=int, default=12, help="updates")
    parser.add_argument("--schedule", type=str, default="WarmupLR", choices=["OneCycle", "WarmupLR"])
    parser.add_argument("--checkpoint_activations", action="store_true")
    parser.add_argument("--autocast", action="store_true", help="torch.autocast around the forward, in bf16")
    parser.add_argument("--monitor_path", type=str, default=None, help="where CSV files go")
    return parser.parse_args()


def get_config(args):
    schedules = {
        "OneCycle": {
            "cycle_first_step_size": 4,
            "cycle_second_step_size": 4,
            "decay_step_size": 2,
            "decay_lr_rate": 0.1,
            "cycle_min_lr": 1e-3,
            "cycle_max_lr": 1e-2,
            "cycle_momentum": True,
            "cycle_min_mom": 0.85,
            "cycle_max_mom": 0.95,
        },
        "WarmupLR": {"warmup_min_lr": 0, "warmup_max_lr": 1e-2, "warmup_num_steps": 4},
    }
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
        "scheduler": {"type": args.schedule, "params": schedules[args.schedule]},
        "zero_optimization": {"stage": args.stage, "stage3_param_persistence_threshold": 0},
        "torch_autocast": {"enabled": args.autocast, "dtype": "bfloat16"},
        "activation_checkpointing": {"partition_activations": False, "number_checkpoints": 3},
        "csv_monitor": {
            "enabled": args.monitor_path is not None,
            "output_path": args.monitor_path or "",
            "job_name": "tour",
        },
    }


class Points(Dataset):
    """Ten points, so that an epoch of the loader ends soon."""

    def __init__(self):
        generator = torch.Generator().manual_seed(3)
        self.x = torch.randn(10, WIDTH, generator=generator)
        self.y = torch.sin(self.x.sum(dim=1, keepdim=True))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, checkpoint_activations):
        super().__init__()
        self.checkpoint_activations = checkpoint_activations
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x, y):
        x.requires_grad_(self.checkpoint_activations)
        for block in self.blocks:
            x = deepspeed.checkpointing.checkpoint(block, x) if self.checkpoint_activations else block(x)
        return F.mse_loss(self.head(x).float(), y)


def main():
    args = get_args()
    deepspeed.init_distributed()
    torch.manual_seed(11)
    config = get_config(args)

    with deepspeed.zero.Init(config_dict_or_path=config, enabled=args.stage == 3):
        model = Net(args.checkpoint_activations)
    total = sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters())
    if args.stage == 3:  # the first rank sets the script's own weights, for all ranks
        generator = torch.Generator().manual_seed(5)
        with deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
            if deepspeed.comm.get_rank() == 0:
                fill(model, generator)
    else:
        fill(model, torch.Generator().manual_seed(5))

    if args.checkpoint_activations:
        deepspeed.checkpointing.configure(
            mpu_=None, deepspeed_config=None, partition_activations=False, num_checkpoints=3
        )
        assert deepspeed.checkpointing.is_configured()

    engine, optimizer, loader, scheduler = deepspeed.initialize(
        args=args, model=model, model_parameters=model.parameters(), training_data=Points(), config=config
    )
    logger.info(f"{total} parameters on {get_accelerator().device_name()}")
    device = torch.device(get_accelerator().device_name(engine.local_rank))
    batches = iter(RepeatingLoader(loader))
    while engine.global_steps < args.steps:
        for _ in range(engine.gradient_accumulation_steps()):
            x, y = next(batches)
            loss = engine(x.to(device), y.to(device))
            boundary = engine.is_gradient_accumulation_boundary()
            engine.backward(loss)
            engine.step()
        assert boundary and engine.micro_steps == 2 * engine.global_steps
        loss = loss.detach().float()
        deepspeed.comm.all_reduce(loss)
        loss /= deepspeed.comm.get_world_size()
        if engine.global_rank == 0:
            print(
                f"step {engine.global_steps} loss {loss.item():.6f} lr {engine.get_lr()[0]:.6f} "
                f"mom {engine.get_mom()[0][0]:.4f} norm {float(engine.get_global_grad_norm()):.5f}",
                flush=True,
            )
    if args.monitor_path is not None and engine.global_rank == 0:
        print("files:", *sorted(os.listdir(os.path.join(args.monitor_path, "tour"))))


@torch.no_grad()
def fill(model, generator):
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(std=0.1, generator=generator)


if __name__ == "__main__":
    main()
