"""Transfers between stages: activations go to the next stage, gradients to the previous one.

A stage may pass nested containers of tensors of any shape.
"""

from __future__ import annotations

import pickle
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from windlass.base.collective_activity import WaitScope
from windlass.base.errors import ModelError
from windlass.base.trace_ranges import traced
from windlass.comm.mesh_axis import MeshAxis
from windlass.comm.point_to_point import start_exchange, wait_for_transfers
from windlass.parallel.pipeline.stage_message import MessageLayout, TensorSpec

_ACTIVATION, _GRADIENT, _HEADER = range(3)  # kinds of message; with the stage they form the tag
_SENDS_IN_FLIGHT = 2


class PeerStageFailed(Exception):
    """Use of a transfer that its sender marked as failed: the sender failed, or received a failed transfer itself."""


@dataclass
class _InFlightTransfer:
    """Started transfer and the tensors that must stay in memory until it ends."""

    tensors: list[torch.Tensor]
    works: list[Any] = field(default_factory=list)
    ok_flag: torch.Tensor | None = None  # one byte: 0 if the tensors have no values because a rank failed

    def wait(self) -> list[torch.Tensor]:
        """Wait until the transfer ends and return its tensors."""
        works, self.works = self.works, []
        wait_for_transfers(works)
        return self.tensors

    @property
    def is_failed(self) -> bool:
        """True if the transfer, which must have ended, was marked as failed."""
        return self.ok_flag is not None and not int(self.ok_flag)


class _DetachedInput(torch.autograd.Function):
    """Received tensor whose gradient goes to a leaf without values.

    Layers may change the tensor in place, and it is freed after its last use.
    """

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


@dataclass
class ReceivedActivation:
    """Input of a stage, received from the previous one.

    Attributes:
        value: output of the previous stage.
        leaves: one leaf, without values, for each tensor whose gradient is sent back. The backward sets its `.grad`.
    """

    value: Any
    leaves: list[torch.Tensor]


