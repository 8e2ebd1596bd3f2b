"""Tests of formats of 1 to 8 bits: rounding bitwise as documented, and words packed as by compressed-tensors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from windlass.base.errors import WeightFormatError
from windlass.kernels.bit_packing import pack_trits, pack_words, unpack_trits, unpack_words
from windlass.kernels.coded_formats import CodedWeightFormat, GroupCodes, make_coded_formats
from windlass.kernels.packed_gemm import join_packed
from windlass.kernels.weight_format import get_weight_format, list_weight_formats

CODED = [form.name for form in make_coded_formats()]
sizes = st.one_of(st.integers(1, 40), st.sampled_from([63, 64, 65, 127, 128, 129, 160]))


def matrix(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator) * torch.logspace(-2, 2, rows)[:, None]
    weight[torch.rand(rows, columns, generator=generator) < 0.1] = 0
    return weight


def rounded_group(values: np.ndarray, name: str) -> np.ndarray:
    """Round the weights of a group by the documented rule, using only numpy."""
    kind = name.split("_")[0]
    f32, f16, f64 = np.float32, np.float16, np.float64
    size = np.abs(values)
    if kind == "binary":
        scale = f16(size.sum(dtype=f64) / len(values))
        return np.where(values >= 0, f32(scale), -f32(scale)).astype(f32)
    if kind == "ternary":
        kept = size > 0.7 * (size.sum(dtype=f64) / len(values))
        scale = f16(size[kept].sum(dtype=f64) / max(int(kept.sum()), 1))
        return (np.sign(values) * kept * f32(scale)).astype(f32)
    bits = int(kind.removeprefix("int"))
    top = 2**bits - 1
    if name.endswith("zp"):
        low, high = min(values.min(), f32(0)), max(values.max(), f32(0))
        scale = f32(f16((high - low) / f32(top)))
        divisor = scale if scale > 0 else f32(1)
        zero = np.clip(np.round(-low / divisor), 0, top)
        codes = np.clip(np.round(values / divisor) + zero, 0, top)
    else:
        scale, zero = f32(f16(size.max() / f32(top / 2 if bits > 1 else 1))), f32(2 ** (bits - 1))
        codes = np.clip(np.round(values / (scale if scale > 0 else f32(1))) + zero, 0, top)
    return ((codes - zero) * scale).astype(f32)


@given(name=st.sampled_from(CODED), rows=st.integers(1, 9), columns=sizes, seed=st.integers(0, 9))
def test_unpacked_values_are_the_documented_rounding(name: str, rows: int, columns: int, seed: int) -> None:
    form = get_weight_format(name)
    assert isinstance(form, CodedWeightFormat)
    weight = matrix(rows, columns, seed)
    step = form.group or columns
    wanted = [
        np.concatenate([rounded_group(row[start : start + step], name) for start in range(0, columns, step)])
        for row in weight.numpy()
    ]
    packed = form.pack(weight)
    found = form.unpack(packed)
    assert found.dtype == torch.float32
    assert torch.equal(found, torch.from_numpy(np.stack(wanted)))
    said = {key: (one.dtype, one.shape) for key, one in form.file_form(rows, columns).items()}
    assert {key: (tensor.dtype, tuple(tensor.shape)) for key, tensor in packed.items()} == said
    again = form.pack_codes(form.unpack_codes(packed))
    assert all(torch.equal(again[key], packed[key]) for key in packed)


@given(bits=st.integers(1, 8), rows=st.integers(0, 5), columns=st.integers(0, 70))
def test_words_have_the_codes_bit_after_bit(bits: int, rows: int, columns: int) -> None:
    codes = torch.randint(2**bits, (rows, columns), dtype=torch.uint8)
    words = pack_words(codes, bits)
    assert words.dtype == torch.int32 and words.shape == (rows, -(-columns * bits // 32))
    assert torch.equal(unpack_words(words, bits, columns), codes)
    for row, line in enumerate(words.numpy().view(np.uint32).tolist()):
        whole = sum(word << (32 * place) for place, word in enumerate(line))
        assert [whole >> (bits * i) & (2**bits - 1) for i in range(columns)] == codes[row].tolist()
        assert whole >> (bits * columns) == 0
    digits = codes % 3
    packed = pack_trits(digits)
    assert packed.shape == (rows, -(-columns // 5)) and torch.equal(unpack_trits(packed, columns), digits)


def test_words_of_more_than_eight_bits_are_refused() -> None:
    message = "codes of 9 bits .*; give 1 to 8 bits"
    with pytest.raises(WeightFormatError, match=message):
        pack_words(torch.ones(1, 8, dtype=torch.uint8), 9)
    with pytest.raises(WeightFormatError, match=message):
        unpack_words(torch.ones(1, 3, dtype=torch.int32), 9, 8)


def test_sizes_of_large_layers() -> None:
    files = {name: get_weight_format(name).file_form(4096, 11008).values() for name in list_weight_formats()}
    ratios = {name: 4 * 4096 * 11008 / sum(tensor.nbytes for tensor in tensors) for name, tensors in files.items()}
    assert (ratios["fp32"], ratios["bf16"], ratios["int8"]) == (1, 2, pytest.approx(32 / (8 + 32 / 11008), rel=1e-9))
    least = {"int8": 3.98, "int4_g128": 7.7, "int2_g128": 15, "ternary": 19, "binary_g128": 28, "fp8": 3.98}
    assert {name for name, ratio in least.items() if ratios[name] < ratio} == set()
    assert ratios["int4_g128"] == pytest.approx(32 / (4 + 16 / 128), rel=1e-5)
    assert ratios["int3_g64"] == pytest.approx(32 / (3 + 16 / 64), rel=1e-5)
    assert ratios["int4_g32_zp"] == pytest.approx(32 / (4 + 20 / 32), rel=1e-5)


@pytest.mark.parametrize("name", ["int4_g32_zp", "int3_g64", "ternary", "binary_g32", "int8", "fp8"])
def test_joined_weights_have_the_rows_of_their_parts(name: str) -> None:
    form = get_weight_format(name)
    parts = [form.pack(matrix(rows, 70, seed=rows)) for rows in (3, 5, 1)]
    assert torch.equal(form.unpack(join_packed(form, parts)), torch.cat([form.unpack(part) for part in parts]))


def test_scales_outside_of_their_range_are_refused() -> None:
    with pytest.raises(
        WeightFormatError, match=r"int4_g128.*element \[0, 0\].*scale outside of the range of torch.float16"
    ):
        get_weight_format("int4_g128").pack(torch.full((1, 4), 1e6))
    form = get_weight_format("int4_g32")
    assert isinstance(form, CodedWeightFormat)
    with pytest.raises(
        WeightFormatError, match=r"scales of shape \(2, 1\) do not fit 2 rows of 40 codes.*give \(2, 2\)"
    ):
        form.pack_codes(GroupCodes(torch.zeros(2, 40, dtype=torch.uint8), torch.ones(2, 1)))
    tiny = form.pack(torch.full((1, 4), 1e-30))
    assert torch.equal(form.unpack(tiny), torch.zeros(1, 4))
    with pytest.raises(WeightFormatError, match="groups of 48 features"):
        CodedWeightFormat("mine", 48)
