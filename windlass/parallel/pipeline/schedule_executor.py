"""Execution of a schedule: the forwards, backwards and transfers of one pipeline rank."""

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
    """Callbacks around the actions, set by the engine.

    Attributes:
        call_module: calls the module for a forward.
        keep_unsharded: returns a context manager for the whole schedule. Parameters stay unsharded inside the context,
            so that they are all-gathered once.
        run_backward: called with a function that runs a backward, and with True if this backward is the last one
            that computes gradients of parameters, so that all gradients are complete after it.
        on_weight_backward: called inside a backward that computes only gradients of weights, before any computation.
        loss_factor: returns the factor by which a micro-batch's loss is multiplied before its backward.
        to_device: moves a micro-batch from the loader to the device.
        leaves: tensors whose gradients an unsplit backward computes besides those of the stage's inputs; None: all
            leaves of the graph, including the parameters.
    """

    call_module: Callable[..., Any]
    keep_unsharded: Callable[[], AbstractContextManager[Any]] = nullcontext
    run_backward: Callable[[Callable[[], None], bool], None] = _run_backward
    on_weight_backward: Callable[[], None] = lambda: None
    loss_factor: Callable[[], float] = lambda: 1.0
    to_device: Callable[[Any], Any] = lambda batch: batch
    leaves: Sequence[torch.Tensor] | None = None


class ScheduleFailed(Exception):
    """Failure of a schedule, on this rank or on another rank of the pipeline.

    Attributes:
        error: exception raised on this rank; None if another rank raised first.
        action: action that this rank was running.
        drain: completes the remaining transfers of the schedule without values, so that other ranks do not wait. Other
            ranks may meanwhile need collectives of this rank: run `drain` on a thread and serve these collectives.
    """

    def __init__(self, error: Exception | None, action: Action | None, drain: Callable[[], None]) -> None:
        super().__init__(str(action))
        self.error, self.action, self.drain = error, action, drain


@dataclass
class _BackwardState:
    """Inputs of a stage's backward of one micro-batch.

    Outputs are stored as gradient edges, so that their memory is freed.

    Attributes:
        input_leaves: inputs of the stage, whose gradients are sent back.
        edges: outputs of the stage, where gradients enter its graph.
        output_gradients: gradients of these outputs; None: the next stage sends them.
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

    Gradients accumulate in `.grad`. Every micro-batch has the same weight, even if the sizes differ; the caller scales
    the losses (`callbacks.loss_factor`).

    Args:
        actions: actions of this rank, from `transfer_order.add_transfers`.
        stages: stages of this rank.
        transfers: transfers of this rank.
        batches: micro-batches of this step, the same on every rank of the pipeline.
        compute_loss: True if the last stage computes losses.
        keep_outputs: keep the model's outputs in the results; for runs without gradients.

    Returns:
        Results of the last stage in order of micro-batches; empty on ranks without the last stage.

    Raises:
        ScheduleFailed: a stage raised on this rank or on another rank of the pipeline: in its module, in its loss
            function, or because its output can't be sent. Errors of a transfer or collective are raised unchanged,
            because ranks can't continue in step over a broken connection.
    """
    runner = _ScheduleRunner(actions, stages, transfers, batches, callbacks, compute_loss, keep_outputs)
    # The last backward that touches parameters completes all gradients. A BACKWARD_INPUT after it adds none.
    final = next(
        (one for one in reversed(actions) if one.kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT)), None
    )
    at = 0
    try:
        # One all-gather for all micro-batches of the step.
        with callbacks.keep_unsharded():
            for action in actions:
                runner.run_action(action, action == final)
                at += 1
            # Send buffers must stay in memory until the peers have received them.
            transfers.wait_all_sent()
    except Exception as error:
        # A finished schedule or a broken connection leaves no transfers to drain: raise the error itself.
        if at == len(actions) or (activity.failed_wait is not None and activity.failed_wait[0] == id(error)):
            raise
        # Free activations first: the drain allocates buffers, and the failure may be an out-of-memory error.
        runner.release_all()
        # A peer that failed reports its own error, so this rank reports none.
        local = None if isinstance(error, PeerStageFailed) else error
        raise ScheduleFailed(local, actions[at], partial(runner.drain, actions, at)) from local
    return [runner.results[micro] for micro in sorted(runner.results)]


def make_shape_key(batch: Any) -> Hashable:
    """Return the shapes and dtypes of a micro-batch's tensors, in order. They are equal on all ranks of a pipeline."""
    return tuple((tuple(tensor.shape), tensor.dtype) for tensor in iterate_tensors(batch))


