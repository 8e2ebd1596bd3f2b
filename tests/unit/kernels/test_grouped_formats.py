"""Tests of formats with groups along any dimension: values equal DeepSpeed's formulas, products equal plain ones."""

from __future__ import annotations

import itertools
import math
import re

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from windlass.base.errors import WeightFormatError
from windlass.kernels.grouped_formats import (
    GroupedWeightFormat,
    MinifloatWeightFormat,
    RangeWeightFormat,
    pack_codes,
    unpack_codes,
)
from windlass.kernels.packed_gemm import join_packed, pack_weight, packed_linear
from windlass.kernels.packed_linear import PackedEmbedding, PackedLinear
from windlass.kernels.weight_format import get_weight_format

FORMATS: list[GroupedWeightFormat] = [
    *(RangeWeightFormat(bits, 16, dim) for bits in (2, 3, 4, 6, 8) for dim in (0, 1)),
    MinifloatWeightFormat(8, 3, 16),
    MinifloatWeightFormat(8, 3, 48),  # groups cross rows of 64
    MinifloatWeightFormat(6, 2, 128),  # a group spans two rows
    MinifloatWeightFormat(4, 1, 100),  # the last group is shorter
    MinifloatWeightFormat(12, 4, 32),
]


def weight(rows: int = 48, columns: int = 64) -> Tensor:
    generator = torch.Generator().manual_seed(rows)
    made = torch.randn(rows, columns, generator=generator)
    made[16:32, :16] = 0.25  # groups of equal weights
    made[32:, 16:32] = 0
    return made


def range_values(wide: Tensor, bits: int, group: int, dim: int) -> Tensor:
    """Return the values of DeepSpeed's formula, group by group."""
    values, top = wide.clone(), 2**bits - 1
    for part in values.split(group, dim):
        for line in part.unbind(1 - dim):
            low, high = line.min().clone(), line.max().clone()
            if high > low:
                scale = top / (high - low)
                line.copy_(((line - low) * scale).clamp(0, top).round().to(torch.uint8) / scale + low)
    return values


def all_floats(bits: int, mantissa: int) -> list[float]:
    exponent = bits - 1 - mantissa
    bias = 2 ** (exponent - 1) - 1
    found = []
    for code in range(2 ** (bits - 1)):
        e, m = code >> mantissa, code & (2**mantissa - 1)
        found.append((m if e == 0 else m + 2**mantissa) * 2.0 ** (max(e, 1) - bias - mantissa))
    return found


def float_values(wide: Tensor, bits: int, mantissa: int, group: int, largest: float) -> Tensor:
    """Round each scaled element to the nearest float of the format, by comparing it with all; ties: the even code."""
    table, flat = all_floats(bits, mantissa), wide.flatten().clone()
    known = torch.tensor(table, dtype=torch.float64)
    for part in flat.split(group):
        scale = part.abs().max() / largest
        for place, one in enumerate(part.tolist()):
            if scale > 0:
                distance = (known - float(abs(torch.tensor(one) / scale))).abs()
                nearest = (distance == distance.min()).nonzero().flatten().tolist()
                code = next((c for c in nearest if c % 2 == 0), nearest[0])
                part[place] = torch.tensor(table[code]) * scale * (-1 if one < 0 else 1)
            else:
                part[place] = 0
    return flat.view(wide.shape)


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_values_equal_the_formula(form: GroupedWeightFormat) -> None:
    if isinstance(form, RangeWeightFormat):
        wide = weight()
        expected = range_values(wide, form.bits, form.group, form.dim)
    else:
        assert isinstance(form, MinifloatWeightFormat)
        wide = weight()[14:19]
        expected = float_values(wide, form.bits, form.mantissa, form.group, form.largest)
    assert torch.equal(form.unpack(form.pack(wide)), expected)


@pytest.mark.parametrize(("bits", "mantissa", "largest"), [(4, 1, 6.0), (6, 2, 28.0), (8, 3, 480.0), (12, 4, 496.0)])
def test_every_code_is_its_own_float(bits: int, mantissa: int, largest: float) -> None:
    form = MinifloatWeightFormat(bits, mantissa, 32)
    assert form.largest == largest
    codes = torch.arange(2**bits, dtype=torch.int32)
    values = form.decode(codes)
    assert values[: 2 ** (bits - 1)].double().tolist() == all_floats(bits, mantissa)
    inside = values.abs() <= largest
    assert torch.equal(form.encode(values[inside]), codes[inside])


def test_stochastic_rounding_has_no_bias() -> None:
    form = MinifloatWeightFormat(4, 1, 32)
    torch.manual_seed(0)
    values = torch.full((20000,), 2.2)
    mean = form.decode(form.encode(values, stochastic=True)).mean()
    assert abs(mean - 2.2) < 0.02 and set(form.decode(form.encode(values, stochastic=True)).tolist()) == {2.0, 3.0}


