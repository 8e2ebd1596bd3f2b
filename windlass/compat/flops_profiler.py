"""DeepSpeed's `FlopsProfiler` and `get_model_profile`: FLOPs, multiply-accumulates, parameters and time by module."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from windlass.base.atomic_file import make_directory, open_new
from windlass.base.errors import ModelError
from windlass.base.module_modes import evaluating
from windlass.base.text import print_escaped
from windlass.observe.flop_counter import FlopCounter
from windlass.observe.flop_profile import ModelProfile, build_profile
from windlass.observe.flop_report import (
    ReportOptions,
    StepFacts,
    aggregated_lines,
    duration_to_string,
    macs_to_string,
    number_to_string,
    params_to_string,
    report_lines,
)
from windlass.parallel.placement import get_global_numel


class FlopsProfiler:
    """Counter of a model's FLOPs and time between `start_profile` and `stop_profile`.

    Totals are those of the forwards in between; the profile of each module also has its backward and recomputation.

    Args:
        model: the model; parts of parameters and ZeRO's placeholders are counted in full.
        ds_engine: engine of the model, for the summary.
        recompute_fwd_factor: number of forwards that the backward recomputes, used for the rates in the report.
    """

    def __init__(self, model: nn.Module, ds_engine: Any = None, recompute_fwd_factor: float = 0.0) -> None:
        self.model, self.ds_engine, self.recompute_fwd_factor = model, ds_engine, recompute_fwd_factor
        self.started = False
        self.func_patched = False
        self._ignored: tuple[type[nn.Module], ...] = ()
        self._counter: FlopCounter | None = None
        self._counting: Any = None
        self._profile: ModelProfile | None = None

    def start_profile(self, ignore_list: Collection[type[nn.Module]] | None = None) -> None:
        """Begin to count; earlier counts are dropped. Modules of the types in `ignore_list` are left out.

        A `TorchDispatchMode` that is entered after this call must be left before `stop_profile`.
        """
        self.end_profile()
        self._ignored = tuple(ignore_list or ())
        self._counter = FlopCounter(self.model, _device_of(self.model), self._ignored)
        self._counter.attach()
        self._counting = self._counter.counting()
        self._counting.__enter__()
        self.started = True

    def stop_profile(self) -> None:
        """Stop counting. The totals stay until the next start or end."""
        if self._counting is not None and self._counter is not None:
            self._counting.__exit__(None, None, None)
            self._counting = None
            self._counter.detach()
            self._profile = self._read(self._counter)

    def reset_profile(self) -> None:
        """Drop the counts so far; a running profile continues from zero."""
        if self._counting is not None:
            self.stop_profile()
            self.start_profile(self._ignored)
        else:
            self._profile = None

    def end_profile(self) -> None:
        """Stop counting and drop the totals."""
        self.stop_profile()
        self._counter, self._profile, self.started = None, None, False

    def is_expert_tensor_parallelism_enabled(self) -> bool:
        """Return True if experts are divided over tensor-parallel ranks."""
        mesh = getattr(self.ds_engine, "mesh", None)
        return mesh is not None and mesh.tp.size > 1 and mesh.ep.size > 1

    @property
    def profile(self) -> ModelProfile:
        """Profile of the last run, or of the running one so far.

        Raises:
            ModelError: nothing was profiled.
        """
        if self._counting is not None and self._counter is not None:
            return self._read(self._counter)
        if self._profile is None:
            raise ModelError("FlopsProfiler: there is no profile; call start_profile() and run the model first")
        return self._profile

    @property
    def flops(self) -> int:
        """FLOPs of the forwards."""
        total: int = self.get_total_flops()
        return total

    @property
    def macs(self) -> int:
        """Multiply-accumulates of the forwards."""
        total: int = self.get_total_macs()
        return total

    @property
    def params(self) -> int:
        """Number of this rank's parameters, in full where ZeRO shards them."""
        total: int = self.get_total_params()
        return total

    def get_total_flops(self, as_string: bool = False) -> Any:
        """Return the FLOPs of the forwards."""
        total = self.profile.root.forward
        return number_to_string(total) if as_string else total

    def get_total_macs(self, as_string: bool = False) -> Any:
        """Return the multiply-accumulates of the forwards."""
        total = self.profile.root.macs
        return macs_to_string(total) if as_string else total

    def get_total_duration(self, as_string: bool = False) -> Any:
        """Return the seconds of the model's forwards."""
        total = self.profile.root.seconds
        return duration_to_string(total) if as_string else total

    def get_total_params(self, as_string: bool = False) -> Any:
        """Return the number of this rank's parameters, in full where ZeRO shards them."""
        total = self.profile.root.parameters
        return params_to_string(total) if as_string else total

    def print_model_profile(
        self,
        profile_step: int = 1,
        module_depth: int = -1,
        top_modules: int = 1,
        detailed: bool = True,
        output_file: str | None = None,
    ) -> None:
        """Print the report, or write it to `output_file`."""
        facts = StepFacts(step=profile_step, recompute_factor=self.recompute_fwd_factor, **self._engine_facts())
        options = ReportOptions(module_depth, top_modules, detailed, facts)
        _write_lines(report_lines(self.profile, options), output_file)

    def print_model_aggregated_profile(self, module_depth: int = -1, top_modules: int = 1) -> None:
        """Print the classes of modules with most parameters, multiply-accumulates and time at each depth."""
        _write_lines(aggregated_lines(self.profile, module_depth, top_modules), None)

    def _engine_facts(self) -> dict[str, Any]:
        engine = self.ds_engine
        if engine is None:
            return {}
        data_size = engine.data_loading_ranks[0]
        return {
            "world_size": engine.world_size,
            "data_size": data_size,
            "model_size": engine.world_size // data_size,
            "micro_batch": engine.train_micro_batch_size_per_gpu(),
        }

    def _read(self, counter: FlopCounter) -> ModelProfile:
        return build_profile(self.model, counter, numel_of_model=get_global_numel)


