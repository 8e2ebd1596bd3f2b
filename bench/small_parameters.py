"""What thousands of small parameters cost beside plain PyTorch: a step, a save and a load, in the same run.

python bench/small_parameters.py --parameters 10000
"""

from __future__ import annotations

import cProfile
import json
import os
import pstats
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table
from torch import nn

from windlass.cli.benches.facts import write_result
from windlass.cli.benches.screen import screen

_RESULTS = Path(__file__).parent / "results"
_PARTS = ("forward and backward", "step", "save", "load")
_WIDTH, _ROWS, _ROUNDS = 16, 4, 3
Seconds = dict[str, list[float]]


class Small(nn.Module):
    """Linear layers of 16 x 16, each with a bias."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH) for _ in range(parameters // 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + 0.01 * layer(x)
        return x.square().mean()


def main(
    parameters: Annotated[int, typer.Option(min=2, help="Tensors of the model, half of them matrices.")] = 10_000,
    ranks: Annotated[str, typer.Option(help="Comma-separated.")] = "1,2",
    stages: Annotated[str, typer.Option(help="Comma-separated.")] = "0,1,2,3",
    profiled: Annotated[int, typer.Option(help="Functions that are shown of each part; 0: none.")] = 0,
    results: Annotated[Path, typer.Option(help="Folder of the JSON.")] = _RESULTS,
) -> None:
    """Time torch alone and windlass in turns, print the ratios and where the time goes, write the JSON."""
    from torch.multiprocessing.spawn import spawn

    os.environ.update(OMP_NUM_THREADS="1", WINDLASS_LOG_LEVEL="WARNING")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for world in (int(one) for one in ranks.split(",")):
            out, store = Path(folder) / f"{world}.json", Path(folder) / f"store{world}"
            arguments = (world, parameters, [int(one) for one in stages.split(",")], profiled, store, out)
            spawn(_rank, arguments, nprocs=world)
            found[str(world)] = json.loads(out.read_text())
    _show(found)
    write_result(results / "small_parameters.json", {"parameters": parameters, "seconds": found})


def _rank(rank: int, world: int, parameters: int, stages: list[int], profiled: int, store: Path, out: Path) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    found: dict[str, Seconds] = {"torch": {}}
    for name in ("torch", *(f"stage {stage}" for stage in stages)):
        folder = [tempfile.mkdtemp(prefix="windlass-small-")] if rank == 0 else [""]
        dist.broadcast_object_list(folder, 0)
        parts = _torch(parameters, folder[0]) if name == "torch" else _windlass(parameters, int(name[-1]), folder[0])
        found[name] = _timed(*parts, profiled=profiled if rank == 0 and name != "torch" else 0, name=name)
        dist.barrier()
    if rank == 0:
        out.write_text(json.dumps(found))
    dist.destroy_process_group()


def _torch(parameters: int, folder: str) -> tuple[Callable[[], object], ...]:
    torch.manual_seed(0)
    model = Small(parameters)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    path = Path(folder) / f"{os.getpid()}.pt"
    x = torch.randn(_ROWS, _WIDTH)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    def load() -> None:
        state = torch.load(path, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    return (
        lambda: model(x).backward(),
        step,
        lambda: torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path),
        load,
    )


def _windlass(parameters: int, stage: int, folder: str) -> tuple[Callable[[], object], ...]:
    import windlass

    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": _ROWS,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage},
    }
    engine, *_ = windlass.initialize(model=Small(parameters), config=config)
    x = torch.randn(_ROWS, _WIDTH)
    return (
        lambda: engine.backward(engine(x)),
        engine.step,
        lambda: engine.save_checkpoint(folder, tag="t"),
        lambda: engine.load_checkpoint(folder, tag="t"),
    )


def _timed(*parts: Callable[[], object], profiled: int, name: str) -> Seconds:
    found: Seconds = {part: [] for part in _PARTS}
    for number in range(_ROUNDS + 1):  # the first makes what stays, such as optimizer states
        for part, run in zip(_PARTS, parts, strict=True):
            profile = cProfile.Profile() if profiled and number == _ROUNDS else None
            begin = time.perf_counter()
            if profile is None:
                run()
            else:
                profile.runcall(run)
            if number and profile is None:
                found[part].append(time.perf_counter() - begin)
            if profile is not None:
                print(f"{name}: {part}")
                pstats.Stats(profile).sort_stats("tottime").print_stats(profiled)
    return found


def _show(found: dict[str, dict[str, Seconds]]) -> None:
    console = screen()
    for world, cases in found.items():
        table = Table(title=f"{world} rank{'s' * (world != '1')}: seconds (and times torch's)")
        table.add_column("")
        for part in _PARTS:
            table.add_column(part, justify="right")
        plain = {part: statistics.median(seconds) for part, seconds in cases["torch"].items()}
        for name, case in cases.items():
            row = []
            for part in _PARTS:
                median = statistics.median(case[part])
                row.append(f"{median:.3f}" + ("" if name == "torch" else f" ({median / plain[part]:.1f})"))
            table.add_row(name, *row)
        console.print(table)


if __name__ == "__main__":
    typer.run(main)
