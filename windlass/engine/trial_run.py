"""Part of a tuning trial that runs inside the program: changes the configuration, measures steps, ends the program.

See [Note: tuning trial] in `trial_job`.
"""

from __future__ import annotations

import importlib
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from windlass.base.atomic_file import write_atomically
from windlass.base.tensor_tree import iterate_tensors
from windlass.config import Config
from windlass.config.config_overrides import override_keys
from windlass.config.config_source import read_source
from windlass.engine.engine_observer import EngineObserver
from windlass.engine.initialize_observer import InitializeObserver, current_observer, install_observer
from windlass.engine.training_engine import Engine
from windlass.engine.trial_job import TrialJob, trial_from_environment
from windlass.observe.memory_usage import proportional_bytes
from windlass.parallel.model_checkpointing import is_checkpointing
from windlass.parallel.pipeline.running_stage import get_running_stage
from windlass.zero.sharded_model import ShardedModel

_SAMPLING_S = 0.02
_EXIT_GRACE_S = 10.0

Forecast = Callable[[Any, tuple[Any, ...], dict[str, Any]], None]


class TrialFinished(SystemExit):
    """Exit of the program on all ranks after enough steps."""


def observer_of_run() -> InitializeObserver:
    """Return the installed observer. In a tuning trial without one, install a `TrialObserver` and return it."""
    observer = current_observer()
    if type(observer) is InitializeObserver:
        job = trial_from_environment()
        if job is not None:
            observer = TrialObserver(job)
            install_observer(observer)
    return observer


class TrialObserver(InitializeObserver):
    """Observer that measures the first engine of the program that has an optimizer."""

    def __init__(self, job: TrialJob) -> None:
        self.job = job
        self._peak = HostMemoryPeak()
        self._forecast: Forecast | None = None
        self._raw: dict[str, Any] = {}
        # Number of elements of the model; None before the first `initialize` with an optimizer.
        self._parameters: int | None = None
        self._steps: TrialSteps | None = None

    def change_config(self, source: Any) -> Any:
        """Return the program's configuration with the keys of the trial; None for engines after the measured one."""
        if self._steps is not None:
            return None
        given = read_source(source).data
        self._raw = {key: value for key, value in given.items() if key != "autotuning"}
        return override_keys(self._raw, self.job.overrides)

    def before_sharding(self, model: nn.Module, optimizer: torch.optim.Optimizer | None, config: Config) -> None:
        """Begin to sample memory, and prepare the memory forecast on rank 0."""
        if optimizer is None or self._steps is not None:
            return
        self._parameters = sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters())
        self._peak.start(held=sum(p.numel() * p.element_size() for p in model.parameters()))
        if self.job.forecast and dist.get_rank() == 0:
            module, _, name = self.job.forecast.partition(":")
            with self._peak.leaving_out():
                make: Any = getattr(importlib.import_module(module), name)
                self._forecast = make(
                    self.job.forecast_order,
                    self._raw,
                    model,
                    dist.get_world_size(),
                    self._peak.base,
                    own_checkpointing=is_checkpointing(model) and not config.activation_checkpointing.enabled,
                )

    def after_initialize(self, engine: Engine) -> None:
        """Measure the steps of the engine from now on."""
        if self._parameters is None or self._steps is not None:
            return
        self._steps = TrialSteps(self.job, engine, self._parameters, self._peak, self._forecast)
        engine.add_observer(self._steps)


