"""FLOPs of one step of an engine, counted on rank 0 and reported once. Later log lines have arithmetic rate and MFU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

import torch
from torch import nn

from windlass.base.atomic_file import make_directory, open_new
from windlass.base.compute_device import synchronized_time
from windlass.base.dtypes import parse_dtype
from windlass.base.log import logger
from windlass.comm.mesh import Mesh
from windlass.config import Config
from windlass.observe.device_peak import DevicePeak, device_peak
from windlass.observe.flop_counter import FlopCounter
from windlass.observe.flop_profile import ModelProfile, build_profile
from windlass.observe.flop_report import ReportOptions, StepFacts, flops_to_string, report_lines
from windlass.parallel.placement import get_global_numel


class ProfiledEngine(Protocol):
    """Methods and attributes of an engine that its profiler reads. See `Engine`."""

    module: nn.Module

    @property
    def device(self) -> torch.device: ...
    @property
    def mesh(self) -> Mesh: ...
    @property
    def global_steps(self) -> int: ...
    @property
    def data_loading_ranks(self) -> tuple[int, int]: ...
    def train_batch_size(self) -> int: ...
    def train_micro_batch_size_per_gpu(self) -> int: ...
    def gradient_accumulation_steps(self) -> int: ...


class StepProfiler:
    """Profiler of the step `flops_profiler.profile_step`, or of the first training step after it.

    Attributes:
        profile: result for one micro-batch; None before that step has ended.
    """

    def __init__(self, config: Config, engine: ProfiledEngine) -> None:
        self._config, self._section, self._engine = config, config.flops_profiler, engine
        self.profile: ModelProfile | None = None
        self._counter: FlopCounter | None = None
        self._step = 0
        self._seconds: dict[str, float] = {}
        self._calls: dict[str, int] = {}
        self._last_line: tuple[int, float] | None = None

    @contextmanager
    def phase(self, name: str, timer: AbstractContextManager[None]) -> Iterator[None]:
        """Run `forward`, `backward` or `step` of the engine inside `timer`; count its FLOPs in the profiled step."""
        if self.profile is None and self._counter is None and name == "forward" and self._begins_now():
            self._begin()
        counter = self._counter
        if counter is None or (name == "forward" and not self._trains()):
            with timer:
                yield
            return
        succeeded = False
        try:
            start = synchronized_time(self._engine.device)
            if name == "step":
                with timer:
                    yield
            else:
                with counter.counting(), timer:
                    yield
            self._seconds[name] = self._seconds.get(name, 0.0) + synchronized_time(self._engine.device) - start
            self._calls[name] = self._calls.get(name, 0) + 1
            succeeded = True
        finally:
            if not succeeded:
                self.close()
        if name == "step":
            self._finish(counter)

    def rate(self, step: int) -> str:
        """Return arithmetic rate and MFU of a rank since the last call, as text; empty before the profile.

        Rate and MFU count the forward and backward FLOPs of the profiled micro-batch, without recomputation.
        """
        if self.profile is None:
            return ""
        now, before = synchronized_time(self._engine.device), self._last_line
        self._last_line = step, now
        if before is None or step <= before[0]:
            return ""
        return self._describe_rate((now - before[1]) / (step - before[0]))

    def close(self) -> None:
        """Stop counting, without a result."""
        if self._counter is not None:
            self._counter.detach()
            self._counter = None

    def _begins_now(self) -> bool:
        return self._engine.global_steps >= self._section.profile_step and self._trains()

    def _trains(self) -> bool:
        return self._engine.module.training and torch.is_grad_enabled()

    def _begin(self) -> None:
        self._step, self._seconds, self._calls = self._engine.global_steps, {}, {}
        self._counter = FlopCounter(self._engine.module, self._engine.device)
        self._counter.attach()

    def _finish(self, counter: FlopCounter) -> None:
        self.close()
        # with several parts of a pipeline on this rank, each micro-batch has several forwards
        micro_batches = min(self._calls.get("forward", 1), self._engine.gradient_accumulation_steps())
        self.profile = build_profile(
            self._engine.module, counter, micro_batches=micro_batches, numel_of_model=get_global_numel
        )
        text = "\n".join(report_lines(self.profile, self._report_options(micro_batches)))
        if self._section.output_file is None:
            logger.info(text)
        else:
            self._write(text)
        self._last_line = self._engine.global_steps, synchronized_time(self._engine.device)

    def _report_options(self, micro_batches: int) -> ReportOptions:
        engine, mesh, section = self._engine, self._engine.mesh, self._section
        data_size = engine.data_loading_ranks[0]
        backward = self._seconds.get("backward")
        forward = self._seconds["forward"] / micro_batches
        step = self._seconds["step"]
        facts = StepFacts(
            step=self._step,
            world_size=mesh.world.size,
            data_size=data_size,
            model_size=mesh.world.size // data_size,
            micro_batch=engine.train_micro_batch_size_per_gpu(),
            samples=engine.train_batch_size(),
            forward_seconds=forward,
            backward_seconds=None if backward is None else backward / micro_batches,
            step_seconds=step,
            micro_batches=micro_batches,
            recompute_factor=section.recompute_fwd_factor,
            peak="" if backward is None else self._describe_rate(forward * micro_batches + backward + step),
        )
        return ReportOptions(section.module_depth, section.top_modules, section.detailed, facts)

    def _describe_rate(self, step_seconds: float) -> str:
        assert self.profile is not None
        root, peak = self.profile.root, self._peak()
        work = (root.forward + root.backward) * self._engine.gradient_accumulation_steps()
        rate = work / step_seconds
        of = f"{flops_to_string(peak.flops)} ({peak.source})"
        return f"{flops_to_string(rate)}, MFU {100 * rate / peak.flops:.1f} % of {of}"

    def _peak(self) -> DevicePeak:
        if self._section.peak_tflops is not None:
            return DevicePeak(1e12 * self._section.peak_tflops, "configuration")
        first = next((p.dtype for p in self._engine.module.parameters() if p.is_floating_point()), torch.float32)
        known = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(first, "fp32")
        return device_peak(self._engine.device, parse_dtype(self._config.dtype_table(known).compute_dtype))

    def _write(self, text: str) -> None:
        path = Path(self._section.output_file or "")
        try:
            make_directory(path.parent)
            with open_new(path, "w", encoding="utf-8") as file:
                file.write(text + "\n")
        except OSError as error:  # the step was made on all ranks, so training continues
            logger.warning(
                f"flops_profiler.output_file: {path} can't be written ({error.strerror}); name a file in a folder that "
                f"you may write. The report follows\n{text}"
            )
            return
        logger.info(f"flops profile of step {self._step}: {path}")
