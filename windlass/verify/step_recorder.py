"""Recorder of the forwards, losses and gradients of one rank's sharded model between two steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from windlass.base.backward_callbacks import current_backward_id, queue_end_of_backward
from windlass.engine.engine_observer import EngineObserver
from windlass.verify.module_trace import ModuleTrace, replace_with_copies
from windlass.verify.recorded_forward import RecordedForward, begin_recording

if TYPE_CHECKING:
    from windlass.engine.training_engine import Engine

_EXIT = "windlass verify: an output of the model"
_FOLLOWED = (
    "than the model's outputs: verify finds tensors in tuples, lists, dicts, dataclasses and attributes of the "
    "outputs and of the model; return that tensor in one of these"
)


@dataclass
class StepRecord:
    """Record of one rank's step.

    Attributes:
        forwards: forwards with a gradient to one of their outputs, in order.
        gradient_sums: for each parameter, in order of arrival, the sum of its gradients from autograd, each times the
            weight of its backward; float64, on the CPU.
        gradient_magnitudes: the same sum of the gradients' magnitudes, for parameters with several gradients.
        outside_gradients: for each parameter, the part of its sum that comes from terms of the loss outside of the
            model, such as a penalty on weights.
        loss_gradients: for each `engine.backward`, the expected and the actual gradient of the loss.
        losses: arguments of `engine.backward`.
        loss_scale: loss scale of the gradients.
        problem: reason why the step can't be compared; empty if it can.
    """

    forwards: list[RecordedForward] = field(default_factory=list)
    gradient_sums: dict[str, torch.Tensor] = field(default_factory=dict)
    gradient_magnitudes: dict[str, torch.Tensor] = field(default_factory=dict)
    outside_gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    loss_gradients: list[tuple[float, float]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    loss_scale: float = 1.0
    problem: str = ""

    def magnitude(self, name: str) -> torch.Tensor:
        """Return the sum of the magnitudes of a parameter's gradients."""
        return self.gradient_magnitudes[name] if name in self.gradient_magnitudes else self.gradient_sums[name].abs()


