"""Activations to the next stage and gradients back: any containers of tensors, of any shape."""

from __future__ import annotations

import pickle
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from windlass.base.activity import During
from windlass.base.errors import ModelError
from windlass.comm.axis import Axis
from windlass.parallel.pipeline.parcel import Form, Sheet

_ACTIVATION, _GRADIENT, _HEADER = range(3)  # what a tag is made of, besides the stage
_SENDS_IN_FLIGHT = 2


class PeerFailed(Exception):
    """Raised where a transfer arrives marked as failed: the sender, or a rank before it, raised in this schedule."""


@dataclass
class _Moving:
    """A transfer that was started, with what must not go before it ended."""

    tensors: list[torch.Tensor]
    works: list[Any] = field(default_factory=list)
    mark: torch.Tensor | None = None  # one byte: 0 where the tensors have no values because a rank failed

    def wait(self) -> list[torch.Tensor]:
        """Its tensors, once it is over."""
        works, self.works = self.works, []
        for work in works:
            work.wait()
        return self.tensors

    @property
    def failed(self) -> bool:
        """Whether a transfer that is over was marked as failed."""
        return self.mark is not None and not int(self.mark)


class _Pass(torch.autograd.Function):
    """A tensor whose gradient goes to a leaf that has no memory: layers may change it in place, and it goes when they
    have no more use for it."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


@dataclass
class Arrived:
    """What a stage got from the one before.

    Attributes:
        value: as it was returned there.
        leaves: one for each tensor of which a gradient goes back, which is found in its `.grad`; without values.
    """

    value: Any
    leaves: list[torch.Tensor]


class Passing:
    """The transfers of one rank of a pipeline; `programs` says when it starts which.

    The receiver has to know shapes before it can receive. It is told them by a header of a few hundred bytes, once for
    each *key*: what is known of the micro-batch on both sides, namely the shapes in it. A value whose shapes follow
    from nothing that both know needs `dynamic`, under which a header goes before every activation.

    Each transfer has one byte before its tensors, which says whether they have values. A rank that failed goes on with
    its transfers (`send_failure`, `send_failed_gradient`, `discard`) so that all connections stay at the same place of
    the schedule; who receives a transfer with this mark raises `PeerFailed` where it would use it.

    `axis.traffic.bytes_moved` counts what this rank receives, under `"activations"`, `"gradients"` and `"headers"`.

    Args:
        axis: the ranks of the pipeline.
        device: where tensors arrive.
        dynamic: shapes are told anew every time.
    """

    def __init__(self, axis: Axis, device: torch.device, *, dynamic: bool = False) -> None:
        self._axis, self._device, self.dynamic = axis, device, dynamic
        self._sent: dict[tuple[int, Hashable], Form] = {}  # by stage and key
        self._known: dict[tuple[int, Hashable], Form] = {}
        self._forms: dict[tuple[int, int, int], Form] = {}  # of what moves now: side, stage, micro-batch
        self._coming: dict[tuple[int, int, int], _Moving] = {}  # what, stage, micro-batch
        self._going: dict[tuple[int, int], dict[int, _Moving]] = {}  # what, stage; by micro-batch
        self._unsent: set[tuple[int, int]] = (
            set()
        )  # stages and micro-batches whose activation a failed rank never sends
        self._beside: dict[tuple[int, int], Any] = {}  # what stays on this rank: an axis of one rank sends nothing

    @property
    def alone(self) -> bool:
        """All stages lie on this rank: what is sent is handed over at once, and nothing need be received."""
        return self._axis.size == 1

    def forget(self) -> None:
        """Shapes are told anew; all ranks of the pipeline call it."""
        self._sent.clear()
        self._known.clear()

    # activations

    def send_activation(self, stage: int, micro: int, key: Hashable, form: Form, tensors: list[torch.Tensor]) -> None:
        """Send what `stage` returned, packed and detached, to the next.

        Raises:
            ModelError: it is of another form than for an equal key before.
        """
        self._forms[_ACTIVATION, stage, micro] = form
        if self.alone:
            self._beside[stage + 1, micro] = tensors, form
            return
        known = None if self.dynamic else self._sent.get((stage, key))
        if known is None:
            self._sent[stage, key] = form
            self._send_header(stage, form)
        elif not known.agrees(form):
            raise ModelError(
                f"stage {stage} returned {_told(form)} for micro-batch {micro}, and {_told(known)} for one with the "
                "same shapes; where what a stage returns changes by itself, say dynamic_shape=True, and after "
                "parameters were frozen or unfrozen call reset_activation_shape() on every rank"
            )
        self._send(_ACTIVATION, stage, micro, stage + 1, tensors)

    def receive_activation(self, stage: int, micro: int, key: Hashable) -> None:
        """Start to receive what `stage` is given. May be called again if it failed for want of memory."""
        known = self._forms.get((_GRADIENT, stage, micro))
        if known is None and not self.dynamic:
            known = self._known.get((stage, key))
        if known is None:
            header = self._receive_header(stage)
            if header is None:
                self._unsent.add((stage, micro))
                return
            known = self._known[stage, key] = header
        self._forms[_GRADIENT, stage, micro] = known
        self._receive(_ACTIVATION, stage, micro, stage - 1, list(known.sheets), "activations")

    def arrived(self, stage: int, micro: int) -> Arrived:
        """What `stage` is given, once it is there.

        Raises:
            PeerFailed: a rank before this one failed.
        """
        if self.alone:
            tensors, form = self._beside.pop((stage, micro))
            self._forms[_GRADIENT, stage, micro] = form
        elif (stage, micro) in self._unsent:
            raise PeerFailed
        else:
            tensors, form = self._finish(_ACTIVATION, stage, micro), self._forms[_GRADIENT, stage, micro]
        leaves, through = [], []
        for tensor, sheet in zip(tensors, form.sheets, strict=True):
            if sheet.learns and torch.is_grad_enabled():
                leaves.append(tensor.new_zeros(()).expand(tensor.shape).requires_grad_(True))
                tensor = _Pass.apply(leaves[-1], tensor)
            through.append(tensor)
        return Arrived(form.filled(through), leaves)

    # gradients

    def send_gradient(self, stage: int, micro: int, leaves: list[torch.Tensor]) -> None:
        """Send the gradients of what `stage` was given to the stage before; zeros where there is none."""
        gradients = [leaf.grad if leaf.grad is not None else torch.zeros_like(leaf) for leaf in leaves]
        self._forms.pop((_GRADIENT, stage, micro), None)
        if self.alone:
            self._beside[-stage, micro] = gradients
            return
        self._send(_GRADIENT, stage, micro, stage - 1, gradients)
        self.settle_gradients(stage)

    def receive_gradient(self, stage: int, micro: int) -> None:
        """Start to receive the gradients of what `stage` returned."""
        sheets = self._forms[_ACTIVATION, stage, micro].learning
        self._receive(_GRADIENT, stage, micro, stage + 1, sheets, "gradients")

    def gradients(self, stage: int, micro: int) -> list[torch.Tensor]:
        """The gradients of those tensors that `stage` returned and that need one, once they are there.

        Raises:
            PeerFailed: a rank after this one failed.
        """
        self._forms.pop((_ACTIVATION, stage, micro), None)
        if self.alone:
            found: list[torch.Tensor] = self._beside.pop((-stage - 1, micro))
            return found
        return self._finish(_GRADIENT, stage, micro)

    # after a failure: the same transfers, without values

    def send_failure(self, stage: int, micro: int, key: Hashable) -> None:
        """Send in place of `send_activation`: there is no activation, because this rank or one before it failed."""
        form = None if self.dynamic else self._sent.get((stage, key))
        if form is None:
            self._forms.pop((_ACTIVATION, stage, micro), None)
            self._send_header(stage, None)
            return
        self._forms[_ACTIVATION, stage, micro] = form
        empty = [sheet.empty(self._device) for sheet in form.sheets]
        self._send(_ACTIVATION, stage, micro, stage + 1, empty, good=False)

    def send_failed_gradient(self, stage: int, micro: int) -> None:
        """Send in place of `send_gradient`; nothing where no activation came to which a gradient would belong."""
        form = self._forms.pop((_GRADIENT, stage, micro), None)
        if form is not None:
            empty = [sheet.empty(self._device) for sheet in form.learning]
            self._send(_GRADIENT, stage, micro, stage - 1, empty, good=False)
            self.settle_gradients(stage)

    def expect_gradient(self, stage: int, micro: int) -> None:
        """As `receive_gradient`, where an activation was sent to which one belongs."""
        if (_ACTIVATION, stage, micro) in self._forms and (_GRADIENT, stage, micro) not in self._coming:
            self.receive_gradient(stage, micro)

    def expect_activation(self, stage: int, micro: int, key: Hashable) -> None:
        """As `receive_activation`, unless that was started."""
        if (_ACTIVATION, stage, micro) not in self._coming and (stage, micro) not in self._unsent:
            self.receive_activation(stage, micro, key)

    def discard_activation(self, stage: int, micro: int) -> None:
        """Receive what `stage` is given and drop it."""
        moving = self._coming.pop((_ACTIVATION, stage, micro), None)
        if moving is not None:
            self._wait(moving)

    def discard_gradients(self, stage: int, micro: int) -> None:
        """Receive the gradients of what `stage` returned and drop them."""
        self._forms.pop((_ACTIVATION, stage, micro), None)
        moving = self._coming.pop((_GRADIENT, stage, micro), None)
        if moving is not None:
            self._wait(moving)
        self.settle_activation(stage, micro)

    # the ends of what was sent

    def settle_activation(self, stage: int, micro: int) -> None:
        """The activation that `stage` sent has been received: its gradient came back."""
        going = self._going.get((_ACTIVATION, stage), {})
        if micro in going:
            self._wait(going.pop(micro))

    def settle_activations(self, stage: int) -> None:
        """Wait for the oldest activations that `stage` sent, where no gradient will come back."""
        self._thin(_ACTIVATION, stage)

    def settle_gradients(self, stage: int) -> None:
        """Wait for the oldest gradients that `stage` sent."""
        self._thin(_GRADIENT, stage)

    def settle(self) -> None:
        """Everything that was sent has been received."""
        for going in self._going.values():
            for moving in going.values():
                self._wait(moving)
        self._going.clear()
        self._forms.clear()
        self._unsent.clear()
        self._beside.clear()

    def _thin(self, what: int, stage: int) -> None:
        going = self._going.get((what, stage), {})
        while len(going) > _SENDS_IN_FLIGHT:
            self._wait(going.pop(min(going)))

    def _wait(self, moving: _Moving) -> list[torch.Tensor]:
        with During(f"a transfer along {self._axis.name}"):
            return moving.wait()

    def _finish(self, what: int, stage: int, micro: int) -> list[torch.Tensor]:
        moving = self._coming.pop((what, stage, micro))
        tensors = self._wait(moving)
        if moving.failed:
            raise PeerFailed
        return tensors

    # the wire

    def _send(
        self, what: int, stage: int, micro: int, to: int, tensors: list[torch.Tensor], *, good: bool = True
    ) -> None:
        mark = torch.tensor([good], dtype=torch.uint8)
        whole = [tensor.contiguous() for tensor in tensors]
        moving = _Moving(whole, self._start(dist.isend, [mark, *whole], to, _tag(what, stage)), mark)
        self._going.setdefault((what, stage), {})[micro] = moving

    def _receive(self, what: int, stage: int, micro: int, source: int, sheets: list[Sheet], counted: str) -> None:
        buffers = [sheet.empty(self._device) for sheet in sheets]
        mark = torch.zeros(1, dtype=torch.uint8)
        works = self._start(dist.irecv, [mark, *buffers], source, _tag(what, source))
        self._coming[what, stage, micro] = _Moving(buffers, works, mark)
        self._axis.traffic.add(counted, 0, sum(sheet.nbytes for sheet in sheets))

    def _start(self, operation: Any, tensors: list[torch.Tensor], stage: int, tag: int) -> list[Any]:
        """Start one transfer, to or from the rank of `stage`: its tensors together, those of the host apart."""
        group = self._axis.group
        peer, works = group.ranks[stage % group.size], []
        for process_group, here in ((group.process_group, False), (group.talks, True)):
            chosen = [t for t in tensors if t.numel() and (t.device.type == "cpu") is here]
            if chosen:
                flat = [tensor.view(-1).view(torch.uint8) for tensor in chosen]
                operations = [dist.P2POp(operation, one, peer, process_group, tag) for one in flat]
                works += dist.batch_isend_irecv(operations)
        return works

    def _send_header(self, stage: int, form: Form | None) -> None:
        """Send a form; None says that this rank failed and that no activation follows."""
        text = torch.frombuffer(bytearray(pickle.dumps(form)), dtype=torch.uint8)
        length = torch.tensor([text.numel()])
        works = [w for t in (length, text) for w in self._start(dist.isend, [t], stage + 1, _tag(_HEADER, stage))]
        going = self._going.setdefault((_HEADER, stage), {})
        going[max(going, default=0) + 1] = _Moving([length, text], works)
        self._thin(_HEADER, stage)

    def _receive_header(self, stage: int) -> Form | None:
        length = torch.zeros(1, dtype=torch.int64)
        self._header_into(length, stage)
        text = torch.zeros(int(length), dtype=torch.uint8)
        self._header_into(text, stage)
        self._axis.traffic.add("headers", 0, length.element_size() + text.numel())
        form: Form | None = pickle.loads(text.numpy().tobytes())
        return form

    def _header_into(self, tensor: torch.Tensor, stage: int) -> None:
        source = stage - 1
        self._wait(_Moving([tensor], self._start(dist.irecv, [tensor], source, _tag(_HEADER, source))))


def _tag(what: int, stage: int) -> int:
    """Of what `stage` sends; NCCL goes by the order alone."""
    return 1 + what + 3 * stage


def _told(form: Form) -> str:
    said = [f"{one.dtype} {list(one.shape)}{'' if one.learns else ' (no gradient)'}" for one in form.sheets]
    return f"{', '.join(said) or 'no tensors'} in {form.skeleton!r}"