class EngineFlopsProfiler(FlopsProfiler):
    """Profiler of an engine. Until `start_profile` is called, `profile` is that of the engine's profiled step.

    Args:
        step_profile: returns the profile of the engine's profiled step, or None before it.
    """

    def __init__(
        self, ds_engine: Any, recompute_fwd_factor: float, step_profile: Callable[[], ModelProfile | None]
    ) -> None:
        super().__init__(ds_engine.module, ds_engine, recompute_fwd_factor)
        self._step_profile = step_profile

    @property
    def profile(self) -> ModelProfile:
        """Profile of the last run, else that of the engine's profiled step.

        Raises:
            ModelError: nothing was profiled.
        """
        of_step = self._step_profile()
        return of_step if self._counter is None and of_step is not None else super().profile


def get_model_profile(
    model: nn.Module,
    input_shape: tuple[int, ...] | None = None,
    args: Iterable[Any] = (),
    kwargs: dict[str, Any] | None = None,
    print_profile: bool = True,
    detailed: bool = True,
    module_depth: int = -1,
    top_modules: int = 1,
    warm_up: int = 1,
    as_string: bool = True,
    output_file: str | None = None,
    ignore_modules: Collection[type[nn.Module]] | None = None,
    mode: str = "forward",
) -> tuple[Any, Any, Any]:
    """Return FLOPs, multiply-accumulates and parameters of one call in evaluation mode.

    Args:
        input_shape: shape of a tensor of ones that is the model's only argument, in place of `args` and `kwargs`.
        warm_up: number of calls before the counted one.
        as_string: return text such as `"1.43 G"`, `"714.7 MMACs"` and `"61.1 M"`; else numbers.
        output_file: receives the report in place of stdout.
        ignore_modules: types of modules that are left out.
        mode: `"forward"`, or `"generate"` for the model's method of this name.

    Raises:
        ModelError: there are no inputs, `args` is a tensor, `input_shape` is not a tuple of sizes, `mode` is unknown,
            or the model has no method `generate`.
    """
    if isinstance(args, torch.Tensor):
        raise ModelError("get_model_profile: args is a tensor; give a list of arguments: [tensor]")
    arguments = list(args)
    if input_shape is not None:
        if type(input_shape) is not tuple or not input_shape:
            raise ModelError(
                f"get_model_profile: input_shape is {input_shape!r}; give a tuple of sizes like (1, 3, 224)"
            )
        arguments = [_ones(model, input_shape)]
    if not arguments and not kwargs:
        raise ModelError("get_model_profile: there are no inputs; give input_shape, args or kwargs")
    if mode not in ("forward", "generate"):
        raise ModelError(f'get_model_profile: mode is {mode!r}; write "forward" or "generate"')
    if mode == "generate" and not callable(getattr(model, "generate", None)):
        raise ModelError(f"get_model_profile: {type(model).__name__} has no method generate; write mode='forward'")
    call = model if mode == "forward" else model.generate
    profiler = FlopsProfiler(model)
    with evaluating(model):
        try:
            for _ in range(warm_up):
                call(*arguments, **(kwargs or {}))  # type: ignore[operator]
            profiler.start_profile(ignore_modules)
            call(*arguments, **(kwargs or {}))  # type: ignore[operator]
            profiler.stop_profile()
            found = profiler.profile.root
            if print_profile:
                profiler.print_model_profile(warm_up, module_depth, top_modules, detailed, output_file)
        finally:
            profiler.end_profile()
    if as_string:
        return number_to_string(found.forward), macs_to_string(found.macs), params_to_string(found.parameters)
    return found.forward, found.macs, found.parameters


def _device_of(model: nn.Module) -> torch.device:
    first = next(model.parameters(), None)
    return torch.device("cpu") if first is None else first.device


def _ones(model: nn.Module, shape: tuple[int, ...]) -> torch.Tensor:
    first = next(model.parameters(), None)
    if first is None:
        return torch.ones(shape)
    dtype = first.dtype if first.is_floating_point() else torch.get_default_dtype()
    return torch.ones(shape, dtype=dtype, device=first.device)


def _write_lines(lines: Iterable[str], output_file: str | None) -> None:
    if output_file is None:
        for line in lines:
            print_escaped(line)
        return
    path = Path(output_file)
    make_directory(path.parent)
    with open_new(path, "w", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")
