"""An image classifier, trained as in DeepSpeed's CIFAR-10 tutorial, on images that are drawn here from a seed.

deepspeed train.py --deepspeed --stage 2 --dtype bf16
deepspeed train.py --deepspeed --moe --num-experts 4 --ep-world-size 2 --moe-param-group
"""

import argparse

import deepspeed
import torch
import torch.nn as nn
import torch.nn.functional as F
from deepspeed.accelerator import get_accelerator
from torch.utils.data import DataLoader, Dataset, DistributedSampler

CLASSES = ("disc", "ring", "bars", "chequers")


def add_argument():
    parser = argparse.ArgumentParser(description="image classifier")
    parser.add_argument("-e", "--epochs", default=4, type=int)
    parser.add_argument("--local_rank", type=int, default=-1, help="local rank passed from the launcher")
    parser.add_argument("--log-interval", type=int, default=4)
    parser.add_argument("--samples", type=int, default=512, help="images to train on; a quarter as many to test on")
    parser.add_argument("--batch-size", type=int, default=32, help="images in a step of all ranks together")
    parser.add_argument("--dtype", default="fp32", type=str, choices=["bf16", "fp16", "fp32"])
    parser.add_argument("--stage", default=0, type=int, choices=[0, 1, 2, 3], help="stage of ZeRO")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--moe", default=False, action="store_true", help="layers of experts")
    parser.add_argument("--ep-world-size", default=1, type=int, help="ranks over which experts are spread")
    parser.add_argument("--num-experts", type=int, nargs="+", default=[1], help="experts of each layer")
    parser.add_argument("--mlp-type", type=str, default="standard", choices=["standard", "residual"])
    parser.add_argument("--top-k", default=1, type=int, help="experts of a sample")
    parser.add_argument("--min-capacity", default=0, type=int, help="samples that an expert takes at least")
    parser.add_argument("--noisy-gate-policy", default=None, type=str, choices=["Jitter", "RSample"])
    parser.add_argument("--moe-param-group", default=False, action="store_true", help="groups of experts' parameters")
    parser = deepspeed.add_config_arguments(parser)
    return parser.parse_args()


def draw(label, generator):
    """Draw a 3x16x16 image of a class: a shape at a random position, in a random colour, under noise."""
    x, y, phase, size = torch.rand(4, generator=generator).tolist()
    rows, columns = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
    distance = ((rows - 4 - 8 * y) ** 2 + (columns - 4 - 8 * x) ** 2).sqrt()
    radius = 3 + 2 * size
    if label == 0:
        shape = distance < radius
    elif label == 1:
        shape = (distance < radius) & (distance > radius - 1.5)
    elif label == 2:
        shape = (columns + 4 * phase).long() % 4 < 2
    else:
        shape = ((columns + 4 * phase).long() // 2 + (rows + 4 * x).long() // 2) % 2 == 0
    colour = 0.5 + 0.5 * torch.rand(3, 1, 1, generator=generator)
    image = colour * shape.float() + 0.15 * torch.randn(3, 16, 16, generator=generator)
    return (image - 0.3) / 0.4


class Shapes(Dataset):
    def __init__(self, samples, seed):
        generator = torch.Generator().manual_seed(seed)
        self.labels = torch.arange(samples) % len(CLASSES)
        self.images = torch.stack([draw(int(label), generator) for label in self.labels])

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.images[index], self.labels[index]


class Net(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1)
        self.conv2 = nn.Conv2d(8, 16, 3, padding=1)
        self.pool = nn.MaxPool2d(2, 2)
        self.fc1 = nn.Linear(16 * 4 * 4, 32)
        self.moe = args.moe
        if self.moe:
            expert = nn.Linear(32, 32)
            self.moe_layer_list = nn.ModuleList(
                deepspeed.moe.layer.MoE(
                    hidden_size=32,
                    expert=expert,
                    num_experts=n_experts,
                    ep_size=args.ep_world_size,
                    use_residual=args.mlp_type == "residual",
                    k=args.top_k,
                    min_capacity=args.min_capacity,
                    noisy_gate_policy=args.noisy_gate_policy,
                )
                for n_experts in args.num_experts
            )
        self.fc2 = nn.Linear(32, len(CLASSES))

    def forward(self, x):
        x = self.pool(F.relu(self.conv1(x)))
        x = self.pool(F.relu(self.conv2(x)))
        x = x.view(-1, 16 * 4 * 4)
        x = F.relu(self.fc1(x))
        if self.moe:
            for layer in self.moe_layer_list:
                x, _, _ = layer(x)
        return self.fc2(x)


def create_moe_param_groups(model):
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    parameters = {"params": [p for p in model.parameters()], "name": "parameters"}
    return split_params_into_different_moe_groups_for_optimizer(parameters)


def get_ds_config(args):
    return {
        "train_batch_size": args.batch_size,
        "steps_per_print": 2000,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 3e-3, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7},
        },
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": 0, "warmup_max_lr": 3e-3, "warmup_num_steps": 8, "warmup_type": "linear"},
        },
        "gradient_clipping": 1.0,
        "prescale_gradients": False,
        "bf16": {"enabled": args.dtype == "bf16"},
        "fp16": {
            "enabled": args.dtype == "fp16",
            "fp16_master_weights_and_grads": False,
            "loss_scale": 0,
            "loss_scale_window": 500,
            "hysteresis": 2,
            "min_loss_scale": 1,
            "initial_scale_power": 15,
        },
        "wall_clock_breakdown": False,
        "zero_optimization": {
            "stage": args.stage,
            "allgather_partitions": True,
            "reduce_scatter": True,
            "allgather_bucket_size": 50000000,
            "reduce_bucket_size": 50000000,
            "overlap_comm": True,
            "contiguous_gradients": True,
        },
    }


