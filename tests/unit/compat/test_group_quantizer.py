"""Tests of quantization by groups, and of `CUDAQuantizer`, which uses it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from windlass.compat import group_quantizer
from windlass.compat.group_quantizer import CUDAQuantizer, GroupQuantizationError
from windlass.compat.op_builders import QuantizerBuilder


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("kind", [group_quantizer.Symmetric, group_quantizer.Asymmetric])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_differ_by_at_most_half_a_step(bits: int, kind: int, dtype: torch.dtype) -> None:
    op = QuantizerBuilder().load()
    values = (torch.randn(6, 32, generator=torch.Generator().manual_seed(0)) * 3 + 1).to(dtype)
    values[2] = 0
    codes, parameters = op.quantize(values, 12, bits, kind)
    assert codes.dtype == torch.int8 and codes.shape == (6, 32 * bits // 8)
    assert parameters.shape == (12, 2 if kind else 1) and parameters.dtype == torch.float32
    again = op.dequantize_fp32(codes, parameters, 12, bits, kind)
    error = (again - values.float()).abs().view(12, -1).amax(dim=1)
    assert (error <= parameters[:, 0] * 0.501).all()
    assert torch.equal(op.dequantize(codes, parameters, 12, bits, kind), again.half())


def test_impossible_groups_and_bits_raise() -> None:
    with pytest.raises(GroupQuantizationError, match="cannot be divided into 5 groups"):
        group_quantizer.quantize(torch.zeros(12), 5, 8, 0)
    with pytest.raises(GroupQuantizationError, match="num_bits is 3"):
        group_quantizer.quantize(torch.zeros(12), 4, 3, 0)
    with pytest.raises(AssertionError, match="multiple of 8"):
        CUDAQuantizer().quantize(torch.zeros(12))


@pytest.fixture
def _own_op(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(CUDAQuantizer, "quantizer_cuda_module", None)
    yield
    CUDAQuantizer.group_size_cache.clear()


@pytest.mark.usefixtures("_own_op")
def test_parameters_come_back_in_their_dtype() -> None:
    quantizer = CUDAQuantizer()
    large = (torch.randn(24_000, generator=torch.Generator().manual_seed(0)) * 1e5).bfloat16()  # beyond fp16
    codes, scales = quantizer.quantize(large)
    assert scales.numel() == 3 and quantizer.group_size_cache == {24_000: 3}
    back = quantizer.dequantize(codes, scales, dtype=torch.bfloat16)
    assert back.dtype == torch.bfloat16 and torch.allclose(back, large, rtol=0.01, atol=float(scales.max()))
    assert quantizer.dequantize(*quantizer.quantize(torch.ones(8), groups=1)).dtype == torch.float16


@pytest.mark.usefixtures("_own_op")
def test_another_op_gets_fp16(monkeypatch: pytest.MonkeyPatch) -> None:
    class Op:
        Symmetric = 0

        def quantize(self, values: torch.Tensor, groups: int, *_: int) -> tuple[torch.Tensor, torch.Tensor]:
            assert values.dtype == torch.float16
            return values.to(torch.int8), torch.ones(groups)

        def dequantize(self, codes: torch.Tensor, *_: object) -> torch.Tensor:
            return codes.half()

    monkeypatch.setattr(CUDAQuantizer, "quantizer_cuda_module", Op())
    codes, scales = CUDAQuantizer().quantize(torch.full((16,), 3.0).bfloat16())
    assert torch.equal(CUDAQuantizer().dequantize(codes, scales, torch.float32), torch.full((16,), 3.0))
