"""A specimen trained on ranks under the eyes of `windlass verify`, whole or with a fault planted in the sharded run."""

from __future__ import annotations

import json
import tempfile
from contextlib import ExitStack, suppress
from typing import Any

import torch.distributed as dist

from tests import oracle
from tests.dist.faults import FAULTS
from tests.dist.harness import run_ranks
from tests.dist.laws import specimen
from tests.models import Place, Specimen, cast


def train_watched(subject: Specimen, config: dict[str, Any], dtype: Any, accumulation: int, steps: int) -> None:
    """Train it as any script would: the place of each micro-batch says its batch."""
    import windlass

    rank = dist.get_rank()
    engine = windlass.initialize(model=oracle.build(subject, rank), config=config)[0]
    for step in range(steps):
        for micro in range(accumulation):
            subject.train(engine, cast(subject.batch(Place(step, micro, rank)), dtype), engine.backward)
            engine.step()


def verify_rank(
    subject: str, config: dict[str, Any], dtype: Any, steps: int, fault: str | None
) -> list[dict[str, Any]]:
    """What rank 0 finds of the specimen under `config`; other ranks return nothing."""
    from windlass.engine.watch import install
    from windlass.verify.order import Order
    from windlass.verify.session import Finished, Session

    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        session = Session(Order(folder, steps))
        stack.callback(install, install(session))
        if fault is not None:
            stack.enter_context(FAULTS[fault]())
        accumulation = config["gradient_accumulation_steps"]
        with suppress(Finished):
            train_watched(specimen(subject), config, dtype, accumulation, steps)
        for watched in session.engines:
            watched.engine.destroy()
        return json.loads(session.order.result.read_text()) if dist.get_rank() == 0 else []


def verify(
    subject: str,
    config: dict[str, Any],
    *,
    ranks: int = 2,
    steps: int = 3,
    dtype: Any = None,
    fault: str | None = None,
    env: dict[str, str] | None = None,
    transport: str | None = None,
) -> dict[str, Any]:
    """The verdict on a specimen."""
    import torch

    found = run_ranks(
        verify_rank, ranks, subject, config, dtype or torch.float32, steps, fault, env=env, transport=transport
    )
    (verdict,) = found[0]
    return dict(verdict)