def test(model_engine, testset, local_device, target_dtype, batch_size=32):
    """Print the accuracy over the whole test set; each rank evaluates a part."""
    sampler = DistributedSampler(testset, shuffle=False)
    right = torch.zeros(len(CLASSES), device=local_device)
    total = torch.zeros(len(CLASSES), device=local_device)
    model_engine.eval()
    with torch.no_grad():
        for images, labels in DataLoader(testset, batch_size=batch_size, sampler=sampler):
            images, labels = images.to(local_device), labels.to(local_device)
            if target_dtype is not None:
                images = images.to(target_dtype)
            predicted = model_engine(images).argmax(dim=1)
            right += torch.bincount(labels[predicted == labels], minlength=len(CLASSES))
            total += torch.bincount(labels, minlength=len(CLASSES))
    model_engine.train()
    deepspeed.comm.all_reduce(right)
    deepspeed.comm.all_reduce(total)
    if deepspeed.comm.get_rank() == 0:
        print(f"accuracy {100 * right.sum().item() / total.sum().item():.2f} %")
        shares = (right / total).tolist()
        for i, name in enumerate(CLASSES):
            print(f"accuracy of {name:>8s}: {100 * shares[i]:2.0f} %")


def main(args):
    deepspeed.init_distributed()
    local_rank = max(args.local_rank, 0)
    get_accelerator().set_device(local_rank)
    get_accelerator().manual_seed_all(args.seed)
    torch.manual_seed(args.seed)

    trainset = Shapes(args.samples, args.seed)
    testset = Shapes(args.samples // 4, args.seed + 1)
    if torch.distributed.get_rank() == 0:
        print("communication backend:", get_accelerator().communication_backend_name())

    net = Net(args)
    parameters = filter(lambda p: p.requires_grad, net.parameters())
    if args.moe_param_group:
        parameters = create_moe_param_groups(net)
    model_engine, optimizer, trainloader, __ = deepspeed.initialize(
        args=args, model=net, model_parameters=parameters, training_data=trainset, config=get_ds_config(args)
    )
    local_device = get_accelerator().device_name(model_engine.local_rank)

    target_dtype = None
    if model_engine.bfloat16_enabled():
        target_dtype = torch.bfloat16
    elif model_engine.fp16_enabled():
        target_dtype = torch.half

    criterion = nn.CrossEntropyLoss()
    for epoch in range(args.epochs):
        running_loss = 0.0
        for i, data in enumerate(trainloader):
            images, labels = data[0].to(local_device), data[1].to(local_device)
            if target_dtype is not None:
                images = images.to(target_dtype)
            loss = criterion(model_engine(images), labels)
            model_engine.backward(loss)
            model_engine.step()
            running_loss += loss.detach().float()
            if i % args.log_interval == args.log_interval - 1:
                deepspeed.comm.all_reduce(running_loss)
                mean = running_loss.item() / args.log_interval / deepspeed.comm.get_world_size()
                if model_engine.global_rank == 0:
                    print(f"[{epoch + 1:2d}, {i + 1:4d}] loss {mean:.6f}")
                running_loss = 0.0
    test(model_engine, testset, local_device, target_dtype)


if __name__ == "__main__":
    main(add_argument())
