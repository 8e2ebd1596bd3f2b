"""Training engine for models with pipeline stages.

Each call runs a full step, because the schedule interleaves forwards and backwards of several micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, TypeVar

import torch

from windlass.base.errors import ConfigError, ModelError
from windlass.base.log import logger
from windlass.base.tensor_tree import iterate_tensors, replace_tensors
from windlass.comm.background_call import BackgroundCall
from windlass.config import Config
from windlass.engine.batch_shapes import BatchShapes
from windlass.engine.collective_errors import CollectiveErrorCheck
from windlass.engine.input_consistency import InputConsistencyCheck
from windlass.engine.micro_batch_reader import MicroBatchReader, repeat_forever
from windlass.engine.model_refresh import unfrozen_parameters
from windlass.engine.schedule_unshard import ScheduleUnshardPolicy
from windlass.engine.training_engine import Engine
from windlass.engine.training_progress import TrainingProgress
from windlass.optim.loss_scale import LossScale
from windlass.parallel.pipeline.apply_pipeline_parallel import get_pipeline_stages
from windlass.parallel.pipeline.pipeline_action import ActionKind as Action
from windlass.parallel.pipeline.pipeline_action import RankActions
from windlass.parallel.pipeline.pipeline_schedules import build_forward_schedule, build_schedule
from windlass.parallel.pipeline.pipeline_stages import MicroBatchResult
from windlass.parallel.pipeline.schedule_executor import ExecutorCallbacks, ScheduleFailed, execute_schedule
from windlass.parallel.pipeline.schedule_simulation import compute_bubble_fraction
from windlass.parallel.pipeline.stage_transfers import StageTransfers
from windlass.parallel.pipeline.transfer_order import add_transfers
from windlass.zero.core.collective_scheduler import SyncPoint
from windlass.zero.engine_callbacks import BuildShardedModel, EngineCallbacks
from windlass.zero.sharded_model import ShardedModel

PipelineEngineT = TypeVar("PipelineEngineT", bound=Engine)

_WORDS = {
    Action.FORWARD: "forward",
    Action.BACKWARD: "backward",
    Action.BACKWARD_INPUT: "backward",
    Action.BACKWARD_WEIGHT: "backward of the weights",
    Action.SEND_ACTIVATION: "sending of the activation",
    Action.RECEIVE_ACTIVATION: "receiving of the activation",
    Action.SEND_GRADIENT: "sending of the gradient",
    Action.RECEIVE_GRADIENT: "receiving of the gradient",
}
_NOT_STARTED = "nothing was computed on any rank; continue with the next batch"
_BATCH_DROPPED = (
    "this batch is dropped on all ranks, parameters and optimizer states are unchanged; continue with the next batch"
)


class PipelineEngine(Engine):
    """Engine for one rank's stages of a pipeline. Every rank of the pipeline reads the same micro-batches.

    `train_batch` makes a step of `gradient_accumulation_steps` micro-batches; `eval_batch` runs micro-batches without
    gradients. `forward`, `backward`, `step` and `no_sync` raise a ModelError.
    """

    _is_last_backward = False  # True during the last backward of the step
    _is_broken = False  # True if a schedule was aborted and the stages are at different micro-batches
    _can_recover = True  # True if a rank that fails can still make the transfers and collectives that others need
    _stage_transfer: StageTransfers | None = None
    _keeps_last_micro_batch = False
    _last_micro_batch: Any = None  # last micro-batch of the last step, if `_keeps_last_micro_batch`

    def __init__(
        self,
        build_sharded_model: BuildShardedModel,
        optimizer: torch.optim.Optimizer | None,
        config: Config,
        progress: TrainingProgress,
        scaler: LossScale,
    ) -> None:
        super().__init__(build_sharded_model, optimizer, config, progress, scaler)
        sharded = self._sharded
        if not progress.managed_gradient_accumulation:
            raise ConfigError(
                "managed_gradient_accumulation is false, but a pipeline runs all micro-batches of a step in one "
                "train_batch; write true"
            )
        stages = get_pipeline_stages(sharded.model)
        assert stages is not None, "a pipeline engine needs a model partitioned by apply_pipeline_parallel"
        self._stages, self._axis = stages, sharded.mesh.pp
        self._stages_per_rank = stages.total_stages // self._axis.size
        self._stage_transfer = StageTransfers(self._axis, self.device, has_dynamic_shapes=stages.has_dynamic_shapes)
        self._left = "Ctrl-C, or a broken connection"
        self._programs: dict[tuple[str, int], RankActions] = {}
        self._batch_reader = MicroBatchReader(sharded.mesh)
        self._error_check = CollectiveErrorCheck(sharded.mesh.world, f"rank {self.global_rank}")
        section, micros = config.pipeline, progress.batch.accumulation
        idle = compute_bubble_fraction(section.schedule, self._axis.size, micros, self._stages_per_rank)
        logger.info(
            f"pipeline: {stages.total_stages} stages on {self._axis.size} ranks, {section.schedule}, {micros} "
            f"micro-batches per step: {100 * idle:.0f} % idle if stages take equally long; "
            f"{self._unshard_policy.traffic_summary(micros)}"
        )

    def _attach(self, sharded: ShardedModel) -> None:
        super()._attach(sharded)
        # a rank that failed inside its stage's forward cannot join the collectives of that forward
        self._can_recover = all(axis.size == 1 for axis in (sharded.mesh.tp, sharded.mesh.sp, sharded.mesh.ep))
        self._unshard_policy = ScheduleUnshardPolicy(sharded, self._config)
        if self._stage_transfer is not None:
            self._stage_transfer.forget_layouts()

    def _make_callbacks(self) -> EngineCallbacks:
        return replace(super()._make_callbacks(), is_step_next=lambda: self._is_last_backward)

    def _record_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Do nothing: `train_batch` records a micro-batch, and a forward of a stage may take activations."""

    def _make_input_check(self, sharded: ShardedModel) -> InputConsistencyCheck:
        return _NoInputCheck(sharded.mesh)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Raise a ModelError: the module is not compiled as a whole."""
        raise ModelError(
            "a pipeline's engine does not compile its module, because the forward of each stage runs other layers; "
            "leave out engine.compile() and compile.enabled, and compile the layers before initialize"
        )

    # Training and evaluation.

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> torch.Tensor:
        """Make one step of `gradient_accumulation_steps` micro-batches. Collective over all ranks.

        Args:
            data_iter: iterator of micro-batches, the same on every rank of a pipeline. It is kept for later steps.
                Default: the previous iterator, or else the loader of `initialize(training_data=...)`, repeated forever.

        Returns:
            The mean of the losses of all micro-batches and data-parallel ranks, a scalar on the device of every rank.
            Each micro-batch has the same weight whatever its size, as in plain accumulation.

        Raises:
            StopIteration: all ranks have read their last micro-batch. Nothing was changed.
            DataError: there are fewer micro-batches than a step needs, or ranks of a pipeline read different ones.
                Nothing was changed.
            PeerError: reading, a stage or the loss raised on another rank, which raises its own error. The message has
                this error, with the stage and micro-batch if a stage raised. No rank makes a step, and training can
                continue with the next batch; after an error in a stage or loss, only if tp, sp and ep are 1.
            ModelError: parameters were unfrozen without `refresh`, or an earlier schedule was aborted.
            LossError, StorageError, UpdateError: as `Engine.step`.
        """
        self._require_ready("train_batch")
        self._sharded.disk_health.require_intact("a batch")  # raises on all ranks, before one waits for others
        if unfrozen_parameters(self._sharded):
            raise ModelError("parameters were unfrozen: call engine.refresh() on every rank of the pipeline first")
        assert self._optimizer is not None, "train_batch needs an optimizer: pass one to initialize or name one"
        if data_iter is not None:
            self.set_dataiterator(data_iter)
        micros = self.progress.batch.accumulation
        batches = self._read_micro_batches(micros, "train_batch", loader=self.training_dataloader)
        if self._keeps_last_micro_batch:
            self._last_micro_batch = batches[-1]
        self.module.train()
        if self._observers:
            self._error_check.run(lambda: self._observe_batches(batches), "preparing the step", _NOT_STARTED)
        self._batch_shapes = _shapes_of_micro_batch(batches[-1])
        try:
            ended = self._run_schedule(self._rank_schedule("train", micros), batches, self._build_callbacks())
        except Exception as error:
            self._note_out_of_memory(error, "schedule")
            raise
        loss: torch.Tensor = self._mean_loss([one.loss for one in ended], True)
        self._reporter.record_loss(loss)
        self.progress.micro_steps += micros - 1
        super().step()
        return loss

    def eval_batch(
        self,
        data_iter: Iterator[Any],
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """Run micro-batches without gradients, in evaluation mode. Collective over all ranks.

        Args:
            data_iter: iterator of micro-batches, the same on every rank of a pipeline.
            return_logits: also return the model's outputs, on the last stage.
            compute_loss: compute losses; if False, return a list of the outputs instead of the loss.
            reduce_output: `"avg"`: the mean over micro-batches and data-parallel ranks; None: a list with one loss per
                micro-batch.
            bcast_loss: send a reduced loss to every rank; else only the last stage has it.
            num_micro_batches: number of micro-batches; `gradient_accumulation_steps` by default.

        Returns:
            The loss; with `return_logits`, a pair of the loss and the outputs of all micro-batches, concatenated if
            their shapes allow it, else as a list. A rank has None in place of a loss or outputs that it lacks.

        Raises:
            StopIteration, DataError, PeerError: as `train_batch`.
            StorageError: parameters were lost earlier, e.g. by a step that was applied in part.
        """
        self._require_ready_to_compute("eval_batch")
        self._sharded.disk_health.require_intact("a batch")
        if reduce_output not in ("avg", None):
            raise ModelError(f'eval_batch: reduce_output is {reduce_output!r}; write "avg", or None')
        micros = num_micro_batches or self.progress.batch.accumulation
        batches = self._read_micro_batches(micros, "eval_batch", data_iter, compute_loss=compute_loss)
        training, requested = self.module.training, return_logits or not compute_loss
        self.module.eval()
        try:
            with torch.no_grad():
                program = self._rank_schedule("evaluate", micros)
                ended = self._run_schedule(
                    program, batches, self._build_callbacks(), compute_loss=compute_loss, keep_outputs=requested
                )
        finally:
            self.module.train(training)
        outputs = [_logits(one.output) for one in ended] or None
        result: Any = outputs
        if compute_loss:
            losses = [one.loss for one in ended]
            result = self._mean_loss(losses, bcast_loss) if reduce_output == "avg" else losses or None
        return (result, _concatenate(outputs)) if return_logits else result

    def keep_last_micro_batch(self) -> None:
        """Keep the last micro-batch of each step until the next step, for `last_micro_batch_gradients`."""
        self._keeps_last_micro_batch = True

    def last_micro_batch_gradients(self, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Run a forward and a backward of the last step's last micro-batch, in the module's present mode. Collective
        over the pipeline. Gradients of parameters are neither computed nor changed.

        Args:
            leaves: leaf tensors, with `grad` None, that this rank's stages use in their forwards; may be empty.

        Returns:
            The gradient of the loss with respect to each of the leaves; None if the loss does not depend on it.

        Raises:
            PeerError: a stage or the loss raised on another rank.
        """
        callbacks = replace(
            self._build_callbacks(), run_backward=lambda run, _: run(), loss_factor=lambda: 1.0, leaves=leaves
        )
        self._run_schedule(self._rank_schedule("differentiate", 1), [self._last_micro_batch], callbacks)
        return [leaf.grad for leaf in leaves]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Raise a ModelError: a pipeline runs full steps only."""
        raise ModelError(_refusal("forward"))

    def backward(self, *args: Any, **kwargs: Any) -> Any:
        """Raise a ModelError: a pipeline runs full steps only."""
        raise ModelError(_refusal("backward"))

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Raise a ModelError: a pipeline runs full steps only."""
        raise ModelError(_refusal("step"))

    def no_sync(self) -> Any:
        """Raise a ModelError: a pipeline runs full steps only."""
        raise ModelError(_refusal("no_sync"))

    # Data.

    def set_dataiterator(self, iterator: Iterator[Any]) -> None:
        """Read micro-batches from `iterator` in later calls."""
        self._batch_reader.set_source(iterator)

    def set_dataloader(self, loader: Iterable[Any]) -> None:
        """Read micro-batches from this loader, repeated forever."""
        self.training_dataloader = loader
        self._batch_reader.set_source(repeat_forever(loader))

    def set_batch_fn(self, fn: Callable[[Any], Any] | None) -> None:
        """Apply `fn` to every micro-batch before it is used."""
        self._batch_reader.transform = fn

    # Execution.

    def _rank_schedule(self, mode: str, micro_batches: int) -> RankActions:
        key = mode, micro_batches
        if key not in self._programs:
            ranks, name = self._axis.size, self._config.pipeline.schedule
            if mode == "evaluate":
                schedule = build_forward_schedule(ranks, micro_batches, self._stages_per_rank)
            else:
                name = name if mode == "train" else "gpipe"  # GPipe never splits a backward into two actions
                schedule = build_schedule(name, ranks, micro_batches, self._stages_per_rank)
            self._programs[key] = add_transfers(schedule)[self._axis.index]
        return self._programs[key]

    def _read_micro_batches(
        self, count: int, purpose: str, data: Any = None, loader: Any = None, *, compute_loss: bool = True
    ) -> list[Any]:
        """Read and check the micro-batches of a step on every rank before any stage runs. Collective."""

        def read() -> list[Any]:
            micro_batches = self._batch_reader.read(count, data, purpose=purpose, loader=loader)
            for batch in micro_batches:
                self._stages.check_batch(batch, compute_loss=compute_loss)
            return micro_batches

        batches: list[Any] = self._error_check.run(read, "reading micro-batches", _NOT_STARTED)
        if self._batch_reader.is_first_use(purpose):
            self._error_check.run(
                lambda: self._batch_reader.check_same_on_peers(batches), "comparing micro-batches", _NOT_STARTED
            )
        return batches

    def _observe_batches(self, batches: list[Any]) -> None:
        for observer in self._observers:
            observer.before_schedule(batches, self._move_to_device)

    def _run_schedule(
        self, schedule: RankActions, batches: list[Any], callbacks: ExecutorCallbacks, **more: bool
    ) -> list[MicroBatchResult]:
        assert self._stage_transfer is not None
        if self._is_broken:
            raise ModelError(
                f"a schedule of this pipeline was aborted ({self._left}), so its stages are no longer at the "
                "same micro-batch; start the run again from its last checkpoint"
            )
        self._is_broken, ended, halted = True, [], None
        try:
            with self._failed_call_barrier.guard("schedule"):
                ended = execute_schedule(schedule, self._stages, self._stage_transfer, batches, callbacks, **more)
        except ScheduleFailed as raised:
            halted = raised
        if halted is not None and not self._can_recover:
            error = halted.error or halted
            axes = [name for name in ("tp", "sp", "ep") if self.mesh.axes[name].size > 1]
            keys = ", ".join(f"parallel.{name}" for name in axes)
            self._left = f"{type(error).__name__}: {error}; with {keys}, a batch that raises cannot be dropped"
            raise error
        if self._can_recover:
            self._finish_schedule(halted)
        self._is_broken = False
        return ended

    def _finish_schedule(self, halted: ScheduleFailed | None) -> None:
        """Complete all transfers and collectives, then raise on every rank if a stage raised on any. Collective."""
        drain = BackgroundCall(halted.drain) if halted is not None else None
        # `sync` takes part in the collectives that other ranks still run before they reach this point.
        self._sharded.scheduler.sync(SyncPoint.SCHEDULE_END)
        if drain is not None:
            drain.join()
        if not self._error_check.any_failed(halted, "a schedule"):
            return
        self._sharded.scheduler.new_step()
        self._sharded.drop_gradients()
        self._drop_token_counts()
        self._is_broken = False
        action = halted.action if halted is not None else None
        what = (
            f"the {_WORDS[action.kind]} of micro-batch {action.micro_batch} in stage {action.stage}" if action else ""
        )
        self._error_check.raise_on_all_ranks(halted.error if halted is not None else None, what, _BATCH_DROPPED)

    def _build_callbacks(self) -> ExecutorCallbacks:
        return ExecutorCallbacks(
            call_module=super().forward,
            keep_unsharded=self._hold_unsharded,
            run_backward=self._run_backward,
            on_weight_backward=self._on_backward_begin,
            loss_factor=lambda: self._scaler.scale,
            to_device=self._move_to_device,
        )

    def _hold_unsharded(self) -> AbstractContextManager[Any]:
        units = self._unshard_policy.held_units()
        return self._sharded.runtime.unsharded(units) if units else nullcontext()

    def _run_backward(self, run: Callable[[], None], is_last: bool) -> None:
        self._is_last_backward, self._loss_is_scaled = is_last, True
        try:
            with self._reporter.timed("backward"):
                run()
        finally:
            self._is_last_backward = False
            self._on_backward_end()

    def _is_syncing(self) -> bool:
        return self._is_last_backward or (self._sharded.policy.grad and not self._unshard_policy.unshards_once)

    def _move_to_device(self, batch: Any) -> Any:
        if not isinstance(batch, torch.Tensor) and hasattr(batch, "to"):  # transformers' BatchEncoding
            return batch.to(self.device)
        moved = {id(t): t.to(self.device, non_blocking=True) for t in iterate_tensors(batch) if t.device != self.device}
        return replace_tensors(batch, moved)

    def _mean_loss(self, losses: list[torch.Tensor | None], broadcast: bool) -> Any:
        """Return the mean loss of all micro-batches and data-parallel ranks; None on a rank that does not have it."""
        local = [loss.float() for loss in losses if loss is not None]
        mean = torch.stack(local).mean() if local else torch.zeros((), device=self.device)
        if self.is_last_stage():
            data = self.mesh.dense.data
            if data.size > 1:
                data.all_reduce(mean)
                mean /= data.size
        if broadcast:
            return self._axis.broadcast(mean, self._axis.size - 1)
        return mean if self.is_last_stage() else None

    # Queries.

    @property
    def num_stages(self) -> int:
        """Number of ranks of the pipeline."""
        return self._axis.size

    @property
    def stage_id(self) -> int:
        """This rank's index in the pipeline."""
        return self._axis.index

    @property
    def micro_batches(self) -> int:
        """Micro-batches per step."""
        return self.progress.batch.accumulation

    def is_first_stage(self) -> bool:
        """Return True if this rank has the first layers."""
        return self._axis.index == 0

    def is_last_stage(self) -> bool:
        """Return True if this rank has the last layers, and so the loss."""
        return self._axis.index == self._axis.size - 1

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return True during the last backward of the step."""
        return self._is_last_backward

    def reset_activation_shape(self) -> None:
        """Exchange the layouts of activations between stages again at the next transfer.

        Call this on every rank if layouts changed although micro-batches have the same shapes.
        """
        if self._stage_transfer is not None:
            self._stage_transfer.forget_layouts()


class _NoInputCheck(InputConsistencyCheck):
    """Input check that does nothing: ranks have compared full micro-batches, and a stage's inputs may be shards."""

    def check(self, inputs: Any) -> None:
        return


