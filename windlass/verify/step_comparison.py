"""Comparison of one sharded training step with the same step of a plain (unsharded) model, phase by phase.

[Note: a step at a time] Both sides begin each step with bitwise equal weights. Each phase of the plain side starts from
the result of the previous phase on the sharded side, once this result was compared: the reduced gradient is compared
with the sum of the gradients of the ranks' autograd, and the update with the plain optimizer's update from the same
reduced gradient. So each bound covers only the rounding of its own phase, even if the optimizer amplifies noise (Adam
turns a gradient of pure rounding error into a full-size step of either sign). A deviation appears in the phase that is
wrong.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from windlass.verify.module_trace import OUTPUT, WEIGHT, TraceEvent
from windlass.verify.recorded_forward import RecordedForward
from windlass.verify.reference_model import ReplayResult
from windlass.verify.step_recorder import StepRecord
from windlass.verify.tensor_difference import MISSING, Difference, measure_difference
from windlass.verify.tolerance import Tolerance
from windlass.verify.verification_report import Deviation, StepResult

_PROPORTIONAL = 1e-3  # relative tolerance for a tensor to count as a multiple of another


class StepComparison:
    """Comparison of one step. It collects deviations in the order in which they are found.

    Args:
        model: the plain model, which gives the classes of modules and the dtypes of parameters.
        tolerance: bounds of rounding.
        step: number of the step, from 1.
    """

    def __init__(self, model: nn.Module, tolerance: Tolerance, step: int) -> None:
        self._model, self._tolerance, self._step = model, tolerance, step
        self.deviations: list[Deviation] = []
        self.result = StepResult(step)
        self._bounds = tolerance.descriptions()

    def compare_forward(self, recorded: RecordedForward, replay: ReplayResult, rank: int, micro: int) -> None:
        """Compare the weights and outputs of modules in the order in which they ran, then the buffers that the forward
        changed.
        """
        where: dict[str, Any] = {"rank": rank, "micro": micro}
        rest = iter(replay.events)
        for event in recorded.events:
            again = next(rest, None)
            while again is not None and again.kind == WEIGHT and again.key != event.key:
                again = next(rest, None)  # skip a weight that the sharded side did not record, as it was still sharded
            if again is None or again.key != event.key or again.sample.shape != event.sample.shape:
                self._report_module_order(event, again, where)
                return
            self._compare_event(event, again, where)
        if (more := next((event for event in rest if event.kind == OUTPUT), None)) is not None:
            self._report_module_order(None, more, where)
        for name, requested in replay.buffers.items():
            have = recorded.buffers_after[name]
            allowed = self._tolerance.forward * (requested.double().abs() + _rms(requested))
            apart = measure_difference(have, requested, allowed, have.dtype)
            self._record("forward", apart, tensor=name, role="buffer after the forward", **where)

    def compare_gradients(self, record: StepRecord, expected_gradients: dict[str, torch.Tensor], rank: int) -> None:
        """Compare the gradients of one rank's autograd, in order of arrival, with the plain model's. Also compare the
        initial gradient of the loss with the loss scale.
        """
        for expected, got in record.loss_gradients:
            apart = measure_difference(torch.tensor(got), torch.tensor(expected), 0.0, torch.float32)
            hint = f"the backward began with a gradient of {got:g}, and the loss scale is {expected:g}"
            self._record("gradient", apart, tensor="the loss", role="gradient of the loss", rank=rank, hint=hint)
        count = sum(value.numel() for value in expected_gradients.values())
        typical = math.sqrt(
            sum(float(_finite(value).square().sum()) for value in expected_gradients.values()) / max(1, count)
        )
        for name in [*record.gradient_sums, *(name for name in expected_gradients if name not in record.gradient_sums)]:
            have, want = record.gradient_sums.get(name), expected_gradients.get(name)
            dtype = self._dtype(name)
            if have is None or want is None:
                self._report_missing("gradient", name, have, rank=rank)
                continue
            if name in record.outside_gradients and dtype is torch.float16:
                # Autograd may overflow in fp16 when it adds a gradient from loss terms outside of the model to the
                # gradient from the model's outputs. The expected sum is in float64 and does not, so elements that are
                # not finite are not compared.
                want = torch.where(have.isfinite(), want, have)
            floor = max(_rms(want), typical)
            allowed = self._tolerance.forward * (want.abs() + floor)
            apart = measure_difference(have, want, allowed, dtype)
            self._record(
                "gradient", apart, tensor=name, role="gradient on its rank", rank=rank, hint=_multiple_hint(have, want)
            )

    def compare_reduced(
        self, reduced: dict[str, torch.Tensor | None], records: list[StepRecord], factor: float
    ) -> None:
        """Compare the reduced gradients with the sum of the gradients of the ranks' autograd; the sum is multiplied by
        `factor` and divided by the loss scale.
        """
        for name, have in reduced.items():
            parts = [
                record.gradient_sums[name] * (factor / record.loss_scale)
                for record in records
                if name in record.gradient_sums
            ]
            if have is None or not parts:
                if (have is None) != (not parts):
                    self._report_missing("reduce", name, have)
                continue
            want = torch.stack(parts).sum(0)
            sizes = [
                record.magnitude(name) * (factor / record.loss_scale)
                for record in records
                if name in record.gradient_sums
            ]
            wire = torch.finfo(self._tolerance.reduce_dtype)
            allowed = self._tolerance.reduce * torch.stack(sizes).sum(0) + wire.tiny * wire.eps / records[0].loss_scale
            apart = measure_difference(have, want, allowed, self._tolerance.accumulate_dtype)
            hint = ""
            if apart.exceeding_count:
                hint = _multiple_hint(have.double().cpu(), want) or self._single_rank_hint(
                    name, have.double().cpu(), records
                )
            self._record("reduce", apart, tensor=name, role="gradient after the reduction", hint=hint)

    def check_overflow(self, records: list[StepRecord]) -> None:
        """Record that the step was skipped for non-finite gradients. If all are finite, this is a deviation."""
        self.result.applied = False
        if all(bool(torch.isfinite(value).all()) for record in records for value in record.gradient_sums.values()):
            hint = "the step was skipped, and every gradient is finite"
            self._record("clip", MISSING, tensor="the norm", role="decision to step", hint=hint)

    def compare_clip(
        self, reduced: dict[str, torch.Tensor | None], norm: float, coefficient: float, gradient_clipping: float
    ) -> None:
        """Compare the norm of the reduced gradients, and the clip coefficient, with the expected values.

        `gradient_clipping` is the maximum norm; 0: no clipping.
        """
        squares = [float(g.double().square().sum()) for g in reduced.values() if g is not None]
        requested = math.sqrt(math.fsum(squares))
        factor = min(1.0, gradient_clipping / (requested + 1e-6)) if gradient_clipping > 0 else 1.0
        for what, have, want in (("gradient norm", norm, requested), ("clip coefficient", coefficient, factor)):
            allowed = self._tolerance.norm * want
            apart = measure_difference(torch.tensor(have).double(), torch.tensor(want).double(), allowed, torch.float32)
            hint = f"it is {have / want:.4g} times the expected value" if apart.exceeding_count and want else ""
            self._record("clip", apart, tensor=what, role="of all gradients", hint=hint)

    def compare_update(
        self, actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], old: dict[str, torch.Tensor]
    ) -> None:
        """Compare the weights after the step."""
        for name, value in actual.items():
            allowed = self._tolerance.update(old[name], expected[name])
            apart = measure_difference(value, expected[name], allowed, value.dtype)
            hint = ""
            if apart.exceeding_count:
                hint = (
                    "it has not changed since before the step"
                    if torch.equal(value.cpu(), old[name].cpu())
                    else _multiple_hint(
                        value.double().cpu() - old[name].double().cpu(),
                        expected[name].double().cpu() - old[name].double().cpu(),
                    ).replace("it is", "the change is")
                )
            self._record("update", apart, tensor=name, role="weight after the step", hint=hint)

    # Forward

    def _compare_event(self, event: TraceEvent, expected: TraceEvent, where: dict[str, Any]) -> None:
        seen, requested = event.sample, expected.sample
        weight = event.kind == WEIGHT
        share = 0.0 if weight else self._tolerance.forward
        if not seen.dtype.is_floating_point:
            share = 0.0
        allowed = share * (requested.values.double().abs() + _finite_or_zero(requested.rms))
        apart = measure_difference(seen.values, requested.values, allowed, seen.dtype)
        if not apart.exceeding_count:  # the norm also covers the elements that were not sampled
            have, want = (torch.tensor([one.norm], dtype=torch.float64) for one in (seen, requested))
            bound = max(share, 1e-12) * _finite_or_zero(requested.norm)
            norms = measure_difference(have, want, bound, torch.float64)
            apart = norms if norms.exceeding_count else apart
        what = "weight during the module's forward" if weight else "output of its module"
        tensor = event.tensor if weight else _output_name(event)
        hint = "the weight differs from that after the last step" if weight and apart.exceeding_count else ""
        self._record("forward", apart, tensor=tensor, module=event.module, role=what, hint=hint, **where)

    def _report_module_order(
        self, event: TraceEvent | None, expected: TraceEvent | None, where: dict[str, Any]
    ) -> None:
        ran = _describe_event(event)
        hint = f"the sharded model ran {ran}, and the plain one ran {_describe_event(expected)}"
        shown = event or expected
        assert shown is not None
        tensor = shown.tensor if shown.kind == WEIGHT else _output_name(shown)
        self._record(
            "forward", MISSING, tensor=tensor, module=shown.module, role="order of modules", hint=hint, **where
        )

    # All phases

    def _report_missing(self, phase: str, name: str, actual: torch.Tensor | None, **where: Any) -> None:
        hint = "the expected gradient is missing" if actual is None else "there is an unexpected gradient"
        self._record(phase, MISSING, tensor=name, role="gradient", hint=hint, **where)

    def _record(
        self, phase: str, difference: Difference, *, tensor: str, role: str, module: str | None = None, **more: Any
    ) -> None:
        self.result.record_difference(phase, difference)
        if not difference.exceeding_count:
            return
        place = tensor.rpartition(".")[0] if module is None else module
        facts = {
            "step": self._step,
            "phase": phase,
            "tensor": tensor,
            "module": self._describe_module(place),
            "role": role,
        }
        self.deviations.append(Deviation.from_difference(difference, **facts, allowed=self._bounds[phase], **more))

    def _describe_module(self, path: str) -> str:
        try:
            kind = type(self._model.get_submodule(path)).__name__
        except AttributeError:
            return ""
        return f"{path} ({kind})" if path else f"the model itself ({kind})"

    def _dtype(self, name: str) -> torch.dtype:
        return self._model.get_parameter(name).dtype

    def _single_rank_hint(self, name: str, actual: torch.Tensor, records: list[StepRecord]) -> str:
        """Return a hint if a reduced gradient is a multiple of one rank's gradient, else ""."""
        for rank, record in enumerate(records):
            part = record.gradient_sums.get(name)
            if part is not None and (factor := _proportionality(actual * record.loss_scale, part)) is not None:
                return f"it contains only rank {rank}'s part, times {factor:.4g}"
        return ""


def _multiple_hint(actual: torch.Tensor, expected: torch.Tensor) -> str:
    factor = _proportionality(actual, expected)
    return f"it is {factor:.4g} times the expected value" if factor is not None and abs(factor - 1) > 1e-2 else ""


def _proportionality(actual: torch.Tensor, expected: torch.Tensor) -> float | None:
    """Return k if `actual` is k times `expected`; None if there is no such k."""
    a, b = actual.reshape(-1).double(), expected.reshape(-1).double()
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


def _finite_or_zero(value: float) -> float:
    return value if math.isfinite(value) else 0.0


def _output_name(event: TraceEvent) -> str:
    name = "output" if event.tensor == "0" else f"output {event.tensor}"
    return f"{name} of {event.module}" if event.module else f"{name} of the model"


def _describe_event(event: TraceEvent | None) -> str:
    if event is None:
        return "nothing more"
    return repr(event.tensor) if event.kind == WEIGHT else f"the {_output_name(event)}"
