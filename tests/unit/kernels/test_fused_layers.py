"""Tests of fused layers: equal to float64 formulas within rounding, in every path."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from windlass.base.errors import ModelError
from windlass.kernels.fused_layers import apply_rotary, gated_activation, rms_norm
from windlass.kernels.inference_path import list_inference_paths

PATHS = list_inference_paths()
paths = st.sampled_from(PATHS)
dtypes = st.sampled_from([torch.float32, torch.bfloat16])


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_near(found: torch.Tensor, wanted: torch.Tensor) -> None:
    limit = 2e-6 if found.dtype == torch.float32 else 2**-7
    assert torch.allclose(found.double(), wanted, rtol=limit, atol=limit)


@given(path=paths, dtype=dtypes, rows=st.integers(1, 9), features=st.integers(1, 150), has_residual=st.booleans())
def test_rms_norm_equals_float64(path: str, dtype: torch.dtype, rows: int, features: int, has_residual: bool) -> None:
    x, weight = random(rows, features).to(dtype), random(features, seed=1)
    residual = random(rows, features, seed=2).to(dtype) if has_residual else None
    total = x if residual is None else x + residual
    result = rms_norm(x, weight, 1e-5, residual=residual, path=path)
    wide = total.double()
    assert_near(result, wide / (wide.square().mean(1, keepdim=True) + 1e-5).sqrt() * weight.double())
    if residual is not None:
        assert torch.equal(residual, total)
    item = rows // 2
    assert torch.equal(rms_norm(total[item], weight, 1e-5, path=path), result[item]) or path == "reference"


@given(
    path=paths,
    dtype=dtypes,
    tokens=st.integers(1, 9),
    heads=st.integers(1, 5),
    half=st.integers(1, 40),
    rest=st.integers(0, 20),
)
def test_rotary_equals_the_complex_product(
    path: str, dtype: torch.dtype, tokens: int, heads: int, half: int, rest: int
) -> None:
    head_dim = 2 * half + rest
    joined = random(tokens, (heads + 1) * head_dim).to(dtype)
    before = joined.clone()
    x = joined[:, : heads * head_dim].unflatten(1, (heads, head_dim))
    angles = random(tokens, half, seed=1)
    wide = x.double()
    turned = torch.complex(wide[..., :half], wide[..., half : 2 * half]) * torch.polar(
        torch.ones(tokens, 1, half).double(), angles.double()[:, None]
    )
    expected = torch.cat([turned.real, turned.imag, wide[..., 2 * half :]], -1)
    apply_rotary(x, angles.cos().repeat(1, 2), angles.sin().repeat(1, 2), path=path)
    assert_near(x, expected)
    assert torch.equal(joined[:, heads * head_dim :], before[:, heads * head_dim :])


@pytest.mark.parametrize("path", PATHS)
def test_rotary_takes_angles_that_are_not_contiguous(path: str) -> None:
    angles, x = random(64, 32, seed=1), random(64, 4, 64)
    cosines, sines = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
    expected = x.clone()
    apply_rotary(expected, cosines, sines, path=path)
    joined = torch.cat([cosines, sines], 1)
    apply_rotary(x, joined[:, :64], joined[:, 64:], path=path)
    assert torch.equal(x, expected)


@given(
    path=paths,
    dtype=dtypes,
    rows=st.integers(1, 9),
    features=st.integers(1, 70),
    activation=st.sampled_from(["silu", "gelu_tanh"]),
    scale=st.sampled_from([1.0, 30.0]),
)
def test_gated_activation_equals_float64(
    path: str, dtype: torch.dtype, rows: int, features: int, activation: str, scale: float
) -> None:
    gate_up = (scale * random(rows, 2 * features)).to(dtype)
    gate, up = gate_up.double().chunk(2, 1)
    active = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    result = gated_activation(gate_up, activation, path=path)
    limit = (4e-6 if dtype == torch.float32 else 2**-7) * scale
    assert torch.allclose(result.double(), active * up, rtol=limit, atol=limit)


@pytest.mark.parametrize("path", PATHS)
def test_activation_of_extreme_gates(path: str) -> None:
    gate = torch.tensor([-1e30, -100.0, -88.0, 0.0, 88.0, 100.0, 1e30, float("inf"), float("nan")])
    actual = gated_activation(torch.cat([gate, torch.ones(9)]), path=path)
    expected = torch.tensor([0.0, 0.0, 0.0, 0.0, 88.0, 100.0, 1e30, float("inf"), float("nan")])
    assert torch.allclose(actual, expected, equal_nan=True)


def test_arguments_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ModelError, match="not halves"):
        gated_activation(torch.zeros(2, 3))
    with pytest.raises(ModelError, match="no activation 'relu'"):
        gated_activation(torch.zeros(2, 4), "relu")
    with pytest.raises(ModelError, match="weight of shape"):
        rms_norm(torch.zeros(2, 3), torch.zeros(4), 1e-5)
    with pytest.raises(ModelError, match="residual of shape"):
        rms_norm(torch.zeros(2, 3), torch.zeros(3), 1e-5, residual=torch.zeros(3, 3))
    with pytest.raises(ModelError, match="angles of shapes"):
        apply_rotary(torch.zeros(2, 3, 4), torch.zeros(3, 4), torch.zeros(3, 4))
    with pytest.raises(ModelError, match="6 angles"):
        apply_rotary(torch.zeros(2, 3, 4), torch.zeros(2, 6), torch.zeros(2, 6))
    with pytest.raises(ModelError, match="float16"):
        rms_norm(torch.zeros(2, 3).half(), torch.zeros(3), 1e-5)