def engine_class_for(engine_class: type[PipelineEngineT], model: torch.nn.Module) -> type[PipelineEngineT]:
    """Return the engine class for a model: `engine_class`, or its pipeline variant for a model with pipeline stages."""
    if get_pipeline_stages(model) is None or issubclass(engine_class, PipelineEngine):
        return engine_class
    if engine_class not in _pipeline_classes:
        _pipeline_classes[engine_class] = (
            PipelineEngine
            if engine_class is Engine
            else type(f"Pipeline{engine_class.__name__}", (PipelineEngine, engine_class), {})
        )
    pipeline_class: type[PipelineEngineT] = _pipeline_classes[engine_class]
    return pipeline_class


_pipeline_classes: dict[type[Engine], Any] = {}  # base engine class -> its pipeline variant


def register_pipeline_engine(engine_class: type[Engine], pipeline_class: type[PipelineEngine]) -> None:
    """Use `pipeline_class` for pipelines in place of `engine_class`."""
    _pipeline_classes[engine_class] = pipeline_class


def _refusal(what: str) -> str:
    return (
        f"engine.{what}() is not available for a pipeline, whose stages interleave forwards and backwards of several "
        "micro-batches; engine.train_batch(data_iter) makes a full step, engine.eval_batch(data_iter) evaluates"
    )


def _logits(output: Any) -> Any:
    return output if isinstance(output, torch.Tensor) else getattr(output, "logits", output)


def _concatenate(outputs: list[Any] | None) -> Any:
    if not outputs or not all(isinstance(one, torch.Tensor) and one.dim() for one in outputs):
        return outputs
    return torch.cat(outputs) if len({one.shape[1:] for one in outputs}) == 1 else outputs


def _shapes_of_micro_batch(batch: Any) -> BatchShapes:
    """Return the shapes of a micro-batch as arguments of the full model's forward."""
    if isinstance(batch, Mapping):
        return BatchShapes((), dict(batch))
    return BatchShapes(tuple(batch) if isinstance(batch, (list, tuple)) else (batch,), {})
