"""Law: on a device with memory of its own, codecs and the collectives that use them give the bits of a CPU.

`tests/gpu/test_gpu_codecs.py` runs the same functions on CUDA.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.separate_device import DEVICE, SeparateDevice, SeparateTensor
from tests.unit.comm.test_lossy_codecs import drawn
from windlass.base.errors import CodecError, ModelError
from windlass.comm import quantized_wire
from windlass.comm.codec import get_codec
from windlass.comm.compressed_collectives import CompressedCollectives
from windlass.comm.compressed_lists import CompressedLists
from windlass.comm.error_feedback import add_decoded, begin_message, end_message
from windlass.comm.quantized_options import LaneErrors, LocoOptions, QuantizedGradients
from windlass.comm.rank_group import RankGroup
from windlass.comm.transport import TransportBuffer
from windlass.kernels import message_codes

NAMES = ("identity", "bf16", "sign", "fine_sign", "int8", "int4", "fp8", "topk", "lowrank")
NUMELS = (1, 7, 300, 5003)
CPU = torch.device("cpu")

Sends = Mapping[int, torch.Tensor]


def messages(device: torch.device, name: str, numel: int) -> list[torch.Tensor]:
    """Return messages of a codec, their decoded values and their errors, computed on the device."""
    codec, found = get_codec(name), []
    for dtype in (torch.float32, torch.bfloat16):
        values = drawn(numel, 3).to(dtype).to(device)
        message = torch.full((codec.encoded_size(numel, dtype),), 255, dtype=torch.uint8, device=device)
        codec.encode(values, message)
        outs = [torch.full((numel,), math.nan, dtype=out, device=device) for out in (dtype, torch.float32)]
        for out in outs:
            codec.decode(message, out, dtype)
        found += [message, *outs]
    tensor, error, sums = (drawn(numel, seed, 1.0).to(device) for seed in (1, 2, 3))
    message = torch.full((codec.encoded_size(numel, torch.float32),), 255, dtype=torch.uint8, device=device)
    begin_message(codec, tensor, error, message)
    end_message(codec, tensor, error, message, decodes=True)
    add_decoded(codec, message, sums)
    return [*found, message, tensor, error, sums]


def echo(sends: Sends, receives: Sends) -> None:
    """Receive from each peer the message for it."""
    for peer, message in receives.items():
        message.copy_(sends[peer])


class EchoChannel:
    """Channel of the first of two ranks. The other rank sends the messages that it receives."""

    name = "echo"
    group = RankGroup(None, (0, 1), 0)  # type: ignore[arg-type]

    def start_exchange(self, sends: Sends, receives: Sends) -> Callable[[], None]:
        echo(sends, receives)
        return lambda: None

    def start_all_gather(self, own: torch.Tensor, receives: Sends) -> Callable[[], None]:
        echo(dict.fromkeys(receives, own), receives)
        return lambda: None


def two_phases(device: torch.device, name: str) -> list[torch.Tensor]:
    """Return results and errors of a two-phase all-reduce of 1-bit Adam."""
    channel: Any = EchoChannel()
    with patch.object(CompressedCollectives, "_compare_codecs"):  # asks the other rank
        lists = CompressedLists(channel, name)
    parts = [[drawn(numel, 10 * to + at, 1.0).to(device) for at, numel in enumerate(NUMELS)] for to in range(2)]
    errors = [[torch.ones_like(part) for part in of_rank] for of_rank in parts]
    sums = lists.reduce_scatter(parts, errors, factor=0.5)
    outs = [[torch.empty_like(one) for one in sums] for _ in range(2)]
    owed = [torch.zeros_like(one) for one in sums]
    lists.all_gather(sums, outs, owed)
    return [*errors[0], *errors[1], *sums, *outs[0], *outs[1], *owed]


def zeropp(device: torch.device, name: str) -> list[torch.Tensor]:
    """Return a gathered buffer, and the result, the squares and the errors of a reduction in two hops."""
    group, numel = RankGroup(None, (0, 1, 2, 3), 0), 4 * 1501  # type: ignore[arg-type]

    def exchange(group: RankGroup, sends: Sends, receives: Sends, tag: int) -> list[Any]:
        echo(sends, receives)
        return []

    with patch.object(quantized_wire, "start_exchange", exchange):
        gathered = drawn(numel, 5).to(device)
        quantized_wire.quantized_gather(group, TransportBuffer(gathered, codec=name), 1).wait()
        flat, errors, found = drawn(numel, 6).to(device), LaneErrors(), [gathered]
        options = QuantizedGradients(name, name, LocoOptions(0.5))
        for add in (False, True):
            out = torch.ones(numel // 4, device=device)
            reduction = quantized_wire.QuantizedReduction(
                group, flat, out, add, 0.25, options, errors, (1, 2), node_size=2, eager=False
            )
            reduction.wait()
            assert reduction.squares is not None
            found.append(out)
    return [*found, errors.flat(numel, device)]


def is_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if the bits of two tensors are equal."""
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


@pytest.mark.parametrize("name", NAMES)
def test_messages_of_a_separate_device_are_those_of_a_cpu(name: str) -> None:
    for numel in NUMELS:
        with SeparateDevice():
            found = messages(DEVICE, name, numel)
            assert all(isinstance(one, SeparateTensor) for one in found)
            copies = [one.to(CPU) for one in found]
        assert all(map(is_equal, copies, messages(CPU, name, numel))), numel


@pytest.mark.parametrize("name", ["sign", "int8", "int4", "topk"])
def test_a_two_phase_all_reduce_of_a_separate_device_is_that_of_a_cpu(name: str) -> None:
    with SeparateDevice():
        found = [one.to(CPU) for one in two_phases(DEVICE, name)]
    assert all(map(is_equal, found, two_phases(CPU, name)))


@pytest.mark.parametrize("name", ["identity", "int8", "int4", "fp8"])
def test_quantized_messages_of_a_separate_device_are_those_of_a_cpu(name: str) -> None:
    with SeparateDevice():
        found = [one.to(CPU) for one in zeropp(DEVICE, name)]
    assert all(map(is_equal, found, zeropp(CPU, name)))


@pytest.mark.parametrize("name", NAMES[2:])
def test_a_value_that_is_not_finite_is_named_on_a_separate_device(name: str) -> None:
    with SeparateDevice():
        values, codec = drawn(300, 1), get_codec(name)
        values[250] = math.inf
        message = torch.empty(codec.encoded_size(300, torch.float32), dtype=torch.uint8, device=DEVICE)
        with pytest.raises(CodecError, match=rf"element 250 of 300 is inf.*codec '{name}'"):
            codec.encode(values.to(DEVICE), message)


def test_a_cpu_cannot_address_a_separate_device() -> None:
    with SeparateDevice():
        values = torch.ones(3, device=DEVICE)
        assert float(values.add_(1).sum()) == 6 and torch.equal(values[1:].to(CPU), torch.full((2,), 2.0))
        with pytest.raises(TypeError, match="separate device"):
            values.numpy()
        with pytest.raises(ModelError, match="of a compressed message is on meta"):
            message_codes.decode("int8", values, values, values)
        with pytest.raises(AssertionError, match="tensors of the CPU and of a separate device"):
            values + torch.ones(3)
