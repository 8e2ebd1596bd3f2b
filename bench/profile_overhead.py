"""Cost of the ranges of a profile, without a recorder and while steps are recorded.

    python bench/profile_overhead.py [--steps 20]

One rank at stage 3, and a Llama of 6 layers whose steps are short, so that ranges weigh much. Without a recorder a
range costs a test of a variable: the number of ranges of a step times the measured cost of one is compared with the
step. Recording is compared with the plain steps around it.
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

LOOPS = 200_000


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


def cost_when_off() -> float:
    """Print the cost of a `WaitScope`; return the cost in seconds of a range (`traced`), both without a recorder."""

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
    print(f"a WaitScope, its watchdog record included: {1e9 * (loop(with_scope) - base):.0f} ns")
    return loop(with_range) - base


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    steps = parser.parse_args().steps
    engine = build()
    step_seconds(engine, 5)
    plain = step_seconds(engine, steps)
    with tempfile.TemporaryDirectory() as folder:
        recorded: dict[bool, list[float]] = {}
        for operators in (False, True):
            with windlass.profile(engine, Path(folder, "trace.json"), operators=operators) as found:
                recorded[operators] = step_seconds(engine, steps)
        assert found.run is not None
        own = [one for one in found.run.ranks[0].events if one["cat"].startswith("windlass,")]
    plain += step_seconds(engine, steps)
    cost, count, typical = cost_when_off(), len(own) / steps, statistics.median(plain)
    print(f"a step: {1000 * typical:.2f} ms, {count:.0f} ranges; a range without a recorder: {1e9 * cost:.0f} ns")
    print(f"off: {100 * count * cost / typical:.3f} % of a step")
    for operators, times in recorded.items():
        more = statistics.median(times) / typical - 1
        print(f"recording {'with' if operators else 'without'} operators: {100 * more:+.1f} %")


if __name__ == "__main__":
    main()
