"""Hello, DeepSpeed: a small network learns to tell two spirals apart, saves as it goes, and resumes from a checkpoint.

deepspeed hello_world.py --deepspeed --deepspeed_config ds_config.json
"""

import argparse
import math

import deepspeed
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import Dataset


def get_arguments():
    parser = argparse.ArgumentParser(description="Hello, DeepSpeed")
    parser.add_argument("--local_rank", type=int, default=-1, help="local rank passed from the launcher")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--save_dir", type=str, default=None, help="where checkpoints go")
    parser.add_argument("--save_interval", type=int, default=0, help="steps between checkpoints; 0: none")
    parser.add_argument("--load_dir", type=str, default=None, help="resume from the latest checkpoint in here")
    parser.add_argument("--ckpt_id", type=str, default=None, help="tag of a checkpoint to resume from instead")
    parser.add_argument("--stop_after", type=int, default=0, help="end after this number of steps, as a crash would")
    parser.add_argument("--seed", type=int, default=42)
    parser = deepspeed.add_config_arguments(parser)
    return parser.parse_args()


class Spirals(Dataset):
    """Points on two spirals, with a little noise."""

    def __init__(self, samples, seed):
        generator = torch.Generator().manual_seed(seed)
        self.labels = torch.arange(samples) % 2
        turn = 0.5 + 2.5 * torch.rand(samples, generator=generator)
        angle = turn * math.pi / 1.5 + self.labels * math.pi
        points = torch.stack([turn * angle.cos(), turn * angle.sin()], dim=1)
        self.points = points + 0.05 * torch.randn(samples, 2, generator=generator)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.points[index], self.labels[index]


class Net(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.fc1 = nn.Linear(2, width)
        self.fc2 = nn.Linear(width, width)
        self.fc3 = nn.Linear(width, 2)

    def forward(self, points, labels):
        hidden = F.relu(self.fc1(points))
        hidden = F.relu(self.fc2(hidden))
        return F.cross_entropy(self.fc3(hidden), labels)


def main():
    args = get_arguments()
    torch.manual_seed(args.seed)
    deepspeed.init_distributed()

    net = Net()
    parameters = filter(lambda p: p.requires_grad, net.parameters())
    dataset = Spirals(args.samples, args.seed)
    model_engine, optimizer, trainloader, lr_scheduler = deepspeed.initialize(
        args=args, model=net, model_parameters=parameters, training_data=dataset
    )

    seen = 0
    if args.load_dir is not None:
        path, client_state = model_engine.load_checkpoint(args.load_dir, args.ckpt_id)
        assert path is not None, f"no checkpoint in {args.load_dir}"
        seen = client_state["step"]
        if model_engine.global_rank == 0:
            print(f"resumed at step {seen} from {path}")

    device = model_engine.device
    step = 0
    for epoch in range(args.epochs):
        trainloader.data_sampler.set_epoch(epoch)
        for points, labels in trainloader:
            if step < seen:  # this step was trained before the checkpoint
                step += 1
                continue
            points, labels = points.to(device), labels.to(device)
            if model_engine.fp16_enabled():
                points = points.half()
            elif model_engine.bfloat16_enabled():
                points = points.bfloat16()
            loss = model_engine(points, labels)
            model_engine.backward(loss)
            model_engine.step()
            step += 1
            loss = loss.detach().float()
            deepspeed.comm.all_reduce(loss)  # sum over all ranks
            loss /= deepspeed.comm.get_world_size()
            if model_engine.global_rank == 0:
                print(f"step {step} loss {loss.item():.6f} lr {lr_scheduler.get_last_lr()[0]:.6f}")
            if args.save_interval and step % args.save_interval == 0:
                model_engine.save_checkpoint(args.save_dir, client_state={"step": step, "epoch": epoch})
            if step == args.stop_after:
                return
    print(f"hello from local rank {model_engine.local_rank} of {deepspeed.comm.get_world_size()}")


if __name__ == "__main__":
    main()
