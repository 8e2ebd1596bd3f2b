"""Comparison of one engine's steps with those of plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from windlass.base.collective_activity import WaitScope
from windlass.base.dtypes import dtype_name, is_castable
from windlass.base.errors import WindlassError
from windlass.comm.rank_group import world_group
from windlass.config import Config
from windlass.engine.engine_observer import EngineObserver
from windlass.engine.training_engine import Engine
from windlass.optim.cpu_optimizer import CPUOptimizer
from windlass.verify.independent_run import IndependentRun
from windlass.verify.reference_model import ReferenceModel
from windlass.verify.step_comparison import StepComparison
from windlass.verify.step_recorder import StepRecord, StepRecorder
from windlass.verify.tensor_difference import MISSING, Difference, measure_difference
from windlass.verify.tolerance import Tolerance
from windlass.verify.verification_report import PHASES, Deviation, VerificationReport
from windlass.zero import full_grad, full_param
from windlass.zero.parameter_registry import require
from windlass.zero.sharded_model import ShardedModel

_CONTINUE, _DONE = -1, -2  # values of `_broadcast_turn` that are not ranks


class VerifyError(WindlassError, RuntimeError):
    """Error for a run that cannot be compared with one of plain PyTorch. The text gives the reason."""


class EngineVerifier(EngineObserver):
    """Verifier of one engine, with the plain copy of its model on rank 0.

    `on_step_compared` is called after each comparison.

    Attributes:
        report: results so far; complete on rank 0 only.
        compared_steps: number of steps compared so far.
        has_deviated: True on all ranks once any tensor has deviated.
    """

    def __init__(
        self,
        engine: Engine,
        reference: ReferenceModel | None,
        independent_run: IndependentRun | None,
        config: Config,
        on_step_compared: Callable[[EngineVerifier], None],
    ) -> None:
        self.engine, self.reference, self._independent_run, self._config, self._on_step_compared = (
            engine,
            reference,
            independent_run,
            config,
            on_step_compared,
        )
        self._layouts: list[ShardedModel] = []  # all sharded models that the engine had
        self._loss_scale = 1.0
        self._names = [name for name, _ in engine.module.named_parameters()]
        self._trained = [name for name, p in engine.module.named_parameters() if p.requires_grad]
        self.compared_steps, self.has_deviated = 0, False
        self._weights_were_edited = False  # True once the script has set parameters itself
        self._reduced_gradients: dict[str, torch.Tensor | None] = {}
        self._clip: tuple[float, float] | None = None
        self._options: list[dict[str, Any]] = []
        self._recorder = StepRecorder(engine)
        engine.add_observer(self._recorder)
        engine.add_observer(self)
        self.report = self._build_report()

    def _build_report(self) -> VerificationReport:
        table = self._sharded.settings
        first = next((unit.dtype for unit in self._sharded.units if is_castable(unit.dtype)), torch.float32)
        report = VerificationReport(
            ranks=dist.get_world_size(),
            stage=self._sharded.policy.stage,
            dtypes=str(self._config.dtype_table(dtype_name(first))),
            parameters=sum(unit.numel for unit in self._sharded.units),
        )
        if table.delayed_update:
            report.notes.append(
                "delayed_update: weights are read after every step, which finishes its update at once; the update "
                "is compared, not its use one step later"
            )
        return report

    def on_sharded(self, model: ShardedModel) -> None:
        """Record that the engine has sharded its model. If it has done so more than once, the next step raises."""
        self._layouts.append(model)

    @property
    def _sharded(self) -> ShardedModel:
        return self._layouts[0]

    def before_step(self) -> None:
        """Load edited weights into the plain copies. Collective.

        Raises:
            VerifyError: the engine has sharded its model more than once.
        """
        if len(self._layouts) > 1:
            raise VerifyError(
                "the model's layout changed during the run (parameters unfrozen or added, engine.refresh): verify "
                "compares runs whose trained parameters do not change; unfreeze them before the first step"
            )
        self._loss_scale = self.engine.loss_scale()
        self._load_edited_weights()
        self._clip, self._reduced_gradients = None, {}

    def after_step(self) -> None:
        """Compare the step, and call `on_step_compared`. Collective."""
        self._compare_step(self._loss_scale)
        self._on_step_compared(self)

    def after_failed_step(self) -> None:
        """Drop the record of the step, because the engine drops the micro-batches of a step that raises."""
        self._recorder.take_record()

    def on_weights_edited(self) -> None:
        """Note that the weights change: `before_step` then loads them into the plain copies."""
        self._weights_were_edited = True

    def before_update(self, norm: float, clip: float) -> None:
        """All-gather the reduced gradients, and copy norm, clip coefficient and optimizer options, before the
        update.
        """
        trained = {name: self.engine.module.get_parameter(name) for name in self._trained}
        # The gradients of parameters in no optimizer group accumulate over steps and count neither in the norm nor in
        # the update.
        places = {name: require(parameter) for name, parameter in trained.items()}
        stepped = {name: p for name, p in trained.items() if places[name].index not in places[name].unit.outside}
        self._reduced_gradients = {name: full_grad(parameter) for name, parameter in stepped.items()}
        self._clip = norm, clip
        assert self.engine.optimizer is not None
        self._options = [
            {key: _detached_copy(value) for key, value in group.items() if key != "params"}
            for group in self.engine.optimizer.param_groups
        ]

    # Full values

    def _full_parameters(self) -> dict[str, torch.Tensor]:
        """All-gather every parameter. Collective."""
        module = self.engine.module
        with torch.no_grad():
            return {name: full_param(module.get_parameter(name)) for name in self._names}

    def compare_initial_weights(self) -> None:
        """Compare names, ties and values before the first step. Collective."""
        values = self._full_parameters()
        if self.reference is not None:
            self._compare_initial_weights_here(self.reference, values)
        self._broadcast_deviated()

    def _compare_initial_weights_here(self, reference: ReferenceModel, values: dict[str, torch.Tensor]) -> None:
        ours, theirs = _first_names(self.engine.module), _first_names(reference.model)
        for name in sorted(ours.keys() | theirs.keys()):
            if ours.get(name) != theirs.get(name):
                self._record_initial_deviation(
                    name,
                    f"it is {_describe_tie(ours.get(name))} in the sharded model and "
                    f"{_describe_tie(theirs.get(name))} in the plain one",
                )
        for name, requested in reference.named_master_weights():
            if name in values:
                apart = measure_difference(values[name], requested.to(values[name].dtype), 0.0, requested.dtype)
                if apart.exceeding_count:
                    self._record_initial_deviation(name, "it differs from the initial value on rank 0", apart)

    def _record_initial_deviation(self, name: str, hint: str, difference: Difference | None = None) -> None:
        difference = difference or MISSING
        module = name.rpartition(".")[0]
        facts = {"step": 0, "phase": "start", "tensor": name, "module": module, "role": "weight before the first step"}
        self.report.deviations.append(
            Deviation.from_difference(difference, **facts, allowed="equal bit by bit", hint=hint)
        )

    def _load_edited_weights(self) -> None:
        if self._weights_were_edited:
            values = self._full_parameters()
            self._set_reference_values(values)
            if self._independent_run is not None:
                self._independent_run.load_values(values)
        self._weights_were_edited = False

    def _set_reference_values(self, values: dict[str, torch.Tensor]) -> None:
        if self.reference is not None:
            for name, value in values.items():
                self.reference.set_value(name, value)

    def after_load(self) -> None:
        """Load weights and optimizer state of a loaded checkpoint into the plain copies. Collective."""
        assert self.engine.optimizer is not None
        values, state = self._full_parameters(), self.engine.optimizer.state_dict()
        self._set_reference_values(values)
        if self.reference is not None:
            self.reference.optimizer.load_state_dict(state)
        if self._independent_run is not None:
            self._independent_run.load_values(values, state)
        self._recorder.take_record()
        self._weights_were_edited = False

    # Step

    def _compare_step(self, scale: float) -> None:
        """Compare the step that just ended with the plain one. Collective."""
        record = self._recorder.take_record()
        record.loss_scale = scale
        for rank, problem in enumerate(world_group().all_gather_object(record.problem)):
            if problem:
                raise VerifyError(f"step {self.compared_steps + 1} cannot be compared (rank {rank}): {problem}")
        values = self._full_parameters()
        self.compared_steps += 1
        if self.reference is None:
            self._send_record_when_asked(record)
        else:
            self._compare_step_here(self.reference, record, values)
            _broadcast_turn(_DONE)
        self._broadcast_deviated()

    def _send_record_when_asked(self, record: StepRecord) -> None:
        """Follow the turns that rank 0 broadcasts until the comparison ends, and send this rank's record in its
        turn.
        """
        while (turn := _broadcast_turn()) != _DONE:
            if turn == dist.get_rank():
                world_group().send_object(record, 0)

    def _broadcast_deviated(self) -> None:
        self.has_deviated = world_group().broadcast_object(bool(self.report.deviations))

    def _compare_step_here(self, reference: ReferenceModel, own: StepRecord, values: dict[str, torch.Tensor]) -> None:
        tolerance = self._build_tolerance(reference, own)
        self.report.tolerances = tolerance.descriptions()
        self.report.micro_batches = len(own.forwards)
        comparison = StepComparison(reference.model, tolerance, self.compared_steps)
        records: list[StepRecord] = []
        losses: list[float] = []
        plain_losses: list[float | None] = []
        for rank in range(dist.get_world_size()):
            record = own if rank == 0 else _receive_record(rank)
            for micro, call in enumerate(record.forwards):
                _broadcast_turn(_CONTINUE)
                found = reference.replay(call, rank)
                comparison.compare_forward(call, found, rank, micro + 1)
                plain_losses.append(found.loss)
                losses += [call.loss[1]] if call.loss is not None else []
                if self._independent_run is not None:
                    self._independent_run.replay(call, rank)
            reference.add_gradients(record.outside_gradients)
            comparison.compare_gradients(record, reference.take_gradient_sums(), rank)
            losses += record.losses if not any(call.loss for call in record.forwards) else []
            record.forwards = []
            records.append(record)
        comparison.result.loss = _mean(losses)
        comparison.result.plain_loss = _mean([loss for loss in plain_losses if loss is not None])
        old = {name: value.clone() for name, value in reference.named_master_weights()}
        factor = self._sharded.settings.predivide_factor * self._sharded.settings.postdivide_factor
        if self._clip is None:
            comparison.check_overflow(records)
        else:
            norm, clip = self._clip
            comparison.compare_reduced(self._reduced_gradients, records, factor)
            comparison.compare_clip(self._reduced_gradients, norm, clip, self.engine.gradient_clipping())
            given = {name: g.double() * clip for name, g in self._reduced_gradients.items() if g is not None}
            reference.step(given, self._options)
        comparison.compare_update(values, dict(reference.named_master_weights()), old)
        self._set_reference_values(values)
        if self._independent_run is not None:
            row = comparison.result
            row.independent_loss, row.drift = self._independent_run.step(
                records, self._options, values, names=set(self._reduced_gradients), factor=factor, applied=row.applied
            )
        self._reduced_gradients = {}
        self.report.steps.append(comparison.result)
        self.report.deviations += sorted(comparison.deviations, key=lambda one: PHASES.index(one.phase))

    def _build_tolerance(self, reference: ReferenceModel, own: StepRecord) -> Tolerance:
        settings = self._sharded.settings
        dtypes = [p.dtype for p in reference.parameters.values() if is_castable(p.dtype)]
        dtypes += [call.autocast[1] for call in own.forwards if call.autocast[0]]
        sides = [size for p in reference.parameters.values() for size in p.shape]
        optimizer = reference.optimizer
        return Tolerance(
            compute_dtype=max(dtypes, key=lambda dtype: float(torch.finfo(dtype).eps), default=torch.float32),
            accumulate_dtype=settings.accumulation_dtype,
            reduce_dtype=settings.reduce_dtype,
            max_summands=max([1, *sides, *(call.max_summands for call in own.forwards)]),
            micro_batch_count=dist.get_world_size() * max(1, len(own.forwards)),
            has_8bit_states=isinstance(optimizer, CPUOptimizer) and _has_8bit_states(optimizer),
            master_dtype=settings.master_dtype or torch.float32,
        )


def _broadcast_turn(turn: int | None = None) -> int:
    """Broadcast the next turn from rank 0: the number of a rank, or `_CONTINUE` or `_DONE`. Collective.

    Rank 0 broadcasts before it replays each forward, so that the watchdog sees progress on the other ranks.
    """
    with WaitScope("the plain run on rank 0"):
        return world_group().broadcast_object(turn)


def _receive_record(rank: int) -> StepRecord:
    _broadcast_turn(rank)
    record = world_group().receive_object(rank)
    assert isinstance(record, StepRecord)
    return record


def _first_names(model: nn.Module) -> dict[str, str]:
    """Map every name of every parameter to the parameter's first name."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(p), name) for name, p in model.named_parameters(remove_duplicate=False)}


def _describe_tie(name: str | None) -> str:
    return "not present" if name is None else f"the parameter {name!r}"


def _detached_copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _has_8bit_states(optimizer: CPUOptimizer) -> bool:
    """Return True if any optimizer state is stored in 8 bits."""
    return any(
        kept.is_quantized for group in optimizer.param_groups for kept in optimizer.state_formats(group).values()
    )
