"""Speed and memory of a model that answers one request, measured in a separate process."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from windlass.base.import_transformers import import_transformers
from windlass.observe.memory_usage import peak_resident_bytes, resident_bytes

_TOKENS = 64
_ROUNDS = 3  # the fastest round counts: other programs only add time


@dataclass(frozen=True)
class RunFigures:
    """Figures of a process that loaded a model and generated tokens for one request.

    Attributes:
        seconds: seconds per generated token.
        memory: peak resident bytes of the process, mapped pages of the model's files included; None without /proc.
        idle_memory: resident bytes of the process before it loaded the weights: interpreter, libraries, classes of the
            model; None without /proc.
    """

    seconds: float
    memory: int | None = None
    idle_memory: int | None = None


def measure_run(path: Path, *, weights: str | None = None, trust_remote_code: bool = False) -> RunFigures:
    """Return the figures of a new process that loads a model and generates tokens for one request on the CPU.

    The memory of the calling process does not count.

    Args:
        weights: weight format that the engine rounds to at load; None: the weights of the directory.
    """
    quiet = partial(import_transformers, "measured models", quiet=True)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), quiet) as pool:
        return pool.submit(run_model, path, weights, trust_remote_code, torch.get_num_threads()).result()


def run_model(
    path: Path,
    weights: str | None = None,
    trust_remote_code: bool = False,
    threads: int | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> RunFigures:
    """Load a model in this process on the CPU, generate tokens for one request, and return the figures."""
    from windlass.compress.model_directory import ModelDirectory, build_empty
    from windlass.inference.llm import LLM
    from windlass.inference.sampling_params import SamplingParams

    if threads is not None:
        torch.set_num_threads(threads)
    # import the modules of the model's class now, because they count as idle memory
    build_empty(ModelDirectory(path), trust_remote_code=trust_remote_code)
    idle = resident_bytes()
    options: dict[str, Any] = {"max_sequences": 1, "skip_tokenizer_init": True, "weights": weights}
    with LLM(path, device="cpu", trust_remote_code=trust_remote_code, **options) as llm:
        prompt = [list(range(3, 11))]
        tokens = max(min(_TOKENS, llm.max_model_len - len(prompt[0])), 1)
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        llm.generate(prompt, params)
        best = float("inf")
        for _ in range(_ROUNDS):
            start = clock()
            llm.generate(prompt, params)
            best = min(best, clock() - start)
    return RunFigures(best / tokens, peak_resident_bytes(), idle)
