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

from windlass.base.collective_activity import activity
from windlass.base.errors import ModelError
from windlass.base.tensor_tree import iterate_tensors
from windlass.parallel.pipeline.pipeline_action import Action, ActionKind, RankActions
from windlass.parallel.pipeline.pipeline_stages import MicroBatchResult, PipelineStages
from windlass.parallel.pipeline.split_backward import SplitBackward
from windlass.parallel.pipeline.stage_message import MessageLayout, pack_message
from windlass.parallel.pipeline.stage_transfers import PeerStageFailed, ReceivedActivation, StageTransfers


def _run_backward(backward: Callable[[], None], is_last: bool) -> None:
    backward()


@dataclass(frozen=True)
class ExecutorCallbacks:
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

    call_module: Callable[..., Any]
    keep_unsharded: Callable[[], AbstractContextManager[Any]] = nullcontext
    run_backward: Callable[[Callable[[], None], bool], None] = _run_backward
    on_weight_backward: Callable[[], None] = lambda: None
    loss_factor: Callable[[], float] = lambda: 1.0
    to_device: Callable[[Any], Any] = lambda batch: batch


class ScheduleFailed(Exception):
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
class _BackwardState:
    """What a stage's backward of one micro-batch needs. Outputs are kept by their edges, so that memory goes back.

    Attributes:
        leaves: what the stage was given, whose gradients go back.
        edges: where gradients enter.
        seeds: the gradients that do; None: they come from the next stage.
    """

    input_leaves: list[torch.Tensor]
    edges: list[GradientEdge]
    output_gradients: list[torch.Tensor] | None = None


def execute_schedule(
    actions: RankActions,
    stages: PipelineStages,
    transfers: StageTransfers,
    batches: Sequence[Any],
    callbacks: ExecutorCallbacks,
    *,
    compute_loss: bool = True,
    keep_outputs: bool = False,
) -> list[MicroBatchResult]:
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
    runner = _ScheduleRunner(actions, stages, transfers, batches, callbacks, compute_loss, keep_outputs)
    final = next(
        (one for one in reversed(actions) if one.kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT)), None
    )
    at = 0
    try:
        with callbacks.keep_unsharded():
            for action in actions:
                runner.run_action(action, action == final)
                at += 1
            transfers.wait_all_sent()
    except Exception as error:
        if at == len(actions) or (activity.failed_wait is not None and activity.failed_wait[0] == id(error)):
            raise
        runner.release_all()
        mine = None if isinstance(error, PeerStageFailed) else error
        raise ScheduleFailed(mine, actions[at], partial(runner.drain, actions, at)) from mine
    return [runner.results[micro] for micro in sorted(runner.results)]


def make_shape_key(batch: Any) -> Hashable:
    """What all ranks of a pipeline know of a micro-batch: the shapes and dtypes of its tensors, in order."""
    return tuple((tuple(tensor.shape), tensor.dtype) for tensor in iterate_tensors(batch))


