"""Tests that `PackedLinear` equals `nn.Linear` with the unpacked weight, and that only `pack` changes its bytes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from windlass.base.errors import WeightFormatError
from windlass.kernels.packed_linear import PackedLinear
from windlass.kernels.weight_format import CastWeightFormat

NAMES = ("fp32", "bf16", "int8")


def linear(bias: bool = True) -> nn.Linear:
    torch.manual_seed(3)
    return nn.Linear(37, 11, bias=bias)


def bytes_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in module.named_parameters() if p.dtype == torch.uint8}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_equals_a_linear_layer_with_the_unpacked_weight(name: str, bias: bool) -> None:
    source = linear(bias)
    packed = PackedLinear.from_linear(source, name)
    plain = packed.to_linear(torch.float32)
    if name == "fp32":
        assert torch.equal(plain.weight, source.weight)
    x = torch.randn(4, 37, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    packed(x).square().sum().backward()
    plain(y).square().sum().backward()
    assert torch.equal(packed(x), plain(y)) and torch.equal(x.grad, y.grad)
    assert [n for n, p in packed.named_parameters() if p.grad is not None] == (["bias"] if bias else [])
    if bias:
        assert torch.equal(packed.bias.grad, plain.bias.grad)
    assert torch.equal(packed.weight, packed.unpack()) and packed.to_linear().weight.dtype == packed.unpack().dtype


@pytest.mark.parametrize("name", NAMES)
def test_casts_and_copies_keep_the_bytes(name: str) -> None:
    packed = PackedLinear.from_linear(linear(), name)
    before = bytes_of(packed)
    assert before.keys() == {f"{name}_{item}" for item in packed.format.file_form(1, 1)}
    x = torch.randn(4, 37)
    expected = packed(x)
    for changed in (copy.deepcopy(packed), packed.half().bfloat16(), packed.double(), packed.float()):
        assert all(torch.equal(value, before[key]) for key, value in bytes_of(changed).items())
    assert packed.bfloat16()(x.bfloat16()).dtype == torch.bfloat16
    packed.bias.data.zero_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(packed(x), nn.functional.linear(x, packed.weight.float(), packed.bias))
    assert not torch.equal(expected, packed(x.bfloat16()).float())


@pytest.mark.parametrize("name", NAMES)
def test_state_dict_round_trip(name: str) -> None:
    packed = PackedLinear.from_linear(linear(), name)
    empty = PackedLinear(37, 11, weight_format=name)
    empty.load_state_dict(packed.state_dict())
    assert torch.equal(empty.unpack(), packed.unpack()) and torch.equal(empty.bias, packed.bias)
    other = PackedLinear(37, 11, weight_format="bf16" if name == "int8" else "int8")
    with pytest.raises(
        RuntimeError, match=f"(?s)Missing key.*{other.format.name}_weight.*Unexpected key.*{name}_weight"
    ):
        other.load_state_dict(packed.state_dict())
    wrong = {**packed.state_dict(), f"{name}_weight": packed.unpack().float()}
    with pytest.raises(WeightFormatError, match=rf"'{name}_weight' is torch\.float32, not the bytes"):
        empty.load_state_dict(wrong)
    again = PackedLinear(37, 11, weight_format=name)
    again.set_packed(packed.packed())
    assert torch.equal(again.unpack(), packed.unpack())


def test_a_format_of_eight_bit_floats_needs_no_change_of_the_layer() -> None:
    float8 = CastWeightFormat("fp8_e4m3", torch.float8_e4m3fn)
    packed = PackedLinear.from_linear(linear(), float8).bfloat16()
    assert packed.fp8_e4m3_weight.dtype == torch.uint8 and packed.fp8_e4m3_weight.shape == (11, 37)
    expected = linear().weight.detach().to(torch.float8_e4m3fn)
    assert torch.equal(packed.unpack().view(torch.uint8), expected.view(torch.uint8))
    x = torch.randn(4, 37).bfloat16()
    assert torch.equal(packed(x), nn.functional.linear(x, expected.bfloat16(), packed.bias))


def test_unaligned_bytes_in_a_shared_buffer() -> None:
    packed = PackedLinear.from_linear(linear(), "int8")
    expected = packed.unpack()
    for parameter in packed.parameters():
        if parameter.dtype == torch.uint8:
            buffer = torch.zeros(parameter.numel() + 1, dtype=torch.uint8)
            buffer[1:] = parameter.detach().view(-1)
            parameter.data = buffer[1:].view(parameter.shape)
    assert torch.equal(packed.unpack(), expected)


def test_mismatched_shapes_are_refused() -> None:
    packed = PackedLinear(37, 11)
    with pytest.raises(WeightFormatError, match=r"shape \(37, 11\) does not fit.*pass one of shape \(11, 37\)"):
        packed.pack(torch.zeros(37, 11))
    with pytest.raises(WeightFormatError, match="packed tensors"):
        packed.set_packed({"weight": torch.zeros(11, 37, dtype=torch.int8)})
    with pytest.raises(WeightFormatError, match="no weight format named 'zip'"):
        PackedLinear(37, 11, weight_format="zip")
    frozen = PackedLinear.from_linear(linear().requires_grad_(False))
    assert not any(parameter.requires_grad for parameter in frozen.parameters())
    assert "weight_format='int8'" in repr(frozen)
