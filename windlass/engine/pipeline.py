"""The engine of a rank of a pipeline: a whole step at a time, since forwards and backwards of stages interleave."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from windlass.base.errors import ConfigError, ModelError
from windlass.base.log import logger
from windlass.base.tree import replace, tensors
from windlass.comm.beside_main import BesideMain
from windlass.config import Config
from windlass.engine.common_failure import CommonFailure
from windlass.engine.micro_batches import MicroBatches, again_and_again
from windlass.engine.progress import Progress
from windlass.engine.refresh import unfrozen
from windlass.engine.same_input import SameInput
from windlass.engine.train import Engine
from windlass.engine.whole_schedule import WholeSchedule
from windlass.optim.loss_scale import LossScale
from windlass.parallel.pipeline.action import Kind as Action
from windlass.parallel.pipeline.action import Order
from windlass.parallel.pipeline.apply import stages_of
from windlass.parallel.pipeline.passing import Passing
from windlass.parallel.pipeline.programs import programs
from windlass.parallel.pipeline.run import Around, Halted, execute
from windlass.parallel.pipeline.schedule import forward_orders, orders
from windlass.parallel.pipeline.simulation import bubble
from windlass.parallel.pipeline.stage import Ended
from windlass.zero.sharded import ShardedModel

Kind = TypeVar("Kind", bound=Engine)

_WORDS = {
    Action.FORWARD: "forward",
    Action.BACKWARD: "backward",
    Action.INPUT: "backward",
    Action.WEIGHT: "backward of the weights",
    Action.SEND_ACTIVATION: "sending of the activation",
    Action.RECEIVE_ACTIVATION: "receiving of the activation",
    Action.SEND_GRADIENT: "sending of the gradient",
    Action.RECEIVE_GRADIENT: "receiving of the gradient",
}
_NOT_BEGUN = "nothing was computed on any rank, and the next batch may follow"
_DROPPED = (
    "this batch is dropped on all ranks, parameters and optimizer states are as they were, and the next batch may "
    "follow"
)


class PipelineEngine(Engine):
    """Trains one rank's stages of a model; every rank of the pipeline reads the same micro-batches.

    `train_batch` makes a step of `gradient_accumulation_steps` micro-batches, `eval_batch` runs some without
    gradients. `forward`, `backward` and `step` are refused.
    """

    _completes = False  # the backward that runs is the last one of the step
    _failed = False  # a schedule was left half-way
    _in_step = True  # a rank that fails can make the transfers and collectives that others still need
    _passing: Passing | None = None

    def __init__(
        self,
        sharded: ShardedModel,
        optimizer: torch.optim.Optimizer | None,
        config: Config,
        progress: Progress,
        scaler: LossScale,
    ) -> None:
        super().__init__(sharded, optimizer, config, progress, scaler)
        if not progress.managed:
            raise ConfigError(
                "managed_gradient_accumulation is false, but a pipeline runs all micro-batches of a step in one "
                "train_batch; write true"
            )
        stages = stages_of(sharded.model)
        assert stages is not None, "a pipeline's engine is for models that apply_pipeline_parallel has seen"
        self._stages, self._axis = stages, sharded.mesh.pp
        self._each = stages.count // self._axis.size
        self._passing = Passing(self._axis, self.device, dynamic=stages.dynamic)
        self._left = "Ctrl-C, or a connection that broke"
        self._programs: dict[tuple[str, int], Order] = {}
        self._source = MicroBatches(sharded.mesh)
        self._common = CommonFailure(sharded.mesh.world, f"rank {self.global_rank}")
        section, micros = config.pipeline, progress.batch.accumulation
        idle = bubble(section.schedule, self._axis.size, micros, self._each)
        logger.info(
            f"pipeline: {stages.count} stages on {self._axis.size} ranks, {section.schedule}, {micros} micro-batches a "
            f"step: {100 * idle:.0f} % idle if stages take equally long; {self._whole.told(micros)}"
        )

    def _adopt(self, sharded: ShardedModel) -> None:
        super()._adopt(sharded)
        # collectives inside a stage's own forward can't be made by a rank that failed in it
        self._in_step = all(axis.size == 1 for axis in (sharded.mesh.tp, sharded.mesh.sp, sharded.mesh.ep))
        sharded.steps_next = lambda: self._completes
        self._same_input = _Compared(sharded.mesh)
        self._whole = WholeSchedule(sharded, self._config)
        if self._passing is not None:
            self._passing.forget()

    # training and evaluation

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> torch.Tensor:
        """Make one step of `gradient_accumulation_steps` micro-batches. Collective over all ranks.

        Args:
            data_iter: gives micro-batches, the same ones on every rank of a pipeline; kept for later steps. By default
                the one that was given before, or else the loader of `initialize(training_data=...)`, again and again.

        Returns:
            The mean of the losses of all micro-batches and data ranks, a scalar on the device of every rank. Each
            micro-batch counts as much as any other, whatever its size, as in plain accumulation.

        Raises:
            StopIteration: there are no more micro-batches, on any rank; nothing happened.
            DataError: there are fewer than a step needs, or ranks of a pipeline read others; nothing happened.
            PeerError: reading, a stage or the loss raised on another rank, which the text names with its stage and
                micro-batch; that rank raises its own error. No rank makes a step, and the next batch may follow.
            LossError, StorageError, UpdateError: as `Engine.step`.
        """
        self._require_ready("train_batch")
        if unfrozen(self._sharded):
            raise ModelError("parameters were unfrozen: call engine.refresh() on every rank of the pipeline first")
        assert self._optimizer is not None, "train_batch needs an optimizer: pass one to initialize or name one"
        if data_iter is not None:
            self.set_dataiterator(data_iter)
        micros = self.progress.batch.accumulation
        batches = self._read(micros, "train_batch", loader=self.training_dataloader)
        self.module.train()
        ended = self._run(self._program("train", micros), batches, self._around())
        loss: torch.Tensor = self._mean([one.loss for one in ended], True)
        self._reporter.saw_loss(loss)
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
            data_iter: gives micro-batches, the same ones on every rank of a pipeline.
            return_logits: return what the model returned as well, on the last stage.
            compute_loss: come to losses; else outputs take their place.
            reduce_output: `"avg"`: the mean over micro-batches and data ranks; None: a list, one a micro-batch.
            bcast_loss: every rank gets a reduced loss; else the last stage alone.
            num_micro_batches: how many; `gradient_accumulation_steps` by default.

        Returns:
            The loss, or a pair of it and of outputs: those of all micro-batches end to end where their shapes allow
            that, else a list. None where a rank has nothing of it.

        Raises:
            StopIteration, DataError, PeerError: as `train_batch`.
        """
        self._require_ready("eval_batch")
        if reduce_output not in ("avg", None):
            raise ModelError(f'eval_batch: reduce_output is {reduce_output!r}; write "avg", or None')
        micros = num_micro_batches or self.progress.batch.accumulation
        batches = self._read(micros, "eval_batch", data_iter, loss=compute_loss)
        training, wanted = self.module.training, return_logits or not compute_loss
        self.module.eval()
        try:
            with torch.no_grad():
                program = self._program("evaluate", micros)
                ended = self._run(program, batches, self._around(), loss=compute_loss, outputs=wanted)
        finally:
            self.module.train(training)
        outputs = [_logits(one.output) for one in ended] or None
        result: Any = outputs
        if compute_loss:
            losses = [one.loss for one in ended]
            result = self._mean(losses, bcast_loss) if reduce_output == "avg" else losses or None
        return (result, _joined(outputs)) if return_logits else result

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Refused."""
        raise ModelError(_refusal("forward"))

    def backward(self, *args: Any, **kwargs: Any) -> Any:
        """Refused."""
        raise ModelError(_refusal("backward"))

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Refused."""
        raise ModelError(_refusal("step"))

    def no_sync(self) -> Any:
        """Refused."""
        raise ModelError(_refusal("no_sync"))

    # data

    def set_dataiterator(self, iterator: Iterator[Any]) -> None:
        """Read micro-batches from here from now on."""
        self._source.take(iterator)

    def set_dataloader(self, loader: Iterable[Any]) -> None:
        """Read micro-batches from this loader, again and again."""
        self.training_dataloader = loader
        self._source.take(again_and_again(loader))

    def set_batch_fn(self, fn: Callable[[Any], Any] | None) -> None:
        """Change every micro-batch by `fn` before it is used."""
        self._source.change = fn

    # running

    def _program(self, what: str, micros: int) -> Order:
        key = what, micros
        if key not in self._programs:
            ranks, name = self._axis.size, self._config.pipeline.schedule
            made = orders(name, ranks, micros, self._each) if what == "train" else None
            self._programs[key] = programs(made or forward_orders(ranks, micros, self._each))[self._axis.index]
        return self._programs[key]

    def _read(self, count: int, what: str, data: Any = None, loader: Any = None, *, loss: bool = True) -> list[Any]:
        """The micro-batches of a step, read and looked at on every rank before anything is run. Collective."""

        def read() -> list[Any]:
            found = self._source.read(count, data, what=what, loader=loader)
            for batch in found:
                self._stages.check(batch, loss=loss)
            return found

        batches: list[Any] = self._common.run(read, "reading micro-batches", _NOT_BEGUN)
        if self._source.begins(what):
            self._common.run(lambda: self._source.compare(batches), "comparing micro-batches", _NOT_BEGUN)
        return batches

    def _run(self, program: Order, batches: list[Any], around: Around, **more: bool) -> list[Ended]:
        assert self._passing is not None
        if self._failed:
            raise ModelError(
                f"a schedule of this pipeline was left half-way ({self._left}), so its stages are no longer at the "
                "same micro-batch; start the run again from its last checkpoint"
            )
        self._failed, ended, halted = True, [], None
        try:
            with self._half_way.part("schedule"):
                ended = execute(program, self._stages, self._passing, batches, around, **more)
        except Halted as raised:
            halted = raised
        if halted is not None and not self._in_step:
            error = halted.error or halted
            axes = [name for name in ("tp", "sp", "ep") if self.mesh.axes[name].size > 1]
            keys = ", ".join(f"parallel.{name}" for name in axes)
            self._left = f"{type(error).__name__}: {error}; beside {keys} a batch that raises can't be dropped"
            raise error
        if self._in_step:
            self._end(halted)
        self._failed = False
        return ended

    def _end(self, halted: Halted | None) -> None:
        """Raise on every rank if a stage raised on any, with all transfers and collectives done. Collective."""
        drain = BesideMain(halted.drain) if halted is not None else None
        self._sharded.order.meet("the end of a schedule")  # serves the collectives of ranks that are not there yet
        if drain is not None:
            drain.join()
        if not self._common.failed(halted, "a schedule"):
            return
        self._sharded.order.new_step()
        self._sharded.forget_gradients()
        self._failed = False
        action = halted.action if halted is not None else None
        what = f"the {_WORDS[action.kind]} of micro-batch {action.micro} in stage {action.stage}" if action else ""
        self._common.tell(halted.error if halted is not None else None, what, _DROPPED)

    def _around(self) -> Around:
        return Around(
            call=super().forward,
            hold=self._hold,
            backward=self._one_backward,
            began=self._backward_began,
            scale=lambda: self._scaler.scale,
            moved=self._on_device,
        )

    def _hold(self) -> AbstractContextManager[Any]:
        units = self._whole.units()
        return self._sharded.runtime.holding(units) if units else nullcontext()

    def _one_backward(self, run: Callable[[], None], last: bool) -> None:
        self._completes, self._scaled = last, True
        try:
            with self._reporter.timed("backward"):
                run()
        finally:
            self._completes = False
            self._backward_ended()

    def _syncs(self) -> bool:
        return self._completes or (self._sharded.policy.grad and not self._whole.once)

    def _on_device(self, batch: Any) -> Any:
        if not isinstance(batch, torch.Tensor) and hasattr(batch, "to"):  # transformers' BatchEncoding
            return batch.to(self.device)
        moved = {id(t): t.to(self.device, non_blocking=True) for t in tensors(batch) if t.device != self.device}
        return replace(batch, moved)

    def _mean(self, losses: list[torch.Tensor | None], broadcast: bool) -> Any:
        """Of all micro-batches and data ranks."""
        mine = [loss.float() for loss in losses if loss is not None]
        mean = torch.stack(mine).mean() if mine else torch.zeros((), device=self.device)
        if self.is_last_stage():
            data = self.mesh.dense.data
            if data.size > 1:
                dist.all_reduce(mean, group=data.process_group)
                mean /= data.size
        if broadcast:
            return self._axis.broadcast(mean, self._axis.size - 1)
        return mean if self.is_last_stage() else None

    # questions

    @property
    def num_stages(self) -> int:
        """Ranks of the pipeline."""
        return self._axis.size

    @property
    def stage_id(self) -> int:
        """This rank's place in it."""
        return self._axis.index

    @property
    def micro_batches(self) -> int:
        """Micro-batches in a step."""
        return self.progress.batch.accumulation

    def is_first_stage(self) -> bool:
        """Whether this rank has the first layers."""
        return self._axis.index == 0

    def is_last_stage(self) -> bool:
        """Whether this rank has the last layers, and so the loss."""
        return self._axis.index == self._axis.size - 1

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the backward that runs is the last one of the step."""
        return self._completes

    def reset_activation_shape(self) -> None:
        """Have stages tell each other anew what they return; on every rank, where that changed though micro-batches
        have the same shapes."""
        if self._passing is not None:
            self._passing.forget()

    def set_has_attention_mask(self, value: bool) -> None:
        """Accepted: stages tell each other what they return."""


class _Compared(SameInput):
    """Whole micro-batches were compared before; what a forward of one stage is given may be a part."""

    def check(self, given: Any) -> None:
        return


def engine_kind(kind: type[Kind], model: torch.nn.Module) -> type[Kind]:
    """The class of the engine for a model: `kind`, or that of a pipeline with all that `kind` has."""
    if stages_of(model) is None or issubclass(kind, PipelineEngine):
        return kind
    if kind not in _kinds:
        _kinds[kind] = (
            PipelineEngine if kind is Engine else type(f"Pipeline{kind.__name__}", (PipelineEngine, kind), {})
        )
    found: type[Kind] = _kinds[kind]
    return found


_kinds: dict[type[Engine], Any] = {}  # by the class without a pipeline


def use_in_pipelines(kind: type[Engine], own: type[PipelineEngine]) -> None:
    """Make engines of the class `own` for pipelines where `kind` is asked for."""
    _kinds[kind] = own


def _refusal(what: str) -> str:
    return (
        f"engine.{what}() is no call for a pipeline, whose stages have forwards and backwards of several micro-batches "
        "under way at once; engine.train_batch(data_iter) makes a whole step, engine.eval_batch(data_iter) evaluates"
    )


def _logits(output: Any) -> Any:
    return output if isinstance(output, torch.Tensor) else getattr(output, "logits", output)


def _joined(outputs: list[Any] | None) -> Any:
    if not outputs or not all(isinstance(one, torch.Tensor) and one.dim() for one in outputs):
        return outputs
    return torch.cat(outputs) if len({one.shape[1:] for one in outputs}) == 1 else outputs