class StepRecorder(EngineObserver):
    """Hooks on a model that an engine trains, and observer of the engine's losses and dropped gradients."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._model, self._device = engine, engine.module, engine.device
        self.record = StepRecord()
        self._accumulation_weight = 1.0 / engine.gradient_accumulation_steps()
        self._weight = self._accumulation_weight
        self._trace = ModuleTrace(self._model)
        self._versions: dict[str, tuple[int, int]] = {}
        self._pending_buffers: dict[str, torch.Tensor] = {}
        self._current_forward: RecordedForward | None = None
        self._forwards: list[RecordedForward] = []
        # Gradients of outputs in the running backward that are not yet added to their forwards.
        self._pending_gradients: list[tuple[RecordedForward, int, torch.Tensor]] = []
        self._backward = -1
        self._reached_parameters = False  # True once the backward has reached a parameter
        self._partially_dropped = ""  # a parameter whose gradient the script dropped while other gradients remained
        self._recorded_losses: list[torch.Tensor] = []  # losses whose gradient is recorded
        # for each forward, sequence numbers just before its first and after its last graph node
        self._graph_ranges: list[tuple[int, int]] = []
        self._names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        self._model.register_forward_pre_hook(self._before_forward, with_kwargs=True, prepend=True)
        self._model.register_forward_hook(self._after_forward)
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad:
                parameter.register_hook(self._parameter_gradient_hook(name))

    def take_record(self) -> StepRecord:
        """Return the record since the last step, and begin a new one."""
        record, self.record = self.record, StepRecord()
        if self._partially_dropped:
            record.problem = record.problem or (
                f"the gradient of {self._partially_dropped!r} was dropped or set to zero while others were kept: a "
                "replay of backwards computes all gradients; verify a script that drops all gradients of a "
                "backward, or none"
            )
        self._partially_dropped = ""
        for call in self._forwards:
            if call.gradients:
                call.buffers = {**self._pending_buffers, **call.buffers}
                self._pending_buffers = {}
                record.forwards.append(call)
            else:  # a forward without backward is not replayed, but the next replay needs the buffers that it changed
                self._pending_buffers |= call.buffers | call.buffers_after
        self._forwards, self._current_forward = [], None
        self._backward, self._reached_parameters = -1, False
        self._recorded_losses.clear()
        self._graph_ranges.clear()
        return record

    # Calls by the engine

    def before_backward(self, loss: torch.Tensor, weight: float) -> None:
        """Record the loss, and multiply the gradients that follow by `weight`."""
        self._weight = weight
        self._record_loss(loss)

    def after_backward(self) -> None:
        """Restore the weight for the gradients of a plain `loss.backward()`."""
        self._weight = self._accumulation_weight

    def on_gradient_dropped(self, name: str, zero: bool) -> None:
        """Remove a parameter's recorded gradient, which the script dropped or set to zero.

        If no gradient is left, drop the recorded losses and the gradients of outputs too.
        """
        record = self.record
        for of_name in (record.gradient_sums, record.gradient_magnitudes, record.outside_gradients):
            of_name.pop(name, None)
        if not record.gradient_sums:
            for call in self._forwards:  # the forwards stay, because a backward of them may follow
                call.gradients.clear()
            record.losses.clear()
        self._partially_dropped = name if record.gradient_sums or zero else ""

    def _record_loss(self, loss: Any) -> None:
        """Record the gradient of a loss, which must equal the loss scale."""
        if not isinstance(loss, torch.Tensor) or not loss.requires_grad or loss.numel() != 1:
            return
        self.record.losses.append(float(loss.detach()))
        if any(loss is known for known in self._recorded_losses):
            return
        self._recorded_losses.append(loss)
        self._hook_outside_gradients(loss)
        expected = float(torch.tensor(self._engine.loss_scale()).to(loss.dtype))
        loss.register_hook(lambda gradient: self.record.loss_gradients.append((expected, float(gradient))))

    def _hook_outside_gradients(self, loss: torch.Tensor) -> None:
        """Hook the parameters that the loss uses directly (a penalty on weights, `full_param`).

        The gradients from this use are recorded apart from the gradients that flow through the model's outputs.
        """
        seen: set[Any] = set()
        rest: list[Any] = [loss.grad_fn]
        while rest:
            node = rest.pop()
            if node is None or node in seen or _EXIT in node.metadata:
                continue
            seen.add(node)
            number = node._sequence_nr()
            if any(first < number < last for first, last in self._graph_ranges):
                inside = f"the loss depends on a tensor inside the model by another path {_FOLLOWED}"
                self.record.problem = self.record.problem or inside
                return
            for place, (below, _) in enumerate(node.next_functions):
                name = self._names.get(id(getattr(below, "variable", None)))
                if name is None:
                    rest.append(below)
                else:
                    node.register_hook(self._outside_gradient_hook(name, place))

    # Hooks on the model

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if current_backward_id() >= 0 or not (module.training or torch.is_grad_enabled()):
            self._current_forward = self._trace.events = None
            return
        self._current_forward = begin_recording(self._model, args, kwargs, self._device)
        self._current_forward.buffers = self._changed_buffers()
        self._trace.events = self._current_forward.events
        self._first_node = _next_node_number()

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        call, self._current_forward, self._trace.events = self._current_forward, None, None
        if call is None or current_backward_id() >= 0:
            return None
        call.buffers_after = self._changed_buffers()
        self._forwards.append(call)
        if not call.grad_enabled:
            return None
        self._graph_ranges.append((self._first_node, _next_node_number()))
        given, copies = replace_with_copies(self._model, output)
        for number, tensor in enumerate(copies):
            made: Any = tensor.grad_fn
            made.metadata[_EXIT] = True
            tensor.register_hook(self._output_gradient_hook(call, number))
            if call.loss is None and tensor.dim() == 0:
                call.loss = number, float(tensor.detach())
        return given

    def _changed_buffers(self) -> dict[str, torch.Tensor]:
        changed = {}
        for name, buffer in self._model.named_buffers(remove_duplicate=False):
            version = (id(buffer), buffer._version)
            if self._versions.get(name) != version:
                self._versions[name] = version
                changed[name] = buffer.detach().to("cpu", copy=True)
        return changed

    # Hooks in a backward

    def _output_gradient_hook(self, forward: RecordedForward, number: int) -> Callable[[torch.Tensor], None]:
        def entered(gradient: torch.Tensor) -> None:
            if torch.is_grad_enabled():
                self.record.problem = (
                    "a backward with create_graph=True: gradients of gradients cannot be replayed from the model's "
                    "outputs; verify the model with a loss that needs none"
                )
            self._note_backward()
            if not any(forward is known for known in self._forwards):
                self.record.problem = (
                    "a backward of a forward that ran before the last step: its weights were overwritten; call "
                    "backward before step"
                )
            self._pending_gradients.append((forward, number, gradient.detach().to("cpu", copy=True)))
            if self._reached_parameters:
                self._commit_pending_gradients()

        return entered

    def _note_backward(self) -> None:
        number = current_backward_id()
        if self._backward < 0:
            self._backward, self._reached_parameters = number, False
            self._pending_gradients.clear()
            queue_end_of_backward(self._on_backward_end)

    def _on_backward_end(self) -> None:
        self._backward, self._reached_parameters = -1, False
        self._pending_gradients.clear()

    def _commit_pending_gradients(self) -> None:
        """Add the pending gradients of outputs to their forwards, once the backward has reached a parameter."""
        for call, number, gradient in self._pending_gradients:
            known = call.gradients.setdefault(self._weight, {})
            known[number] = known[number] + gradient if number in known else gradient
        self._pending_gradients.clear()

    def _parameter_gradient_hook(self, name: str) -> Callable[[torch.Tensor], None]:
        def arrived(gradient: torch.Tensor) -> None:
            if self._backward < 0:
                self.record.problem = f"a gradient reached {name!r} by another path {_FOLLOWED}"
            self._reached_parameters = True
            self._commit_pending_gradients()
            part, record = self._weighted(gradient), self.record
            if name in record.gradient_sums:
                record.gradient_magnitudes[name] = record.magnitude(name) + part.abs()
                record.gradient_sums[name] += part
            else:
                record.gradient_sums[name] = part

        return arrived

    def _outside_gradient_hook(self, name: str, input_index: int) -> Callable[..., None]:
        def came(gradients: tuple[torch.Tensor | None, ...], _: Any) -> None:
            gradient = gradients[input_index]
            if gradient is None:
                return
            self._note_backward()
            part, outside = self._weighted(gradient), self.record.outside_gradients
            outside[name] = outside[name] + part if name in outside else part

        return came

    def _weighted(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return a gradient times the weight of its backward, in float64 on the CPU."""
        dense = gradient.detach().to_dense() if gradient.is_sparse else gradient.detach()
        return dense.to("cpu", torch.float64, copy=True).mul_(self._weight)


def _next_node_number() -> int:
    """Return the sequence number that torch would give to the next graph node."""
    with torch.enable_grad():
        node = torch.zeros((), requires_grad=True).clone().grad_fn
    assert node is not None
    return int(node._sequence_nr())
