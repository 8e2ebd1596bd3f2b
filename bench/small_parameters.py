"""Cost of thousands of small parameters, compared with plain PyTorch: a step, a save and a load, in the same run.

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

from windlass.cli.benches.bench_console import bench_console
from windlass.cli.benches.bench_results import write_result

_RESULTS = Path(__file__).parent / "results"
_TIMED_PARTS = ("forward and backward", "step", "save", "load")
_PLAIN = "torch"
_MODULES = "of torch's load, Module.load_state_dict"
_WIDTH, _ROWS = 16, 4
Seconds = dict[str, list[float]]


class SmallLayers(nn.Module):
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
    rounds: Annotated[int, typer.Option(min=1, help="Measured rounds, after an initial one.")] = 3,
    profiled: Annotated[int, typer.Option(help="Functions to show for each part; 0: none.")] = 0,
    results: Annotated[Path, typer.Option(help="The JSON file.")] = _RESULTS / "small_parameters.json",
) -> None:
    """Time plain torch and windlass alternately, print the ratios and the profile, write the JSON.

    Times are CPU seconds of the process, because wall times on a shared machine are useless.
    """
    from torch.multiprocessing.spawn import spawn

    os.environ.update(OMP_NUM_THREADS="1", WINDLASS_LOG_LEVEL="WARNING")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    actual: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for world in (int(item) for item in ranks.split(",")):
            out, store = Path(folder) / f"{world}.json", Path(folder) / f"store{world}"
            arguments = (world, parameters, [int(item) for item in stages.split(",")], rounds, profiled, store, out)
            spawn(_run_rank, arguments, nprocs=world)
            actual[str(world)] = json.loads(out.read_text())
            _print_tables(world, actual[str(world)])
            shared = os.getloadavg()[0] > 1.5 * world
            result = {"parameters": parameters, "machine_was_shared": shared, "processor_seconds": actual}
            write_result(results, result)


def _run_rank(
    rank: int, world: int, parameters: int, stages: list[int], rounds: int, profiled: int, store: Path, out: Path
) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    results: dict[str, Seconds] = {_PLAIN: {_MODULES: []}}
    cases = {_PLAIN: _torch_calls(parameters, tempfile.mkdtemp(prefix="windlass-small-"), results[_PLAIN][_MODULES])}
    for stage in stages:
        folder = [tempfile.mkdtemp(prefix="windlass-small-")] if rank == 0 else [""]
        dist.broadcast_object_list(folder, 0)
        begin = time.process_time()
        cases[f"stage {stage}"] = _windlass_calls(parameters, stage, folder[0])
        results[f"stage {stage}"] = {"initialize": [time.process_time() - begin]}
    for number in range(rounds + 1):  # the first round creates lasting objects, such as optimizer states
        for name, parts in cases.items():
            for part, run in zip(_TIMED_PARTS, parts, strict=True):
                last = number == rounds and rank == 0 and name != _PLAIN
                seconds = _time_parts(run, f"{name}: {part}", profiled if last else 0)
                if number and seconds is not None:
                    results[name].setdefault(part, []).append(seconds)
            dist.barrier()
    results[_PLAIN][_MODULES] = results[_PLAIN][_MODULES][1:]
    if rank == 0:
        out.write_text(json.dumps(results))
    dist.destroy_process_group()


def _torch_calls(parameters: int, folder: str, modules: list[float]) -> tuple[Callable[[], object], ...]:
    torch.manual_seed(0)
    model = SmallLayers(parameters)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    path = Path(folder) / f"{os.getpid()}.pt"
    x = torch.randn(_ROWS, _WIDTH)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    def load() -> None:
        state = torch.load(path, weights_only=True)
        begin = time.process_time()
        model.load_state_dict(state["model"])
        modules.append(time.process_time() - begin)
        optimizer.load_state_dict(state["optimizer"])

    return (
        lambda: model(x).backward(),
        step,
        lambda: torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path),
        load,
    )


def _windlass_calls(parameters: int, stage: int, folder: str) -> tuple[Callable[[], object], ...]:
    import windlass

    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": _ROWS,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage},
    }
    engine, *_ = windlass.initialize(model=SmallLayers(parameters), config=config)
    x = torch.randn(_ROWS, _WIDTH)
    return (
        lambda: engine.backward(engine(x)),
        engine.step,
        lambda: engine.save_checkpoint(folder, tag="t"),
        lambda: engine.load_checkpoint(folder, tag="t"),
    )


def _time_parts(run: Callable[[], object], name: str, profiled: int) -> float | None:
    """Return the CPU seconds in all threads; None with profiling, which takes several times as long."""
    begin = time.process_time()
    if not profiled:
        run()
        return time.process_time() - begin
    profile = cProfile.Profile()
    profile.runcall(run)
    print(name)
    pstats.Stats(profile).sort_stats("tottime").print_stats(profiled)
    return None


def _print_tables(world: int, cases: dict[str, Seconds]) -> None:
    table = Table(title=f"{world} rank{'s' * (world != 1)}: seconds on the processor (times torch's, by rounds)")
    table.add_column("")
    for part in ("initialize", *_TIMED_PARTS):
        table.add_column(part, justify="right")
    for name, case in cases.items():
        row = [f"{case['initialize'][0]:.2f}" if "initialize" in case else ""]
        for part in _TIMED_PARTS:
            if part not in case:
                row.append("profiled")
                continue
            ratios = [local / plain for local, plain in zip(case[part], cases[_PLAIN][part], strict=False)]
            ratio = "" if name == _PLAIN else f" ({statistics.median(ratios):.2f})"
            row.append(f"{statistics.median(case[part]):.3f}{ratio}")
        table.add_row(name, *row)
    bench_console().print(table)
    modules = statistics.median(cases[_PLAIN][_MODULES])
    bench_console().print(
        f"{_MODULES}: {modules:.3f} s, which grows with the square of the number of modules in a list"
    )


if __name__ == "__main__":
    typer.run(main)
