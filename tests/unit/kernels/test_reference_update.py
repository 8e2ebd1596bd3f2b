"""Tests of the reference update: exact fused multiply-add, and laws of the narrow optimizer states."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from tests.unit.kernels.rule_cases import RULES, assert_same_bits, nearest, piece
from windlass.kernels.kernel_dispatch import REFERENCE_PATH, apply_updates
from windlass.kernels.reference import dequantize_blockwise, quantize_blockwise
from windlass.kernels.reference.fused_multiply_add import fma
from windlass.kernels.reference.stochastic_rounding import (
    get_state_noise,
    make_rounding_noise,
    stochastic_round_to_bf16,
)
from windlass.kernels.update_tensors import SCALE_BLOCK, count_scales

single = st.floats(width=32, allow_nan=False, allow_infinity=False)


def rounded(exact: Fraction) -> float:
    """Return the fp32 number nearest to `exact`, ties to even: a first guess or one of its two neighbours."""
    guess = torch.tensor(float(exact), dtype=torch.float64).float()
    around = [guess.nextafter(torch.tensor(-math.inf)), guess, guess.nextafter(torch.tensor(math.inf))]
    finite = [value for value in around if value.isfinite()]
    gaps = {int(value.view(torch.int32)): abs(Fraction(value.item()) - exact) for value in finite}
    least = min(gaps.values())
    closest = [bits for bits, gap in gaps.items() if gap == least]
    best = closest[0] if len(closest) == 1 else next(bits for bits in closest if bits % 2 == 0)
    return torch.tensor(best, dtype=torch.int32).view(torch.float32).item()


@given(a=single, b=single, c=single)
@example(a=1 + 2**-12, b=1 + 2**-12, c=2.0**-60)  # rounding to fp64 first would make this a tie
@example(a=1.0000001192092896, b=2.0**-25, c=1.0)
@example(a=0.0, b=-1.0, c=0.0)
def test_fma_rounds_the_exact_result_once(a: float, b: float, c: float) -> None:
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if abs(exact) >= Fraction(2) ** 127:
        return
    result = fma(torch.tensor([a]), torch.tensor([b]), torch.tensor([c])).item()
    assert result == rounded(exact)


def test_fma_propagates_non_finite_values() -> None:
    a = torch.tensor([torch.inf, torch.nan, torch.inf, 1.0])
    b = torch.tensor([1.0, 1.0, 0.0, 1.0])
    c = torch.tensor([-torch.inf, 0.0, 0.0, torch.inf])
    torch.testing.assert_close(fma(a, b, c), a * b + c, equal_nan=True, rtol=0, atol=0)


def in_blocks(count: int, signed: bool, decades: float = 3.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(count)
    sizes = 10 ** (-decades * torch.rand(count, generator=generator))
    values = torch.randn(count, generator=generator) * sizes
    return values if signed else values.square()


@pytest.mark.parametrize("signed", [True, False])
@given(count=st.integers(1, 3 * SCALE_BLOCK), bits=st.integers(0, (1 << 20) - 1))
def test_quantized_value_is_an_adjacent_level(signed: bool, count: int, bits: int) -> None:
    values = in_blocks(count, signed)
    codes, scales = quantize_blockwise(values, torch.full((count,), bits), signed)
    assert codes.dtype == torch.uint8 and scales.numel() == count_scales(count)
    error = (dequantize_blockwise(codes, scales, signed) - values).abs()
    # Adjacent codes differ by at most an eighth of the value; the smallest step is that from 0 to the smallest code.
    smallest = 1.125 * 2.0 ** (-15 if signed else -31) * scales.repeat_interleave(SCALE_BLOCK)[:count]
    step = torch.maximum(values.abs() / 8, smallest)
    assert (error <= step * (1 + 1e-5)).all()


@pytest.mark.parametrize("signed", [True, False])
def test_rounding_to_nearest_halves_the_error_bound(signed: bool) -> None:
    values = in_blocks(4 * SCALE_BLOCK, signed)
    values = values[values.abs() > 1e-3 * values.abs().max()]
    error = (dequantize_blockwise(*nearest(values, signed), signed) - values).abs() / values.abs()
    assert error.max() <= 1 / 16 * (1 + 1e-5)


@pytest.mark.parametrize("signed", [True, False])
@given(count=st.integers(1, 3 * SCALE_BLOCK), decades=st.floats(0, 12), power=st.integers(-30, 30))
def test_quantization_is_idempotent(signed: bool, count: int, decades: float, power: int) -> None:
    """Quantizing decoded values again returns the same codes, for any noise.

    So a checkpoint may decode, move and quantize states again. Blocks with other boundaries keep the values too.
    """
    values = in_blocks(count, signed, decades) * 2.0**power
    values[::7] = 0
    generator = torch.Generator().manual_seed(count)
    first, again = (torch.randint(0, 1 << 20, (count,), generator=generator) for _ in range(2))
    codes, scales = quantize_blockwise(values, first, signed)
    decoded = dequantize_blockwise(codes, scales, signed)
    codes_again, scales_again = quantize_blockwise(decoded, again, signed)
    assert torch.equal(codes_again, codes) and torch.equal(scales_again, scales)
    moved = torch.cat([torch.zeros(100), decoded])
    # values that have a code under the scale of any block
    inside = decoded.abs() >= decoded.abs().max() * 2.0 ** (-14 if signed else -30)
    moved_again = dequantize_blockwise(
        *quantize_blockwise(moved, torch.cat([torch.zeros(100, dtype=torch.int64), again]), signed), signed
    )
    assert torch.equal(moved_again[100:][inside], decoded[inside])


@pytest.mark.parametrize("signed", [True, False])
def test_scales_are_powers_of_two_down_to_the_least(signed: bool) -> None:
    for top in (1.0, 1.9, 1e-12, 1e-30, 1e-44, 3e38):
        _, scales = nearest(torch.full((SCALE_BLOCK,), top), signed)
        assert math.frexp(scales.item())[0] == 0.5
    assert scales.item() == 2.0**127 and nearest(torch.zeros(1), signed)[1].item() == 2.0 ** (-63 if signed else -95)


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("value", [0.777, 0.013, 3.1e-5, 2.5e-5, 1.1e-5, 3.1e-6, 3.1e-7])
def test_stochastic_rounding_is_right_on_average(signed: bool, value: float) -> None:
    """The mean over all possible noise equals the value, for normal codes and for signed ones below the smallest."""
    noise = torch.arange(1 << 20).view(-1, SCALE_BLOCK).clone()
    block = torch.full(noise.shape, value)
    block[:, 0], noise[:, 0] = 1.0, 0
    decoded = dequantize_blockwise(*quantize_blockwise(block.view(-1), noise.view(-1), signed), signed).view(
        noise.shape
    )
    assert decoded[:, 1:].double().mean().item() == pytest.approx(value, rel=1e-3)


def test_rounding_to_bf16_is_right_on_average() -> None:
    every = torch.arange(0, 1 << 20, 257)
    values = torch.full((every.numel(),), 1.00123)
    assert stochastic_round_to_bf16(values, every).float().mean().item() == pytest.approx(1.00123, rel=1e-4)


def test_noise_is_uniform_and_differs_by_state_and_step() -> None:
    parameter, gradient = torch.randn(1 << 16), torch.zeros(1 << 16)
    bits = make_rounding_noise(parameter, gradient, 1)
    for state in range(3):
        own = get_state_noise(bits, state).double() / (1 << 20)
        assert abs(own.mean() - 0.5) < 0.01 and abs(own.var() - 1 / 12) < 0.005
    following = make_rounding_noise(parameter, gradient, 2)
    together = torch.stack([get_state_noise(bits, 0), get_state_noise(following, 0), get_state_noise(bits, 1)]).double()
    assert (torch.corrcoef(together) - torch.eye(3)).abs().max() < 0.03


def test_a_second_moment_never_becomes_zero() -> None:
    values = torch.zeros(SCALE_BLOCK)
    values[:5] = torch.tensor([1.0, 1e-12, 1e-30, 2.0**-129, 0.0])
    codes, scales = quantize_blockwise(values, torch.zeros(SCALE_BLOCK, dtype=torch.int64), signed=False)
    assert (codes[:4] > 0).all() and not codes[4:].any()
    assert (dequantize_blockwise(codes, scales, signed=False)[:4] > 0).all()


def test_non_finite_value_affects_only_its_block() -> None:
    for bad in (torch.inf, torch.nan):
        values = torch.ones(3 * SCALE_BLOCK)
        values[SCALE_BLOCK + 7] = bad
        for signed in (True, False):
            codes, scales = nearest(values, signed)
            assert not codes[SCALE_BLOCK : 2 * SCALE_BLOCK].any() and scales[1] == torch.inf
            decoded = dequantize_blockwise(codes, scales, signed)
            assert decoded[SCALE_BLOCK : 2 * SCALE_BLOCK].isnan().all()
            torch.testing.assert_close(decoded[:SCALE_BLOCK], values[:SCALE_BLOCK])
            torch.testing.assert_close(decoded[2 * SCALE_BLOCK :], values[2 * SCALE_BLOCK :])


def test_slow_averages_change_in_low_precision_states() -> None:
    """Slow averages follow the gradients. With beta2 = 0.999, rounding to nearest would freeze the second moment."""
    count, steps = 4 * SCALE_BLOCK, 700
    start = torch.randn(count, generator=torch.Generator().manual_seed(0))
    rule = RULES["adamw"]
    dtypes = (torch.float32, torch.bfloat16, torch.uint8)
    exact, rounded, quantized = pieces = [piece(rule(1), start, torch.ones(count), dtype) for dtype in dtypes]
    apply_updates(rule(1), pieces, path=REFERENCE_PATH)
    generator = torch.Generator().manual_seed(1)
    for step in range(2, steps):
        gradient = torch.randn(count, generator=generator) * 1e-3
        for own in pieces:
            own.gradient.copy_(gradient)
        apply_updates(rule(step), pieces, path=REFERENCE_PATH)
    assert exact.states[1].mean() < 0.6e-3  # 1e-3 after the first update
    for stored in (rounded.states[1].float(), dequantize_blockwise(quantized.states[1], quantized.scales[1], False)):
        assert stored.mean().item() == pytest.approx(exact.states[1].mean().item(), rel=0.05)


@pytest.mark.parametrize("name", RULES)
def test_updates_have_the_same_bits_under_any_default_dtype(name: str) -> None:
    rule, start = RULES[name](3), torch.linspace(-1, 1, 40)
    pieces = [piece(rule, start, gradient) for gradient in (start.flip(0), start.flip(0), 0 * start, 0 * start)]
    try:
        for number, own in enumerate(pieces):
            torch.set_default_dtype((torch.float32, torch.bfloat16)[number % 2])
            apply_updates(rule, [own], path=REFERENCE_PATH)
    finally:
        torch.set_default_dtype(torch.float32)
    assert_same_bits(*pieces[:2])
    assert_same_bits(*pieces[2:])


def test_two_quantized_moments_take_at_most_2_1_bytes_per_element() -> None:
    count = 1_000_000
    own = piece(RULES["adamw"](1), torch.zeros(count), torch.zeros(count), torch.uint8)
    assert sum(tensor.nbytes for tensor in (*own.states, *own.scales)) <= 2.1 * count
