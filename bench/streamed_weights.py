"""Decoding with weights that stay in a file, for a model several times larger than the memory that the process may use.

Each step reads the weights of all matrix products once, whatever the batch size. The upper bound of the tokens a
second, the roof, is therefore `batch x read rate / bytes of the weights`, but at most the rate at which the products
can be computed (in fp32). The read rate is that of plain direct I/O on the same file, measured alternately with the
steps; for weights in host memory it is that of a plain read loop on all threads.

python bench/streamed_weights.py --path /mnt/nvme
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from windlass.base.byte_counts import parse_bytes
from windlass.base.log import logger
from windlass.cli.benches.bench_console import bench_console
from windlass.cli.benches.bench_results import write_result

_RESULTS = Path(__file__).parent / "results"
# Freed blocks return to the system, because memory is scarce here.
_MALLOC_ENVIRONMENT = {
    "WINDLASS_KEEP_FREED_MEMORY": "0",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(4 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(16 << 20),
}
_VOCABULARY = 2048
_PROMPT, _ANSWER = 3, 40  # numbers of tokens
_LEAST_RATIO = 3.0
_READ_BYTES = 2 << 30
_SIDE = 1024  # rows and columns of the timed matrices
_TARGETS = {"disk": 0.90, "host": 0.95}


def main(
    hidden: Annotated[int, typer.Option(min=64, help="Width of the Llama, a multiple of 64.")] = 2048,
    layers: Annotated[int, typer.Option(min=1, help="Number of blocks; 10.5 x hidden^2 parameters each.")] = 23,
    cap: Annotated[str, typer.Option(help="Memory limit of the process that reads from disk.")] = "1.2G",
    weights: Annotated[str, typer.Option(help="Format: fp32, bf16 or int8.")] = "fp32",
    batches: Annotated[str, typer.Option(help="Sequences that decode at the same time.")] = "1,8,32",
    rounds: Annotated[int, typer.Option(min=1, help="Repetitions, in turns.")] = 3,
    steps: Annotated[int, typer.Option(min=1, help="Decode steps of a timing.")] = 2,
    host: Annotated[bool, typer.Option("--host/--no-host", help="Also from host memory, without a limit.")] = True,
    path: Annotated[Path, typer.Option(help="A folder on the disk to use.")] = Path("."),
    name: Annotated[str, typer.Option(help="Name of the files in --results.")] = "streamed_weights",
    results: Annotated[Path, typer.Option(help="Folder of the JSON and the picture.")] = _RESULTS,
    strict: Annotated[bool, typer.Option("--strict", help="Exit code 1 if a target is missed.")] = False,
) -> None:
    """Decode from disk under the limit and from host memory; print and plot tokens a second and the roofs."""
    console = bench_console()
    most = parse_bytes(cap, "--cap")
    with tempfile.TemporaryDirectory(prefix="windlass-streamed-", dir=path) as folder:
        work = {
            "weights": weights,
            "batches": [int(batch) for batch in batches.split(",")],
            "rounds": rounds,
            "steps": steps,
            "cap": most,
        }
        parameters = _write_model(Path(folder), hidden, layers)
        told: dict[str, Any] = {}
        for tier in ("disk", "host") if host else ("disk",):
            told[tier] = _run_child(Path(folder), {**work, "tier": tier})
    nbytes = told["disk"]["streamed_bytes"]
    if nbytes < _LEAST_RATIO * most:
        console.print(f"the weights are {nbytes / most:.2f} x the limit, below {_LEAST_RATIO:g} x: lower --cap")
    table = Table(title=f"{parameters / 1e6:.0f}M parameters, {nbytes / 1e9:.2f} GB of {weights} weights", box=None)
    for column in ("tier", "batch", "tokens/s", "roof", "of roof"):
        table.add_column(column, justify="right")
    missed = []
    for tier, found in told.items():
        for batch, row in found["rows"].items():
            table.add_row(tier, batch, f"{row['tokens_per_second']:.3g}", f"{row['roof']:.3g}", f"{row['of_roof']:.1%}")
            if row["of_roof"] < _TARGETS[tier]:
                missed.append(
                    f"{tier}, batch {batch}: {row['of_roof']:.1%} of the roof, the target is {_TARGETS[tier]:.0%}"
                )
    console.print(table)
    disk = told["disk"]
    console.print(
        f"limit {most / 1e9:.2f} GB (kernel-enforced), {disk['private_bytes'] / 1e9:.2f} GB of it in use at the end, "
        f"weights {nbytes / most:.2f} x the limit; staging {disk['staging_bytes'] / 1e6:.0f} MB"
    )
    console.print(*(f"missed: {line}" for line in missed), sep="\n")
    verdict = {"weights_over_limit": nbytes / most, "missed": missed, "parameters": parameters}
    console.print(
        f"written: {write_result(results / f'{name}.json', {'bench': 'streamed_weights', **work, **verdict, **told})}"
    )
    _plot(told, verdict, results / f"{name}.png")
    if strict and missed:
        raise typer.Exit(1)


def _run_child(folder: Path, work: dict[str, Any]) -> dict[str, Any]:
    """Run this script in a child process with its own memory limit. Return its measurements."""
    (folder / "work.json").write_text(json.dumps(work))
    environment = {**os.environ, **_MALLOC_ENVIRONMENT}
    done = subprocess.run([sys.executable, __file__, "--measure", str(folder)], check=False, env=environment)
    if done.returncode:
        raise typer.Exit(done.returncode)
    return dict(json.loads((folder / "told.json").read_text()))


def _write_model(folder: Path, hidden: int, layers: int) -> int:
    """Write a random Llama layer by layer; return the number of its parameters."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(hidden // 512, 1),
        max_position_embeddings=256,
        dtype="float32",
    )
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    files: dict[str, list[str]] = {}
    for key in model.state_dict():
        parts = key.split(".")
        files.setdefault(f"{parts[2]}" if "layers" in key else "rest", []).append(key)
    generator = torch.Generator().manual_seed(0)
    index: dict[str, str] = {}
    for label, keys in files.items():
        file = f"model-{label}.safetensors"
        tensors = {}
        for key in keys:
            form = model.state_dict()[key]
            tensors[key] = torch.ones(form.shape) if form.dim() == 1 else _random(form.shape, generator)
        save_file(tensors, folder / file, {"format": "pt"})
        index |= dict.fromkeys(keys, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return sum(p.numel() for p in model.parameters())


def _random(shape: Any, generator: Any) -> Any:
    """Return uniform numbers with a standard deviation of 0.02, because normal ones take longer to draw."""
    import torch

    return torch.empty(shape).uniform_(-0.035, 0.035, generator=generator)


def _measure(folder: Path) -> None:
    """Load the model, decode, and write the rates to `folder`/told.json."""
    work = json.loads((folder / "work.json").read_text())
    if work["tier"] == "disk":
        # limit of private memory; pages of mapped files are shared, so they do not count
        resource.setrlimit(resource.RLIMIT_DATA, (work["cap"], work["cap"]))
    from windlass import LLM

    began = time.monotonic()
    llm = LLM(
        folder,
        skip_tokenizer_init=True,
        weights=work["weights"],
        weights_tier=work["tier"],
        max_sequences=max(work["batches"]),
        max_tokens_per_step=_PROMPT * max(work["batches"]),
        kv_cache_tokens=max(work["batches"]) * 64,
        max_model_len=64,
    )
    loaded = time.monotonic() - began
    parts = llm.engine.runner._packed
    nbytes = parts.index.streamed_bytes
    (file,) = folder.glob("windlass-weights/*.weights")
    read: Callable[[], float] = _disk_reader(file, nbytes) if work["tier"] == "disk" else _memory_reader()
    rates: list[float] = []
    seconds: dict[str, list[float]] = {str(batch): [] for batch in work["batches"]}
    for _ in range(work["rounds"]):
        for batch in work["batches"]:
            rates.append(read())
            seconds[str(batch)].append(_decode(llm, batch, work["steps"]))
    rate, product = statistics.median(rates), _product_rate()
    weights = nbytes / {"fp32": 4, "bf16": 2, "int8": 1}[work["weights"]]
    rows = {}
    for batch, times in seconds.items():
        speed, roof = int(batch) / statistics.median(times), int(batch) * rate / nbytes
        if work["weights"] == "fp32":
            roof = min(roof, product / (2 * weights))
        rows[batch] = {
            "tokens_per_second": speed,
            "roof": roof,
            "of_roof": speed / roof,
            "step_seconds": times,
        }
    told = {
        "streamed_bytes": nbytes,
        "staging_bytes": parts.staging_bytes,
        "load_seconds": loaded,
        "read_rates": rates,
        "rows": rows,
        "cost": [llm.engine.cost.weight_seconds, llm.engine.cost.token_seconds],
        "private_bytes": _private_bytes(),
        "product_rate": product,
    }
    (folder / "told.json").write_text(json.dumps(told))
    llm.close()


def _decode(llm: Any, batch: int, steps: int) -> float:
    """Return the seconds of a decode step of `batch` sequences."""
    from windlass import SamplingParams

    engine = llm.engine
    params = SamplingParams(temperature=0, max_tokens=_ANSWER, ignore_eos=True)
    for number in range(batch):
        engine.add_request(f"{number}", [(7 * number + place) % _VOCABULARY for place in range(_PROMPT)], params)
    while engine.stats().num_waiting or not all(sequence.has_sampled for sequence in engine._table.running.values()):
        engine.step()
    engine.step()  # the first step of this batch size
    before, began = engine.stats().step_tokens, time.perf_counter()
    for _ in range(steps):
        engine.step()
    found = (time.perf_counter() - began) / steps
    if engine.stats().step_tokens - before != batch * steps:
        raise SystemExit("a timed step had another number of tokens; raise _ANSWER")
    for number in range(batch):
        engine.cancel(f"{number}")
    engine.clear_prefix_cache()
    return found


def _disk_reader(file: Path, nbytes: int) -> Callable[[], float]:
    """Return a function that reads the file by plain direct I/O of the same blocks and depth, and returns bytes a
    second."""
    from windlass.storage.direct_file_reader import DirectFileReader

    reader = DirectFileReader(file)
    part = 32 << 20
    buffer = reader.allocate_buffer(2 * part)

    def read() -> float:
        began = time.perf_counter()
        flying: list[Any] = []
        for number in range(nbytes // part):
            if len(flying) == 2:
                flying.pop(0).wait()
            into = buffer[number % 2 * part :][:part]
            flying.append(reader.start("the file", number * part, into))
        for one in flying:
            one.wait()
        return nbytes // part * part / (time.perf_counter() - began)

    return read


def _memory_reader() -> Callable[[], float]:
    """Return a function that reads memory on huge pages by a plain loop on all threads, and returns bytes a second."""
    import torch

    from windlass.kernels.huge_pages import empty_on_huge_pages
    from windlass.kernels.inference_path import get_inference_path

    path = get_inference_path()
    assert path.module is not None  # streamed weights need the native kernels too
    native = path.module
    memory = empty_on_huge_pages((_READ_BYTES,), torch.uint8).fill_(1)

    def read() -> float:
        times = []
        for _ in range(3):
            began = time.perf_counter()
            native.read_memory(path.number, memory.data_ptr(), _READ_BYTES, torch.get_num_threads())
            times.append(time.perf_counter() - began)
        return _READ_BYTES / min(times)

    return read


def _product_rate() -> float:
    """Return the floating-point operations a second of a float32 product."""
    import torch

    square, times = torch.randn(_SIDE, _SIDE), []
    for _ in range(3):
        began = time.perf_counter()
        square @ square
        times.append(time.perf_counter() - began)
    return 2 * _SIDE**3 / min(times)


def _private_bytes() -> int:
    """Return the private memory that the kernel counts against the limit."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmData"].split()[0]) * 1024


def _plot(told: dict[str, Any], verdict: dict[str, Any], path: Path) -> None:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        logger.info("no picture: matplotlib is not installed (pip install 'windlass[plot]')")
        return
    figure = Figure(figsize=(8, 4.5), dpi=140, layout="constrained")
    axes = figure.subplots()
    for (tier, found), color in zip(told.items(), ("#1f77b4", "#d62728"), strict=False):
        batches = [int(batch) for batch in found["rows"]]
        axes.plot(batches, [row["roof"] for row in found["rows"].values()], "--", color=color, label=f"{tier}: roof")
        speeds = [row["tokens_per_second"] for row in found["rows"].values()]
        axes.plot(batches, speeds, "o-", color=color, label=f"{tier}: measured")
        for batch, speed, row in zip(batches, speeds, found["rows"].values(), strict=True):
            axes.annotate(
                f"{row['of_roof']:.0%}", (batch, speed), xytext=(4, -12), textcoords="offset points", fontsize=8
            )
    axes.set(xscale="log", yscale="log", xlabel="sequences in a step", ylabel="tokens a second")
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.legend(fontsize=8)
    axes.set_title(
        f"{verdict['parameters'] / 1e6:.0f}M parameters; from disk with a memory limit of 1/"
        f"{verdict['weights_over_limit']:.1f} of the weights",
        fontsize=10,
    )
    canvas: Any = FigureCanvasAgg(figure)
    canvas.print_png(str(path))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        _measure(Path(sys.argv[2]))
    else:
        typer.run(main)
