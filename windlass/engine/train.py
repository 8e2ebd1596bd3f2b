"""The training engine: forward, backward, step, and what a script may ask of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from windlass.base.activity import activity
from windlass.base.autograd import at_end_of_backward, current_backward
from windlass.base.dtypes import parse_dtype
from windlass.base.errors import ConfigError, LossError, ModelError, StorageError
from windlass.base.garbage import hold_off
from windlass.base.log import logger
from windlass.checkpoint.background import Background
from windlass.comm.axis import Axis
from windlass.config import Batch, Config
from windlass.engine.batches import loader_of
from windlass.engine.blame import Blame
from windlass.engine.buffers import BufferCasts, Buffers
from windlass.engine.files import Files
from windlass.engine.half_way import HalfWay
from windlass.engine.optimizer import ShardedOptimizer
from windlass.engine.progress import Progress
from windlass.engine.questions import Questions
from windlass.engine.refresh import refresh, refuse_lost_gradients, take_foreign_gradients, unfrozen
from windlass.engine.reporting import Reporter
from windlass.engine.same_input import SameInput
from windlass.optim.loss_scale import LossScale
from windlass.parallel.experts import balances_of, move_all
from windlass.parallel.sequence.apply import sequence_parallel_of
from windlass.zero.parking import KINDS
from windlass.zero.script_gradients import foreign
from windlass.zero.settings import Outcome
from windlass.zero.sharded import ShardedModel


class Engine(Questions, Files, nn.Module):
    """A model in training (or evaluation) under one configuration. Made by `windlass.initialize`.

    What is not the engine's own falls through to the module.
    """

    # whether a step right after another, without a backward, is accepted: gradients of the first are gone
    repeats_steps = False
    hides_gradients = False  # whether parameters' `.grad` reads as None; else reading its values raises
    takes_foreign_gradients = (
        False  # whether a gradient that the script sets is dropped at the step; else setting raises
    )
    # whether zero_grad between a micro-batch that does not end a step and the next backward keeps what was accumulated
    keeps_accumulated = False
    skips_bad_steps = False  # whether a gradient that is not finite costs its step, with a warning, and no error
    keeps_buffers = False  # whether 16-bit models keep the dtype of their buffers, but for the statistics of norms
    _scaling: Engine | None = None  # of the class: whose loss the backward that runs began with

    def __init__(
        self,
        sharded: ShardedModel,
        optimizer: torch.optim.Optimizer | None,
        config: Config,
        progress: Progress,
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
        self._reporter = Reporter(config, self)
        self._weight = 1.0 / progress.batch.accumulation
        self._no_sync = False
        self._scaled = False  # the loss of the backward to come has the loss scale in it
        self._norm: float | None = None
        self._micro_backwards = 0  # backwards of the step under way when its last micro-batch ended
        self._saves = Background(sharded.mesh.world.ranks)
        self._destroyed = False
        self.saved_tags: set[str] = set()  # of checkpoints that this engine wrote
        self._collect_again = hold_off() if config.disable_python_gc else _nothing
        self.rebuild: Callable[[Engine], ShardedModel] = _not_rebuilt  # lays the model out anew, after destroy
        self._adopt(sharded)

    def _adopt(self, sharded: ShardedModel) -> None:
        """Train this one from now on."""
        self._sharded, data = sharded, sharded.mesh.dense.data
        if self._optimizer is not None:
            self._optimizer.follow(sharded)
        meet = partial(sharded.order.meet, "the sending of buffers")
        self._buffers_of = Buffers(self.module, data, self.device, self._buffer_casts(), meet)
        self._balances = balances_of(self.module)
        self._blame = Blame(sharded.mesh.world)
        self._half_way = HalfWay(sharded.mesh, gathers=any(unit.frees for unit in sharded.units))
        sequences = sequence_parallel_of(self.module)
        self._same_input = SameInput(sharded.mesh, parts=sequences is None or sequences.given)
        self._alone_in_eval = sequences is not None and sequences.only_training
        sharded.runtime.on_backward_begin.append(lambda: self._half_way.begin("backward"))
        script = sharded.script_gradients
        script.hidden, script.raises = self.hides_gradients, not self.takes_foreign_gradients
        script.keeps, script.dropping = self._keeps_accumulated, self._tell_dropped
        gradients = sharded.gradients
        gradients.weight = lambda: self._weight * self._own_share()
        gradients.syncing = self._syncs
        if self._config.fp16.enabled:
            gradients.watch = self._watch
        sharded.steps_next = lambda: self.progress.at_boundary() and not self._no_sync
        sharded.loss_scale = lambda: self._scaler.scale
        sharded.runtime.on_backward_end.append(self._backward_ended)
        sharded.runtime.on_backward_end.append(self._count_backward)

    def _buffer_casts(self) -> BufferCasts | None:
        compute, section = self._sharded.settings.compute, self._config.data_types
        if compute is None:
            return None
        dtype = parse_dtype(section.buffer_dtype) if section.buffer_dtype else None
        return BufferCasts(self.module, compute, dtype, section.keep_in_fp32_modules, norms_only=self.keeps_buffers)

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
        refresh(self)

    # training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        self._require_ready("forward")
        if Engine._scaling is not None and current_backward() < 0:  # of a backward that an exception ended
            _forget_scaling()
        if torch.is_grad_enabled() and unfrozen(self._sharded):
            self.refresh()
        if self.module.training and torch.is_grad_enabled():
            self._buffers_of.before_forward()
        if self._config.fp16.enabled and self._config.fp16.auto_cast:
            args, kwargs = _cast((args, kwargs), torch.float16)
        self._blame.micro_batch = self.progress.micro_steps
        self._sharded.health.refuse("a forward")
        activity.evaluating = not self.module.training
        together = self.module.training or not self._alone_in_eval
        with self._half_way.part("forward", together=together), self._reporter.timed("forward"), self._autocast():
            self._same_input.check((args, kwargs))
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
        self._weight = 1.0 / self.progress.batch.accumulation if scale_wrt_gas else 1.0
        self._note_backward_of(loss)
        self._scaled = True
        self._reporter.saw_loss(loss)
        try:
            with self._half_way.part("backward"), self._reporter.timed("backward"):
                (loss.float() * self._scaler.scale if self._scaler.scale != 1.0 else loss).backward(
                    retain_graph=retain_graph
                )
        finally:
            self._weight = 1.0 / self.progress.batch.accumulation
            self._backward_ended()
        return loss * (1.0 / self.progress.batch.accumulation) if scale_wrt_gas else loss

    def scale(self, loss: torch.Tensor, retain_graph: bool = False) -> torch.Tensor:
        """`loss` times the loss scale; call `.backward()` on it where `engine.backward` does not fit. `retain_graph` is
        accepted: a graph that is kept may be gone through again."""
        self._note_backward_of(loss)
        self._scaled = True
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
        self._half_way.rejoin()
        if self._no_sync:
            raise ModelError("step() inside no_sync(): gradients were not reduced; leave the context first")
        self.progress.applied = False
        self.progress.stepping = True
        try:
            if self.progress.at_boundary():
                self._half_way.begin("step")
                with self._reporter.timed("step"):
                    self._take_step(lr_kwargs or {})
        finally:  # a refused step has dropped its micro-batches: the next one begins a step
            self.progress.stepping = False
            self.progress.micro_steps += 1
            self._micro_backwards = self._sharded.gradients.backwards

    def _step_by_optimizer(self) -> None:
        """What `engine.optimizer.step()` does."""
        self.step()

    def _take_step(self, lr_kwargs: dict[str, Any]) -> None:
        assert self._optimizer is not None
        refuse_lost_gradients(self._sharded)
        if by_hand := take_foreign_gradients(self._sharded):
            self._tell_foreign(by_hand)
        for average in self._sharded.averages.values():
            average.refuse_applied("step()")
        fp16 = self._config.fp16.enabled
        self._buffers_of.before_forward()  # a rank that had no batch for this step
        flags = [float(self._buffers_of.changed()), self._saves.failed()]
        section = self._config.zero_optimization.offload_optimizer
        try:
            outcome = self._sharded.step(
                self._config.gradient_clipping,
                self._scaler.scale,
                skip_overflow=fp16,
                flags=flags,
                delay=section is not None and self.global_steps >= section.delayed_update_start,
                repeats=self.repeats_steps,
            )
        except StorageError:
            self._blame.clear()
            raise
        self._norm = outcome.norm
        if outcome.bad:
            self._blame.clear()
            self._report_bad(outcome)
        if outcome.flags[0] > 0:
            self._buffers_of.invalidate()
        self._optimizer.mark_called()
        if outcome.applied:
            self._optimizer.run_post_hooks()
            self._balance_routers()
        where = ""
        if fp16 and not outcome.applied:
            where = f"{self._blame.find()}, step {self.progress.global_steps}"
        self._blame.clear()
        self._optimizer.overflow = not outcome.applied
        self.progress.stepped(applied=outcome.applied)
        if not outcome.bad:
            self._scaler.update(not outcome.applied, where)
        self._optimizer.loss_scale = self._scaler.scale
        if self.lr_scheduler is not None and outcome.applied:
            self._step_schedule(lr_kwargs)
        self._reporter.stepped()
        if outcome.flags[1] > 0:  # of any rank: all are told at the same step
            self._saves.finish()

    def _balance_routers(self) -> None:
        """Biases of routers move by what the tokens of all data ranks chose. Collective over them."""
        if self._balances:
            move_all(self._balances, [Axis("data", self._sharded.mesh.dense.data)])
            self._buffers_of.changed_alike()

    def _tell_foreign(self, names: list[str]) -> None:
        raise ModelError(foreign(names))

    def _report_bad(self, outcome: Outcome) -> None:
        step, norm, bad = self.progress.global_steps, outcome.norm, outcome.bad
        if self.skips_bad_steps:
            logger.warning(f"step {step}: the gradient norm is {norm}, first in {bad!r}; step skipped")
            return
        raise LossError(
            f"step {step}: the gradient norm is {norm}, first in {bad!r}; the parameters are as they were. "
            "Look for a loss that is not finite, lower the learning rate, or leave out the batch: the gradients are "
            "dropped, so training may go on"
        )

    def _step_schedule(self, lr_kwargs: dict[str, Any]) -> None:
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
            extra = sum(s.unit.layout.padded for s in self._sharded.slots) * self._sharded.settings.accumulate.itemsize
            self._reporter.once(
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

    def _syncs(self) -> bool:
        return not self._no_sync and (self._sharded.policy.grad or self.progress.at_boundary())

    def _between_micro_batches(self) -> bool:
        """Whether a micro-batch was ended that does not end the step, and no backward came since."""
        return 0 < self._micro_backwards == self._sharded.gradients.backwards

    def _keeps_accumulated(self) -> bool:
        return self.keeps_accumulated and self._between_micro_batches()

    def _tell_dropped(self) -> None:
        if self._between_micro_batches():
            self._reporter.once(
                "dropped",
                f"zero_grad() in the middle of a step: gradients of micro-batches that engine.step() had ended are "
                f"dropped (gradient_accumulation_steps is {self.progress.batch.accumulation}). The engine clears "
                "gradients itself after each step",
            )

    def _watch(self, unit: Any, index: int, gradient: torch.Tensor) -> None:
        if not self._scaled and self._scaler.scale != 1.0 and Engine._scaling is None:
            raise ModelError(
                f"loss.backward() under fp16 with a loss scale of {self._scaler.scale:g}: the loss has no scale in it. "
                "Call engine.backward(loss), or engine.scale(loss).backward()"
            )
        self._blame.watch(unit, index, gradient)

    def _note_backward_of(self, loss: torch.Tensor) -> None:
        """See `attach_model`: whatever the model returned, its backward is known from the loss on."""
        if loss.requires_grad and loss.grad_fn is not None:
            loss.register_hook(lambda _: self._backward_began())

    def _backward_began(self) -> None:
        Engine._scaling = self
        self._sharded.runtime.note_backward()

    def _backward_ended(self) -> None:
        self._scaled = False
        if Engine._scaling is self:
            if current_backward() >= 0:  # other engines may still take gradients at its end
                at_end_of_backward(_forget_scaling)
            else:
                _forget_scaling()

    def _count_backward(self) -> None:
        self.progress.backwards += 1

    def _own_share(self) -> float:
        """What makes the loss scale in the gradients this engine's own, where another's loss passes through it."""
        other = Engine._scaling
        return 1.0 if self._scaled or other is None else self._scaler.scale / other._scaler.scale

    def _autocast(self) -> AbstractContextManager[Any]:
        section = self._config.torch_autocast
        if not section.enabled:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=parse_dtype(section.dtype or "bf16"))

    def resize(self, train: int, micro: int, accumulation: int) -> None:
        """Take other batch numbers from the next step on; `train` is `micro * accumulation *` ranks.

        Raises:
            ModelError: a step has begun.
        """
        if self.progress.begun:
            raise ModelError("the batch can't change in the middle of a step: end it first, by engine.step()")
        self.progress.batch = Batch(train=train, micro=micro, accumulation=accumulation)
        self.progress.micro_steps = self.progress.global_steps * accumulation
        self._weight = 1.0 / accumulation

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Say whether the current micro-batch ends a step; holds until it is said otherwise.

        Raises:
            ModelError: the configuration says that every call of `step` ends one.
        """
        if not self.progress.managed:
            raise ModelError(
                "set_gradient_accumulation_boundary: managed_gradient_accumulation is false, so every engine.step() "
                "ends a step; call step() where one ends, or write true"
            )
        self.progress.override = bool(is_boundary)

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
        taken = self._sharded.parking.take(KINDS if include is None else include, pin=pin_memory)
        logger.info(f"offload_states: {taken / 2**20:.1f} MiB of this rank's device memory are in host memory now")

    def reload_states(self, non_blocking: bool = False) -> None:
        """Bring back what `offload_states` took."""
        self._sharded.parking.bring_back()

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
        return loader_of(self, dataset, *args, **kwargs)

    def destroy(self) -> None:
        """Give the plain model back, whole, with no hooks. Collective at stage 3, and where an update is under way;
        doing it again does nothing."""
        if not self._destroyed:
            self._destroyed = True
            self._collect_again()
            self._reporter.close()
            try:
                self._saves.close()
            finally:
                self._sharded.destroy()


def _nothing() -> None:
    return


def _forget_scaling() -> None:
    Engine._scaling = None


def _not_rebuilt(engine: Engine) -> ShardedModel:
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