class StageTransfers:
    """Transfers of one pipeline rank, which start in the order of `transfer_order`.

    A receiver needs the shapes before it can receive. The sender sends them in a header of a few hundred bytes, once
    for each stage and *key*: shapes and dtypes in the micro-batch and the grad mode, which both ranks have. If the
    shapes of activations do not follow from the key, set `has_dynamic_shapes`.

    Each transfer of activations or gradients includes one byte: 1 if its tensors have values, 0 if the transfer is
    marked as failed. A rank that failed continues its transfers (`send_failed_activation`, `send_failed_gradient`,
    `discard_activation`, `discard_gradients`), so that all connections stay at the same position in the schedule. A
    rank that receives a transfer marked as failed raises `PeerStageFailed` where it would use the values.

    `axis.traffic.bytes_moved` counts the bytes that this rank receives, under `"activations"`, `"gradients"` and
    `"headers"`.

    Args:
        axis: the ranks of the pipeline.
        device: device of received tensors.
        has_dynamic_shapes: send a header before every activation.
    """

    def __init__(self, axis: MeshAxis, device: torch.device, *, has_dynamic_shapes: bool = False) -> None:
        self._axis, self._device, self.has_dynamic_shapes = axis, device, has_dynamic_shapes
        self._sent_layouts: dict[tuple[int, Hashable], MessageLayout] = {}  # keys: stage, key (see the class)
        self._received_layouts: dict[tuple[int, Hashable], MessageLayout] = {}  # the same keys; skeletons are pickled
        # Layouts of unfinished micro-batches. Keys: kind, stage, micro-batch. The kind _ACTIVATION is for the output
        # that the stage sends, _GRADIENT for the input whose gradients the stage returns.
        self._active_layouts: dict[tuple[int, int, int], MessageLayout] = {}
        self._receiving: dict[tuple[int, int, int], _InFlightTransfer] = {}  # keys: kind, stage, micro-batch
        self._sending: dict[tuple[int, int], dict[int, _InFlightTransfer]] = {}  # keys: (kind, stage), micro-batch
        self._failed_activations: set[tuple[int, int]] = (
            set()
        )  # stages and micro-batches whose activation a failed rank never sends
        # Values passed between stages of a single rank. Keys: the stage that receives an activation (or, negative, the
        # stage that sent a gradient), and the micro-batch.
        self._handed_over: dict[tuple[int, int], Any] = {}

    @property
    def is_single_rank(self) -> bool:
        """True if all stages are on this rank: values are passed on directly, and nothing is sent or received."""
        return self._axis.size == 1

    def forget_layouts(self) -> None:
        """Drop all stored layouts: the next activations are sent with headers. Call on all ranks of the pipeline."""
        self._sent_layouts.clear()
        self._received_layouts.clear()

    # Activations

    def send_activation(
        self, stage: int, micro_batch: int, key: Hashable, layout: MessageLayout, tensors: list[torch.Tensor]
    ) -> None:
        """Start to send the output of `stage`, packed and detached, to the next stage.

        Raises:
            ModelError: the layout differs from that of an earlier micro-batch with an equal key.
        """
        if self.is_single_rank:
            self._handed_over[stage + 1, micro_batch] = tensors, layout
            return
        known = None if self.has_dynamic_shapes else self._sent_layouts.get((stage, key))
        if known is None:
            self._send_header(stage, layout)
            self._sent_layouts[stage, key] = layout
        elif not known.matches(layout):
            # The receiver allocates memory by the layout that it stored for this key.
            raise ModelError(
                f"stage {stage} returned {_describe_layout(layout)} for micro-batch {micro_batch}, and "
                f"{_describe_layout(known)} for one with the same shapes; if the outputs of a stage vary, set "
                "dynamic_shape=True; after parameters were frozen or unfrozen, call reset_activation_shape() on every "
                "rank"
            )
        # The layout is stored for the returning gradients, which have the shapes of the differentiable tensors, and for
        # `send_failed_activation`: from here on the receiver has the layout and waits for the tensors.
        self._active_layouts[_ACTIVATION, stage, micro_batch] = layout
        self._send(_ACTIVATION, stage, micro_batch, stage + 1, tensors)

    def receive_activation(self, stage: int, micro_batch: int, key: Hashable) -> None:
        """Start to receive the input of `stage`; wait for its header, if one is sent.

        A call that ran out of memory may be repeated.
        """
        # `known` is set if an earlier call failed after the header: the header must not be received twice.
        known = self._active_layouts.get((_GRADIENT, stage, micro_batch))
        if known is None and not self.has_dynamic_shapes:
            known = self._received_layouts.get((stage, key))
        if known is None:
            header = self._receive_header(stage)
            if header is None:
                # The sender failed before it had a layout, so no activation follows.
                self._failed_activations.add((stage, micro_batch))
                return
            known = self._received_layouts[stage, key] = header
        self._active_layouts[_GRADIENT, stage, micro_batch] = known
        self._receive(_ACTIVATION, stage, micro_batch, stage - 1, list(known.tensor_specs), "activations")

    def take_activation(self, stage: int, micro_batch: int) -> ReceivedActivation:
        """Wait for the input of `stage` and return it.

        Raises:
            PeerStageFailed: the rank of the previous stage failed, or had received a failed transfer.
        """
        if self.is_single_rank:
            tensors, form = self._handed_over.pop((stage, micro_batch))
            self._active_layouts[_GRADIENT, stage, micro_batch] = form
        elif (stage, micro_batch) in self._failed_activations:
            raise PeerStageFailed
        else:
            tensors, form = (
                self._take_received(_ACTIVATION, stage, micro_batch),
                self._active_layouts[_GRADIENT, stage, micro_batch],
            )
            # Unpickle only here, because a user's class may raise. By now the header and the tensors have been
            # received, so sender and receiver are at the same position in the schedule.
            form = replace(form, skeleton=pickle.loads(form.skeleton))
        leaves, through = [], []
        for tensor, spec in zip(tensors, form.tensor_specs, strict=True):
            if spec.requires_grad and torch.is_grad_enabled():
                # One element, expanded: autograd uses the leaf's shape and `.grad`, never its values.
                leaves.append(tensor.new_zeros(()).expand(tensor.shape).requires_grad_(True))
                tensor = _DetachedInput.apply(leaves[-1], tensor)
            through.append(tensor)
        return ReceivedActivation(form.fill(through), leaves)

    # Gradients

    def send_gradient(self, stage: int, micro_batch: int, leaves: list[torch.Tensor]) -> None:
        """Send the gradients of the input of `stage` to the previous stage; zeros for a tensor without gradient."""
        # The receiver expects a gradient for every differentiable tensor.
        gradients = [leaf.grad if leaf.grad is not None else torch.zeros_like(leaf) for leaf in leaves]
        self._active_layouts.pop((_GRADIENT, stage, micro_batch), None)
        if self.is_single_rank:
            self._handed_over[-stage, micro_batch] = gradients
            return
        self._send(_GRADIENT, stage, micro_batch, stage - 1, gradients)
        self.limit_gradient_sends(stage)

    def receive_gradient(self, stage: int, micro_batch: int) -> None:
        """Start to receive the gradients of the output of `stage`."""
        specs = self._active_layouts[_ACTIVATION, stage, micro_batch].differentiable_specs
        self._receive(_GRADIENT, stage, micro_batch, stage + 1, specs, "gradients")

    def take_gradients(self, stage: int, micro_batch: int) -> list[torch.Tensor]:
        """Wait for the gradients of the output of `stage` and return them, one for each differentiable tensor.

        Raises:
            PeerStageFailed: the rank of the next stage failed, or had received a failed transfer.
        """
        self._active_layouts.pop((_ACTIVATION, stage, micro_batch), None)
        if self.is_single_rank:
            found: list[torch.Tensor] = self._handed_over.pop((-stage - 1, micro_batch))
            return found
        return self._take_received(_GRADIENT, stage, micro_batch)

    # After a failure: the same transfers, without values

    def send_failed_activation(self, stage: int, micro_batch: int, key: Hashable) -> None:
        """Send a message without values in place of `send_activation`: this rank failed, or received such a message."""
        form = self._active_layouts.get((_ACTIVATION, stage, micro_batch))
        if form is None and not self.has_dynamic_shapes:
            form = self._sent_layouts.get((stage, key))
        if form is None:
            # The receiver waits for a header; a header of None ends the exchange.
            self._send_header(stage, None)
            return
        self._active_layouts[_ACTIVATION, stage, micro_batch] = form
        empty = [spec.empty(self._device) for spec in form.tensor_specs]
        self._send(_ACTIVATION, stage, micro_batch, stage + 1, empty, ok=False)

    def send_failed_gradient(self, stage: int, micro_batch: int) -> None:
        """Send a message without values in place of `send_gradient`.

        Send nothing if this stage has no layout of its input: then the previous stage expects no gradient.
        """
        form = self._active_layouts.pop((_GRADIENT, stage, micro_batch), None)
        if form is not None:
            empty = [spec.empty(self._device) for spec in form.differentiable_specs]
            self._send(_GRADIENT, stage, micro_batch, stage - 1, empty, ok=False)
            self.limit_gradient_sends(stage)

    def ensure_gradient_receive(self, stage: int, micro_batch: int) -> None:
        """Start to receive the gradient as `receive_gradient` does, if an activation was sent and no receive was
        started.
        """
        if (_ACTIVATION, stage, micro_batch) in self._active_layouts and (
            _GRADIENT,
            stage,
            micro_batch,
        ) not in self._receiving:
            self.receive_gradient(stage, micro_batch)

    def ensure_activation_receive(self, stage: int, micro_batch: int, key: Hashable) -> None:
        """Start to receive the activation as `receive_activation` does, unless a receive was started already."""
        if (_ACTIVATION, stage, micro_batch) not in self._receiving and (
            stage,
            micro_batch,
        ) not in self._failed_activations:
            self.receive_activation(stage, micro_batch, key)

    def discard_activation(self, stage: int, micro_batch: int) -> None:
        """Wait for the input of `stage`, if its receive was started, and drop it."""
        moving = self._receiving.pop((_ACTIVATION, stage, micro_batch), None)
        if moving is not None:
            self._wait(moving)

    def discard_gradients(self, stage: int, micro_batch: int) -> None:
        """Wait until the output of `stage` is sent and its gradients, if requested, are received; drop them."""
        self._active_layouts.pop((_ACTIVATION, stage, micro_batch), None)
        moving = self._receiving.pop((_GRADIENT, stage, micro_batch), None)
        if moving is not None:
            self._wait(moving)
        self.wait_activation_sent(stage, micro_batch)

    # End of sends

    def wait_activation_sent(self, stage: int, micro_batch: int) -> None:
        """Wait until an activation is sent, and free its send buffer.

        The wait ends at once if the gradient of the activation has arrived: the peer has received the activation.
        """
        going = self._sending.get((_ACTIVATION, stage), {})
        if micro_batch in going:
            self._wait(going.pop(micro_batch))

    def limit_activation_sends(self, stage: int) -> None:
        """Wait for the oldest activations of `stage` if more than two are in flight. Used if gradients are disabled."""
        self._limit_in_flight(_ACTIVATION, stage)

    def limit_gradient_sends(self, stage: int) -> None:
        """Wait for the oldest gradients that `stage` sent if more than two are in flight."""
        self._limit_in_flight(_GRADIENT, stage)

    def wait_all_sent(self) -> None:
        """Wait until everything that was sent has been received, and clear the state of the schedule."""
        for going in self._sending.values():
            for moving in going.values():
                self._wait(moving)
        self._sending.clear()
        self._active_layouts.clear()
        self._failed_activations.clear()
        self._handed_over.clear()

    def _limit_in_flight(self, kind: int, stage: int) -> None:
        going = self._sending.get((kind, stage), {})
        while len(going) > _SENDS_IN_FLIGHT:
            # The lowest micro-batch was sent first.
            self._wait(going.pop(min(going)))

    def _wait(self, moving: _InFlightTransfer) -> list[torch.Tensor]:
        with WaitScope(f"a transfer along {self._axis.name}"):
            return moving.wait()

    def _take_received(self, kind: int, stage: int, micro_batch: int) -> list[torch.Tensor]:
        moving = self._receiving.pop((kind, stage, micro_batch))
        tensors = self._wait(moving)
        if moving.is_failed:
            raise PeerStageFailed
        return tensors

    # Point-to-point operations

    def _send(
        self, kind: int, stage: int, micro_batch: int, to: int, tensors: list[torch.Tensor], *, ok: bool = True
    ) -> None:
        mark = torch.tensor([ok], dtype=torch.uint8)
        # Sends need contiguous memory; the transfer keeps these tensors alive until it ends.
        with traced("send", "activations" if kind == _ACTIVATION else "gradients"):
            full = [tensor.contiguous() for tensor in tensors]
            moving = _InFlightTransfer(full, self._start([mark, *full], to, _tag(kind, stage), sends=True), mark)
        self._sending.setdefault((kind, stage), {})[micro_batch] = moving

    def _receive(
        self, kind: int, stage: int, micro_batch: int, source: int, tensor_specs: list[TensorSpec], traffic_name: str
    ) -> None:
        buffers = [spec.empty(self._device) for spec in tensor_specs]
        mark = torch.zeros(1, dtype=torch.uint8)
        works = self._start([mark, *buffers], source, _tag(kind, source), sends=False)
        self._receiving[kind, stage, micro_batch] = _InFlightTransfer(buffers, works, mark)
        self._axis.traffic.add(traffic_name, 0, sum(spec.nbytes for spec in tensor_specs))

    def _start(self, tensors: list[torch.Tensor], stage: int, tag: int, *, sends: bool) -> list[Any]:
        """Start one transfer to or from the rank of `stage`: one batch of device tensors and one of host tensors."""
        group = self._axis.group
        works: list[Any] = []
        for on_cpu in (False, True):
            # Empty tensors are not sent; both sides have their shapes.
            chosen = [(stage % group.size, t) for t in tensors if t.numel() and (t.device.type == "cpu") is on_cpu]
            sent, received = (chosen, []) if sends else ([], chosen)
            works += start_exchange(group, sent, received, tag=tag, on_cpu=on_cpu)
        return works

    def _send_header(self, stage: int, layout: MessageLayout | None) -> None:
        """Send a layout; None means that this rank failed and that no activation follows."""
        packed = None if layout is None else replace(layout, skeleton=pickle.dumps(layout.skeleton))
        text = torch.frombuffer(bytearray(pickle.dumps(packed)), dtype=torch.uint8)
        length = torch.tensor([text.numel()])
        works = [w for t in (length, text) for w in self._start([t], stage + 1, _tag(_HEADER, stage), sends=True)]
        going = self._sending.setdefault((_HEADER, stage), {})
        going[max(going, default=0) + 1] = _InFlightTransfer([length, text], works)
        # An activation has arrived when its gradient returns. Headers have no gradient, so limit the headers in flight.
        self._limit_in_flight(_HEADER, stage)

    def _receive_header(self, stage: int) -> MessageLayout | None:
        """Receive a layout with a pickled skeleton; None if the sender failed."""
        length = torch.zeros(1, dtype=torch.int64)
        self._receive_header_into(length, stage)
        text = torch.zeros(int(length), dtype=torch.uint8)
        self._receive_header_into(text, stage)
        self._axis.traffic.add("headers", 0, length.element_size() + text.numel())
        form: MessageLayout | None = pickle.loads(text.numpy().tobytes())
        return form

    def _receive_header_into(self, tensor: torch.Tensor, stage: int) -> None:
        source = stage - 1
        works = self._start([tensor], source, _tag(_HEADER, source), sends=False)
        self._wait(_InFlightTransfer([tensor], works))


def _tag(kind: int, stage: int) -> int:
    """Return the tag of messages from `stage`. NCCL ignores tags and matches messages by order."""
    return 1 + kind + 3 * stage


def _describe_layout(layout: MessageLayout) -> str:
    tensor_texts = [
        f"{one.dtype} {list(one.shape)}{'' if one.requires_grad else ' (no gradient)'}" for one in layout.tensor_specs
    ]
    return f"{', '.join(tensor_texts) or 'no tensors'} in {layout.skeleton!r}"
