"""Tests of packed products: equal to float64 within rounding, and rows with the same bits in any batch."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from windlass.base.errors import ConfigError, ModelError, WeightFormatError
from windlass.kernels.coded_formats import CodedWeightFormat, GroupCodes
from windlass.kernels.inference_path import get_inference_path, list_inference_paths
from windlass.kernels.packed_gemm import PackedPanels, pack_panels, pack_weight, packed_linear
from windlass.kernels.reference.quantized_input import quantize_groups
from windlass.kernels.weight_format import CastWeightFormat, PackedWeight, get_weight_format, list_weight_formats

PATHS = list_inference_paths()
NATIVE = PATHS[:-1]
CODED = (
    *("int8_g64", "int4_g128", "int4_g32_zp", "int3_g64", "int2_g128", "ternary", "binary_g32", "binary", "int4_zp"),
    *("int1_g32", "int1_zp", "int5_g64", "int6_zp", "int7_g32_zp"),
)
FORMATS = (
    *("fp32", "bf16", "bf16, bf16 inputs", "int8", "int8, int8 inputs", "fp8"),
    *CODED,
    *(f"{name}, int8 inputs" for name in CODED),
)
PLAIN = [name for name in list_weight_formats() if name != "fp16"]  # float16 weights have no panels
ALL = sorted({*FORMATS, *PLAIN, *(f"{name}, int8 inputs" for name in PLAIN if "int" in name or "ary" in name)})
DTYPES = (torch.float32, torch.bfloat16)

sizes = st.one_of(st.integers(1, 70), st.sampled_from([127, 128, 129, 160, 257]))
kinds = {"path": st.sampled_from(PATHS), "format": st.sampled_from(ALL), "dtype": st.sampled_from(DTYPES)}
native_kinds = {**kinds, "path": st.sampled_from(NATIVE or PATHS)}


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def pack(weight: torch.Tensor, format: str, path: str | None = None) -> PackedPanels:
    name, _, inputs = format.partition(", ")
    return pack_weight(weight, name, quantize_inputs=bool(inputs), path=path)


def exact(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, format: str) -> torch.Tensor:
    name, _, inputs = format.partition(", ")
    form = get_weight_format(name)
    if inputs:
        x = x.bfloat16() if inputs == "bf16 inputs" else quantize_groups(x.float())
    values = form.unpack(form.pack(weight)).double()
    return x.double() @ values.T + (0 if bias is None else bias.double())


@given(rows=sizes, outputs=sizes, features=sizes, has_bias=st.booleans(), threads=st.integers(1, 3), **kinds)
def test_product_equals_float64_within_rounding(
    rows: int, outputs: int, features: int, has_bias: bool, threads: int, path: str, format: str, dtype: torch.dtype
) -> None:
    assert_product_is_exact((rows, outputs, features), has_bias, threads, path, format, dtype)


# Sizes are (rows, outputs, features): one row, several rows, and more rows than a tile. No number of outputs is a
# multiple of 16, the width of a panel, and few numbers of features are multiples of the group size.
@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param([(1, 1, 1), (1, 33, 131), (3, 70, 64), (9, 17, 257), (40, 45, 129)], id="small"),
        pytest.param([(1, 130, 1100), (257, 300, 513), (70, 515, 640)], id="large", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("path", PATHS)
def test_every_kernel_equals_float64_within_rounding(path: str, format: str, sizes: list[tuple[int, int, int]]) -> None:
    for number, size in enumerate(sizes):
        for dtype in DTYPES:
            assert_product_is_exact(size, number % 2 == 1, 1 + number % 2, path, format, dtype)


@pytest.mark.parametrize("path", PATHS)
def test_every_format_has_exact_products(path: str) -> None:
    for format in ALL:
        for size in ((1, 33, 131), (9, 17, 257)):
            assert_product_is_exact(size, True, 1, path, format, torch.float32)
        assert_product_is_exact((3, 5, 40), False, 1, path, format, torch.bfloat16)


def assert_product_is_exact(
    size: tuple[int, int, int], has_bias: bool, threads: int, path: str, format: str, dtype: torch.dtype
) -> None:
    """Compare a product to float64, within the rounding of its dtype.

    Args:
        size: rows, outputs and features.
    """
    rows, outputs, features = size
    weight, x = random(outputs, features), random(rows, features, seed=1).to(dtype)
    bias = random(outputs, seed=2) if has_bias else None
    torch.set_num_threads(threads)
    try:
        actual = packed_linear(x, pack(weight, format, path), bias)
    finally:
        torch.set_num_threads(1)
    expected = exact(x, weight, bias, format)
    assert actual.dtype == dtype and actual.shape == expected.shape, format
    scale = float((x.double().abs() @ weight.double().abs().T).max()) + 1
    # for bf16 inputs the reference also rounds weights and bias to bf16, and sums in another order
    limit = 1e-6 if dtype == torch.float32 else 2**-8 if path != "reference" else 2**-6
    assert float((actual.double() - expected).abs().max()) <= limit * scale, format


@pytest.mark.parametrize("name", ["int8", *CODED])
@pytest.mark.parametrize("path", PATHS)
def test_products_of_whole_numbers_are_exact(path: str, name: str) -> None:
    """Products of int8 inputs are accumulated as integers: the sum of a group neither rounds nor saturates."""
    for rows, outputs, features in ((1, 37, 300), (3, 16, 128), (17, 45, 131), (40, 5, 400)):
        packed = whole_weight(name, outputs, features)
        generator = torch.Generator().manual_seed(rows)
        x = torch.randint(-127, 128, (rows, features), generator=generator)
        x[:, ::128] = 127  # so that each group of 128 inputs is quantized with the scale 1
        x[0] = 127  # row 0 of `x` and of the weight give the largest sum
        weight = get_weight_format(name).unpack(packed)
        assert torch.equal(weight, weight.round())
        found = packed_linear(
            x.float(), pack_panels(packed, name, (outputs, features), quantize_inputs=True, path=path)
        )
        assert torch.equal(found.to(torch.int64), x @ weight.to(torch.int64).T), (rows, outputs, features)


def whole_weight(name: str, outputs: int, features: int) -> PackedWeight:
    """Return a packed weight of integers, from random codes of a format. The first row has only the largest code."""
    form, generator = get_weight_format(name), torch.Generator().manual_seed(features)
    if not isinstance(form, CodedWeightFormat):
        codes = torch.randint(-127, 128, (outputs, features), generator=generator, dtype=torch.int8)
        codes[0] = 127
        return {"weight": codes, "weight_scale": torch.ones(outputs, 1)}
    low, high = {"ternary": (0, 2), "ternary_g64": (1, 3)}.get(name, (0, 2**form.bits - 1))
    codes = torch.randint(low, high + 1, (outputs, features), generator=generator, dtype=torch.uint8)
    codes[0], codes[-1] = high, low
    shape = outputs, form.count_groups(features)
    scale = torch.full(shape, 2.0 if form.bits == 1 else 1.0, dtype=torch.float16)  # 1-bit codes minus zero: -1/2, 1/2
    zero = torch.randint(0, high + 1, shape, generator=generator, dtype=torch.uint8) if form.has_zeros else None
    return form.pack_codes(GroupCodes(codes, scale, zero))


@given(
    rows=st.integers(2, 70),
    first=st.integers(0, 69),
    count=st.integers(1, 40),
    outputs=sizes,
    features=sizes,
    threads=st.integers(1, 3),
    **native_kinds,
)
def test_rows_have_the_same_bits_in_every_batch(
    rows: int, first: int, count: int, outputs: int, features: int, threads: int, path: str, format: str,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    if path == "reference":  # the reference does not guarantee equal bits
        return
    packed = pack(random(outputs, features), format, path)
    x = random(rows, features, seed=1).to(dtype)
    together = packed_linear(x, packed)
    first %= rows
    torch.set_num_threads(threads)
    try:
        alone = packed_linear(x[first : first + count], packed)
    finally:
        torch.set_num_threads(1)
    assert torch.equal(alone, together[first : first + count])


@pytest.mark.parametrize("quantizes", [False, True])
@pytest.mark.parametrize("name", ["int4_g32_zp", "ternary"])
@pytest.mark.parametrize("path", NATIVE)
def test_threads_that_share_the_panels_of_few_rows_change_no_bit(path: str, name: str, quantizes: bool) -> None:
    size = 1030, 1100  # large enough that several threads share a product, with fewer panels than some have threads
    packed = pack_panels(get_weight_format(name).pack(random(*size)), name, size, quantize_inputs=quantizes, path=path)
    for rows in (1, 3, 8, 13, 16):
        x = random(rows, size[1], seed=1)
        expected = packed_linear(x, packed)
        for threads in (2, 3, 5, 70):
            torch.set_num_threads(threads)
            try:
                assert torch.equal(packed_linear(x, packed), expected), (rows, threads)
            finally:
                torch.set_num_threads(1)


@pytest.mark.parametrize("path", NATIVE)
def test_more_rows_than_are_packed_at_once(path: str) -> None:
    packed, x = pack_weight(random(17, 5), path=path), random(2100, 5, seed=1)
    result = packed_linear(x, packed)
    assert torch.equal(result, torch.cat([packed_linear(part, packed) for part in x.split(300)]))
    assert torch.allclose(result, x @ random(17, 5).T, atol=1e-5)


@pytest.mark.skipif(not NATIVE, reason="no native module was built")
def test_forked_child_multiplies_with_threads() -> None:
    packed, x = pack_weight(random(400, 300)), random(64, 300, seed=1)
    torch.set_num_threads(2)
    try:
        expected = packed_linear(x, packed)
        child = os.fork()
        if child == 0:
            os._exit(0 if torch.equal(packed_linear(x, packed), expected) else 1)
        assert os.waitpid(child, 0)[1] == 0
    finally:
        torch.set_num_threads(1)


@given(outputs=st.integers(1, 40), extra=st.integers(1, 40), rows=st.integers(1, 20), **native_kinds)
def test_outputs_have_the_same_bits_in_a_joined_weight(
    outputs: int, extra: int, rows: int, path: str, format: str, dtype: torch.dtype
) -> None:
    if path == "reference":
        return
    weight, x = random(outputs + extra, 50), random(rows, 50, seed=1).to(dtype)
    joined = packed_linear(x, pack(weight, format, path))
    parts = [packed_linear(x, pack(part, format, path)) for part in weight.split([outputs, extra])]
    assert torch.equal(torch.cat(parts, 1), joined)


# The format with bf16 inputs is left out: instructions that multiply pairs add products in another order.
@pytest.mark.parametrize("format", [name for name in FORMATS if name != "bf16, bf16 inputs"])
def test_sets_with_fused_multiply_add_agree_in_every_bit(format: str) -> None:
    x, weight = random(13, 131), random(45, 131, seed=1)
    fused = [path for path in NATIVE if path != "baseline"]
    results = [packed_linear(x, pack(weight, format, path)) for path in fused]
    assert all(torch.equal(item, results[0]) for item in results)


@pytest.mark.parametrize("path", PATHS)
def test_quantized_inputs_lose_at_most_half_a_scale(path: str) -> None:
    x, weight = random(3, 300), torch.eye(300)
    x[1, 128:256] = 0
    x[2, 5] = 1000
    result = packed_linear(x, pack_weight(weight, "int8", quantize_inputs=True, path=path))
    scales = torch.stack([part.abs().amax(1) / 127 for part in x.split(128, 1)], 1).repeat_interleave(128, 1)[:, :300]
    assert bool(((result - x).abs() <= 0.5001 * scales).all())
    assert float((result - x)[2, 128:].abs().max()) < 0.02  # x[2, 5], the outlier, is in group 0
    with pytest.raises(WeightFormatError, match="'fp32'; use 'bf16', 'int8'"):
        pack_weight(weight, "fp32", quantize_inputs=True)


@pytest.mark.parametrize("rows", [1, 13])
@pytest.mark.parametrize("features", [1, 50, 131])
@pytest.mark.parametrize("path", PATHS)
def test_rounding_inputs_to_bf16_equals_rounded_inputs(path: str, features: int, rows: int) -> None:
    x, packed = random(rows, features, seed=1), pack(random(20, features), "bf16, bf16 inputs", path)
    assert torch.equal(packed_linear(x, packed), packed_linear(x.bfloat16().float(), packed))
    assert not torch.equal(packed_linear(x, packed), packed_linear(x, pack(random(20, features), "bf16", path)))
    if path != "reference":  # the reference rounds after each operation
        assert torch.equal(packed_linear(x, packed).bfloat16(), packed_linear(x.bfloat16(), packed))


@pytest.mark.parametrize("format", ["fp32", "bf16, bf16 inputs", "int8, int8 inputs"])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_not_finite_stay_in_their_row(path: str, format: str, value: float) -> None:
    packed = pack(random(20, 33), format, path)
    x = random(9, 33, seed=1)
    clean = packed_linear(x, packed)
    x[4, 7] = value
    result = packed_linear(x, packed)
    assert not result[4].isfinite().any()
    assert torch.allclose(result[[0, 1, 2, 3, 5, 6, 7, 8]], clean[[0, 1, 2, 3, 5, 6, 7, 8]], atol=1e-6)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("format", [name for name in FORMATS if "," not in name])
def test_packed_tensors_of_a_file_give_the_same_product(path: str, format: str) -> None:
    weight, x = random(37, 50), random(5, 50, seed=1)
    packed = pack_panels(get_weight_format(format).pack(weight), format, (37, 50), path=path)
    assert torch.equal(packed_linear(x, packed), packed_linear(x, pack(weight, format, path)))
    with pytest.raises(WeightFormatError, match=r"weight_scale.* are not of format 'fp32'"):
        pack_panels(get_weight_format("int8").pack(weight), "fp32", (37, 50), path=path)


def test_weight_is_copied_and_takes_the_bytes_of_its_format() -> None:
    for format, bytes_of in (("fp32", 4), ("bf16", 2), ("int8", 1)):
        weight, x = random(64, 96), random(3, 96, seed=1)
        packed = pack_weight(weight, format)
        before = packed_linear(x, packed)
        weight.zero_()
        assert torch.equal(packed_linear(x, packed), before)
        assert packed.nbytes == 64 * 96 * bytes_of + (64 * 4 if format == "int8" else 0)


def test_other_formats_take_their_own_product() -> None:
    half = CastWeightFormat("half_for_test", torch.float16)
    packed = pack_weight(random(6, 8), half)
    assert packed.path == "reference"
    assert torch.allclose(packed_linear(random(2, 8, seed=1), packed), random(2, 8, seed=1) @ random(6, 8).T, atol=1e-2)


@pytest.mark.parametrize("path", [PATHS[0], "reference"])
def test_leading_dimensions_views_and_empty_inputs(path: str) -> None:
    packed = pack_weight(random(6, 8), path=path)
    x = random(5, 3, 8, seed=1)
    assert packed_linear(x, packed).shape == (5, 3, 6)
    assert torch.allclose(packed_linear(x[:, 1], packed), packed_linear(x, packed)[:, 1], atol=1e-6)
    assert packed_linear(x[0, 0], packed).shape == (6,)
    assert packed_linear(x[:0], packed).shape == (0, 3, 6)


@pytest.mark.parametrize(
    ("x", "bias", "said"),
    [
        (torch.zeros(2, 7), None, r"shape \(2, 7\) does not fit .*must be 8"),
        (torch.zeros(2, 8, dtype=torch.float64), None, "float64"),
        (torch.zeros(2, 8), torch.zeros(5), r"bias of shape \(5,\)"),
        (torch.zeros(2, 8, requires_grad=True), None, "no gradients"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(x: torch.Tensor, bias: torch.Tensor | None, said: str) -> None:
    with pytest.raises(ModelError, match=said):
        packed_linear(x, pack_weight(random(6, 8)), bias)


def test_freed_storage_is_refused() -> None:
    x = torch.zeros(4, 8)
    x.untyped_storage().resize_(0)
    packed: PackedPanels = pack_weight(random(6, 8))
    if packed.path != "reference":
        with pytest.raises(ModelError, match="the input of shape .*freed"):
            packed_linear(x, packed)


def test_path_of_the_environment_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PATHS:
        monkeypatch.setenv("WINDLASS_KERNELS", name.lower())
        result = pack_weight(random(4, 4)).path
        assert result == (PATHS[0] if name == "AVX-512" else name), "the best of the family"
    if "AVX-512-BF16" in PATHS:
        assert PATHS[1:3] == ["AVX-512-VNNI", "AVX-512"]
    monkeypatch.setenv("WINDLASS_KERNELS", "sse9")
    with pytest.raises(ConfigError, match="'sse9'.*reference"):
        get_inference_path()
    with pytest.raises(ConfigError, match="'sse9'.*reference"):
        pack_weight(random(4, 4), path="sse9")
