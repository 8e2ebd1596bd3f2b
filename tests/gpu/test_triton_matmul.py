"""Law: the Triton kernel of packed products equals the product with the unpacked weight, within float32's rounding.

The tests run on a GPU, or anywhere in Triton's interpreter:
`TRITON_INTERPRET=1 pytest -m gpu tests/gpu/test_triton_matmul.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.gpu.triton_device import DEVICE, INTERPRETED, NEEDS_TRITON
from tests.packed_matmul_cases import FORMATS, exact_product, pack_random, random_inputs
from windlass.kernels.packed_linear import PackedLinear
from windlass.kernels.weight_format import get_weight_format

pytestmark = NEEDS_TRITON
SIZES = [(1, 65, 300), (3, 70, 128), (17, 5, 31), (2, 1, 1)]  # rows, outputs, features
MANY = (130, 70, 200)


@pytest.fixture(autouse=True)
def _uses_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the interpreter, make layers on the CPU use the Triton kernel instead of native kernels."""
    if INTERPRETED:
        monkeypatch.setattr("windlass.kernels.device_matmul.runs_kernels", lambda device: True)
        monkeypatch.setattr("windlass.kernels.panel_cache._is_native", lambda weight_format, input: False)


def multiply(name: str, sizes: tuple[int, int, int], dtype: torch.dtype, *, with_bias: bool) -> None:
    """Compare the kernel's product with the exact one."""
    from windlass.kernels import triton_matmul

    rows, outputs, features = sizes
    packed, form = pack_random(name, outputs, features), get_weight_format(name)
    input, bias = random_inputs((rows, features), dtype), random_inputs((outputs,), dtype, 2) if with_bias else None
    expected, terms = exact_product(name, packed, input, bias)
    calls = []

    def counted(*arguments: Any) -> torch.Tensor:
        calls.append(arguments)
        return original(*arguments)

    original = triton_matmul.multiply
    moved = {key: tensor.to(DEVICE) for key, tensor in packed.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_matmul, "multiply", counted)
        found = form.linear(input.to(DEVICE), moved, None if bias is None else bias.to(DEVICE))
    assert len(calls) == 1 and found.dtype == dtype
    rounding = 1e-6 * terms + (0 if dtype == torch.float32 else torch.finfo(dtype).eps * expected.abs())
    assert bool(((found.cpu().double() - expected).abs() <= rounding + 1e-30).all())


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_products_are_those_of_the_unpacked_weight(name: str, sizes: tuple[int, int, int]) -> None:
    multiply(name, sizes, torch.float32, with_bias=True)
    multiply(name, sizes, torch.float16, with_bias=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["int8", "fp8", "int8_g128_zp", "int4_g32_zp", "int3_g64", "ternary", "binary_g128"])
def test_many_rows(name: str, dtype: torch.dtype) -> None:
    if INTERPRETED and dtype == torch.bfloat16:
        pytest.skip("the interpreter multiplies the bits of bfloat16 as integers")
    multiply(name, MANY, dtype, with_bias=True)


@pytest.mark.parametrize("name", ["int8", "int4_g32_zp", "int3_zp"])
@pytest.mark.parametrize("programs", [1, 512])
def test_features_in_parts(name: str, programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("windlass.kernels.triton_matmul._PROGRAMS", programs)
    for sizes in ((1, 7, 1500), (40, 7, 1500)):
        multiply(name, sizes, torch.float32, with_bias=True)


def test_values_of_float8_are_all_read() -> None:
    from windlass.kernels import triton_matmul
    from windlass.kernels.device_matmul import CodedMatrix

    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).view(1, 256).T.contiguous()
    matrix = CodedMatrix("fp8", codes.to(DEVICE), torch.ones(256, 1, device=DEVICE))
    found = triton_matmul.multiply(torch.ones(1, 1, device=DEVICE), matrix, None)[0].cpu()
    torch.testing.assert_close(found, codes.float()[:, 0], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", ["int8", "int4_g32_zp", "fp8", "ternary"])
def test_layers_give_the_gradients_of_the_unpacked_weight(name: str) -> None:
    packed = PackedLinear(100, 33, weight_format=name, device=DEVICE)
    packed.set_packed({key: one.to(DEVICE) for key, one in pack_random(name, 33, 100).items()})
    plain = packed.to_linear(torch.float32)
    x = random_inputs((2, 3, 100), torch.float32).to(DEVICE).requires_grad_()
    y = x.detach().clone().requires_grad_()
    packed(x).square().sum().backward()
    plain(y).square().sum().backward()
    torch.testing.assert_close(packed(x), plain(y), rtol=1e-4, atol=1e-2)
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-3, atol=1.0)
    torch.testing.assert_close(packed.bias.grad, plain.bias.grad, rtol=1e-4, atol=1e-2)
