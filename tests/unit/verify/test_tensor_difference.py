"""Tests of comparing tensors: differing elements, size of a difference, samples and tolerances."""

from __future__ import annotations

import math
import pickle

import pytest
import torch

from windlass.verify.module_trace import LIMIT, sample_tensor
from windlass.verify.tensor_difference import EQUAL, measure_difference, ulp_size
from windlass.verify.tolerance import Tolerance


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_spacing_is_the_distance_to_the_next_number(dtype: torch.dtype) -> None:
    values = torch.tensor([1.0, 1.5, 2.0, 3.7, 1e-3, 123.0], dtype=dtype)
    after = torch.nextafter(values, torch.tensor(math.inf, dtype=dtype))
    assert torch.equal(ulp_size(values.double(), dtype), after.double() - values.double())


def test_difference_units_and_positions() -> None:
    expected = torch.tensor([[1.0, -2.0], [4.0, 0.0]])
    actual = expected.clone()
    actual[1, 0] = torch.nextafter(torch.nextafter(actual[1, 0], torch.tensor(9.0)), torch.tensor(9.0))
    apart = measure_difference(actual, expected, 0.0, torch.float32)
    assert apart.ulps == 2 and apart.exceeding_count == 1 and apart.worst_index == 2 and apart.expected == 4.0
    assert apart.relative == pytest.approx(2 * 4 * 2.0**-23 / math.sqrt(21))
    within = measure_difference(actual, expected, 1e-6, torch.float32)
    assert within.exceeding_count == 0 and 0 < within.allowance_ratio < 1


def test_non_finite_values_equal_only_themselves() -> None:
    odd = torch.tensor([math.nan, math.inf, -math.inf, 1.0])
    assert measure_difference(odd, odd.clone(), 0.0, torch.float32).exceeding_count == 0
    for other in (
        [0.0, math.inf, -math.inf, 1.0],
        [math.nan, -math.inf, -math.inf, 1.0],
        [math.nan, math.inf, 5.0, 1.0],
    ):
        apart = measure_difference(torch.tensor(other), odd, 1e9, torch.float32)
        assert apart.exceeding_count == 1 and apart.allowance_ratio == math.inf
    assert measure_difference(torch.empty(0), torch.empty(0), 0.0, torch.float32) == EQUAL


def test_tolerance_is_per_element() -> None:
    expected, actual = torch.zeros(3), torch.tensor([1e-3, 1e-3, 2e-3])
    apart = measure_difference(actual, expected, torch.tensor([1e-2, 1e-4, 1e-2]), torch.float32)
    assert apart.exceeding_count == 1 and apart.worst_index == 1


def test_sample_estimates_all_elements() -> None:
    big = torch.linspace(-1, 1, 10 * LIMIT + 3)
    seen = sample_tensor(big)
    assert len(seen.values) <= LIMIT and torch.equal(seen.values, big[:: seen.stride])
    assert seen.norm == pytest.approx(float(big.double().norm())) and seen.shape == big.shape
    big[1] += 10.0  # an element between the sampled ones
    assert sample_tensor(big).norm > seen.norm * 1.01
    assert torch.equal(sample_tensor(torch.tensor([True, False])).values, torch.tensor([True, False]))


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_samples_of_unusual_tensors() -> None:
    plain = torch.tensor([[1.0, 0.0], [-2.0, 0.5]])
    unusual = [plain.to_sparse(), plain.to_sparse_csr(), plain.to(torch.float8_e4m3fn), plain.to(torch.float8_e5m2)]
    for tensor in unusual:
        seen = sample_tensor(tensor)
        assert torch.equal(seen.values, plain.reshape(-1)) and seen.shape == plain.shape
        assert seen.norm == pytest.approx(math.sqrt(5.25))
        assert torch.equal(pickle.loads(pickle.dumps(seen)).values, seen.values)  # ranks send samples to rank 0
    seen = sample_tensor(torch.tensor([3.0 + 4.0j]).conj())
    assert seen.values.tolist() == [3.0, -4.0] and seen.norm == 5.0


def test_bounds_follow_from_dtypes_and_sizes() -> None:
    wide = Tolerance(torch.float32, torch.float32, torch.float32, max_summands=64, micro_batch_count=4)
    assert Tolerance(torch.bfloat16, torch.float32, torch.float32, 64, 4).forward > 100 * wide.forward
    assert Tolerance(torch.float32, torch.float32, torch.float32, 6400, 4).forward > 5 * wide.forward
    assert Tolerance(torch.float32, torch.float32, torch.bfloat16, 64, 4).reduce == 6 * 2.0**-7
    assert wide.reduce == 6 * 2.0**-23
    old = torch.tensor([1.0, 100.0])
    allowed = wide.update(old, old + torch.tensor([0.0, 1.0]))
    assert allowed[0] == pytest.approx((4 + 64) * 2.0**-23)
    assert set(wide.descriptions()) == {"start", "forward", "gradient", "reduce", "clip", "update"}
