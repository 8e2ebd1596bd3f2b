"""Time of drawing the next tokens of many requests from their logits: windlass, and transformers' logits processors.

python bench/sampling.py    # a minute
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table
from transformers.generation import logits_process

from windlass.cli.benches.bench_console import bench_console
from windlass.cli.benches.bench_results import write_result
from windlass.inference.sampler import SequenceSampler, sample
from windlass.inference.sampling_params import SamplingParams

_RESULTS = Path(__file__).parent / "results" / "sampling.json"
_TEMPERATURE, _TOP_K, _TOP_P, _MIN_P = 0.8, 50, 0.95, 0.05
_SPREAD = 3.0  # standard deviation of the logits, about that of a trained model


def main(
    rows: Annotated[int, typer.Option(min=1, help="Requests.")] = 32,
    vocabularies: Annotated[str, typer.Option(help="Numbers of tokens, separated by commas.")] = "8192,128256",
    rounds: Annotated[int, typer.Option(min=1, help="Turns that each contender takes.")] = 9,
    results: Annotated[Path, typer.Option(help="The JSON file.")] = _RESULTS,
) -> None:
    """Measure each kind of sampling, the contenders in turn; print the fastest turns, and write them as JSON."""
    table = Table(title=f"Milliseconds for the next tokens of {rows} requests")
    for column in ("tokens", "sampling", "windlass", "transformers", "ratio", "reading the logits"):
        table.add_column(column, justify="right")
    found = []
    for size in (int(text) for text in vocabularies.split(",")):
        logits = torch.randn(rows, size, generator=torch.Generator().manual_seed(0)) * _SPREAD
        floor = min(_seconds(lambda logits=logits: logits.sum()) for _ in range(rounds))
        for name, (params, processors) in _kinds().items():
            samplers = [SequenceSampler(params, [1, 2, 3], [], seed) for seed in range(rows)]
            contenders: dict[str, Callable[[], Any]] = {
                "windlass": lambda logits=logits, samplers=samplers: sample(logits, samplers),
                "transformers": lambda logits=logits, processors=processors: _draw(logits, processors),
            }
            times: dict[str, list[float]] = {contender: [] for contender in contenders}
            for _ in range(rounds):
                for contender, run in contenders.items():
                    times[contender].append(_seconds(run))
            ours, theirs = min(times["windlass"]), min(times["transformers"])
            found.append({"vocabulary": size, "sampling": name, "floor": floor, "seconds": times})
            figures = (ours * 1e3, theirs * 1e3, theirs / ours, floor * 1e3)
            table.add_row(str(size), name, *(f"{figure:.2f}" for figure in figures))
    bench_console().print(table)
    write_result(results, {"rows": rows, "threads": torch.get_num_threads(), "measurements": found})


def _kinds() -> dict[str, tuple[SamplingParams, list[Any]]]:
    """Return the parameters of each kind of sampling, and transformers' processors for the same."""
    warm = logits_process.TemperatureLogitsWarper(_TEMPERATURE)
    top_k, top_p = logits_process.TopKLogitsWarper(_TOP_K), logits_process.TopPLogitsWarper(_TOP_P)
    return {
        "temperature": (SamplingParams(temperature=_TEMPERATURE), [warm]),
        "top-k": (SamplingParams(temperature=_TEMPERATURE, top_k=_TOP_K), [warm, top_k]),
        "top-p": (SamplingParams(temperature=_TEMPERATURE, top_p=_TOP_P), [warm, top_p]),
        "top-k and top-p": (SamplingParams(temperature=_TEMPERATURE, top_k=_TOP_K, top_p=_TOP_P), [warm, top_k, top_p]),
        "min-p": (
            SamplingParams(temperature=_TEMPERATURE, min_p=_MIN_P),
            [warm, logits_process.MinPLogitsWarper(_MIN_P)],
        ),
    }


def _draw(logits: torch.Tensor, processors: list[Any]) -> list[int]:
    for processor in processors:
        logits = processor(None, logits)
    tokens: list[int] = torch.multinomial(logits.softmax(-1), 1)[:, 0].tolist()
    return tokens


def _seconds(run: Callable[[], Any]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


if __name__ == "__main__":
    typer.run(main)
