"""The training engine: forward, backward, step, and what a script may ask of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from windlass.base.backward_callbacks import current_backward_id, queue_end_of_backward
from windlass.base.collective_activity import activity
from windlass.base.dtypes import parse_dtype
from windlass.base.errors import ConfigError, LossError, ModelError, StorageError
from windlass.base.garbage_collection import suspend_garbage_collection
from windlass.base.log import logger
from windlass.checkpoint.async_save import AsyncSave
from windlass.comm.mesh_axis import MeshAxis
from windlass.config import BatchSizes, Config
from windlass.engine.checkpoint_methods import CheckpointMethods
from windlass.engine.data_loaders import build_data_loader
from windlass.engine.engine_reporter import EngineReporter
from windlass.engine.failed_call_barrier import FailedCallBarrier
from windlass.engine.input_consistency import InputConsistencyCheck
from windlass.engine.model_refresh import (
    check_no_lost_gradients,
    drop_external_gradients,
    refresh_engine,
    unfrozen_parameters,
)
from windlass.engine.module_buffers import BufferDtypePolicy, BufferSynchronizer
from windlass.engine.nonfinite_locator import NonFiniteLocator
from windlass.engine.query_methods import QueryMethods
from windlass.engine.sharded_optimizer import ShardedOptimizer
from windlass.engine.training_progress import TrainingProgress
from windlass.optim.loss_scale import LossScale
from windlass.parallel.experts import find_router_biases, update_biases
from windlass.parallel.sequence.apply_sequence_parallel import sequence_parallel_of
from windlass.zero.core.script_gradients import format_foreign_gradients
from windlass.zero.core.zero_settings import StepOutcome
from windlass.zero.sharded_model import ShardedModel
from windlass.zero.update.offload_states import KINDS


class Engine(QueryMethods, CheckpointMethods, nn.Module):
    """A model in training (or evaluation) under one configuration. Made by `windlass.initialize`.

    What is not the engine's own falls through to the module.
    """

    # whether a step right after another, without a backward, is accepted: gradients of the first are gone
    allows_repeated_steps = False
    hides_gradients = False  # whether parameters' `.grad` reads as None; else reading its values raises
    drops_external_gradients = (
        False  # whether a gradient that the script sets is dropped at the step; else setting raises
    )
    # whether zero_grad between a micro-batch that does not end a step and the next backward keeps what was accumulated
    keeps_accumulated_gradients = False
    skips_nonfinite_steps = False  # whether a gradient that is not finite costs its step, with a warning, and no error
    keeps_buffers = False  # whether 16-bit models keep the dtype of their buffers, but for the statistics of norms
    _scaling_engine: Engine | None = None  # of the class: whose loss the backward that runs began with

    def __init__(
        self,
        sharded: ShardedModel,
        optimizer: torch.optim.Optimizer | None,
        config: Config,
        progress: TrainingProgress,
        scaler: LossScale,
    ) -> None:
        super().__init__()
        self.module = sharded.model
        self._sharded, self._config, self.progress, self._scaler = sharded, config, progress, scaler
        self.device = sharded.device
        world = sharded.mesh.world
        self.world_size, self.global_rank = world.size, world.ranks[world.index]
        self.local_rank = self.device.index if self.device.index is not None else _local_rank()
        self.config = config.raw
        self._optimizer: ShardedOptimizer | None = None
        if optimizer is not None:
            self._optimizer = ShardedOptimizer(optimizer, sharded, self._step_by_optimizer, self.refresh)
        self.optimizer: Any = self._optimizer  # what scripts see; DeepSpeed has another thing there where there is none
        self.lr_scheduler: Any = None
        self.training_dataloader: Any = None
        self._reporter = EngineReporter(config, self)
        self._loss_weight = 1.0 / progress.batch.accumulation
        self._no_sync = False
        self._loss_is_scaled = False  # the loss of the backward to come has the loss scale in it
        self._grad_norm: float | None = None
        self._backwards_at_last_step_call = 0  # backwards of the step under way when its last micro-batch ended
        self._async_save = AsyncSave(sharded.mesh.world.ranks)
        self._destroyed = False
        self.saved_tags: set[str] = set()  # of checkpoints that this engine wrote
        self._restore_gc = suspend_garbage_collection() if config.disable_python_gc else _nothing
        self.rebuild_sharded_model: Callable[[Engine], ShardedModel] = (
            _refuse_rebuild  # lays the model out anew, after destroy
        )
        self._attach(sharded)

    def _attach(self, sharded: ShardedModel) -> None:
        """Train this one from now on."""
        self._sharded, data = sharded, sharded.mesh.dense.data
        if self._optimizer is not None:
            self._optimizer.attach(sharded)
        meet = partial(sharded.scheduler.sync, "the sending of buffers")
        self._buffer_sync = BufferSynchronizer(self.module, data, self.device, self._buffer_dtype_policy(), meet)
        self._router_balances = find_router_biases(self.module)
        self._nonfinite_locator = NonFiniteLocator(sharded.mesh.world)
        self._failed_call_barrier = FailedCallBarrier(
            sharded.mesh, gathers=any(unit.frees_memory for unit in sharded.units)
        )
        sequences = sequence_parallel_of(self.module)
        self._input_check = InputConsistencyCheck(
            sharded.mesh, sequence_is_sharded=sequences is None or sequences.pre_sharded
        )
        self._alone_in_eval = sequences is not None and sequences.only_training
        sharded.runtime.on_backward_begin.append(lambda: self._failed_call_barrier.begin("backward"))
        script = sharded.script_gradients
        script.hidden, script.raises = self.hides_gradients, not self.drops_external_gradients
        script.keeps, script.dropping = self._keeps_accumulated_now, self._log_dropped_gradients
        gradients = sharded.reducer
        gradients.gradient_weight = lambda: self._loss_weight * self._scale_correction()
        gradients.reduces_this_backward = self._is_syncing
        if self._config.fp16.enabled:
            gradients.on_gradient = self._observe_gradient
        sharded.next_is_step = lambda: self.progress.is_at_boundary() and not self._no_sync
        sharded.loss_scale = lambda: self._scaler.scale
        sharded.runtime.on_backward_end.append(self._on_backward_end)
        sharded.runtime.on_backward_end.append(self._count_backward)

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
        """Take the model as it is now: parameters that were unfrozen, modules added or taken away. Collective.

        What was trained before keeps its master weights and optimizer states; what is new begins as in plain PyTorch.
        It happens by itself at the first forward after `requires_grad` was set on a frozen parameter of the optimizer's
        groups, and where `optimizer.add_param_group` brings parameters that are new. Where parameters were only
        unfrozen, their units get masters and a place for gradients, and all else stays where it is, gradients of a step
        that has begun too; where modules came or went it takes host memory for the model on every rank, for masters and
        states over all. What went has to be taken out of the optimizer's groups before.

        Raises:
            ModelError: modules came or went and a step has begun, an optimizer's parameter is none of the model's, or
                averages of the parameters are applied. Nothing was changed.
            StorageError: there is no space on disk. Where modules came or went, the engine counts as destroyed then.
        """
        self._require_ready("refresh")
        refresh_engine(self)

    # training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        self._require_ready("forward")
        if Engine._scaling_engine is not None and current_backward_id() < 0:  # of a backward that an exception ended
            _clear_scaling_engine()
        if torch.is_grad_enabled() and unfrozen_parameters(self._sharded):
            self.refresh()
        if self.module.training and torch.is_grad_enabled():
            self._buffer_sync.broadcast_if_stale()
        if self._config.fp16.enabled and self._config.fp16.auto_cast:
            args, kwargs = _cast((args, kwargs), torch.float16)
        self._nonfinite_locator.micro_batch = self.progress.micro_steps
        self._sharded.disk_health.require_intact("a forward")
        activity.is_evaluating = not self.module.training
        together = self.module.training or not self._alone_in_eval
        with (
            self._failed_call_barrier.guard("forward", together=together),
            self._reporter.timed("forward"),
            self._autocast(),
        ):
            self._input_check.check((args, kwargs))
            output = self.module(*args, **kwargs)
        self._sharded.after_forward()
        return output

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Backpropagate `loss`, a scalar, divided by the accumulation steps unless `scale_wrt_gas` is False.

        Returns:
            The loss so divided, without the loss scale.

        Raises:
            AssertionError: there is no optimizer, or the loss is no scalar.
        """
        assert self._optimizer is not None, (
            "backward needs an optimizer: pass one to initialize or name one in the config"
        )
        assert isinstance(loss, torch.Tensor) and loss.numel() == 1, (
            f"backward takes a scalar loss, not {tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss)}"
        )
        self._loss_weight = 1.0 / self.progress.batch.accumulation if scale_wrt_gas else 1.0
        self._hook_backward_begin(loss)
        self._loss_is_scaled = True
        self._reporter.record_loss(loss)
        try:
            with self._failed_call_barrier.guard("backward"), self._reporter.timed("backward"):
                (loss.float() * self._scaler.scale if self._scaler.scale != 1.0 else loss).backward(
                    retain_graph=retain_graph
                )
        finally:
            self._loss_weight = 1.0 / self.progress.batch.accumulation
            self._on_backward_end()
        return loss * (1.0 / self.progress.batch.accumulation) if scale_wrt_gas else loss

    def scale(self, loss: torch.Tensor, retain_graph: bool = False) -> torch.Tensor:
        """`loss` times the loss scale; call `.backward()` on it where `engine.backward` does not fit. `retain_graph` is
        accepted: a graph that is kept may be gone through again."""
        self._hook_backward_begin(loss)
        self._loss_is_scaled = True
        return loss.float() * self._scaler.scale if self._scaler.scale != 1.0 else loss

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """End a micro-batch; at the accumulation boundary clip, update, clear gradients and advance the schedule.

        Raises:
            LossError: a gradient is not finite (under fp16, or with `skips_bad_steps`, such a step is skipped instead).
                Nothing was updated.
            StorageError: a disk failed, on any rank: before the update, and nothing was updated; or within it, or it
                returned damaged parameters or states, and the model is of no use any more: then every call is refused
                but `destroy` and a `load_checkpoint` of all that it has. The text says which.
            UpdateError: the update of the step before, which was delayed, failed on some rank.
        """
        assert self._optimizer is not None, "step needs an optimizer: pass one to initialize or name one in the config"
        self._require_ready("step")
        self._failed_call_barrier.wait_for_peers()
        if self._no_sync:
            raise ModelError("step() inside no_sync(): gradients were not reduced; leave the context first")
        self.progress.last_step_applied = False
        self.progress.is_stepping = True
        try:
            if self.progress.is_at_boundary():
                self._failed_call_barrier.begin("step")
                with self._reporter.timed("step"):
                    self._optimizer_step(lr_kwargs or {})
        finally:  # a refused step has dropped its micro-batches: the next one begins a step
            self.progress.is_stepping = False
            self.progress.micro_steps += 1
            self._backwards_at_last_step_call = self._sharded.reducer.backward_count

    def _step_by_optimizer(self) -> None:
        """What `engine.optimizer.step()` does."""
        self.step()

    def _optimizer_step(self, lr_kwargs: dict[str, Any]) -> None:
        assert self._optimizer is not None
        check_no_lost_gradients(self._sharded)
        if by_hand := drop_external_gradients(self._sharded):
            self._report_external_gradients(by_hand)
        for average in self._sharded.averages.values():
            average.refuse_applied("step()")
        fp16 = self._config.fp16.enabled
        self._buffer_sync.broadcast_if_stale()  # a rank that had no batch for this step
        flags = [float(self._buffer_sync.has_changed()), self._async_save.failure_flag()]
        section = self._config.zero_optimization.offload_optimizer
        try:
            outcome = self._sharded.step(
                self._config.gradient_clipping,
                self._scaler.scale,
                skip_overflow=fp16,
                flags=flags,
                delay=section is not None and self.global_steps >= section.delayed_update_start,
                repeats=self.allows_repeated_steps,
            )
        except StorageError:
            self._nonfinite_locator.clear()
            raise
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
            self._scaler.update(not outcome.applied, where)
        self._optimizer.loss_scale = self._scaler.scale
        if self.lr_scheduler is not None and outcome.applied:
            self._step_lr_scheduler(lr_kwargs)
        self._reporter.record_step()
        if outcome.flags[1] > 0:  # of any rank: all are told at the same step
            self._async_save.finish()

    def _balance_routers(self) -> None:
        """Biases of routers move by what the tokens of all data ranks chose. Collective over them."""
        if self._router_balances:
            update_biases(self._router_balances, [MeshAxis("data", self._sharded.mesh.dense.data)])
            self._buffer_sync.mark_synchronized()

    def _report_external_gradients(self, names: list[str]) -> None:
        raise ModelError(format_foreign_gradients(names))

    def _report_nonfinite(self, outcome: StepOutcome) -> None:
        step, norm, bad = self.progress.global_steps, outcome.norm, outcome.bad
        if self.skips_nonfinite_steps:
            logger.warning(f"step {step}: the gradient norm is {norm}, first in {bad!r}; step skipped")
            return
        raise LossError(
            f"step {step}: the gradient norm is {norm}, first in {bad!r}; the parameters are as they were. "
            "Look for a loss that is not finite, lower the learning rate, or leave out the batch: the gradients are "
            "dropped, so training may go on"
        )

    def _step_lr_scheduler(self, lr_kwargs: dict[str, Any]) -> None:
        if isinstance(self.lr_scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau) and "metrics" not in lr_kwargs:
            return  # it needs a metric, which only the caller has: `step(lr_kwargs={"metrics": ...})` or its own step()
        try:
            self.lr_scheduler.step(**lr_kwargs)
        except TypeError:
            self.lr_scheduler.step(self.train_batch_size())
        except ValueError as error:  # torch's own tell of a zip() and its arguments
            known, groups = getattr(self.lr_scheduler, "base_lrs", None), self.get_lr()
            if known is None or len(known) == len(groups):
                raise
            raise ModelError(
                f"{type(self.lr_scheduler).__name__} was made for {len(known)} optimizer groups, and there are "
                f"{len(groups)} now: the step was made, the schedule was not. After add_param_group make such a "
                "schedule again: engine.lr_scheduler = ..."
            ) from error

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside only add up locally; the first one outside reduces everything. Works at every stage."""
        if self._sharded.policy.grad:
            extra = (
                sum(s.unit.layout.padded for s in self._sharded.slots)
                * self._sharded.settings.accumulation_dtype.itemsize
            )
            self._reporter.log_once(
                "no_sync",
                f"no_sync at stage {self.zero_optimization_stage()} keeps whole gradients: {extra / 2**20:.0f} MiB "
                f"more a rank",
            )
        before, self._no_sync = self._no_sync, True
        try:
            yield
        finally:
            self._no_sync = before

    def finish_update(self) -> None:
        """Finish the update of the last step, if it is under way (`offload_optimizer.delayed_update`), so that the next
        forward computes with it. Collective; without such an update it does nothing.

        Saving, `destroy`, `full_state_dict`, `GatheredParameters` and `windlass.zero.full_param` and its like do that
        by themselves. A forward does not, evaluation included: it may be one rank's alone.

        Raises:
            UpdateError: the update failed on some rank.
        """
        self._sharded.finish_update()

    def eval_batch(self, batch: Any) -> Any:
        """The module's output for `batch` (a dict of keywords, a tuple of arguments, or one), without gradients."""
        training = self.module.training
        self.module.eval()
        try:
            with torch.no_grad():
                if isinstance(batch, dict):
                    return self(**batch)
                return self(*batch) if isinstance(batch, (tuple, list)) else self(batch)
        finally:
            self.module.train(training)

    def train(self, mode: bool = True) -> None:  # type: ignore[override]
        """Set the module's mode."""
        self.module.train(mode)

    def eval(self) -> None:  # type: ignore[override]
        """Set the module to evaluation."""
        self.module.eval()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of the step under way, of all micro-batches so far; after a step there are none. As in
        plain PyTorch, `optimizer.zero_grad()`, `zero_grad()` of the module or of one inside it and
        `parameter.grad = None` do the same for their parameters.

        Not collective, but all ranks have to drop the same after the same backwards.

        Args:
            set_to_none: else gradients become zero, and the optimizer steps with that.
        """
        self._sharded.script_gradients.drop_all(self.module.parameters(), zero=not set_to_none)

    # what hooks ask

    def _is_syncing(self) -> bool:
        return not self._no_sync and (self._sharded.policy.grad or self.progress.is_at_boundary())

    def _is_between_micro_batches(self) -> bool:
        """Whether a micro-batch was ended that does not end the step, and no backward came since."""
        return 0 < self._backwards_at_last_step_call == self._sharded.reducer.backward_count

    def _keeps_accumulated_now(self) -> bool:
        return self.keeps_accumulated_gradients and self._is_between_micro_batches()

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
            raise ModelError(
                f"loss.backward() under fp16 with a loss scale of {self._scaler.scale:g}: the loss has no scale in it. "
                "Call engine.backward(loss), or engine.scale(loss).backward()"
            )
        self._nonfinite_locator.record(unit, index, gradient)

    def _hook_backward_begin(self, loss: torch.Tensor) -> None:
        """See `attach_model`: whatever the model returned, its backward is known from the loss on."""
        if loss.requires_grad and loss.grad_fn is not None:
            loss.register_hook(lambda _: self._on_backward_begin())

    def _on_backward_begin(self) -> None:
        Engine._scaling_engine = self
        self._sharded.runtime.register_backward()

    def _on_backward_end(self) -> None:
        self._loss_is_scaled = False
        if Engine._scaling_engine is self:
            if current_backward_id() >= 0:  # other engines may still take gradients at its end
                queue_end_of_backward(_clear_scaling_engine)
            else:
                _clear_scaling_engine()

    def _count_backward(self) -> None:
        self.progress.backward_count += 1

    def _scale_correction(self) -> float:
        """What makes the loss scale in the gradients this engine's own, where another's loss passes through it."""
        other = Engine._scaling_engine
        return 1.0 if self._loss_is_scaled or other is None else self._scaler.scale / other._scaler.scale

    def _autocast(self) -> AbstractContextManager[Any]:
        section = self._config.torch_autocast
        if not section.enabled:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=parse_dtype(section.dtype or "bf16"))

    def set_batch_sizes(self, train_batch_size: int, micro_batch_size: int, gradient_accumulation_steps: int) -> None:
        """Take other batch numbers from the next step on; `train` is `micro * accumulation *` ranks.

        Raises:
            ModelError: a step has begun.
        """
        if self.progress.is_step_started:
            raise ModelError("the batch can't change in the middle of a step: end it first, by engine.step()")
        self.progress.batch = BatchSizes(
            train=train_batch_size, micro=micro_batch_size, accumulation=gradient_accumulation_steps
        )
        self.progress.micro_steps = self.progress.global_steps * gradient_accumulation_steps
        self._loss_weight = 1.0 / gradient_accumulation_steps

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Say whether the current micro-batch ends a step; holds until it is said otherwise.

        Raises:
            ModelError: the configuration says that every call of `step` ends one.
        """
        if not self.progress.managed_gradient_accumulation:
            raise ModelError(
                "set_gradient_accumulation_boundary: managed_gradient_accumulation is false, so every engine.step() "
                "ends a step; call step() where one ends, or write true"
            )
        self.progress.boundary_override = bool(is_boundary)

    def offload_states(
        self,
        include: Iterable[Any] | None = None,
        device: Any = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Take what rests on the device to host memory until `reload_states`, so that something else may use it.

        Args:
            include: any of `optim_states`, `hp_params`, `lp_params`, `lp_grads`, `contiguous_grad_buffer`; all by
                default.
            device: only the CPU.
            pin_memory: page-lock the copies.
            non_blocking: accepted; the memory is free when this returns.

        Raises:
            ConfigError: another device, or a kind that there is not.
            ModelError: they are offloaded already.
        """
        if str(getattr(device, "value", device)) not in ("cpu", "OffloadDeviceEnum.cpu"):
            raise ConfigError(f'offload_states: device is {device!r}; states can be taken to the "cpu"')
        self._sharded.finish_update()
        taken = self._sharded.state_offloader.offload(KINDS if include is None else include, pin=pin_memory)
        logger.info(f"offload_states: {taken / 2**20:.1f} MiB of this rank's device memory are in host memory now")

    def reload_states(self, non_blocking: bool = False) -> None:
        """Bring back what `offload_states` took."""
        self._sharded.state_offloader.reload()

    def report(self) -> dict[str, Any]:
        """Bytes at rest by slot and home, by unit, what is gathered now, and what a step sent; printed on rank 0."""
        return self._reporter.report()

    def deepspeed_io(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        """A loader of this rank's micro-batches, as `initialize(training_data=...)` makes it.

        The first with `route="train"` becomes `training_dataloader`, whose place is part of checkpoints.

        Args:
            dataset: of known length; an iterable one is taken as it comes, on every rank.
            args, kwargs: `batch_size` (the configuration's micro-batch by default), `route` ("train" is shuffled;
                "eval" and "predict" are not), `pin_memory`, `data_sampler` (this rank's order, instead of one that a
                checkpoint can go on in), `collate_fn`, `num_local_io_workers`.
        """
        return build_data_loader(self, dataset, *args, **kwargs)

    def destroy(self) -> None:
        """Give the plain model back, whole, with no hooks. Collective at stage 3, and where an update is under way;
        doing it again does nothing."""
        if not self._destroyed:
            self._destroyed = True
            self._restore_gc()
            self._reporter.close()
            try:
                self._async_save.close()
            finally:
                self._sharded.destroy()


def _nothing() -> None:
    return


def _clear_scaling_engine() -> None:
    Engine._scaling_engine = None


def _refuse_rebuild(engine: Engine) -> ShardedModel:
    raise ModelError("this engine can't lay its model out anew: make engines by windlass.initialize")


def _local_rank() -> int:
    import os

    return int(os.environ.get("LOCAL_RANK", "0"))


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(_cast(item, dtype) for item in value)
    if isinstance(value, dict):
        return {key: _cast(item, dtype) for key, item in value.items()}
    return value
