"""Tests of weight formats: the documented rounding of packed weights, and products equal to the unpacked weight's."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from windlass.base.errors import WeightFormatError
from windlass.kernels import packed_matmul, weight_format
from windlass.kernels.packed_linear import pack_linear_layers
from windlass.kernels.weight_format import (
    Int8WeightFormat,
    get_weight_format,
    list_weight_formats,
    register_weight_format,
)

NAMES = (
    "fp32",
    "bf16",
    "int8",
    "fp8",
    "int8_g32",
    "int4_g128",
    "int4_g32_zp",
    "int3",
    "int2_g64",
    "ternary",
    "ternary_g32",
    "binary",
)
SHAPES = ((5, 7), (1, 1), (64, 33), (0, 4), (4, 0))


@pytest.fixture
def registry() -> Iterator[None]:
    before = dict(weight_format._formats)
    yield
    weight_format._formats.clear()
    weight_format._formats.update(before)


def matrix(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows * 100 + columns)
    return (torch.randn(rows, columns, generator=generator) * torch.logspace(-3, 2, rows)[:, None]).to(dtype)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_packed_tensors_have_the_layout_of_files(name: str, shape: tuple[int, int], tmp_path: Path) -> None:
    form = get_weight_format(name)
    packed = form.pack(matrix(*shape))
    text = {key: (item.dtype, item.shape) for key, item in form.file_form(*shape).items()}
    assert {key: (tensor.dtype, tuple(tensor.shape)) for key, tensor in packed.items()} == text
    assert sum(tensor.numel() * tensor.element_size() for tensor in packed.values()) == sum(
        item.nbytes for item in form.file_form(*shape).values()
    )
    save_file(packed, tmp_path / "file.safetensors")
    again = load_file(tmp_path / "file.safetensors")
    assert torch.equal(form.unpack(again), form.unpack(packed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_unpacked_values(dtype: torch.dtype) -> None:
    weight = matrix(31, 65, dtype)
    assert torch.equal(get_weight_format("fp32").unpack(get_weight_format("fp32").pack(weight)), weight.float())
    assert torch.equal(get_weight_format("bf16").unpack(get_weight_format("bf16").pack(weight)), weight.bfloat16())
    form = get_weight_format("int8")
    packed = form.pack(weight)
    result = form.unpack(packed)
    limit = weight.float().abs().amax(1, keepdim=True) / 127 / 2 * (1 + 1e-5)
    assert bool(((result - weight.float()).abs() <= limit).all())
    assert bool((packed["weight"].abs().amax(1) == 127).all()), "the largest of a row is the end of the range"
    again = form.pack(result)
    assert torch.equal(again["weight"], packed["weight"]), "packing what was unpacked changes nothing"


def test_int8_rounds_half_to_even_and_takes_rows_of_zeros() -> None:
    weight = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5], [0.0] * 6, [1e-45] * 6])
    packed = get_weight_format("int8").pack(weight)
    assert packed["weight"].tolist()[:2] == [[127, 0, 2, 2, 0, -2], [0] * 6]
    assert packed["weight_scale"].flatten().tolist()[:2] == [1.0, 0.0]
    result = get_weight_format("int8").unpack(packed)
    assert bool(torch.isfinite(result).all()) and torch.equal(result[1], torch.zeros(6))


def gradients(
    call: Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor], x: torch.Tensor, bias: torch.Tensor | None
) -> list[torch.Tensor]:
    """Return the output and the gradients of input and bias, for an upstream gradient that is not constant."""
    leaves = [item.detach().clone().requires_grad_() for item in (x, bias) if item is not None]
    out = call(leaves[0], leaves[1] if bias is not None else None)
    out.backward(torch.linspace(-1, 1, out.numel()).view(out.shape).to(out.dtype))
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_linear_equals_that_of_the_unpacked_weight(name: str, dtype: torch.dtype, with_bias: bool) -> None:
    form, weight = get_weight_format(name), matrix(19, 33) / 100
    packed = form.pack(weight)
    x = torch.randn(3, 4, 33, generator=torch.Generator().manual_seed(5)).to(dtype)
    bias = torch.linspace(-1, 1, 19).to(dtype) if with_bias else None
    actual = gradients(lambda x, b: form.linear(x, packed, b), x, bias)
    expected = gradients(lambda x, b: F.linear(x, form.unpack(packed).to(dtype), b), x, bias)
    assert len(actual) == 2 + with_bias
    for have, want in zip(actual, expected, strict=True):
        assert torch.equal(have, want) and have.dtype == dtype
    # Unpack 5 of the 19 rows at a time: the input's gradient is summed in another order.
    bound = 1e-2 if dtype.itemsize == 2 else 1e-5
    with mock.patch.object(packed_matmul, "BLOCK_NUMEL", 33 * 5):
        blocks = gradients(lambda x, b: form.linear(x, packed, b), x, bias)
    for have, want in zip(blocks, expected, strict=True):
        torch.testing.assert_close(have, want, rtol=bound, atol=bound)


def test_no_unpacked_weight_outlives_the_forward() -> None:
    form = get_weight_format("int8")
    packed, saved = form.pack(matrix(64, 64)), []
    x = torch.ones(2, 64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        form.linear(x, packed, None)
    assert sorted(tensor.numel() * tensor.element_size() for tensor in saved) == [4 * 64, 64 * 64]


@pytest.mark.usefixtures("registry")
def test_the_documented_format() -> None:
    page = (Path(__file__).parents[3] / "docs/compression.md").read_text("utf-8")
    (code,) = re.findall(r"```python\n((?:(?!```).)*register_weight_format.*?)```", page, re.DOTALL)
    exec(compile(code, "compression.md", "exec"), {"__name__": "format_page"})
    layer, x = torch.nn.Linear(8, 4), torch.randn(3, 8)
    model = torch.nn.Sequential(layer)
    expected = F.linear(x, layer.weight.detach().half().float(), layer.bias)
    assert pack_linear_layers(model, "half") == ["0"]
    torch.testing.assert_close(model(x), expected)


@pytest.mark.usefixtures("registry")
def test_weight_format_registry() -> None:
    assert {"bf16", "fp8", "fp32", "int8", "int4_g128", "int2_g128", "ternary", "binary_g128"} <= set(
        list_weight_formats()
    )

    class Mine(Int8WeightFormat):
        name = "int8_too"

    local = Mine()
    register_weight_format(local)
    register_weight_format(local)
    assert get_weight_format("int8_too") is local
    with pytest.raises(WeightFormatError, match="'int8_too' is registered already"):
        register_weight_format(Mine())
    local.name = "a.b"
    with pytest.raises(WeightFormatError, match=r"'a\.b' has an invalid name"):
        register_weight_format(local)
    with pytest.raises(
        WeightFormatError, match="no weight format named 'nf5'; use one of bf16, binary, .*fp32, .*int8, .*int8_too"
    ):
        get_weight_format("nf5")


@pytest.mark.parametrize("name", NAMES)
def test_unpackable_weights_are_refused(name: str) -> None:
    form, bad = get_weight_format(name), matrix(3, 4)
    bad[1, 2] = float("nan")
    with pytest.raises(WeightFormatError, match=rf"{name}.*element \[1, 2\] of a weight of shape \(3, 4\): it"):
        form.pack(bad)
    for wrong in (torch.zeros(3), torch.zeros(2, 2, dtype=torch.int8), torch.zeros(2, 2, device="meta")):
        with pytest.raises(WeightFormatError):
            form.pack(wrong)
    with pytest.raises(WeightFormatError, match="outside of the range of torch"):
        form.pack(torch.full((1, 1), 1e300, dtype=torch.float64))