class TrialSteps(EngineObserver):
    """Observer that times the steps of an engine and ends the program.

    Args:
        parameters: Number of elements of the model.
        forecast: Function that predicts the memory of candidate configurations. It is called before the first forward
            runs, with the micro-batch size and the forward's arguments; None: no forecast.
    """

    def __init__(
        self, job: TrialJob, engine: Engine, parameters: int, peak: HostMemoryPeak, forecast: Forecast | None
    ) -> None:
        self._job, self._engine, self._parameters = job, engine, parameters
        self._peak, self._forecast = peak, forecast
        self._done = 0
        self._step_s: list[float] = []
        self._forward_s: list[float] = []
        self._update_s: list[float] = []
        self._forward = 0.0
        self._started = self._forward_started = self._update_started = time.perf_counter()
        self._fed: list[int] | None = None
        # Run this hook before all others: those of sequence parallelism leave only this rank's tokens of the batch.
        engine.module.register_forward_pre_hook(self._before_forward, with_kwargs=True, prepend=True)
        engine.module.register_forward_hook(self._after_forward)

    def on_sharded(self, model: ShardedModel) -> None:
        self._group = model.mesh.world
        self._device = model.device

    def _before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._fed is None and torch.is_grad_enabled():  # skip the batches of an evaluation before the training
            first = next((t for t in iterate_tensors((args, kwargs)) if t.dim()), None)
            self._fed = list(first.shape) if first is not None else []
            if self._forecast is not None:
                stage = get_running_stage()
                if stage is not None:  # the forward of a first stage gets no labels, which the last stage needs
                    args, kwargs = (), dict(stage.arguments)
                with self._peak.leaving_out():
                    self._forecast(self._engine.progress.batch.micro, args, kwargs)
        self._forward_started = self._now()

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        self._forward += self._now() - self._forward_started

    def before_step(self) -> None:
        self._update_started = self._now()

    def after_step(self) -> None:
        """Record the step, and end the program after the last one.

        Raises:
            TrialFinished: enough steps were timed, or the configuration is much slower than the best one.
        """
        now = self._now()
        self._done += 1
        timed = self._done - self._job.warmup
        if timed > self._job.steps:
            os._exit(0)  # the program continued after TrialFinished
        if timed > 0:
            self._step_s.append(now - self._started)
            self._forward_s.append(self._forward)
            self._update_s.append(now - self._update_started)
        if timed == 0:
            self._peak.stop()
        is_slow = timed == 2 and self._job.slow_s is not None and self._group.broadcast_object(self._is_slow())
        if timed == self._job.steps or is_slow:
            self._finish(ended_early=is_slow and timed < self._job.steps)
        self._forward, self._started = 0.0, self._now()

    def _is_slow(self) -> bool:
        return self._job.slow_s is not None and min(self._step_s) > self._job.slow_s

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def _finish(self, *, ended_early: bool) -> None:
        self._peak.stop()
        on_device = torch.cuda.max_memory_reserved(self._device) if self._device.type == "cuda" else 0
        peaks = self._group.all_gather_object((on_device, self._peak.bytes))
        if self._group.index == 0:
            batch = self._engine.progress.batch
            result = {
                "step_s": statistics.median(self._step_s),
                "steps": self._step_s,
                "forward_s": statistics.median(self._forward_s),
                "update_s": statistics.median(self._update_s),
                "train_batch": batch.train,
                "micro": batch.micro,
                "accumulation": batch.accumulation,
                "world_size": self._group.size,
                "fed_shape": self._fed or [],
                "parameters": self._parameters,
                "device": self._device.type,
                "peak_device": max(device for device, _ in peaks),
                "peak_host": max(host for _, host in peaks),
                "ended_early": ended_early,
            }
            write_atomically(Path(self._job.result), json.dumps(result, indent=1))
        self._group.barrier()
        sys.stdout.flush()
        sys.stderr.flush()
        exit_later()
        raise TrialFinished(0)


def exit_later() -> None:
    """End this process after some seconds, if it waits for others at its exit."""
    timer = threading.Timer(_EXIT_GRACE_S, os._exit, (0,))
    timer.daemon = True
    timer.start()


class HostMemoryPeak:
    """Peak of this process's memory (PSS: a page that n processes share counts 1/n), sampled by a thread.

    Attributes:
        base: Bytes of the process without the model, at the start of the sampling.
        bytes: Largest sample.
    """

    def __init__(self) -> None:
        self.base = self.bytes = self._left_out = 0
        self._sampling = threading.Lock()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, held: int) -> None:
        """Begin to sample. `held`: bytes of the model."""
        self.bytes = proportional_bytes() or 0
        self.base = max(0, self.bytes - held)
        self._thread = threading.Thread(target=self._sample, name="tune-memory", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop sampling."""
        if self._thread is not None:
            self._over.set()
            self._thread.join()
            self._thread = None

    @contextmanager
    def leaving_out(self) -> Iterator[None]:
        """Context without samples. Memory that it leaves allocated is subtracted from later samples."""
        with self._sampling:
            before = proportional_bytes() or 0
            try:
                yield
            finally:
                self._left_out += max(0, (proportional_bytes() or 0) - before)

    def _sample(self) -> None:
        while not self._over.wait(_SAMPLING_S):
            with self._sampling:
                self.bytes = max(self.bytes, (proportional_bytes() or 0) - self._left_out)