class _ScheduleRunner:
    """Of one schedule."""

    def __init__(
        self,
        actions: RankActions,
        stages: PipelineStages,
        transfers: StageTransfers,
        batches: Sequence[Any],
        callbacks: ExecutorCallbacks,
        compute_loss: bool,
        keep_outputs: bool,
    ) -> None:
        self._stages, self._transfers, self._callbacks = stages, transfers, callbacks
        self._compute_loss, self._keep_outputs = compute_loss, keep_outputs
        self._batches = batches
        self._shape_keys = [(make_shape_key(batch), torch.is_grad_enabled()) for batch in batches]
        self._device_batches: dict[int, Any] = {}  # micro-batches on the device
        self._remaining_uses = Counter(one.micro_batch for one in actions if one.kind is ActionKind.FORWARD)
        self._backward_states: dict[tuple[int, int], _BackwardState] = {}
        self._unsent_outputs: dict[
            tuple[int, int], tuple[MessageLayout, list[torch.Tensor]]
        ] = {}  # returned, not sent yet
        self._weight_backwards: dict[tuple[int, int], SplitBackward] = {}
        self.results: dict[int, MicroBatchResult] = {}

    def run_action(self, action: Action, is_last_backward: bool) -> None:
        """One action of the program; `last`: no backward follows it."""
        stage, micro, passing = action.stage, action.micro_batch, self._transfers
        match action.kind:
            case ActionKind.RECEIVE_ACTIVATION:
                passing.receive_activation(stage, micro, self._shape_keys[micro])
            case ActionKind.SEND_ACTIVATION:
                self._send(stage, micro)
            case ActionKind.RECEIVE_GRADIENT:
                passing.receive_gradient(stage, micro)
            case ActionKind.SEND_GRADIENT:
                passing.send_gradient(stage, micro, self._backward_states.pop((stage, micro)).input_leaves)
            case ActionKind.FORWARD:
                self._forward(stage, micro)
            case ActionKind.BACKWARD | ActionKind.BACKWARD_INPUT:
                self._backward(stage, micro, is_last_backward, split=action.kind is ActionKind.BACKWARD_INPUT)
            case ActionKind.BACKWARD_WEIGHT:
                later = self._weight_backwards.pop((stage, micro))
                if later:
                    self._callbacks.run_backward(
                        partial(later.backward_weights, self._callbacks.on_weight_backward), is_last_backward
                    )

    def release_all(self) -> None:
        """Free all activations and graphs."""
        self._backward_states.clear()
        self._unsent_outputs.clear()
        self._weight_backwards.clear()
        self._device_batches.clear()
        self.results.clear()

    def drain(self, actions: RankActions, at: int) -> None:
        """Make the transfers of `program[at:]` without values; that of `program[at]` itself unless it was made."""
        for action in actions[at:] if not self._transfers.is_single_rank else ():
            self._drain_action(action.kind, action.stage, action.micro_batch)
        self._transfers.wait_all_sent()

    def _drain_action(self, kind: ActionKind, stage: int, micro_batch: int) -> None:
        passing = self._transfers
        match kind:
            case ActionKind.RECEIVE_ACTIVATION:
                passing.ensure_activation_receive(stage, micro_batch, self._shape_keys[micro_batch])
            case ActionKind.FORWARD:
                passing.discard_activation(stage, micro_batch)
            case ActionKind.SEND_ACTIVATION:
                passing.send_failed_activation(stage, micro_batch, self._shape_keys[micro_batch])
            case ActionKind.RECEIVE_GRADIENT:
                passing.ensure_gradient_receive(stage, micro_batch)
            case ActionKind.BACKWARD | ActionKind.BACKWARD_INPUT:
                passing.discard_gradients(stage, micro_batch)
            case ActionKind.SEND_GRADIENT:
                passing.send_failed_gradient(stage, micro_batch)
            case ActionKind.BACKWARD_WEIGHT:
                pass

    def _forward(self, stage: int, micro_batch: int) -> None:
        arrived = self._transfers.take_activation(stage, micro_batch) if stage else ReceivedActivation(None, [])
        result = self._stages.run_stage(
            self._callbacks.call_module,
            stage,
            arrived.value,
            self._take_batch(micro_batch),
            compute_loss=self._compute_loss,
        )
        learns = torch.is_grad_enabled()
        if isinstance(result, MicroBatchResult):
            if learns and result.loss is not None:
                self._backward_states[stage, micro_batch] = self._backward_state_of_loss(arrived.leaves, result.loss)
            loss = None if result.loss is None else result.loss.detach()
            self.results[micro_batch] = MicroBatchResult(loss, result.output if self._keep_outputs else None)
            return
        form, out = pack_message(result)
        if learns:
            edges = [get_gradient_edge(tensor) for tensor in out if tensor.requires_grad]
            self._backward_states[stage, micro_batch] = _BackwardState(arrived.leaves, edges)
        self._unsent_outputs[stage, micro_batch] = form, [tensor.detach() for tensor in out]
        if self._transfers.is_single_rank:
            self._send(stage, micro_batch)

    def _send(self, stage: int, micro_batch: int) -> None:
        self._transfers.send_activation(
            stage, micro_batch, self._shape_keys[micro_batch], *self._unsent_outputs.pop((stage, micro_batch))
        )
        if not torch.is_grad_enabled():
            self._transfers.limit_activation_sends(stage)

    def _backward_state_of_loss(self, input_leaves: list[torch.Tensor], loss: torch.Tensor) -> _BackwardState:
        if loss.numel() != 1:
            raise ModelError(f"the last stage returned a loss of shape {list(loss.shape)}; it has to be a scalar")
        if not loss.requires_grad:
            return _BackwardState(input_leaves, [], [])
        scale = self._callbacks.loss_factor()
        root = loss if scale == 1.0 else loss.float() * scale
        return _BackwardState(input_leaves, [get_gradient_edge(root)], [torch.ones_like(root)])

    def _backward(self, stage: int, micro_batch: int, is_last_backward: bool, *, split: bool) -> None:
        kept = self._backward_states[stage, micro_batch]
        seeds = kept.output_gradients
        if seeds is None:
            seeds = self._transfers.take_gradients(stage, micro_batch)
            self._transfers.wait_activation_sent(stage, micro_batch)
        edges, kept.edges, kept.output_gradients = kept.edges, [], None
        if not split:
            if edges:
                self._callbacks.run_backward(partial(torch.autograd.backward, edges, seeds), is_last_backward)
        else:
            later = self._weight_backwards[stage, micro_batch] = SplitBackward(edges, seeds, kept.input_leaves)
            if later and kept.input_leaves:
                self._callbacks.run_backward(later.backward_inputs, False)
        if stage == 0:
            del self._backward_states[stage, micro_batch]
        elif self._transfers.is_single_rank:
            self._transfers.send_gradient(
                stage, micro_batch, self._backward_states.pop((stage, micro_batch)).input_leaves
            )

    def _take_batch(self, micro_batch: int) -> Any:
        """The micro-batch on the device, for as long as forwards need it."""
        if micro_batch not in self._device_batches:
            self._device_batches[micro_batch] = self._callbacks.to_device(self._batches[micro_batch])
        self._remaining_uses[micro_batch] -= 1
        return (
            self._device_batches[micro_batch]
            if self._remaining_uses[micro_batch]
            else self._device_batches.pop(micro_batch)
        )
