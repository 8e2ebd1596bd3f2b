"""Training engine: forward, backward, step, and the methods that scripts call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from windlass.base.backward_callbacks import current_backward_id, queue_end_of_backward
from windlass.base.collective_activity import activity
from windlass.base.dtypes import is_castable, parse_dtype
from windlass.base.errors import CommunicationError, ConfigError, LossError, LossScalingError, ModelError
from windlass.base.garbage_collection import suspend_garbage_collection
from windlass.base.log import logger
from windlass.base.model_updates import note_update
from windlass.base.module_modes import evaluating
from windlass.checkpoint.async_save import AsyncSave
from windlass.comm.mesh_axis import MeshAxis
from windlass.config import BatchSizes, Config
from windlass.engine.batch_shapes import BatchShapes
from windlass.engine.checkpoint_methods import CheckpointMethods
from windlass.engine.compiled_forwards import CompiledForwards
from windlass.engine.data_loaders import build_data_loader
from windlass.engine.engine_observer import EngineObserver
from windlass.engine.engine_reporter import EngineReporter
from windlass.engine.failed_call_barrier import FailedCallBarrier
from windlass.engine.input_consistency import InputConsistencyCheck
from windlass.engine.model_refresh import (
    check_no_lost_gradients,
    drop_external_gradients,
    has_pending_gradients,
    refresh_model,
    unfrozen_parameters,
)
from windlass.engine.module_buffers import BufferDtypePolicy, BufferSynchronizer
from windlass.engine.nonfinite_locator import NonFiniteLocator
from windlass.engine.out_of_memory import FailedRun, note_out_of_memory
from windlass.engine.query_methods import QueryMethods
from windlass.engine.rng_and_data_position import step_start_position
from windlass.engine.sharded_optimizer import ShardedOptimizer, ShardedOptimizerCallbacks
from windlass.engine.training_progress import TrainingProgress
from windlass.optim.loss_scale import LossScale
from windlass.parallel.experts import find_router_biases, update_biases
from windlass.parallel.sequence.apply_sequence_parallel import sequence_parallel_of
from windlass.zero.access.script_gradients import ScriptGradientCallbacks, format_foreign_gradients
from windlass.zero.core.collective_scheduler import SyncPoint
from windlass.zero.core.sharded_parameter import note_freed_values
from windlass.zero.engine_callbacks import BuildShardedModel, EngineCallbacks
from windlass.zero.sharded_model import ShardedModel
from windlass.zero.step_outcome import StepOutcome
from windlass.zero.update.offload_states import KINDS

if TYPE_CHECKING:
    from windlass.engine.hybrid_generation import HybridGeneration


class Engine(QueryMethods, CheckpointMethods, nn.Module):
    """Model in training (or evaluation) under one configuration. Built by `windlass.initialize`.

    Attributes that the engine does not have are looked up in the module.
    """

    # True: a second step without a backward between is accepted, although the first has cleared the gradients
    allows_repeated_steps = False
    hides_gradients = False  # True: parameters' `.grad` reads as None; else reading its values raises
    drops_external_gradients = (
        False  # True: a gradient that the script sets is dropped at the step; else setting it raises
    )
    # True: zero_grad after a micro-batch that does not end a step keeps the accumulated gradients
    keeps_accumulated_gradients = False
    applies_nonfinite_steps = False  # True: a non-finite gradient updates the parameters like any other
    skips_nonfinite_steps = False  # True: a non-finite gradient skips its step with a warning, instead of an error
    keeps_buffers = False  # True: 16-bit models keep the dtype of their buffers, except the statistics of norms
    _scaling_engine: Engine | None = None  # shared by all engines: engine that scaled the current backward's loss

    def __init__(
        self,
        build_sharded_model: BuildShardedModel,
        optimizer: torch.optim.Optimizer | None,
        config: Config,
        progress: TrainingProgress,
        scaler: LossScale,
    ) -> None:
        super().__init__()
        self._config, self.progress, self._scaler = config, progress, scaler
        self._observers: list[EngineObserver] = []
        self._build_sharded_model = build_sharded_model
        self._hybrid: HybridGeneration | None = None
        sharded = self._sharded = build_sharded_model(self._make_callbacks())
        self.module = sharded.model
        self.device = sharded.device
        world = sharded.mesh.world
        self.world_size, self.global_rank = world.size, world.ranks[world.index]
        self.local_rank = self.device.index if self.device.index is not None else _local_rank()
        self.config = config.raw
        self._optimizer: ShardedOptimizer | None = None
        if optimizer is not None:
            self._optimizer = ShardedOptimizer(
                optimizer,
                sharded,
                ShardedOptimizerCallbacks(
                    step=self._step_by_optimizer,
                    refresh=self.refresh,
                    loss_scale=self.loss_scale,
                    set_loss_scale=self._set_loss_scale,
                ),
            )
        # Public attribute. `DeepSpeedEngine` sets it to a placeholder object if there is no optimizer.
        self.optimizer: Any = self._optimizer
        self.lr_scheduler: Any = None
        self._step_start_position: dict[str, Any] | None = None  # data position at the start of the current step
        self.training_dataloader = None
        self._reporter = EngineReporter(config, self, has_monitor=optimizer is not None)
        self._reporter.record_start(sharded)
        self._loss_weight = 1.0 / progress.batch.accumulation
        self._no_sync = False
        self._loss_is_scaled = False  # True: the loss of the next backward includes the loss scale
        self._grad_norm: float | None = None
        self._batch_shapes: BatchShapes | None = None  # inputs of the last forward, for a note on its memory
        self._backwards_at_last_step_call = 0  # backwards of the current step, counted when the last `step` call ended
        self._async_save = AsyncSave(sharded.mesh.world.ranks)
        self._destroyed = False
        self._compiled = CompiledForwards()
        self.saved_tags: set[tuple[str, str]] = set()  # directories and tags of checkpoints that this engine wrote
        self._restore_gc = suspend_garbage_collection() if config.disable_python_gc else _nothing
        self._attach(sharded)

    @property
    def training_dataloader(self) -> Any:
        """Data loader. Checkpoints contain its position."""
        return self._training_dataloader

    @training_dataloader.setter
    def training_dataloader(self, loader: Any) -> None:
        self._training_dataloader = loader
        self._note_step_start()

    def _note_step_start(self) -> None:
        self._step_start_position = step_start_position(self._training_dataloader)

    def _make_callbacks(self) -> EngineCallbacks:
        """Return the callables that the engine's sharded models call."""
        return EngineCallbacks(
            gradient_weight=lambda: self._loss_weight * self._scale_correction(),
            reduces_this_backward=self._is_syncing,
            is_step_next=lambda: self.progress.is_at_boundary() and not self._no_sync,
            loss_scale=lambda: self._scaler.scale,
            on_gradient=self._observe_gradient if self._config.fp16.enabled else None,
            on_backward_begin=lambda: self._failed_call_barrier.begin("backward"),
            on_backward_end=self._end_gradients,
            before_update=self._before_update,
            on_weights_edited=self._on_weights_edited,
            on_gradient_dropped=self._on_gradient_dropped,
            script_gradients=ScriptGradientCallbacks(
                hides_gradients=lambda: self.hides_gradients,
                refuses_external_gradients=lambda: not self.drops_external_gradients,
                keeps_accumulated=lambda: self.keeps_accumulated_gradients and self._is_between_micro_batches(),
                before_drop=self._log_dropped_gradients,
            ),
        )

    def add_observer(self, observer: EngineObserver) -> None:
        """Call the methods of `observer` from now on, after those of earlier observers."""
        self._observers.append(observer)
        observer.on_sharded(self._sharded)

    def remove_observer(self, observer: EngineObserver) -> None:
        """Stop calling `observer`. Does nothing if it was not added."""
        # A new list, because an observer may remove itself while all of them are called.
        self._observers = [one for one in self._observers if one is not observer]

    def _attach(self, sharded: ShardedModel) -> None:
        """Connect the engine to a sharded model that it has built."""
        self._sharded = sharded
        if self._optimizer is not None:
            self._optimizer.attach(sharded)
        meet = partial(sharded.scheduler.sync, SyncPoint.BUFFER_BROADCAST)
        self._buffer_sync = BufferSynchronizer(
            self.module, sharded.mesh, self.device, self._buffer_dtype_policy(), meet
        )
        self._router_balances = find_router_biases(self.module)
        self._nonfinite_locator = NonFiniteLocator(sharded.mesh.world)
        self._failed_call_barrier = FailedCallBarrier(
            sharded.mesh, gathers=any(unit.frees_memory for unit in sharded.units)
        )
        self._input_check = self._make_input_check(sharded)
        sequences = sequence_parallel_of(self.module)
        self._alone_in_eval = sequences is not None and sequences.only_training
        for observer in self._observers:
            observer.on_sharded(sharded)

    def _make_input_check(self, sharded: ShardedModel) -> InputConsistencyCheck:
        sequences = sequence_parallel_of(self.module)
        return InputConsistencyCheck(sharded.mesh, sequence_is_sharded=sequences is None or sequences.pre_sharded)

    def _buffer_dtype_policy(self) -> BufferDtypePolicy | None:
        compute, section = self._sharded.settings.param_dtype, self._config.data_types
        if compute is None:
            return None
        dtype = parse_dtype(section.buffer_dtype) if section.buffer_dtype else None
        return BufferDtypePolicy(
            self.module, compute, dtype, section.keep_in_fp32_modules, norms_only=self.keeps_buffers
        )

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(super().__getattr__("module"), name)

    def refresh(self) -> None:
        """Adapt to changes of the model: parameters that were unfrozen, modules that were added or removed. Collective.

        Parameters that were trained before keep their master weights and optimizer states, also if they are frozen at
        present, unless they left the optimizer's groups. New ones begin as in plain PyTorch. Scripts need to call this
        only after modules changed. The engine itself calls it at the first forward after `requires_grad` was set on a
        frozen parameter of the optimizer's groups, and if `optimizer.add_param_group` brings new parameters.

        If parameters were only unfrozen, their units get master weights and gradient storage. All other data stays in
        place, including gradients of a step that has begun. If modules changed, every rank needs host memory for the
        model, and for master weights and states divided by the number of ranks. Before the call, remove parameters
        of removed modules from the optimizer's groups.

        Raises:
            ModelError: modules changed and a step has begun, an optimizer's parameter is not in the model, an embedding
                with `max_norm` would be trained on several data ranks, or the parameters are replaced by their moving
                averages at present. Nothing was changed.
            StorageError: there is no space on NVMe. If modules changed, the engine is destroyed.
        """
        self._require_ready("refresh")
        refresh_model(self._sharded, before_destroy=self._async_save.wait, rebuild=self._rebuild)

    def _rebuild(self) -> ShardedModel:
        """Shard the model again, after the previous sharded model was destroyed. Collective."""
        sharded = self._build_sharded_model(self._make_callbacks())
        self._attach(sharded)
        return sharded

    # Training.

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        self._require_ready_to_compute("forward")
        # A backward that ended with an exception leaves `_scaling_engine` set.
        if Engine._scaling_engine is not None and current_backward_id() < 0:
            _clear_scaling_engine()
        if torch.is_grad_enabled() and unfrozen_parameters(self._sharded):
            self.refresh()
        if self.module.training and torch.is_grad_enabled():
            self._buffer_sync.broadcast_if_stale()
        if self._config.fp16.enabled and self._config.fp16.auto_cast:
            args, kwargs = _cast((args, kwargs), torch.float16)
        self._nonfinite_locator.micro_batch = self.progress.micro_steps
        self._sharded.disk_health.require_intact("a forward")
        # Inside `applied()` the parameters are averages, from which a rank's local change must not be subtracted.
        is_averaged = any(average.is_applied for average in self._sharded.averages.values())
        if (self.module.training or torch.is_grad_enabled()) and not is_averaged:
            self._sharded.replicas.show_local_weights()
        else:
            self._sharded.replicas.show_common_weights()
        activity.is_evaluating = not self.module.training
        together = self.module.training or not self._alone_in_eval
        self._record_inputs(args, kwargs)
        try:
            with (
                self._failed_call_barrier.guard("forward", together=together),
                self._reporter.timed("forward"),
                self._autocast(),
            ):
                self._input_check.check((args, kwargs))
                output = self.module(*args, **kwargs)
        except Exception as error:
            self._note_out_of_memory(error, "forward")
            raise
        self._sharded.after_forward()
        return output

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Backpropagate the scalar `loss`, divided by the accumulation steps unless `scale_wrt_gas` is False.

        Returns:
            The divided loss, without the loss scale.

        Raises:
            AssertionError: there is no optimizer, or the loss is not a scalar.
        """
        assert self._optimizer is not None, (
            "backward needs an optimizer: pass one to initialize or name one in the config"
        )
        assert isinstance(loss, torch.Tensor) and loss.numel() == 1, (
            f"backward takes a scalar loss, not {tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss)}"
        )
        self._loss_weight = 1.0 / self.progress.batch.accumulation if scale_wrt_gas else 1.0
        for observer in self._observers:
            observer.before_backward(loss, self._loss_weight)
        self._hook_backward_begin(loss)
        self._loss_is_scaled = True
        self._reporter.record_loss(loss)
        try:
            with self._failed_call_barrier.guard("backward"), self._reporter.timed("backward"):
                (loss.float() * self._scaler.scale if self._scaler.scale != 1.0 else loss).backward(
                    retain_graph=retain_graph
                )
        except Exception as error:
            self._note_out_of_memory(error, "backward")
            note_freed_values(error)
            raise
        finally:
            self._loss_weight = 1.0 / self.progress.batch.accumulation
            self._on_backward_end()
            for observer in self._observers:
                observer.after_backward()
        return loss * (1.0 / self.progress.batch.accumulation) if scale_wrt_gas else loss

    def scale(self, loss: torch.Tensor, retain_graph: bool = False) -> torch.Tensor:
        """Return `loss` times the loss scale. Call `.backward()` on the result where `engine.backward` does not fit.

        `retain_graph` is accepted and ignored; pass it to `backward` of the result.
        """
        for observer in self._observers:
            observer.before_backward(loss, 1.0 / self.progress.batch.accumulation)
        self._hook_backward_begin(loss)
        self._loss_is_scaled = True
        return loss.float() * self._scaler.scale if self._scaler.scale != 1.0 else loss

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """End a micro-batch.

        At the accumulation boundary, clip gradients, update parameters, clear gradients and advance the learning rate
        scheduler.

        Raises:
            LossError: a gradient is not finite (under fp16, or with `skips_nonfinite_steps`, such a step is skipped
                instead). Nothing was updated.
            StorageError: NVMe failed on some rank. If that was before the update, nothing was updated. If it was during
                the update, or if damaged parameters or states were read, the model is unusable: every call raises
                except `destroy` and a `load_checkpoint` of the complete state. The message names the case.
            UpdateError: the delayed update of the previous step failed on some rank.
        """
        assert self._optimizer is not None, "step needs an optimizer: pass one to initialize or name one in the config"
        self._require_ready("step")
        observers = self._observers if self.progress.would_end_step() else []
        for observer in observers:
            observer.before_step()
        try:
            self._end_micro_batch(lr_kwargs or {})
        except BaseException as error:
            self._note_out_of_memory(error, "step")
            for observer in observers:
                observer.after_failed_step()
            raise
        note_update(self.module)
        for observer in observers:
            observer.after_step()

    def _record_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._batch_shapes = BatchShapes(args, kwargs)

    def _note_out_of_memory(self, error: BaseException, moment: str) -> None:
        """Add a note to an out-of-memory error: the predicted memory, and a configuration that would fit."""
        note_out_of_memory(
            error, FailedRun(self.module, self._config, self.world_size, self.device, moment, self._batch_shapes)
        )

    def _end_micro_batch(self, lr_kwargs: dict[str, Any]) -> None:
        self._failed_call_barrier.wait_for_peers()
        if self._no_sync:
            raise ModelError("step() inside no_sync(): gradients were not reduced; leave the context first")
        self.progress.last_step_applied = False
        self.progress.is_stepping = True
        try:
            if self.progress.is_at_boundary():
                self._failed_call_barrier.begin("step")
                with self._reporter.timed("step"):
                    self._optimizer_step(lr_kwargs)
        finally:  # a failed step has dropped its gradients, so the next micro-batch begins a step
            self.progress.is_stepping = False
            self.progress.end_micro_batch()
            self._backwards_at_last_step_call = self._sharded.reducer.backward_count
            if not self.progress.is_step_started:
                self._note_step_start()

    def _step_by_optimizer(self) -> None:
        """Implement `engine.optimizer.step()`."""
        self.step()

    def _optimizer_step(self, lr_kwargs: dict[str, Any]) -> None:
        assert self._optimizer is not None
        self._sharded.runtime.end_failed_backwards()
        try:
            outcome = self._update_parameters()
        except CommunicationError:
            raise  # `drop_gradients` could hang: reductions in flight may never end
        except Exception:
            # The micro-batches of the failed step stay counted. The next one begins a step without their gradients.
            self._sharded.drop_gradients()
            self._drop_token_counts()
            self._nonfinite_locator.clear()
            raise
        if not outcome.applied:
            self._drop_token_counts()
        fp16 = self._config.fp16.enabled
        self._grad_norm = outcome.norm
        if outcome.bad:
            self._nonfinite_locator.clear()
            self._report_nonfinite(outcome)
        if outcome.flags[0] > 0:
            self._buffer_sync.mark_stale()
        self._optimizer.mark_called()
        if outcome.applied:
            self._optimizer.run_post_hooks()
            self._balance_routers()
        where = ""
        if fp16 and not outcome.applied:
            where = f"{self._nonfinite_locator.locate()}, step {self.progress.global_steps}"
        self._nonfinite_locator.clear()
        self._optimizer.overflow = not outcome.applied
        self.progress.record_step(applied=outcome.applied)
        if not outcome.bad:
            self._update_loss_scale(not outcome.applied, where)
        if self.lr_scheduler is not None and outcome.applied:
            self._step_lr_scheduler(lr_kwargs)
        self._reporter.record_step(self._sharded.transport.traffic)
        if outcome.flags[1] > 0:  # the async save failed on some rank: all ranks raise at the same step
            self._async_save.finish()

    def _update_loss_scale(self, overflow: bool, location: str = "") -> None:
        """Update the loss scale at the end of a step, and the values that contain it."""
        before = self._scaler.scale
        self._scaler.update(overflow, location)
        self._follow_loss_scale(before)

    def _follow_loss_scale(self, before: float) -> None:
        """Convert values that contain the loss scale `before` to the current loss scale."""
        if self._scaler.scale != before:
            self._sharded.rescale_unstepped(self._scaler.scale / before)
            self._sharded.quantization_errors.rescale(self._scaler.scale / before)

    def _set_loss_scale(self, scale: float) -> None:
        """Replace the loss scale, for `optimizer.loss_scale = scale` in a script. All ranks set the same scale."""
        if scale == self._scaler.scale:  # scripts that compute the scale set it in every micro-batch
            return
        if not self._config.fp16.enabled:
            raise LossScalingError(
                f"the loss scale cannot be set to {scale!r}: without fp16 losses are not scaled; set fp16.enabled"
            )
        if self._loss_is_scaled or has_pending_gradients(self._sharded):
            raise LossScalingError(
                f"the loss scale cannot be set to {scale!r} in the middle of a step, whose gradients contain the scale "
                f"{self._scaler.scale:g}; set it after engine.step() at the accumulation boundary"
            )
        before = self._scaler.scale
        self._scaler.set_scale(scale)
        self._follow_loss_scale(before)

    def _update_parameters(self) -> StepOutcome:
        """Check the gradients of the step and, unless all ranks agree to skip the step, update the parameters.

        If this method raises, the caller drops the gradients.
        """
        check_no_lost_gradients(self._sharded)
        if by_hand := drop_external_gradients(self._sharded):
            self._report_external_gradients(by_hand)
        for average in self._sharded.averages.values():
            average.refuse_applied("step()")
        self._buffer_sync.broadcast_if_stale()  # needed on a rank that had no batch, and so no forward, in this step
        flags = [float(self._buffer_sync.has_changed()), self._async_save.failure_flag()]
        section = self._config.zero_optimization.offload_optimizer
        return self._sharded.step(
            self.gradient_clipping(),
            self._scaler.scale,
            skip_overflow=self._config.fp16.enabled,
            flags=flags,
            delay=section is not None and self.global_steps >= section.delayed_update_start,
            repeats=self.allows_repeated_steps,
            apply_nonfinite=self.applies_nonfinite_steps,
        )

    def _balance_routers(self) -> None:
        """Update router biases by the tokens per expert, summed over the data-parallel ranks. Collective over them."""
        if self._router_balances:
            update_biases(self._router_balances, [MeshAxis("data", self._sharded.mesh.dense.data)])
            self._buffer_sync.mark_synchronized()

    def _drop_token_counts(self) -> None:
        """Drop the token counts of router biases, so that tokens of dropped micro-batches do not move the biases."""
        for balance in self._router_balances:
            balance.pop_counts()

    def _report_external_gradients(self, names: list[str]) -> None:
        raise ModelError(format_foreign_gradients(names))

    def _report_nonfinite(self, outcome: StepOutcome) -> None:
        step, norm, bad = self.progress.global_steps, outcome.norm, outcome.bad
        if self.skips_nonfinite_steps:
            logger.warning(f"step {step}: the gradient norm is {norm}, first in {bad!r}; step skipped")
            return
        raise LossError(
            f"step {step}: the gradient norm is {norm}, first in {bad!r}; the parameters are unchanged. "
            "Look for a loss that is not finite, lower the learning rate, or leave out the batch: the gradients are "
            "dropped, so training can continue"
        )

    def _step_lr_scheduler(self, lr_kwargs: dict[str, Any]) -> None:
        if isinstance(self.lr_scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau) and "metrics" not in lr_kwargs:
            return  # needs the metric: `engine.step(lr_kwargs={"metrics": ...})`, or the script steps the scheduler
        try:
            self.lr_scheduler.step(**lr_kwargs)
        except TypeError:
            self.lr_scheduler.step(self.train_batch_size())
        except ValueError as error:  # torch's message is about zip(), not about optimizer groups
            known, groups = getattr(self.lr_scheduler, "base_lrs", None), self.get_lr()
            if known is None or len(known) == len(groups):
                raise
            raise ModelError(
                f"{type(self.lr_scheduler).__name__} was constructed for {len(known)} optimizer groups, and there "
                f"are {len(groups)} now: the parameters were updated, the learning rate was not. After "
                "add_param_group create the scheduler again: engine.lr_scheduler = ..."
            ) from error

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally inside the context; the first backward after the context reduces them.

        Works at every stage.
        """
        if self._sharded.policy.grad:
            extra = (
                sum(s.unit.layout.padded for s in self._sharded.slots)
                * self._sharded.settings.accumulation_dtype.itemsize
            )
            self._reporter.log_once(
                "no_sync",
                f"no_sync at stage {self.zero_optimization_stage()} keeps unsharded gradients: {extra / 2**20:.0f} MiB "
                f"more per rank",
            )
        before, self._no_sync = self._no_sync, True
        try:
            yield
        finally:
            self._no_sync = before

    def finish_update(self) -> None:
        """Finish the update of the last step if it is still running (`offload_optimizer.delayed_update`), and copy
        the master weights to parameters that lag behind them or differ between ranks.

        The next forward then uses the updated parameters. Collective; does nothing if there are no such parameters.

        Saving, `destroy`, `full_state_dict`, `GatheredParameters` and functions like `windlass.zero.full_param` call
        this method themselves. A forward does not, not even in evaluation, because it may run on one rank only.

        Raises:
            ModelError: a parameter that differs between ranks was changed in place. The change was undone.
            UpdateError: the update failed on some rank.
        """
        self._sharded.finish_update()

    def generate(self, input_ids: Any = None, *, attention_mask: Any = None, **settings: Any) -> Any:
        """Generate tokens with the current weights, by an inference engine with continuous batching.

        Arguments and result are those of transformers' `generate`. If the inference engine does not support a setting,
        the module's own `generate` runs. No weights are copied; at stage 3 the parameters are unsharded once for the
        call. Collective at stage 3 and along tp.

        Args:
            input_ids: int64 `[batch, tokens]`.
            attention_mask: 0 where `input_ids` is padded.

        Raises:
            RequestError: a prompt is empty, or a prompt and its answer exceed the model's context window.
        """
        return self.hybrid.generate(input_ids, attention_mask, **settings)

    @property
    def hybrid(self) -> HybridGeneration:
        """Inference engine that computes with the training module itself."""
        if self._hybrid is None:
            from windlass.engine.hybrid_generation import HybridGeneration
            from windlass.inference.engine_options import EngineOptions

            section = self._config.hybrid_engine
            options = EngineOptions(check_at_load=False, deterministic=False)
            self._hybrid = HybridGeneration(
                lambda: self._sharded, options, releases_cache=section.release_inference_cache
            )
        return self._hybrid

    def eval_batch(self, batch: Any) -> Any:
        """Return the module's output for `batch` without gradients.

        Args:
            batch: a dict of keyword arguments, a tuple or list of arguments, or a single argument.
        """
        with evaluating(self.module), torch.no_grad():
            if isinstance(batch, dict):
                return self(**batch)
            return self(*batch) if isinstance(batch, (tuple, list)) else self(batch)

    def train(self, mode: bool = True) -> None:  # type: ignore[override]
        """Set the module to training mode, or to evaluation mode if `mode` is False."""
        self.module.train(mode)

    def eval(self) -> None:  # type: ignore[override]
        """Set the module to evaluation mode."""
        self.module.eval()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of all micro-batches of the current step. `step` drops them too.

        As in plain PyTorch, `optimizer.zero_grad()`, `zero_grad()` of the module or a submodule, and `parameter.grad =
        None` do the same for their parameters.

        Not collective, but all ranks must drop the same gradients after the same backwards.

        Args:
            set_to_none: if False, gradients become zero, and the optimizer steps with these zeros.
        """
        self._sharded.script_gradients.drop_all(self.module.parameters(), zero=not set_to_none)

    # Callbacks of hooks.

    def _is_syncing(self) -> bool:
        return not self._no_sync and (self._sharded.policy.grad or self.progress.is_at_boundary())

    def _is_between_micro_batches(self) -> bool:
        """Return True between a micro-batch that does not end the step and the next backward."""
        return 0 < self._backwards_at_last_step_call == self._sharded.reducer.backward_count

    def _log_dropped_gradients(self) -> None:
        if self._is_between_micro_batches():
            self._reporter.log_once(
                "dropped",
                f"zero_grad() in the middle of a step: gradients of micro-batches that engine.step() had ended are "
                f"dropped (gradient_accumulation_steps is {self.progress.batch.accumulation}). The engine clears "
                "gradients itself after each step",
            )

    def _observe_gradient(self, unit: Any, index: int, gradient: torch.Tensor) -> None:
        if not self._loss_is_scaled and self._scaler.scale != 1.0 and Engine._scaling_engine is None:
            raise LossScalingError(
                f"Loss scaling is required: loss.backward() under fp16 with a loss scale of {self._scaler.scale:g}. "
                "The loss is not scaled: call engine.backward(loss), or engine.scale(loss).backward()"
            )
        self._nonfinite_locator.record(unit, index, gradient)

    def _hook_backward_begin(self, loss: torch.Tensor) -> None:
        """Register a hook on the loss that runs when its backward starts.

        Unlike a hook on the model's output, it works for any type of output.
        """
        if loss.requires_grad and loss.grad_fn is not None:
            loss.register_hook(lambda _: self._on_backward_begin())

    def _on_backward_begin(self) -> None:
        Engine._scaling_engine = self
        self._sharded.runtime.register_backward()

    def _on_backward_end(self) -> None:
        self._loss_is_scaled = False
        if Engine._scaling_engine is self:
            if current_backward_id() >= 0:  # other engines may still take gradients until the backward ends
                queue_end_of_backward(_clear_scaling_engine)
            else:
                _clear_scaling_engine()

    def _end_gradients(self) -> None:
        """Handle the end of an outermost backward that reached parameters."""
        self._on_backward_end()
        self.progress.backward_count += 1

    def _before_update(self, norm: float, clip: float) -> None:
        for observer in self._observers:
            observer.before_update(norm, clip)

    def _on_weights_edited(self) -> None:
        note_update(self.module)
        for observer in self._observers:
            observer.on_weights_edited()

    def _on_gradient_dropped(self, name: str, zero: bool) -> None:
        for observer in self._observers:
            observer.on_gradient_dropped(name, zero)

    def _scale_correction(self) -> float:
        """Return the factor that converts gradients with another engine's loss scale to this engine's loss scale."""
        other = Engine._scaling_engine
        return 1.0 if self._loss_is_scaled or other is None else self._scaler.scale / other._scaler.scale

    def _autocast(self) -> AbstractContextManager[Any]:
        section = self._config.torch_autocast
        if not section.enabled:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=parse_dtype(section.dtype or "bf16"))

    def set_batch_sizes(self, train_batch_size: int, micro_batch_size: int, gradient_accumulation_steps: int) -> None:
        """Change the batch sizes from the next step on.

        `train_batch_size` is the product of the other two and the number of data-loading ranks.

        Raises:
            ModelError: a step has begun.
        """
        if self.progress.is_step_started:
            raise ModelError("the batch sizes can't change in the middle of a step: end it first with engine.step()")
        self.progress.batch = BatchSizes(
            train=train_batch_size, micro=micro_batch_size, accumulation=gradient_accumulation_steps
        )
        self.progress.micro_steps = self.progress.global_steps * gradient_accumulation_steps
        self._loss_weight = 1.0 / gradient_accumulation_steps

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Set whether the current micro-batch ends a step. The setting holds until the next call.

        Raises:
            ModelError: `managed_gradient_accumulation` is false, so every call of `step` ends a step.
        """
        if not self.progress.managed_gradient_accumulation:
            raise ModelError(
                "set_gradient_accumulation_boundary: managed_gradient_accumulation is false, so every engine.step() "
                "ends a step; call step() at the end of a step, or write true"
            )
        self.progress.boundary_override = bool(is_boundary)

    def offload_states(
        self,
        include: Iterable[Any] | None = None,
        device: Any = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Move this rank's states from the device to host memory until `reload_states`, to free device memory.

        Until then forwards need the parameters on the device, and backwards the gradients too; steps and checkpoints
        need all states. Calls raise if values that they need are offloaded. Optimizers with local steps, `DiLoCo` and
        `ZeroOneAdam`, need all states for a forward.

        Args:
            include: any of `optimizer_states`, `master_weights`, `parameters`, `gradients`, all by default; or
                DeepSpeed's names for them, `optim_states`, `hp_params`, `lp_params`, `lp_grads`, and
                `contiguous_grad_buffer`, which moves nothing: the gradient buffer is a ring of two units' size.
            device: only the CPU.
            pin_memory: page-lock the copies.
            non_blocking: accepted and ignored; the memory is free when this returns.

        Raises:
            ConfigError: `device` is not the CPU, or `include` has an unknown kind.
            ModelError: the states are offloaded already.
        """
        if str(getattr(device, "value", device)) not in ("cpu", "OffloadDeviceEnum.cpu"):
            raise ConfigError(f'offload_states: device is {device!r}; states can only be moved to the "cpu"')
        kinds = KINDS if include is None else _offloaded_kinds(include)
        self._sharded.finish_update()
        taken = self._sharded.state_offloader.offload(kinds, pin=pin_memory)
        logger.info(f"offload_states: {taken / 2**20:.1f} MiB were moved from this rank's device to host memory")

    def reload_states(self, non_blocking: bool = False) -> None:
        """Move the states back to the device that `offload_states` moved to host memory."""
        self._sharded.state_offloader.reload()

    def report(self) -> dict[str, Any]:
        """Return this rank's stored bytes (by slot and tier, and by unit), the unsharded units, and a step's traffic.

        Rank 0 logs the bytes by slot and tier. See `EngineReporter.report` and `memory_report` for the keys.
        """
        return self._reporter.report(self._sharded)

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> Any:
        """Return a loader of this rank's micro-batches, as `initialize(training_data=...)` builds it.

        The first loader with `route="train"` becomes `training_dataloader`, whose position is saved in checkpoints.

        Args:
            dataset: a dataset of known length. An iterable dataset is read as it is, on every rank.
            batch_size: samples of a micro-batch; the configuration's by default.
            route: "train" is shuffled; "eval" and "predict" are not.
            pin_memory: page-lock batches, if the device is a GPU.
            data_sampler: sampler of this rank's samples. A checkpoint cannot resume its position.
            collate_fn: function that makes a batch from a list of samples.
            num_local_io_workers: number of processes that load samples; 0 by default.
        """
        loader = build_data_loader(
            dataset,
            self.train_micro_batch_size_per_gpu() if batch_size is None else batch_size,
            *self.data_loading_ranks,
            drop_last=self._config.dataloader_drop_last,
            pin_memory=pin_memory and self.device.type == "cuda",
            route=route,
            data_sampler=data_sampler,
            collate_fn=collate_fn,
            num_local_io_workers=num_local_io_workers,
        )
        if route == "train" and self.training_dataloader is None:
            self.training_dataloader = loader
        return loader

    @property
    def is_compiled(self) -> bool:
        """True if `compile` was called."""
        return bool(self._compiled)

    def compile(self, backend: Any = "inductor", compile_kwargs: dict[str, Any] | None = None) -> None:
        """Compile the module in place with torch.compile. A second call does nothing.

        Below stage 3 this compiles the module's forward. At stage 3, where hooks unshard and reshard weights between
        blocks, it compiles the forward of each innermost block.

        Args:
            compile_kwargs: other arguments of `torch.compile`. `backend` takes precedence over one of them.
        """
        options = dict(compile_kwargs or {})
        if options.pop("backend", backend) != backend:
            logger.warning("engine.compile uses backend %r, not that of compile_kwargs; pass it as backend", backend)
        if not self._compiled:
            self._compiled.compile(self._sharded.compile_safe(), backend=backend, **options)

    def destroy(self) -> None:
        """Restore the plain model with full parameters and without hooks.

        Collective at stage 3 and while an update is in flight. A second call does nothing.
        """
        if not self._destroyed:
            self._destroyed = True
            self._restore_gc()
            with ExitStack() as stack:  # callbacks run in reverse order, all of them even if one raises
                stack.callback(self._sharded.destroy)
                stack.callback(self._async_save.close)
                stack.callback(self._reporter.close)
                stack.callback(self._compiled.restore)
                if self._hybrid is not None:
                    stack.callback(self._hybrid.close)


_KINDS_BY_DS_NAME = {
    "optim_states": "optimizer_states",
    "hp_params": "master_weights",
    "lp_params": "parameters",
    "lp_grads": "gradients",
    "contiguous_grad_buffer": None,
}


def _offloaded_kinds(include: Iterable[Any]) -> list[str]:
    """Return the kinds of states that `include` names, each once. Members of enumerations count by their value."""
    names = [str(getattr(one, "value", one)) for one in include]
    for name in names:
        if name not in KINDS and name not in _KINDS_BY_DS_NAME:
            raise ConfigError(
                f"offload_states: there is no kind {name!r}; use any of {', '.join(KINDS)}, or "
                f"{', '.join(_KINDS_BY_DS_NAME)}"
            )
    kinds = dict.fromkeys(_KINDS_BY_DS_NAME.get(name, name) for name in names)
    return [kind for kind in kinds if kind is not None]


def _nothing() -> None:
    return


def _clear_scaling_engine() -> None:
    Engine._scaling_engine = None


def _local_rank() -> int:
    import os

    return int(os.environ.get("LOCAL_RANK", "0"))


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if is_castable(value.dtype) else value
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(_cast(item, dtype) for item in value)
    if isinstance(value, dict):
        return {key: _cast(item, dtype) for key, item in value.items()}
    return value
