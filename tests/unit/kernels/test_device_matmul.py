"""Tests of the dispatch to device kernels, with a stand-in of the kernel in plain PyTorch."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from tests.packed_matmul_cases import FORMATS, exact_product, pack_random, random_inputs
from windlass.kernels import device_matmul, packed_matmul
from windlass.kernels.bit_packing import unpack_trits, unpack_words
from windlass.kernels.device_matmul import CodedMatrix, has_kernel
from windlass.kernels.packed_linear import PackedLinear
from windlass.kernels.weight_format import get_weight_format

CPU = torch.device("cpu")


def read_matrix(matrix: CodedMatrix, features: int) -> torch.Tensor:
    """Decode a matrix to its float32 weight, as the docstring of `CodedMatrix` describes."""
    if matrix.coding == "words":
        codes = unpack_words(matrix.codes, matrix.bits, features).float()
    else:
        codes = unpack_trits(matrix.codes, features).float() if matrix.coding == "trits" else matrix.codes.float()
    zero: torch.Tensor | float = matrix.zero
    if matrix.zeros is not None:
        words = matrix.zeros.t().contiguous()
        zero = unpack_words(words, matrix.bits, len(codes)).t().float()
        zero = zero.repeat_interleave(matrix.group or features, 1)[:, :features]
    return (codes - zero) * matrix.scale.float().repeat_interleave(matrix.group or features, 1)[:, :features]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[CodedMatrix]:
    """Make the CPU count as a device with the kernel. Return the matrices with which the stand-in kernel is called."""
    seen: list[CodedMatrix] = []

    def multiply(input: torch.Tensor, matrix: CodedMatrix, bias: torch.Tensor | None) -> torch.Tensor:
        seen.append(matrix)
        product = input.float() @ read_matrix(matrix, input.shape[1]).T
        return (product if bias is None else product + bias).to(input.dtype)

    stand_in = ModuleType("windlass.kernels.triton_matmul")
    stand_in.multiply = multiply
    monkeypatch.setattr("windlass.kernels.triton_matmul", stand_in, raising=False)
    monkeypatch.setattr(device_matmul, "runs_kernels", lambda device: True)
    monkeypatch.setattr("windlass.kernels.panel_cache._is_native", lambda weight_format, input: False)
    return seen


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_describes_its_codes(name: str, calls: list[CodedMatrix]) -> None:
    packed, form = pack_random(name, 5, 70), get_weight_format(name)
    input = random_inputs((2, 3, 70), torch.float32)
    expected, terms = exact_product(name, packed, input, None)
    found = form.linear(input, packed, None)
    assert len(calls) == 1 and bool(((found - expected).abs() <= 1e-5 * terms).all())


@pytest.mark.parametrize("name", ["int8", "fp8", "int4_g32_zp"])
def test_backwards_unpack(name: str, calls: list[CodedMatrix]) -> None:
    packed = PackedLinear(70, 5, weight_format=name)
    packed.set_packed(pack_random(name, 5, 70))
    plain = packed.to_linear(torch.float32)
    x = random_inputs((4, 70), torch.float32).requires_grad_()
    y = x.detach().clone().requires_grad_()
    packed(x).square().sum().backward()
    plain(y).square().sum().backward()
    assert len(calls) == 1
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-4, atol=1.0)
    torch.testing.assert_close(packed.bias.grad, plain.bias.grad, rtol=1e-4, atol=1e-1)


def test_other_inputs_are_multiplied_by_unpacked_rows(calls: list[CodedMatrix]) -> None:
    form, packed = get_weight_format("int4_g32_zp"), pack_random("int4_g32_zp", 5, 70)
    apart = {**packed, "weight_scale": packed["weight_scale"].t().contiguous().t()}
    for input, tensors in (
        (random_inputs((65, 70), torch.float32), packed),
        (random_inputs((2, 70), torch.float64), packed),
        (torch.zeros(0, 70), packed),
        (random_inputs((2, 70), torch.float32), apart),
    ):
        assert form.linear(input, tensors, None).shape == (len(input), 5)
    assert not calls
    form.linear(random_inputs((65, 70), torch.bfloat16), packed, None)
    assert len(calls) == 1


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # torch's forward AD uses it
def test_forward_mode_derivatives_are_refused(calls: list[CodedMatrix]) -> None:
    packed, ones = pack_random("int4_g32", 5, 70), torch.ones(1, 70)
    with torch.autograd.forward_ad.dual_level(), pytest.raises(RuntimeError, match="forward mode"):
        get_weight_format("int4_g32").linear(torch.autograd.forward_ad.make_dual(ones, ones), packed, None)


def test_the_kernel_is_for_cuda() -> None:
    assert not has_kernel(torch.zeros(1, 4)) and not device_matmul.runs_kernels(CPU)
    assert packed_matmul.multiply_alone(torch.zeros(1, 4), None, None, 3) is None
