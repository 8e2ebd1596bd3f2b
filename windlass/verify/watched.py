"""One engine, each of whose steps is held against the plain one's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from windlass.base.activity import During
from windlass.base.dtypes import dtype_name
from windlass.base.errors import WindlassError
from windlass.config import Config
from windlass.engine.train import Engine
from windlass.optim.cpu_optimizer import CPUOptimizer
from windlass.verify.alone import Alone
from windlass.verify.comparison import Comparison
from windlass.verify.difference import NOT_THERE, Difference, difference
from windlass.verify.plain import Plain
from windlass.verify.recorder import Record, Recorder
from windlass.verify.tolerance import Tolerance
from windlass.verify.verdict import PHASES, Deviation, Verdict
from windlass.zero import full_grad, full_param

_GOES_ON, _OVER = -1, -2  # where no rank has its turn


class VerifyError(WindlassError, RuntimeError):
    """A run that cannot be compared with a plain one; the text says why."""


class Watched:
    """One engine, and on rank 0 the plain copy of its model; `compared` is called after each compared step.

    Attributes:
        verdict: what was found so far; of rank 0 alone.
        steps: compared so far.
        deviated: something did, on all ranks.
    """

    def __init__(
        self,
        engine: Engine,
        plain: Plain | None,
        alone: Alone | None,
        config: Config,
        compared: Callable[[Watched], None],
    ) -> None:
        self.engine, self.plain, self._alone, self._config, self._compared = engine, plain, alone, config, compared
        self._sharded = engine._sharded
        self._names = [name for name, _ in engine.module.named_parameters()]
        self._trained = [name for name, p in engine.module.named_parameters() if p.requires_grad]
        self.steps, self.deviated = 0, False
        self._changed = False  # the script set parameters itself
        self._reduced: dict[str, torch.Tensor | None] = {}
        self._clip: tuple[float, float] | None = None
        self._options: list[dict[str, Any]] = []
        self.verdict = self._verdict()
        self._recorder = Recorder(engine)
        self._wrap()

    def _verdict(self) -> Verdict:
        table = self._sharded.settings
        verdict = Verdict(
            ranks=dist.get_world_size(),
            stage=self._sharded.policy.stage,
            dtypes=str(self._config.dtype_table(dtype_name(self._sharded.units[0].dtype))),
            parameters=sum(unit.numel for unit in self._sharded.units),
        )
        if table.delayed:
            verdict.notes.append(
                "delayed_update: weights are read after every step, which finishes its update at once; what is "
                "compared is the update, not that it is used one step late"
            )
        return verdict

    def _wrap(self) -> None:
        engine: Any = self.engine
        step, load = engine.step, engine.load_checkpoint

        def watched_step(lr_kwargs: dict[str, Any] | None = None) -> None:
            if not engine.progress.ends_at_step():
                step(lr_kwargs)
                return
            if engine._sharded is not self._sharded:
                raise VerifyError(
                    "the model was laid out again in mid-run (parameters unfrozen or added, engine.refresh): verify "
                    "compares runs whose trained parameters stay the same; verify it with them unfrozen from the start"
                )
            scale = engine.loss_scale()
            self._take_over_edits()
            self._clip, self._reduced = None, {}
            try:
                step(lr_kwargs)
            except BaseException:
                self._recorder.take()  # a refused step has dropped its micro-batches
                raise
            self._compare(scale)
            self._compared(self)

        def watched_load(*args: Any, **kwargs: Any) -> Any:
            found = load(*args, **kwargs)
            self._take_over_all()
            return found

        engine.step, engine.load_checkpoint = watched_step, watched_load
        engine.optimizer._step = watched_step
        sharded: Any = self._sharded
        renewing = sharded.renewing

        def watched_renewing(units: Any, **words: Any) -> Any:
            self._changed = True
            return renewing(units, **words)

        sharded.before_update, sharded.renewing = self._before_update, watched_renewing

    def _before_update(self, norm: float, clip: float) -> None:
        """The reduced gradients are whole on all ranks together; the engine has reduced them by itself."""
        module = self.engine.module
        self._reduced = {name: full_grad(module.get_parameter(name)) for name in self._trained}
        self._clip = norm, clip
        assert self.engine.optimizer is not None
        self._options = [
            {key: _value(value) for key, value in group.items() if key != "params"}
            for group in self.engine.optimizer.param_groups
        ]

    # whole values

    def _whole(self) -> dict[str, torch.Tensor]:
        """Every parameter, on all ranks. Collective."""
        module = self.engine.module
        with torch.no_grad():
            return {name: full_param(module.get_parameter(name)) for name in self._names}

    def start(self) -> None:
        """Compare names, ties and values before the first step. Collective."""
        values = self._whole()
        if self.plain is not None:
            self._compare_start(self.plain, values)
        self._agree()

    def _compare_start(self, plain: Plain, values: dict[str, torch.Tensor]) -> None:
        ours, theirs = _ties(self.engine.module), _ties(plain.model)
        for name in sorted(ours.keys() | theirs.keys()):
            if ours.get(name) != theirs.get(name):
                self._deviates(
                    name, f"{_tied(ours.get(name))} in the sharded model, {_tied(theirs.get(name))} in the plain one"
                )
        for name, wanted in plain.values():
            if name in values:
                apart = difference(values[name], wanted.to(values[name].dtype), 0.0, wanted.dtype)
                if apart.beyond:
                    self._deviates(name, "it is not the value that rank 0 began with", apart)

    def _deviates(self, name: str, hint: str, apart: Difference | None = None) -> None:
        apart = apart or NOT_THERE
        module = name.rpartition(".")[0]
        facts = {"step": 0, "phase": "start", "tensor": name, "module": module, "what": "weight before the first step"}
        self.verdict.deviations.append(Deviation.of(apart, **facts, allowed="equal bit by bit", hint=hint))

    def _take_over_edits(self) -> None:
        if self._changed:
            values = self._whole()
            self._take_over(values)
            if self._alone is not None:
                self._alone.take_over(values)
        self._changed = False

    def _take_over(self, values: dict[str, torch.Tensor]) -> None:
        if self.plain is not None:
            for name, value in values.items():
                self.plain.take_over(name, value)

    def _take_over_all(self) -> None:
        """What a checkpoint brought is where the plain side goes on from, too. Collective."""
        assert self.engine.optimizer is not None
        values, state = self._whole(), self.engine.optimizer.state_dict()
        self._take_over(values)
        if self.plain is not None:
            self.plain.optimizer.load_state_dict(state)
        if self._alone is not None:
            self._alone.take_over(values, state)
        self._recorder.take()
        self._changed = False

    # a step

    def _compare(self, scale: float) -> None:
        """Hold the step that just ended against the plain one. Collective."""
        record = self._recorder.take()
        record.scale = scale
        problems: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(problems, record.problem)
        for rank, problem in enumerate(problems):
            if problem:
                raise VerifyError(f"step {self.steps + 1} cannot be compared (rank {rank}): {problem}")
        values = self._whole()
        self.steps += 1
        if self.plain is None:
            self._attend(record)
        else:
            self._compare_here(self.plain, record, values)
            _turn(_OVER)
        self._agree()

    def _attend(self, record: Record) -> None:
        """Hear from rank 0, each time that it got on, until it is through; hand over this rank's record in between."""
        while (turn := _turn()) != _OVER:
            if turn == dist.get_rank():
                dist.send_object_list([record], dst=0)

    def _agree(self) -> None:
        told = [bool(self.verdict.deviations)]
        dist.broadcast_object_list(told, src=0)
        self.deviated = told[0]

    def _compare_here(self, plain: Plain, own: Record, values: dict[str, torch.Tensor]) -> None:
        tolerance = self._tolerance(plain, own)
        self.verdict.tolerances = tolerance.lines()
        self.verdict.micro_batches = len(own.calls)
        comparison = Comparison(plain.model, tolerance, self.steps)
        records: list[Record] = []
        losses: list[float] = []
        plain_losses: list[float | None] = []
        for rank in range(dist.get_world_size()):
            record = own if rank == 0 else _receive(rank)
            for micro, call in enumerate(record.calls):
                _turn(_GOES_ON)
                found = plain.replay(call, rank)
                comparison.forward(call, found, rank, micro + 1)
                plain_losses.append(found.loss)
                losses += [call.loss[1]] if call.loss is not None else []
                if self._alone is not None:
                    self._alone.replay(call, rank)
            plain.add(record.outside)
            comparison.gradient(record, plain.take_sums(), rank)
            losses += record.losses if not any(call.loss for call in record.calls) else []
            record.calls = []
            records.append(record)
        comparison.row.loss = _mean(losses)
        comparison.row.plain_loss = _mean([loss for loss in plain_losses if loss is not None])
        old = {name: value.clone() for name, value in plain.values()}
        if self._clip is None:
            comparison.overflow(records)
        else:
            norm, clip = self._clip
            settings = self._sharded.settings
            comparison.reduce(self._reduced, records, settings.before * settings.after)
            comparison.clip(self._reduced, norm, clip, self._config.gradient_clipping)
            given = {name: g.double() * clip for name, g in self._reduced.items() if g is not None}
            plain.step(given, self._options)
        comparison.update(values, dict(plain.values()), old)
        self._take_over(values)
        if self._alone is not None:
            row = comparison.row
            row.alone_loss, row.drift = self._alone.step(records, self._options, values, applied=row.applied)
        self._reduced = {}
        self.verdict.rows.append(comparison.row)
        self.verdict.deviations += sorted(comparison.deviations, key=lambda one: PHASES.index(one.phase))

    def _tolerance(self, plain: Plain, own: Record) -> Tolerance:
        settings = self._sharded.settings
        dtypes = [p.dtype for p in plain.parameters.values() if p.is_floating_point()]
        dtypes += [call.autocast[1] for call in own.calls if call.autocast[0]]
        sides = [size for p in plain.parameters.values() for size in p.shape]
        optimizer = plain.optimizer
        return Tolerance(
            compute=max(dtypes, key=lambda dtype: float(torch.finfo(dtype).eps), default=torch.float32),
            accumulate=settings.accumulate,
            wire=settings.wire,
            longest=max([1, *sides, *(call.rows for call in own.calls)]),
            parts=dist.get_world_size() * max(1, len(own.calls)),
            coded=isinstance(optimizer, CPUOptimizer) and _is_coded(optimizer),
            master=settings.master or torch.float32,
        )


def _turn(now: int | None = None) -> int:
    """Rank 0 says what comes now: the turn of a rank, or none. So no wait of the others is longer than one replay, and
    their watchdogs know that it gets on. Collective."""
    told = [now]
    with During("the plain run on rank 0"):
        dist.broadcast_object_list(told, src=0)
    assert told[0] is not None
    return told[0]


def _receive(rank: int) -> Record:
    _turn(rank)
    box: list[Any] = [None]
    dist.recv_object_list(box, src=rank)
    assert isinstance(box[0], Record)
    return box[0]


def _ties(model: nn.Module) -> dict[str, str]:
    """By every name of every parameter, the first name of the same one."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(p), name) for name, p in model.named_parameters(remove_duplicate=False)}


def _tied(name: str | None) -> str:
    return "not there" if name is None else f"the parameter {name!r}"


def _value(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _is_coded(optimizer: CPUOptimizer) -> bool:
    """Whether any state is kept in 8 bits."""
    return any(kept.coded for group in optimizer.param_groups for kept in optimizer.formats(group).values())
