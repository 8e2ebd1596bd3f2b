"""Tests that `PackedLinear` equals `nn.Linear` with the unpacked weight, and that only `pack` changes its bytes."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from windlass.base.errors import WeightFormatError
from windlass.kernels import panel_cache
from windlass.kernels.inference_path import get_inference_path
from windlass.kernels.packed_gemm import pack_panels
from windlass.kernels.packed_linear import PackedLinear, pack_linear_layers
from windlass.kernels.weight_format import CastWeightFormat, list_weight_formats

NAMES = ("fp32", "bf16", "int8", "fp8", "int4_g32_zp", "int3", "ternary", "binary_g64")


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
    torch.testing.assert_close(packed(x), plain(y), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-5, atol=1e-4)
    assert [n for n, p in packed.named_parameters() if p.grad is not None] == (["bias"] if bias else [])
    if bias:
        torch.testing.assert_close(packed.bias.grad, plain.bias.grad, rtol=1e-5, atol=1e-4)
    assert torch.equal(packed.weight, packed.unpack()) and packed.to_linear().weight.dtype == packed.unpack().dtype


@given(
    name=st.sampled_from([*list_weight_formats(), "int4_g32_ordered", "int8_g64_zp_ordered"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    rows=st.integers(0, 9),
    outputs=st.integers(1, 35),
    inputs=st.one_of(st.integers(1, 70), st.sampled_from([127, 128, 129, 257])),
    bias=st.booleans(),
)
def test_every_format_multiplies_every_dtype(
    name: str, dtype: torch.dtype, rows: int, outputs: int, inputs: int, bias: bool
) -> None:
    torch.manual_seed(outputs)
    packed = PackedLinear.from_linear(nn.Linear(inputs, outputs, bias=bias), name)
    if dtype != torch.float32:
        packed = packed.to(dtype)
    x = torch.randn(inputs, rows).t().to(dtype)  # not contiguous
    with torch.no_grad():
        wanted = x.double() @ packed.unpack().double().t()
        if packed.bias is not None:
            wanted += packed.bias.double()
        for _ in range(2):  # the second product has panels
            found = packed(x)
            assert found.dtype == dtype and found.shape == (rows, outputs)
            limit = {torch.bfloat16: 2e-2, torch.float16: 3e-3}.get(dtype, 1e-5)
            torch.testing.assert_close(found.double(), wanted, rtol=limit, atol=limit)


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
        wanted = nn.functional.linear(x, packed.weight.float(), packed.bias)
        torch.testing.assert_close(packed(x), wanted, rtol=2e-2, atol=2e-2)
    assert not torch.equal(expected, packed(x.bfloat16()).float())


@pytest.mark.parametrize("name", ["int8", "fp8", "int4_g32_zp", "ternary"])
def test_products_run_on_native_kernels_and_follow_the_bytes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    packs = []

    def counted(*arguments: Any, **options: Any) -> Any:
        packs.append(1)
        return pack_panels(*arguments, **options)

    def refuse(*arguments: Any) -> Any:
        raise AssertionError("the weight is unpacked")

    monkeypatch.setattr(panel_cache, "pack_panels", counted)
    packed = PackedLinear.from_linear(linear(), name)
    x = torch.randn(3, 4, 37)
    native = get_inference_path().module is not None
    with monkeypatch.context() as patch:
        if native:
            patch.setattr(type(packed.format), "unpack", refuse)
            patch.setattr(F, "linear", refuse)
        results = [packed(x) for _ in range(4)]
        assert all(torch.equal(one, results[0]) for one in results) and len(packs) == 2 * native
    other = linear()
    with torch.no_grad():
        other.weight.mul_(3)
    packed.pack(other.weight)
    torch.testing.assert_close(packed(x), F.linear(x, packed.weight, packed.bias), rtol=1e-5, atol=1e-5)
    twin = pickle.loads(pickle.dumps(packed))
    twin.pack(linear().weight)
    copied = copy.deepcopy(packed)
    copied.load_state_dict(twin.state_dict())
    torch.testing.assert_close(copied(x), results[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(packed(x), F.linear(x, packed.weight, packed.bias), rtol=1e-5, atol=1e-5)
    # As in an engine, make the parameters views of one flat buffer, and refill it without a change of their versions.
    stored = {key: one for key, one in packed.named_parameters() if one.dtype == torch.uint8}
    flat = torch.empty(sum(one.numel() + 64 for one in stored.values()), dtype=torch.uint8)
    place = 0
    for one in stored.values():
        view = flat[place : place + one.numel()].view(one.shape)
        view.copy_(one.detach())
        one.data = view
        place += -(-one.numel() // 64) * 64
    for _ in range(3):
        packed(x)
    for (key, _), view in zip(stored.items(), stored.values(), strict=True):
        view.data.copy_(twin.get_parameter(key).detach())
    torch.testing.assert_close(packed(x), results[0], rtol=1e-5, atol=1e-5)


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
    first = f"{name}_{next(iter(packed.format.file_form(11, 37)))}"
    wrong = {**packed.state_dict(), first: packed.unpack().float()}
    with pytest.raises(WeightFormatError, match=rf"'{first}' is torch\.float32, not the bytes"):
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


def test_a_layer_used_in_two_places_is_packed_in_both() -> None:
    model = nn.Module()
    model.first = linear()
    model.block = nn.Sequential(model.first, nn.ReLU())
    model.again = model.block
    assert pack_linear_layers(model, "int8") == ["first"]
    assert isinstance(model.first, PackedLinear) and model.block[0] is model.first and model.again is model.block
