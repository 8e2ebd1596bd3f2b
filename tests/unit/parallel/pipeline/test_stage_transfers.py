"""Tests of transfers between two stages after an error, with messages that are recorded instead of sent."""

from __future__ import annotations

import threading
from collections import defaultdict
from typing import Any

import pytest
import torch

from windlass.comm.mesh_axis import single_rank_axis
from windlass.parallel.pipeline.stage_message import pack_message
from windlass.parallel.pipeline.stage_transfers import PeerStageFailed, StageTransfers

CPU = torch.device("cpu")
HEADER, ACTIVATION, GRADIENT = 3, 1, 5  # tags of stage 0's header and activation, and of stage 1's gradient


class Wire(StageTransfers):
    """Transfers of one rank through a dictionary of messages that both ranks share in one process."""

    is_single_rank = False

    def __init__(self, messages: dict[int, list[list[torch.Tensor]]], *, dynamic: bool = False) -> None:
        super().__init__(single_rank_axis("pp"), CPU, has_dynamic_shapes=dynamic)
        self.messages, self.failing_tag = messages, 0

    def _start(self, tensors: list[torch.Tensor], stage: int, tag: int, *, sends: bool) -> list[Any]:
        if tag == self.failing_tag:
            self.failing_tag = 0
            raise torch.OutOfMemoryError("out of memory")
        if sends:
            self.messages[tag].append([tensor.clone() for tensor in tensors])
        else:
            for target, arrived in zip(tensors, self.messages[tag].pop(0), strict=True):
                target.copy_(arrived)
        return []


class Unreadable:
    """Object that can be pickled, but raises ValueError when it is unpickled."""

    def __reduce__(self) -> Any:
        return int, ("no number",)


def _pair(*, dynamic: bool = False) -> tuple[Wire, Wire]:
    messages: dict[int, list[list[torch.Tensor]]] = defaultdict(list)
    return Wire(messages, dynamic=dynamic), Wire(messages, dynamic=dynamic)


@pytest.mark.parametrize("dynamic", [False, True])
def test_output_that_cannot_be_pickled_ends_with_an_empty_header(dynamic: bool) -> None:
    sender, receiver = _pair(dynamic=dynamic)
    with pytest.raises(TypeError, match="cannot pickle"):
        sender.send_activation(0, 0, "key", *pack_message((torch.ones(2), threading.Lock())))
    sender.send_failed_activation(0, 0, "key")
    receiver.receive_activation(1, 0, "key")
    with pytest.raises(PeerStageFailed):
        receiver.take_activation(1, 0)
    assert not any(sender.messages.values())


@pytest.mark.parametrize("dynamic", [False, True])
def test_error_after_the_header_sends_no_second_header(dynamic: bool) -> None:
    sender, receiver = _pair(dynamic=dynamic)
    sender.failing_tag = ACTIVATION
    with pytest.raises(torch.OutOfMemoryError):
        sender.send_activation(0, 0, "key", *pack_message(torch.ones(2)))
    sender.send_failed_activation(0, 0, "key")
    receiver.receive_activation(1, 0, "key")
    with pytest.raises(PeerStageFailed):
        receiver.take_activation(1, 0)
    assert not any(sender.messages.values())


def test_output_that_cannot_be_unpickled_leaves_both_ranks_in_step() -> None:
    sender, receiver = _pair()
    form, tensors = pack_message((torch.ones(2).requires_grad_(), Unreadable()))
    for micro_batch in range(2):  # the second micro-batch sends no header
        sender.send_activation(0, micro_batch, "key", form, [tensor.detach() for tensor in tensors])
        receiver.receive_activation(1, micro_batch, "key")
        with pytest.raises(ValueError, match="no number"):
            receiver.take_activation(1, micro_batch)
        receiver.discard_activation(1, micro_batch)
        receiver.send_failed_gradient(1, micro_batch)
        assert sorted(tag for tag, sent in sender.messages.items() if sent) == [GRADIENT]
        sender.receive_gradient(0, micro_batch)
        with pytest.raises(PeerStageFailed):
            sender.take_gradients(0, micro_batch)
    assert not any(sender.messages.values())