class _ScheduleRunner:
    """Execution state of one schedule."""

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
        # Shapes of stage outputs may also depend on the grad mode, so it is part of the key.
        self._shape_keys = [(make_shape_key(batch), torch.is_grad_enabled()) for batch in batches]
        self._device_batches: dict[int, Any] = {}  # micro-batches on the device
        self._remaining_uses = Counter(one.micro_batch for one in actions if one.kind is ActionKind.FORWARD)
        self._backward_states: dict[tuple[int, int], _BackwardState] = {}
        self._unsent_outputs: dict[
            tuple[int, int], tuple[MessageLayout, list[torch.Tensor]]
        ] = {}  # outputs of forwards that are not sent yet
        self._weight_backwards: dict[tuple[int, int], SplitBackward] = {}
        self.results: dict[int, MicroBatchResult] = {}

    def run_action(self, action: Action, is_last_backward: bool) -> None:
        """Run one action. `is_last_backward`: no later action computes gradients of parameters."""
        stage, micro, passing = action.stage, action.micro_batch, self._transfers
        match action.kind:
            case ActionKind.RECEIVE_ACTIVATION:
                passing.receive_activation(stage, micro, self._shape_keys[micro])
            case ActionKind.SEND_ACTIVATION:
                self._send(stage, micro)
            case ActionKind.RECEIVE_GRADIENT:
                passing.receive_gradient(stage, micro)
            case ActionKind.SEND_GRADIENT:
                # This is the last use of the state: this stage's backward has stored the gradients in the input leaves.
                passing.send_gradient(stage, micro, self._backward_states.pop((stage, micro)).input_leaves)
            case ActionKind.FORWARD:
                self._forward(stage, micro)
            case ActionKind.BACKWARD | ActionKind.BACKWARD_INPUT:
                self._backward(stage, micro, is_last_backward, split=action.kind is ActionKind.BACKWARD_INPUT)
            case ActionKind.BACKWARD_WEIGHT:
                later = self._weight_backwards.pop((stage, micro))
                # `later` is false if the stage has no trainable parameters: nothing is left to do.
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
        """Complete the transfers of `actions[at:]` without values.

        A transfer that `actions[at]` already started is not repeated.
        """
        # On a single rank stages exchange values directly, so there is nothing to complete.
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
            # Without gradients (evaluation) there is no backward that would free the state.
            if learns and result.loss is not None:
                self._backward_states[stage, micro_batch] = self._backward_state_of_loss(arrived.leaves, result.loss)
            # Detach the loss, so that the result does not keep the graph alive.
            loss = None if result.loss is None else result.loss.detach()
            self.results[micro_batch] = MicroBatchResult(loss, result.output if self._keep_outputs else None)
            return
        form, out = pack_message(result)
        if learns:
            # Edges instead of tensors: the graph stays, and the outputs are freed once they are sent.
            edges = [get_gradient_edge(tensor) for tensor in out if tensor.requires_grad]
            self._backward_states[stage, micro_batch] = _BackwardState(arrived.leaves, edges)
        self._unsent_outputs[stage, micro_batch] = form, [tensor.detach() for tensor in out]
        # The schedule of a single rank has no transfers, so pass the output to the next stage here.
        if self._transfers.is_single_rank:
            self._send(stage, micro_batch)

    def _send(self, stage: int, micro_batch: int) -> None:
        self._transfers.send_activation(
            stage, micro_batch, self._shape_keys[micro_batch], *self._unsent_outputs.pop((stage, micro_batch))
        )
        # In training the returning gradient shows that a send has ended. Without gradients, limit the sends in flight.
        if not torch.is_grad_enabled():
            self._transfers.limit_activation_sends(stage)

    def _backward_state_of_loss(self, input_leaves: list[torch.Tensor], loss: torch.Tensor) -> _BackwardState:
        if loss.numel() != 1:
            raise ModelError(f"the last stage returned a loss of shape {list(loss.shape)}; return a scalar")
        # A loss without graph, e.g. of a model without trainable parameters: the backward has nothing to do.
        if not loss.requires_grad:
            return _BackwardState(input_leaves, [], [])
        scale = self._callbacks.loss_factor()
        # Scale in float32, so that a 16-bit loss does not overflow.
        root = loss if scale == 1.0 else loss.float() * scale
        return _BackwardState(input_leaves, [get_gradient_edge(root)], [torch.ones_like(root)])

    def _backward(self, stage: int, micro_batch: int, is_last_backward: bool, *, split: bool) -> None:
        kept = self._backward_states[stage, micro_batch]
        seeds = kept.output_gradients
        if seeds is None:
            seeds = self._transfers.take_gradients(stage, micro_batch)
            # The gradient has arrived, so the peer has received the activation: free its send buffer now.
            self._transfers.wait_activation_sent(stage, micro_batch)
        # Drop the edges from the state before the backward, so that it frees the graph as it runs.
        edges, kept.edges, kept.output_gradients = kept.edges, [], None
        if not split:
            leaves = self._callbacks.leaves
            inputs = None if leaves is None else [*kept.input_leaves, *leaves]
            if edges and (inputs is None or inputs):
                self._callbacks.run_backward(
                    partial(torch.autograd.backward, edges, seeds, inputs=inputs), is_last_backward
                )
        else:
            later = self._weight_backwards[stage, micro_batch] = SplitBackward(edges, seeds, kept.input_leaves)
            if later and kept.input_leaves:
                # False: not the last backward of the step, because the backward of the weights follows.
                self._callbacks.run_backward(later.backward_inputs, False)
        if stage == 0:
            # No previous stage, hence no SEND_GRADIENT that would remove the state.
            del self._backward_states[stage, micro_batch]
        elif self._transfers.is_single_rank:
            # The schedule of a single rank has no transfers, so pass the gradients to the previous stage here.
            self._transfers.send_gradient(
                stage, micro_batch, self._backward_states.pop((stage, micro_batch)).input_leaves
            )

    def _take_batch(self, micro_batch: int) -> Any:
        """Return the micro-batch on the device. At its last forward on this rank, drop the stored reference."""
        if micro_batch not in self._device_batches:
            self._device_batches[micro_batch] = self._callbacks.to_device(self._batches[micro_batch])
        self._remaining_uses[micro_batch] -= 1
        return (
            self._device_batches[micro_batch]
            if self._remaining_uses[micro_batch]
            else self._device_batches.pop(micro_batch)
        )
