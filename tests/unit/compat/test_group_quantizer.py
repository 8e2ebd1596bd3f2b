"""Tests of quantization by groups, and of `CUDAQuantizer`, which uses it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from windlass.compat import group_quantizer
from windlass.compat.dimension_group_quantizer import DimensionGroupDequantizer, DimensionGroupQuantizer
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
    with pytest.raises(AssertionError, match="multiples of 8"):
        CUDAQuantizer().quantize(torch.zeros(12))


@pytest.fixture
def _own_op(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(CUDAQuantizer, "quantizer_cuda_module", None)
    yield
    CUDAQuantizer.group_size_cache.clear()


@pytest.mark.usefixtures("_own_op")
def test_parameters_come_back_in_their_dtype() -> None:
    quantizer = CUDAQuantizer()
    large = (torch.randn(24_000, generator=torch.Generator().manual_seed(0)) * 1e5).bfloat16()  # too large for fp16
    codes, scales = quantizer.quantize(large)
    assert scales.numel() == 3 and quantizer.group_size_cache == {24_000: 3}
    back = quantizer.dequantize(codes, scales, dtype=torch.bfloat16)
    assert back.dtype == torch.bfloat16 and torch.allclose(back, large, rtol=0.01, atol=float(scales.max()))
    assert quantizer.dequantize(*quantizer.quantize(torch.ones(8), groups=1)).dtype == torch.float16


@pytest.mark.usefixtures("_own_op")
def test_replaced_quantizer_op_receives_fp16(monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_groups_along_a_dimension_differ_by_at_most_half_a_step(bits: int, dim: int, dtype: torch.dtype) -> None:
    config = {"num_bits": bits, "group_size": 4, "group_dim": dim, "symmetric": False}
    values = torch.randn(8, 12, generator=torch.Generator().manual_seed(0)).to(dtype)
    codes, scales, minima = DimensionGroupQuantizer(config).quantize(values)
    found = DimensionGroupDequantizer(config, torch.float32).dequantize(codes, scales, minima)
    assert codes.dtype == torch.uint8 and codes.numel() == values.numel() * bits // 8
    assert scales.dtype == dtype and found.shape == values.shape
    # Each group of 4 along the dimension has its own step, 1 / scale.
    error = (found - values.float()).abs().unflatten(dim, (-1, 4))
    assert bool((error <= 0.5001 / scales.float() + 1e-2 * (dtype != torch.float32)).all())


def test_equal_values_and_narrow_groups_keep_their_values() -> None:
    config = {"num_bits": 8, "group_size": 4, "group_dim": 0, "symmetric": False}
    values = torch.tensor([3.0, 3.0, 3.0, 3.0, 1e-3, 2e-3, 3e-3, 4e-3], dtype=torch.float16)
    found = DimensionGroupDequantizer(config, torch.float16).dequantize(
        *DimensionGroupQuantizer(config).quantize(values)
    )
    torch.testing.assert_close(found, values, rtol=0, atol=2e-5)


def test_impossible_groups_along_a_dimension_raise() -> None:
    config = {"num_bits": 4, "group_size": 3, "group_dim": 0, "symmetric": False}
    with pytest.raises(GroupQuantizationError, match="not a multiple of group_size 3"):
        DimensionGroupQuantizer(config).quantize(torch.zeros(4, 2))
    with pytest.raises(GroupQuantizationError, match="even size, not 5"):
        DimensionGroupQuantizer(config).quantize(torch.zeros(3, 5))
    with pytest.raises(GroupQuantizationError, match="symmetric is true"):
        DimensionGroupQuantizer({**config, "symmetric": True})
    with pytest.raises(GroupQuantizationError, match="num_bits is 2"):
        DimensionGroupDequantizer({**config, "num_bits": 2}, torch.float32)
