"""Training under `windlass verify`, healthy or with a fault planted in the sharded run."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

import torch
import torch.distributed as dist

from tests import oracle
from tests.dist.equivalence_runs import specimen
from tests.dist.harness import run_ranks
from tests.dist.planted_faults import FAULTS
from tests.models import Place, cast


def train_specimen(name: str, config: dict[str, Any], dtype: torch.dtype, steps: int) -> None:
    """Train as any script would, with data that depend on the step, index and rank of the micro-batch."""
    import windlass

    subject, rank = specimen(name), dist.get_rank()
    engine = windlass.initialize(model=oracle.build(subject, rank), config=config)[0]
    for step in range(steps):
        for micro in range(config["gradient_accumulation_steps"]):
            subject.train(engine, cast(subject.batch(Place(step, micro, rank)), dtype), engine.backward)
            engine.step()


def watch(train: Callable[..., None], steps: int, fault: str | None, *args: Any) -> list[dict[str, Any]]:
    """Return the findings of rank 0 about `train`. Other ranks return an empty list."""
    from windlass.engine.initialize_observer import install_observer
    from windlass.verify.verification_job import VerificationJob
    from windlass.verify.verification_rank import VerificationFinished, VerificationSession

    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        session = VerificationSession(VerificationJob(folder, steps))
        stack.callback(install_observer, install_observer(session))
        if fault is not None:
            stack.enter_context(FAULTS[fault]())
        with suppress(VerificationFinished):
            train(*args)
        session.write_result()
        for watched in session.verifiers:
            watched.engine.destroy()
        return json.loads(session.job.result_path.read_text()) if dist.get_rank() == 0 else []


def verify_training(
    train: Callable[..., None], *args: Any, ranks: int = 2, steps: int = 3, fault: str | None = None, **more: Any
) -> list[dict[str, Any]]:
    """Return the verdicts on `train(*args)`, one per engine; `more` has arguments of `run_ranks`."""
    result: list[list[dict[str, Any]]] = run_ranks(watch, ranks, train, steps, fault, *args, **more)
    return result[0]


def verify(
    subject: str,
    config: dict[str, Any],
    *,
    steps: int = 3,
    dtype: torch.dtype = torch.float32,
    **more: Any,
) -> dict[str, Any]:
    """Return the verdict on a specimen."""
    (verdict,) = verify_training(train_specimen, subject, config, dtype, steps, steps=steps, **more)
    return verdict
