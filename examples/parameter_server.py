"""Trains a small language model on workers of unequal speed, by a synchronous or an asynchronous parameter server.

    windlass run --servers 2 --workers 4 examples/parameter_server.py --mode asynchronous --out runs/ps
    windlass run --servers 2 --workers 4 examples/parameter_server.py --mode synchronous --out runs/ps
    python examples/parameter_server.py --plot --out runs/ps      # both curves of held-out loss over time

Worker 3 takes `--slow` times as long for a step as the others. Synchronous updates wait for worker 3; asynchronous ones
do not.
"""

from __future__ import annotations

import argparse
import inspect
import json
import time
from pathlib import Path

import torch
from torch import nn

import windlass
from windlass import parameter_server

CONTEXT, WIDTH = 16, 48


class CharacterModel(nn.Module):
    """Model that predicts the next byte from the `CONTEXT` bytes before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.layers = nn.Sequential(nn.Linear(CONTEXT * WIDTH, 256), nn.GELU(), nn.Linear(256, 256))

    def forward(self, context: torch.Tensor) -> torch.Tensor:
        return self.layers(self.embedding(context).flatten(1))


def text() -> torch.Tensor:
    """Return the bytes of some modules of Python's library."""
    modules = (argparse, inspect, json)
    return torch.frombuffer(bytearray("".join(map(inspect.getsource, modules)).encode()), dtype=torch.uint8).long()


def batch(data: torch.Tensor, size: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    starts = torch.randint(0, len(data) - CONTEXT, (size,), generator=generator)
    windows = data[starts[:, None] + torch.arange(CONTEXT + 1)[None].clamp(max=CONTEXT)]
    return windows[:, :CONTEXT], windows[:, CONTEXT]


def main() -> None:
    flags = argparse.ArgumentParser()
    flags.add_argument("--mode", default="asynchronous")
    flags.add_argument("--seconds", type=float, default=20)
    flags.add_argument("--step-seconds", type=float, default=0.02, help="least duration of a step of a fast worker")
    flags.add_argument("--slow", type=float, default=8)
    flags.add_argument("--out", type=Path, required=True)
    flags.add_argument("--plot", action="store_true")
    args = flags.parse_args()
    if args.plot:
        plot(args.out)
        return
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = CharacterModel()
    settings = parameter_server.ParameterServerSettings(mode=args.mode)
    worker = parameter_server.start(model, lambda parameters: torch.optim.Adagrad(parameters, lr=0.02), settings)
    if worker is None:  # this process was a server, and all workers have left
        return
    data = text()
    train, held_out = data[:-8192], data[-8192:]
    generator = torch.Generator().manual_seed(worker.index)
    check = batch(held_out, 2048, torch.Generator().manual_seed(99))
    duration = args.step_seconds * (args.slow if worker.index == 3 else 1)
    curve, begin, measured = [], time.monotonic(), -1.0
    with worker:
        while (now := time.monotonic() - begin) < args.seconds:
            worker.pull()
            if worker.index == 0 and now - measured > args.seconds / 40:
                with torch.no_grad():
                    curve.append([now, worker.version, float(nn.functional.cross_entropy(model(check[0]), check[1]))])
                measured = now
            context, target = batch(train, 64, generator)
            nn.functional.cross_entropy(model(context), target).backward()
            time.sleep(max(0.0, begin + now + duration - time.monotonic()))
            worker.push()
    if worker.index == 0:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / f"{args.mode}.json").write_text(json.dumps({"version": windlass.__version__, "curve": curve}))
        print(f"{args.mode}: {curve[-1][1]} updates in {curve[-1][0]:.1f} s, held-out loss {curve[-1][2]:.3f}")


def plot(folder: Path) -> None:
    """Draw the curves of both modes that `main` has written."""
    modes = ("synchronous", "asynchronous")
    draw(
        {mode: json.loads((folder / f"{mode}.json").read_text())["curve"] for mode in modes},
        folder / "parameter_server.png",
    )


def draw(curves: dict[str, list[list[float]]], path: Path) -> None:
    """Draw the held-out loss of each mode over time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 3.6))
    for mode, curve in curves.items():
        axes.plot([point[0] for point in curve], [point[2] for point in curve], label=mode)
    axes.set_xlabel("seconds")
    axes.set_ylabel("held-out loss, nats per byte")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
