"""Scripts of DeepSpeedExamples as they are: their losses are those of the same training in plain PyTorch.

Versions: DeepSpeedExamples 45b4b71 (training/cifar).
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from tests.clients.harness import Client, client

STEPS = 24
BATCH = 16

# What the script uses of torchvision, which has no build for every torch. Pictures are random, with their label inside.
TORCHVISION = """
import types
import torch

torch.manual_seed(3)  # the script sets none


class CIFAR10(torch.utils.data.Dataset):
    def __init__(self, root, train, download, transform):
        generator = torch.Generator().manual_seed(1 if train else 2)
        count = {steps} * {batch} if train else 20
        self.labels = torch.arange(count) % 10  # its test divides by the number of each
        pictures = torch.rand(count, 3, 32, 32, generator=generator)
        pictures[:, 0, 0, 0] = self.labels / 10
        self.pictures = (pictures - 0.5) / 0.5

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.pictures[index], int(self.labels[index])


def nothing(*arguments):
    return None


datasets = types.SimpleNamespace(CIFAR10=CIFAR10)
transforms = types.ModuleType("transforms")
transforms.Compose = transforms.ToTensor = transforms.Normalize = nothing
"""

# The script's own network in plain PyTorch, on one process that computes each rank's part of a batch by itself.
PLAIN = """
import argparse, importlib.util, json, math, sys
import torch
from torch.utils.data import DataLoader, DistributedSampler
import torchvision

spec = importlib.util.spec_from_file_location("script", sys.argv[1])
script = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)
ranks, batch, found = int(sys.argv[2]), {batch}, []
net = script.Net(argparse.Namespace(moe=False))
data = torchvision.datasets.CIFAR10("", True, True, None)
loaders = []
for rank in range(ranks):
    sampler = DistributedSampler(data, num_replicas=ranks, rank=rank)
    loaders.append(DataLoader(data, batch_size=batch // ranks, sampler=sampler))
optimizer = torch.optim.AdamW(net.parameters(), lr=0.001, betas=(0.8, 0.999), eps=1e-8, weight_decay=3e-7)
for step, batches in enumerate(zip(*loaders)):
    optimizer.param_groups[0]["lr"] = 0.001 * math.log(max(step, 1)) / math.log(1000)  # 0 twice
    losses = [torch.nn.functional.cross_entropy(net(pictures), labels) for pictures, labels in batches]
    found.append(losses[0].item())
    optimizer.zero_grad()
    (sum(losses) / ranks).backward()
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()
print("PLAIN " + json.dumps(found))
"""


@pytest.fixture(scope="module")
def examples() -> Client:
    return client("DEEPSPEED_EXAMPLES", "https://github.com/deepspeedai/DeepSpeedExamples", "")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("path")
    sizes = {"steps": STEPS, "batch": BATCH}
    (folder / "torchvision.py").write_text(TORCHVISION.format(**sizes))
    (folder / "plain.py").write_text(PLAIN.format(**sizes))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2])  # alone, the rows come in an order that the seed does not tell
@pytest.mark.parametrize("stage", [3, 2, 1, 0])
def test_cifar_trains_as_in_plain_pytorch(examples: Client, path: Path, stage: int, ranks: int) -> None:
    """Law: the first rank's losses, to the three decimals that the script prints."""
    script = examples.folder / "training" / "cifar" / "cifar10_deepspeed.py"
    options = ("--epochs", 1, "--log-interval", 1, "--dtype", "fp32", "--stage", stage)
    printed = examples.run(script, "--deepspeed", *options, ranks=ranks, path=(path,))
    found = [float(loss) for loss in re.findall(r"\[ 1, +\d+\] loss: +(\S+)", printed)]
    standing_in = examples.run(path / "plain.py", script, ranks, path=(path,), stands_in=True)
    wanted = json.loads(standing_in.partition("PLAIN ")[2].splitlines()[0])
    assert len(found) == len(wanted) == STEPS and abs(wanted[0] - wanted[-1]) > 0.01
    assert all(math.isfinite(loss) for loss in found)
    assert found == pytest.approx(wanted, abs=6e-4)
