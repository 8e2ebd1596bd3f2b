"""Profiler of an engine's steps: `windlass.profile`."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from windlass.base import trace_ranges
from windlass.base.errors import ConfigError, ModelError, WindlassError
from windlass.base.log import logger
from windlass.comm.rank_group import world_group
from windlass.engine.engine_observer import EngineObserver
from windlass.engine.training_engine import Engine
from windlass.tracing.chrome_trace import write_trace
from windlass.tracing.memory_timeline import HeldMemory, held_memory
from windlass.tracing.operator_events import OperatorEvents, OperatorProfiler
from windlass.tracing.range_log import RangeLog
from windlass.tracing.rank_profile import RankProfile, make_rank_profile
from windlass.tracing.run_profile import RunProfile
from windlass.zero.sharded_model import ShardedModel


class TraceProfiler(EngineObserver):
    """Recorder of the steps of one engine, between `start` and `stop`.

    Args:
        engine: the engine, which this object observes until `close`.
        operators: also record the operators and allocations of torch.
        after_step: called after each step with this profiler.
    """

    def __init__(
        self, engine: Engine, *, operators: bool = True, after_step: Callable[[TraceProfiler], None] | None = None
    ) -> None:
        self._engine, self._with_operators, self._after_step = engine, operators, after_step
        self._model: ShardedModel | None = None
        self._log: RangeLog | None = None
        self._operators: OperatorProfiler | None = None
        self._held: HeldMemory | None = None
        self.seen_steps = 0  # number of steps since the construction
        engine.add_observer(self)

    @property
    def is_recording(self) -> bool:
        """True between `start` and `stop`."""
        return self._log is not None

    @property
    def recorded_steps(self) -> int:
        """Number of finished steps since `start`."""
        return len(self._log.steps) if self._log is not None else 0

    def on_sharded(self, model: ShardedModel) -> None:
        self._model = model

    def after_step(self) -> None:
        self.seen_steps += 1
        if self._log is not None:
            self._log.end_step()
        if self._after_step is not None:
            self._after_step(self)

    def start(self) -> None:
        """Begin to record, between two steps. Collective if an update is in flight.

        Raises:
            ModelError: another profile is being recorded in this process.
        """
        assert self._model is not None
        if trace_ranges.recorder is not None:
            raise ModelError("a profile is being recorded in this process already; end it before the next")
        self._held = held_memory(self._model)
        if self._with_operators:
            self._operators = OperatorProfiler(self._engine.device)
            self._operators.start()
        self._log = RangeLog(self._model.transport.name)
        trace_ranges.install_recorder(self._log)

    def cancel(self) -> None:
        """Stop recording and drop the recorded data; does nothing if nothing is recorded."""
        self._take()

    def stop(self) -> RankProfile:
        """Stop recording, and return the profile of this rank.

        Raises:
            ModelError: no step ended since `start`.
        """
        model, held = self._model, self._held
        log, operators = self._take()
        if log is None or not log.steps or model is None or held is None:
            raise ModelError(
                "no step ended in the profile; inside it, call engine.step() (or train_batch) up to an accumulation "
                "boundary"
            )
        return make_rank_profile(
            log,
            operators,
            held,
            rank=self._engine.global_rank,
            host=platform.node(),
            device=str(self._engine.device),
            transport=model.transport.name,
        )

    def close(self) -> None:
        """Stop observing the engine."""
        self.cancel()
        self._engine.remove_observer(self)

    def _take(self) -> tuple[RangeLog | None, OperatorEvents | None]:
        log, self._log = self._log, None
        profiler, self._operators = self._operators, None
        if log is not None:
            trace_ranges.install_recorder(None)
        return log, profiler.stop() if profiler is not None else None


def gather_profiles(local: RankProfile) -> RunProfile | None:
    """Return the profiles of all ranks on rank 0; None on other ranks. Collective."""
    world = world_group()
    packed = world.gather_object(local.pack())
    if world.index != 0:
        return None
    return RunProfile([RankProfile.unpack(one) for one in packed])


@dataclass
class ProfileResult:
    """Result of `windlass.profile`.

    Attributes:
        run: profiles of all ranks, on rank 0 after the context; else None.
    """

    run: RunProfile | None = None

    def summary(self) -> str:
        """Return the summary as text; empty on other ranks than 0, and inside the context."""
        return self.run.summary() if self.run is not None else ""


@contextmanager
def profile(engine: Engine, path: str | Path, *, operators: bool = True) -> Iterator[ProfileResult]:
    """Record the steps of `engine` inside the context, and write a trace of all ranks to `path` on rank 0.

    Collective: all ranks enter and leave the context between the same two steps. If its body raises, nothing is
    written.

    Args:
        path: file for Perfetto (ui.perfetto.dev) or chrome://tracing; compressed if its name ends in `.gz`.
        operators: also record torch's operators and their allocations, which include the activations. This makes steps
            somewhat slower.

    Raises:
        ConfigError: `path` is a folder, or its folder does not exist.
        ModelError: no step ended inside the context, or another profile is being recorded.
        TraceFileError: the trace cannot be written.
    """
    check_trace_path(Path(path))
    result, profiler = ProfileResult(), TraceProfiler(engine, operators=operators)
    try:
        profiler.start()
        yield result
        result.run = gather_profiles(profiler.stop())
    finally:
        profiler.close()
    if result.run is not None:
        save_trace(result.run, Path(path))
        logger.info(f"{result.summary()}\ntrace: {path}; open it in ui.perfetto.dev")


def check_trace_path(path: Path) -> None:
    """Raise ConfigError if no file can be made at `path`."""
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ConfigError(f"cannot write a trace to {path}: give a file in a folder that exists, such as trace.json")


class TraceFileError(WindlassError, OSError):
    """Error for a trace file that cannot be written."""


def save_trace(run: RunProfile, path: Path) -> None:
    """Write the trace.

    Raises:
        TraceFileError: the file cannot be written.
    """
    try:
        write_trace(run, path)
    except OSError as error:
        raise TraceFileError(
            f"cannot write the trace to {path}: {error.strerror or error}; free some space or give another file"
        ) from error
