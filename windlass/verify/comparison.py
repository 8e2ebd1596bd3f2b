"""One step held against the plain one, phase by phase.

[Note: a step at a time] Both sides begin each step with the same weights, bit by bit. What a phase of the plain side
starts from is what the phase before it gave on the sharded side, once that was found equal: the reduced gradient is
held against the sum of the gradients that the ranks' autograd gave, and the update against the plain optimizer under
the very gradient that was reduced. So every bound is that of one phase's own rounding, whatever the optimizer makes of
noise (Adam turns a gradient that is nothing but rounding into a step of full size, of either sign), and the phase in
which something deviates is the phase that is wrong.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from windlass.verify.call import Call
from windlass.verify.difference import NOT_THERE, Difference, difference
from windlass.verify.plain import Replay
from windlass.verify.recorder import Record
from windlass.verify.tolerance import Tolerance
from windlass.verify.trace import OUTPUT, WEIGHT, Event
from windlass.verify.verdict import Deviation, StepRow

_PROPORTIONAL = 1e-3  # a tensor that is a multiple of another up to this


class Comparison:
    """Holds one step, and collects what deviates in the order in which it was found.

    Args:
        model: the plain one, whose modules have names.
        tolerance: what is rounding.
        step: counted from 1.
    """

    def __init__(self, model: nn.Module, tolerance: Tolerance, step: int) -> None:
        self._model, self._tolerance, self._step = model, tolerance, step
        self.deviations: list[Deviation] = []
        self.row = StepRow(step)
        self._lines = tolerance.lines()

    def forward(self, call: Call, found: Replay, rank: int, micro: int) -> None:
        """A call's modules in the order in which they ran, then the buffers that it changed."""
        where: dict[str, Any] = {"rank": rank, "micro": micro}
        rest = iter(found.events)
        for event in call.events:
            again = next(rest, None)
            while again is not None and again.kind == WEIGHT and again.key != event.key:
                again = next(rest, None)  # a weight that was not there yet when the sharded module began
            if again is None or again.key != event.key or again.seen.shape != event.seen.shape:
                self._other_order(event, again, where)
                return
            self._event(event, again, where)
        if (more := next((event for event in rest if event.kind == OUTPUT), None)) is not None:
            self._other_order(None, more, where)
        for name, wanted in found.buffers.items():
            have = call.buffers_after[name]
            allowed = self._tolerance.forward * (wanted.double().abs() + _rms(wanted))
            apart = difference(have, wanted, allowed, have.dtype)
            self._note("forward", apart, tensor=name, what="buffer after the forward", **where)

    def gradient(self, record: Record, wanted: dict[str, torch.Tensor], rank: int) -> None:
        """What autograd gave on one rank, in the order in which it came, and what the loss was multiplied by."""
        for expected, got in record.factors:
            apart = difference(torch.tensor(got), torch.tensor(expected), 0.0, torch.float32)
            hint = f"backward began with {got:g} where the loss scale is {expected:g}"
            self._note("gradient", apart, tensor="the loss", what="gradient of the loss", rank=rank, hint=hint)
        count = sum(value.numel() for value in wanted.values())
        typical = math.sqrt(sum(float(_finite(value).square().sum()) for value in wanted.values()) / max(1, count))
        for name in [*record.sums, *(name for name in wanted if name not in record.sums)]:
            have, want = record.sums.get(name), wanted.get(name)
            dtype = self._dtype(name)
            if have is None or want is None:
                self._one_sided("gradient", name, have, rank=rank)
                continue
            if name in record.outside and dtype is torch.float16:  # parts that only together are too large
                want = torch.where(have.isfinite(), want, have)
            floor = max(_rms(want), typical)
            allowed = self._tolerance.forward * (want.abs() + floor)
            apart = difference(have, want, allowed, dtype)
            self._note(
                "gradient", apart, tensor=name, what="gradient on its rank", rank=rank, hint=_multiple(have, want)
            )

    def reduce(self, reduced: dict[str, torch.Tensor | None], records: list[Record], factor: float) -> None:
        """Compare the reduced gradients with the sum of what the ranks' autograd gave, times `factor`."""
        for name, have in reduced.items():
            parts = [record.sums[name] * (factor / record.scale) for record in records if name in record.sums]
            if have is None or not parts:
                if (have is None) != (not parts):
                    self._one_sided("reduce", name, have)
                continue
            want = torch.stack(parts).sum(0)
            sizes = [record.size(name) * (factor / record.scale) for record in records if name in record.sums]
            wire = torch.finfo(self._tolerance.wire)
            allowed = self._tolerance.reduce * torch.stack(sizes).sum(0) + wire.tiny * wire.eps / records[0].scale
            apart = difference(have, want, allowed, self._tolerance.accumulate)
            hint = ""
            if apart.beyond:
                hint = _multiple(have.double().cpu(), want) or self._only_of(name, have.double().cpu(), records)
            self._note("reduce", apart, tensor=name, what="gradient after the reduction", hint=hint)

    def overflow(self, records: list[Record]) -> None:
        """The step was skipped for gradients that are not finite: some are not, indeed."""
        self.row.applied = False
        if all(bool(torch.isfinite(value).all()) for record in records for value in record.sums.values()):
            hint = "the step was skipped, and every gradient is finite"
            self._note("clip", NOT_THERE, tensor="the norm", what="decision to step", hint=hint)

    def clip(self, reduced: dict[str, torch.Tensor | None], norm: float, coefficient: float, limit: float) -> None:
        """The norm of the reduced gradients, and what they were multiplied by to keep it below `limit` (0: none)."""
        squares = [float(g.double().square().sum()) for g in reduced.values() if g is not None]
        wanted = math.sqrt(math.fsum(squares))
        factor = min(1.0, limit / (wanted + 1e-6)) if limit > 0 else 1.0
        for what, have, want in (("gradient norm", norm, wanted), ("clip coefficient", coefficient, factor)):
            allowed = self._tolerance.norm * want
            apart = difference(torch.tensor(have).double(), torch.tensor(want).double(), allowed, torch.float32)
            hint = f"it is {have / want:.4g} times what it should be" if apart.beyond and want else ""
            self._note("clip", apart, tensor=what, what="of all gradients", hint=hint)

    def update(
        self, have: dict[str, torch.Tensor], want: dict[str, torch.Tensor], old: dict[str, torch.Tensor]
    ) -> None:
        """The weights after the step."""
        for name, value in have.items():
            allowed = self._tolerance.update(old[name], want[name])
            apart = difference(value, want[name], allowed, value.dtype)
            hint = ""
            if apart.beyond:
                hint = (
                    "it is what it was before the step"
                    if torch.equal(value.cpu(), old[name].cpu())
                    else _multiple(
                        value.double().cpu() - old[name].double().cpu(),
                        want[name].double().cpu() - old[name].double().cpu(),
                    ).replace("it is", "the change is")
                )
            self._note("update", apart, tensor=name, what="weight after the step", hint=hint)

    # of a forward

    def _event(self, event: Event, again: Event, where: dict[str, Any]) -> None:
        seen, wanted = event.seen, again.seen
        weight = event.kind == WEIGHT
        share = 0.0 if weight else self._tolerance.forward
        if not seen.dtype.is_floating_point:
            share = 0.0
        allowed = share * (wanted.values.double().abs() + _number(wanted.rms))
        apart = difference(seen.values, wanted.values, allowed, seen.dtype)
        if not apart.beyond:  # of what was not kept the norm tells
            whole = torch.tensor([seen.norm]), torch.tensor([wanted.norm])
            bound = max(share, 1e-12) * _number(wanted.norm)
            norms = difference(*whole, bound, torch.float64)
            apart = norms if norms.beyond else apart
        what = "weight as its module saw it" if weight else "output of its module"
        tensor = event.tensor if weight else _output(event)
        hint = "the weight is not the one after the last step" if weight and apart.beyond else ""
        self._note("forward", apart, tensor=tensor, module=event.module, what=what, hint=hint, **where)

    def _other_order(self, event: Event | None, again: Event | None, where: dict[str, Any]) -> None:
        ran = _describe(event)
        hint = f"the sharded model came to {ran}, the plain one to {_describe(again)}"
        shown = event or again
        assert shown is not None
        tensor = shown.tensor if shown.kind == WEIGHT else _output(shown)
        self._note(
            "forward", NOT_THERE, tensor=tensor, module=shown.module, what="order of modules", hint=hint, **where
        )

    # of all phases

    def _one_sided(self, phase: str, name: str, have: torch.Tensor | None, **where: Any) -> None:
        hint = (
            "there is no gradient, and there should be" if have is None else "there is a gradient where none should be"
        )
        self._note(phase, NOT_THERE, tensor=name, what="gradient", hint=hint, **where)

    def _note(
        self, phase: str, apart: Difference, *, tensor: str, what: str, module: str | None = None, **more: Any
    ) -> None:
        self.row.saw(phase, apart)
        if not apart.beyond:
            return
        place = tensor.rpartition(".")[0] if module is None else module
        facts = {"step": self._step, "phase": phase, "tensor": tensor, "module": self._module(place), "what": what}
        self.deviations.append(Deviation.of(apart, **facts, allowed=self._lines[phase], **more))

    def _module(self, path: str) -> str:
        try:
            kind = type(self._model.get_submodule(path)).__name__
        except AttributeError:
            return ""
        return f"{path} ({kind})" if path else f"the model itself ({kind})"

    def _dtype(self, name: str) -> torch.dtype:
        return self._model.get_parameter(name).dtype

    def _only_of(self, name: str, have: torch.Tensor, records: list[Record]) -> str:
        """Whether a reduced gradient is one rank's alone."""
        for rank, record in enumerate(records):
            part = record.sums.get(name)
            if part is not None and (factor := _factor(have * record.scale, part)) is not None:
                return f"only rank {rank}'s part is in it, times {factor:.4g}"
        return ""