@pytest.mark.parametrize("bits", [2, 3, 4, 6, 8, 12])
def test_packed_codes_round_trip(bits: int) -> None:
    for count in (1, 7, 24):
        codes = torch.randint(2**bits, (3, count))
        packed = pack_codes(codes, bits)
        assert packed.shape[1] * 8 < count * bits + math.lcm(bits, 8)
        assert torch.equal(unpack_codes(packed, bits, count), codes.int())


@pytest.mark.parametrize("form", [FORMATS[4], FORMATS[5], FORMATS[11]], ids=lambda form: form.name)
def test_products_and_gradients_equal_those_of_the_values(
    form: GroupedWeightFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    linear = nn.Linear(64, 48)
    with torch.no_grad():
        linear.weight.copy_(weight())
    packed = PackedLinear.from_linear(linear, form)
    plain = packed.to_linear()
    for rows_of_block in (48, 16):
        monkeypatch.setattr("windlass.kernels.packed_matmul.BLOCK_NUMEL", rows_of_block * 64)
        x = torch.randn(3, 5, 64, requires_grad=True)
        twin = x.detach().clone().requires_grad_()
        found, expected = packed(x), plain(twin)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
        (found.sin().sum() + packed.bias.sum()).backward()
        (expected.sin().sum() + plain.bias.sum()).backward()
        torch.testing.assert_close(x.grad, twin.grad, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(packed.bias.grad, plain.bias.grad)


@pytest.mark.parametrize("form", [*FORMATS[4:6], FORMATS[11], *map(get_weight_format, ("int8", "int4_g32_zp", "bf16"))])
def test_an_embedding_looks_up_the_values(form: GroupedWeightFormat) -> None:
    table = PackedEmbedding(48, 64, weight_format=form, dtype=torch.bfloat16)
    table.load_state_dict({"weight": weight()})
    ids = torch.tensor([[0, 47, 20], [20, 3, 3]])
    assert torch.equal(table(ids), F.embedding(ids, table.weight).bfloat16())
    assert table.float()(ids).dtype == torch.float32


@pytest.mark.parametrize("size", [1e-37, 1e-40])
def test_groups_of_vanishing_weights_give_finite_products(size: float) -> None:
    # weight decay leaves such weights in unused rows; `(2 ** bits - 1) / (max - min)` is infinite
    form = RangeWeightFormat(8, 32)
    wide = weight(48, 64)
    wide[3] *= size
    wide[5, :32], wide[5, 7] = 0, size
    input = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    found = packed_linear(input, pack_weight(wide, form))
    torch.testing.assert_close(found, input @ form.unpack(form.pack(wide)).t(), atol=1e-4, rtol=1e-4)


def test_matrices_are_joined() -> None:
    for form in (FORMATS[4], FORMATS[5], FORMATS[10]):
        parts = [form.pack(weight(rows)) for rows in (32, 16)]
        joined = join_packed(form, parts)
        assert torch.equal(form.unpack(joined), torch.cat([form.unpack(part) for part in parts]))
    short = FORMATS[13]
    with pytest.raises(WeightFormatError, match="whose last group is short"):
        join_packed(short, [short.pack(weight(rows)) for rows in (32, 16)])


def test_a_plain_state_is_packed() -> None:
    linear = nn.Linear(64, 48)
    packed = PackedLinear(64, 48, weight_format="int4_g32")
    packed.load_state_dict(linear.state_dict())
    assert torch.equal(packed.unpack(), packed.format.unpack(packed.format.pack(linear.weight)))
    assert packed.bias is not None and torch.equal(packed.bias, linear.bias)
    holder = nn.Sequential(PackedLinear(64, 48, weight_format="int4_g32"))
    holder.load_state_dict(nn.Sequential(linear).state_dict())
    assert torch.equal(holder[0].unpack(), packed.unpack())
    with pytest.raises(WeightFormatError, match=re.escape("'weight' has shape (48, 32), and the layer (48, 64)")):
        packed.load_state_dict(nn.Linear(32, 48).state_dict())


def test_what_no_format_is_refused() -> None:
    for arguments in ((5, 16, 1), (4, 16, 2), (12, 16, 1), (4, 0, 1)):
        with pytest.raises(WeightFormatError, match="is not a weight format"):
            RangeWeightFormat(*arguments)
    for arguments in ((8, 7, 16), (5, 2, 16), (8, 3, 0)):
        with pytest.raises(WeightFormatError, match="are not a weight format"):
            MinifloatWeightFormat(*arguments)
    with pytest.raises(WeightFormatError, match="groups of 10 do not divide dimension 1"):
        RangeWeightFormat(4, 10).pack(weight())
    for form, bad in itertools.product((FORMATS[4], FORMATS[10]), (float("nan"), float("inf"))):
        broken = weight()
        broken[3, 2] = bad
        with pytest.raises(WeightFormatError, match=re.escape("element [3, 2]")):
            form.pack(broken)
