"""Executes a schedule: the forwards, backwards and transfers of one rank of a pipeline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from windlass.base.activity import activity
from windlass.base.errors import ModelError
from windlass.base.tree import tensors
from windlass.parallel.pipeline.action import Action, Kind, Order
from windlass.parallel.pipeline.parcel import Form, pack
from windlass.parallel.pipeline.passing import Arrived, Passing, PeerFailed
from windlass.parallel.pipeline.split import Later
from windlass.parallel.pipeline.stage import Ended, Stages


def _plainly(backward: Callable[[], None], last: bool) -> None:
    backward()


@dataclass(frozen=True)
class Around:
    """What happens around the actions; an engine puts its own here.

    Attributes:
        hold: entered for the whole schedule, so that parameters are gathered once.
        call: calls the module for a forward.
        backward: runs what it is given, a backward; it is told whether that is the last one in the schedule, after
            which all gradients are complete.
        began: called in a backward of parameters alone, before anything else.
        scale: what each micro-batch's loss is multiplied by before its backward.
        moved: a micro-batch as it comes from the loader, on the device.
    """

    call: Callable[..., Any]
    hold: Callable[[], AbstractContextManager[Any]] = nullcontext
    backward: Callable[[Callable[[], None], bool], None] = _plainly
    began: Callable[[], None] = lambda: None
    scale: Callable[[], float] = lambda: 1.0
    moved: Callable[[Any], Any] = lambda batch: batch


class Halted(Exception):
    """A schedule that failed on this rank, or on a rank that sends to it.

    Attributes:
        error: what was raised here; None if another rank raised first.
        action: what this rank was doing.
        drain: makes the transfers that are left of the schedule, without values, so that other ranks do not wait. Other
            ranks may need collectives of this one meanwhile: run it on a thread and serve those.
    """

    def __init__(self, error: Exception | None, action: Action | None, drain: Callable[[], None]) -> None:
        super().__init__(str(action))
        self.error, self.action, self.drain = error, action, drain


@dataclass
class _Kept:
    """What a stage's backward of one micro-batch needs. Outputs are kept by their edges, so that memory goes back.

    Attributes:
        leaves: what the stage was given, whose gradients go back.
        edges: where gradients enter.
        seeds: the gradients that do; None: they come from the next stage.
    """

    leaves: list[torch.Tensor]
    edges: list[GradientEdge]
    seeds: list[torch.Tensor] | None = None


def execute(
    program: Order,
    stages: Stages,
    passing: Passing,
    batches: Sequence[Any],
    around: Around,
    *,
    loss: bool = True,
    outputs: bool = False,
) -> list[Ended]:
    """Run one rank's part of a schedule.

    Gradients add up in `.grad`, as in plain accumulation: each micro-batch counts as much as any other, whatever its
    size, and the caller divides (`around.scale`).

    Args:
        program: from `programs`.
        stages: the rank's.
        passing: its transfers.
        batches: the micro-batches of this step; every rank of the pipeline has the same ones.
        loss: the last stage comes to losses.
        outputs: what the model returned is kept; for runs without gradients.

    Returns:
        What the last stage came to, by micro-batch; empty on all other ranks.

    Raises:
        Halted: a stage raised (its module, its loss function, what it returned can't be passed on), here or on another
            rank of the pipeline. An error of a transfer or collective itself is raised as it is: connections that broke
            can't be kept in step.
    """
    runner = _Runner(program, stages, passing, batches, around, loss, outputs)
    final = next((one for one in reversed(program) if one.kind in (Kind.BACKWARD, Kind.WEIGHT)), None)
    at = 0
    try:
        with around.hold():
            for action in program:
                runner.do(action, action == final)
                at += 1
            passing.settle()
    except Exception as error:
        if at == len(program) or (activity.broken is not None and activity.broken[0] == id(error)):
            raise
        runner.forget()
        mine = None if isinstance(error, PeerFailed) else error
        raise Halted(mine, program[at], partial(runner.drain, program, at)) from mine
    return [runner.ended[micro] for micro in sorted(runner.ended)]


def shapes(batch: Any) -> Hashable:
    """What all ranks of a pipeline know of a micro-batch: the shapes and dtypes of its tensors, in order."""
    return tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors(batch))


class _Runner:
    """Of one schedule."""

    def __init__(
        self,
        program: Order,
        stages: Stages,
        passing: Passing,
        batches: Sequence[Any],
        around: Around,
        loss: bool,
        outputs: bool,
    ) -> None:
        self._stages, self._passing, self._around = stages, passing, around
        self._loss, self._outputs = loss, outputs
        self._batches = batches
        self._keys = [(shapes(batch), torch.is_grad_enabled()) for batch in batches]
        self._here: dict[int, Any] = {}  # micro-batches on the device
        self._uses = Counter(one.micro for one in program if one.kind is Kind.FORWARD)
        self._kept: dict[tuple[int, int], _Kept] = {}
        self._out: dict[tuple[int, int], tuple[Form, list[torch.Tensor]]] = {}  # returned, not sent yet
        self._later: dict[tuple[int, int], Later] = {}
        self.ended: dict[int, Ended] = {}

    def do(self, action: Action, last: bool) -> None:
        """One action of the program; `last`: no backward follows it."""
        stage, micro, passing = action.stage, action.micro, self._passing
        match action.kind:
            case Kind.RECEIVE_ACTIVATION:
                passing.receive_activation(stage, micro, self._keys[micro])
            case Kind.SEND_ACTIVATION:
                self._send(stage, micro)
            case Kind.RECEIVE_GRADIENT:
                passing.receive_gradient(stage, micro)
            case Kind.SEND_GRADIENT:
                passing.send_gradient(stage, micro, self._kept.pop((stage, micro)).leaves)
            case Kind.FORWARD:
                self._forward(stage, micro)
            case Kind.BACKWARD | Kind.INPUT:
                self._backward(stage, micro, last, split=action.kind is Kind.INPUT)
            case Kind.WEIGHT:
                later = self._later.pop((stage, micro))
                if later:
                    self._around.backward(partial(later.run, self._around.began), last)

    def forget(self) -> None:
        """Free all activations and graphs."""
        self._kept.clear()
        self._out.clear()
        self._later.clear()
        self._here.clear()
        self.ended.clear()

    def drain(self, program: Order, at: int) -> None:
        """Make the transfers of `program[at:]` without values; that of `program[at]` itself unless it was made."""
        for action in program[at:] if not self._passing.alone else ():
            self._drain(action.kind, action.stage, action.micro)
        self._passing.settle()

    def _drain(self, kind: Kind, stage: int, micro: int) -> None:
        passing = self._passing
        match kind:
            case Kind.RECEIVE_ACTIVATION:
                passing.expect_activation(stage, micro, self._keys[micro])
            case Kind.FORWARD:
                passing.discard_activation(stage, micro)
            case Kind.SEND_ACTIVATION:
                passing.send_failure(stage, micro, self._keys[micro])
            case Kind.RECEIVE_GRADIENT:
                passing.expect_gradient(stage, micro)
            case Kind.BACKWARD | Kind.INPUT:
                passing.discard_gradients(stage, micro)
            case Kind.SEND_GRADIENT:
                passing.send_failed_gradient(stage, micro)
            case Kind.WEIGHT:
                pass

    def _forward(self, stage: int, micro: int) -> None:
        arrived = self._passing.arrived(stage, micro) if stage else Arrived(None, [])
        result = self._stages.run(self._around.call, stage, arrived.value, self._batch(micro), loss=self._loss)
        learns = torch.is_grad_enabled()
        if isinstance(result, Ended):
            if learns and result.loss is not None:
                self._kept[stage, micro] = self._seeded(arrived.leaves, result.loss)
            loss = None if result.loss is None else result.loss.detach()
            self.ended[micro] = Ended(loss, result.output if self._outputs else None)
            return
        form, out = pack(result)
        if learns:
            edges = [get_gradient_edge(tensor) for tensor in out if tensor.requires_grad]
            self._kept[stage, micro] = _Kept(arrived.leaves, edges)
        self._out[stage, micro] = form, [tensor.detach() for tensor in out]
        if self._passing.alone:
            self._send(stage, micro)

    def _send(self, stage: int, micro: int) -> None:
        self._passing.send_activation(stage, micro, self._keys[micro], *self._out.pop((stage, micro)))
        if not torch.is_grad_enabled():
            self._passing.settle_activations(stage)

    def _seeded(self, leaves: list[torch.Tensor], loss: torch.Tensor) -> _Kept:
        if loss.numel() != 1:
            raise ModelError(f"the last stage returned a loss of shape {list(loss.shape)}; it has to be a scalar")
        if not loss.requires_grad:
            return _Kept(leaves, [], [])
        scale = self._around.scale()
        root = loss if scale == 1.0 else loss.float() * scale
        return _Kept(leaves, [get_gradient_edge(root)], [torch.ones_like(root)])

    def _backward(self, stage: int, micro: int, last: bool, *, split: bool) -> None:
        kept = self._kept[stage, micro]
        seeds = kept.seeds
        if seeds is None:
            seeds = self._passing.gradients(stage, micro)
            self._passing.settle_activation(stage, micro)
        edges, kept.edges, kept.seeds = kept.edges, [], None
        if not split:
            if edges:
                self._around.backward(partial(torch.autograd.backward, edges, seeds), last)
        else:
            later = self._later[stage, micro] = Later(edges, seeds, kept.leaves)
            if later and kept.leaves:
                self._around.backward(later.inputs, False)
        if stage == 0:
            del self._kept[stage, micro]
        elif self._passing.alone:
            self._passing.send_gradient(stage, micro, self._kept.pop((stage, micro)).leaves)

    def _batch(self, micro: int) -> Any:
        """The micro-batch on the device, for as long as forwards need it."""
        if micro not in self._here:
            self._here[micro] = self._around.moved(self._batches[micro])
        self._uses[micro] -= 1
        return self._here[micro] if self._uses[micro] else self._here.pop(micro)
