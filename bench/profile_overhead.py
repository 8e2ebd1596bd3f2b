"""Cost of profiler ranges (`windlass.tracing`), without a recorder and while steps are recorded.

    python bench/profile_overhead.py [--steps 20]

One rank at stage 3, and a Llama of 6 layers whose steps are short, so that ranges weigh much. Without a recorder a
range costs a test of a variable, and a wait (`WaitScope`) also its record for the watchdog. The share of a step is
computed: its number of ranges and of waits, times their measured costs. Recorded steps are compared with the plain
steps before and after them.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers

import windlass
from windlass.base.collective_activity import WaitScope
from windlass.base.trace_ranges import traced
from windlass.cli.benches.bench_results import write_result

LOOPS = 200_000
_RESULTS = Path(__file__).parent / "results"


def build() -> Any:
    """Return an engine of a small Llama at stage 3."""
    torch.manual_seed(0)
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=512, **shape))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    }
    return windlass.initialize(model=model, config=config)[0]


def step_seconds(engine: Any, steps: int) -> list[float]:
    """Return the time of each step."""
    ids = torch.randint(0, 512, (2, 64))
    found = []
    for _ in range(steps):
        begun = time.perf_counter()
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
        found.append(time.perf_counter() - begun)
    return found


def costs_when_off() -> tuple[float, float]:
    """Return the costs in seconds of a range (`traced`) and of a `WaitScope`, both without a recorder."""

    def loop(body: Any) -> float:
        begun = time.perf_counter()
        for _ in range(LOOPS):
            body()
        return (time.perf_counter() - begun) / LOOPS

    def empty() -> None:
        return

    def with_range() -> None:
        with traced("update", "x"):
            pass

    def with_scope() -> None:
        with WaitScope("gather", ("w",)):
            pass

    base = loop(empty)
    return loop(with_range) - base, loop(with_scope) - base


def share_when_off(categories: list[str], steps: int, costs: tuple[float, float], step: float) -> dict[str, float]:
    """Return the numbers of ranges and waits in a step, and the share of a step that they cost without a recorder.

    Args:
        categories: Categories of windlass' own events in `steps` recorded steps.
        costs: Seconds of a range and of a wait.
        step: Seconds of a plain step.
    """
    waits = categories.count("windlass,wait") / steps
    # An operation in flight has two events, and each of them counts as a range.
    ranges = len(categories) / steps - waits
    return {
        "ranges of a step": ranges,
        "waits of a step": waits,
        "share": (ranges * costs[0] + waits * costs[1]) / step,
    }


def main() -> None:
    """Print the figures, and write profile_overhead.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--results", type=Path, default=_RESULTS, help="folder of the JSON")
    options = parser.parse_args()
    steps = options.steps
    engine = build()
    step_seconds(engine, 5)
    plain = step_seconds(engine, steps)
    with tempfile.TemporaryDirectory() as folder:
        recorded: dict[bool, list[float]] = {}
        for operators in (False, True):
            with windlass.profile(engine, Path(folder, "trace.json"), operators=operators) as found:
                recorded[operators] = step_seconds(engine, steps)
        assert found.run is not None
        own = [one["cat"] for one in found.run.ranks[0].events if one["cat"].startswith("windlass,")]
    plain += step_seconds(engine, steps)
    costs, typical = costs_when_off(), statistics.median(plain)
    off = share_when_off(own, steps, costs, typical)
    print(
        f"a step: {1000 * typical:.2f} ms, {off['ranges of a step']:.0f} ranges of {1e9 * costs[0]:.0f} ns and "
        f"{off['waits of a step']:.0f} waits of {1e9 * costs[1]:.0f} ns without a recorder"
    )
    print(f"off: {100 * off['share']:.3f} % of a step")
    recording = {}
    for operators, times in recorded.items():
        kind = f"{'with' if operators else 'without'} operators"
        recording[kind] = statistics.median(times) / typical - 1
        print(f"recording {kind}: {100 * recording[kind]:+.1f} %")
    write_result(
        options.results / "profile_overhead.json",
        {
            "bench": "profile_overhead",
            "step_s": typical,
            "range_s": costs[0],
            "wait_s": costs[1],
            "off": off,
            "recording": recording,
        },
    )


if __name__ == "__main__":
    main()