def _multiple(have: torch.Tensor, want: torch.Tensor) -> str:
    factor = _factor(have, want)
    return f"it is {factor:.4g} times what it should be" if factor is not None and abs(factor - 1) > 1e-2 else ""


def _factor(have: torch.Tensor, want: torch.Tensor) -> float | None:
    """k where `have` is k times `want`; None where it is no multiple."""
    a, b = have.reshape(-1).double(), want.reshape(-1).double()
    size = float(b.square().sum())
    if not size or not math.isfinite(size):
        return None
    factor = float(torch.dot(a, b)) / size
    return factor if float((a - factor * b).norm()) <= _PROPORTIONAL * float(a.norm()) and factor else None


def _rms(value: torch.Tensor) -> float:
    wide = _finite(value.double())
    return float(wide.norm()) / math.sqrt(max(1, wide.numel()))


def _finite(value: torch.Tensor) -> torch.Tensor:
    return value.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def _number(value: float) -> float:
    return value if math.isfinite(value) else 0.0


def _output(event: Event) -> str:
    name = "output" if event.tensor == "0" else f"output {event.tensor}"
    return f"{name} of {event.module}" if event.module else f"{name} of the model"


def _describe(event: Event | None) -> str:
    if event is None:
        return "the end"
    return repr(event.tensor) if event.kind == WEIGHT else f"the {_output(event)}"
