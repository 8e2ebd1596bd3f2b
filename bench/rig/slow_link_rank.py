"""Rank of a training method on a slow link, pinned to a core, that trains on command."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from rig.compared_methods import RANKS
from rig.job import Job
from rig.method_rank import pin
from rig.models import Sizes, build, samples
from rig.worker import Worker

MODEL = Sizes(hidden=512, layers=12, heads=8, intermediate=1408, vocabulary=8192)
HELD, LR = 16, 1e-4
"""Steps between two messages of 0/1 Adam; learning rate of all methods."""
INNER_STEPS = 32

ENGINES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "stage 1": {"type": "AdamW", "stage": 1},
    "1-bit adam": {"type": "OneBitAdam", "stage": 0, "freeze_step": 1},
    "1-bit adam, stage 1": {"type": "OneBitAdam", "stage": 1, "freeze_step": 1},
    "0/1 adam": {
        "type": "ZeroOneAdam",
        "stage": 0,
        "var_freeze_step": 1,
        "var_update_scaler": 1,
        "local_step_scaler": 1,
        "local_step_clipper": HELD,
    },
    "powersgd": {"type": "PowerSGD", "stage": 0, "start_step": 1},
    "diloco": {"type": "DiLoCo", "stage": 0, "inner_steps": INNER_STEPS},
    "diloco, overlapped": {
        "type": "DiLoCo",
        "stage": 0,
        "inner_steps": INNER_STEPS,
        "fragments": 4,
        "overlap_steps": 6,
    },
}
"""Optimizer and stage by name of the method; an empty entry is torch's DistributedDataParallel."""
PERIODS = {"0/1 adam": HELD, "diloco": INNER_STEPS, "diloco, overlapped": INNER_STEPS}
"""Steps of a method's cycle; methods without an entry send the same in every step."""
_WARM = {"0/1 adam": 2 * HELD, "diloco": INNER_STEPS, "diloco, overlapped": INNER_STEPS}
_FIRST_STEPS = 3


class SlowLinkRank(Worker):
    """Worker of a `RankPool` for a method of `ENGINES`."""

    def __init__(self, job: Job, rank: int, meeting: str) -> None:
        pin(rank)
        super().__init__(job, rank, meeting)

    @property
    def sizes(self) -> Sizes:
        """Sizes of the model."""
        return replace(MODEL, layers=self._job.size.layers)

    @property
    def dtype(self) -> Any:
        """Dtype of the parameters."""
        return self._torch.float32

    def build(self, watch: bool = False) -> dict[str, Any]:
        """Build the model and its engine, and train through the method's warm-up, until its messages have their final
        form.

        Return the number of parameters, and the seconds of a forward and backward without the method.
        """
        name = self._job.engine
        model = build(self.sizes).to(self.dtype)
        compute = self._compute_alone(model)
        self._numel = sum(p.numel() for p in model.parameters())
        self._step = self._ddp(model) if name == "ddp" else self._windlass(model)
        for _ in range(_WARM.get(name, _FIRST_STEPS)):
            self._step(self._tokens())
        return {"parameters": self._numel, "compute": compute}

    def _compute_alone(self, model: Any) -> float:
        """Return the seconds of a forward and backward of one batch, while all ranks compute."""
        times = []
        for _ in range(_FIRST_STEPS):
            tokens = self._tokens()
            self._dist.barrier()
            start = time.perf_counter()
            model(input_ids=tokens, labels=tokens).loss.backward()
            times.append(time.perf_counter() - start)
            model.zero_grad(set_to_none=True)
        return min(times)

    def pace(self, rate: int) -> int:
        """Call `rig.link.pace` for the existing connections."""
        from rig.link import pace

        return pace(rate)

    def steps(self, count: int) -> dict[str, Any]:
        """Call `timed_steps`, and check that one connection carries the bytes."""
        from rig.link import received_by_connection, require_one_link

        before = received_by_connection()
        found = self.timed_steps(count)
        require_one_link([nbytes - before.get(ends, 0) for ends, nbytes in received_by_connection().items()])
        return found

    def timed_steps(self, count: int) -> dict[str, Any]:
        """Train. Return the seconds of all steps together, the CPU seconds, and the bytes received from the peer."""
        from windlass.comm.traffic import set_traffic_observer

        received: list[int] = []
        set_traffic_observer(lambda operation, nbytes: received.append(nbytes))
        self._dist.barrier()
        start, busy = time.perf_counter(), time.process_time()
        for _ in range(count):
            self._step(self._tokens())
        self._dist.barrier()
        seconds, busy = time.perf_counter() - start, time.process_time() - busy
        set_traffic_observer(None)
        if self._job.engine == "ddp":  # least volume of an all-reduce, because DDP has no traffic counter
            received = [count * 2 * 4 * self._numel * (RANKS - 1) // RANKS]
        return {"seconds": seconds, "busy": busy, "bytes": sum(received)}

    def _tokens(self) -> Any:
        self._taken += 1
        size = self._job.size
        return samples(self.sizes.vocabulary, size.batch, size.length, 1000 * self._taken + self._rank)

    def _ddp(self, model: Any) -> Any:
        from torch.nn.parallel import DistributedDataParallel

        optimizer = self._torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)

        def step(tokens: Any) -> None:
            wrapped(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return step

    def _windlass(self, model: Any) -> Any:
        import windlass

        config = {
            "train_micro_batch_size_per_gpu": self._job.size.batch,
            "comm": {"transport": "gloo"},  # shared memory has no link to pace
            "steps_per_print": 10**9,
            **self._sections(),
        }
        engine: Any = windlass.initialize(model=model, config=config)[0]

        def step(tokens: Any) -> None:
            engine.backward(engine(input_ids=tokens, labels=tokens).loss)
            engine.step()

        return step

    def _sections(self) -> dict[str, Any]:
        """Return the sections of the configuration that are the method's own."""
        given = dict(ENGINES[self._job.engine])
        kind, stage = given.pop("type"), given.pop("stage")
        return {
            "optimizer": {"type": kind, "params": {"lr": LR, **given}},
            "zero_optimization": {"stage": stage},
        }
