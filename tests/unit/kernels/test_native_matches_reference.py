"""Tests that every native path is bitwise equal to the PyTorch reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.kernels.rule_cases import RULES, assert_same_bits, copy_of, piece
from windlass.kernels.kernel_dispatch import REFERENCE_PATH, apply_updates, list_kernel_paths
from windlass.kernels.update_tensors import SCALE_BLOCK, UpdateTensors

NATIVE = [path for path in list_kernel_paths() if path != REFERENCE_PATH]
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
STATES = [torch.float32, torch.bfloat16, torch.uint8]
SIZES = st.one_of(st.integers(0, 40), st.integers(200, 1500), st.just(SCALE_BLOCK), st.just(4 * SCALE_BLOCK))

pytestmark = pytest.mark.skipif(not NATIVE, reason="no native module was built")


def values(count: int, seed: int, spread: float = 3.0) -> torch.Tensor:
    """Return normally distributed numbers times random scales that span `spread` decades."""
    generator = torch.Generator().manual_seed(seed)
    scale = 10 ** (spread * (torch.rand(count, generator=generator) - 0.5))
    return torch.randn(count, generator=generator) * scale


def run_both(
    rule: str, path: str, ours: UpdateTensors, steps: int, seed: int, divisor: float = 1.0, threads: int = 2
) -> None:
    theirs = copy_of(ours)
    for step in range(1, steps + 1):
        ours.gradient.copy_(values(ours.gradient.numel(), seed + step))
        numbers = RULES[rule](step)
        apply_updates(numbers, [ours], divisor, path=path, threads=threads)
        apply_updates(numbers, [theirs], divisor, path=REFERENCE_PATH)
        assert_same_bits(ours, theirs)


@pytest.mark.parametrize("path", NATIVE)
@pytest.mark.parametrize("rule", RULES)
@given(data=st.data())
@settings(max_examples=12)
def test_every_format_and_alignment_equals_the_reference(rule: str, path: str, data: st.DataObject) -> None:
    count, seed, shift = data.draw(SIZES), data.draw(st.integers(0, 999)), data.draw(st.integers(0, 5))
    parameter, gradient = data.draw(st.sampled_from(FLOATS)), data.draw(st.sampled_from(FLOATS))
    state, lowered = data.draw(st.sampled_from(STATES)), data.draw(st.sampled_from([None, *FLOATS[1:]]))
    divisor = data.draw(st.sampled_from([1.0, 64.0, 3.3]))
    start = values(count, seed).to(parameter)
    ours = piece(RULES[rule](1), start, torch.zeros(count, dtype=gradient), state, lowered, shift)
    run_both(rule, path, ours, 3, seed, divisor)


@pytest.mark.parametrize("path", NATIVE)
@pytest.mark.parametrize("state", STATES, ids=str)
@pytest.mark.parametrize("rule", ["adamw", "adam-amsgrad", "sgd-nesterov", "lamb"])
def test_large_tensor_split_over_threads_equals_the_reference(rule: str, state: torch.dtype, path: str) -> None:
    count = 300 * SCALE_BLOCK + 77  # three parts of at most 128 blocks, for three threads
    ours = piece(RULES[rule](1), values(count, 1), torch.zeros(count, dtype=torch.bfloat16), state, torch.bfloat16)
    run_both(rule, path, ours, 2, seed=2, threads=3)


ODD = [0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-45, -1e-40, 3e38, -3e38, 1.0, 6e-8, 65519.0, 65520.0, 1e5]


@pytest.mark.parametrize("path", NATIVE)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_special_values_equal_the_reference(rule: str, dtype: torch.dtype, path: str) -> None:
    """Infinities, NaNs, signed zeros and subnormals, each as parameter with each as gradient."""
    odd = torch.tensor(ODD)
    parameters, gradients = odd.repeat_interleave(len(ODD)), odd.repeat(len(ODD))
    for state in STATES[:2]:
        ours = piece(RULES[rule](1), parameters.to(dtype), gradients.to(dtype), state, torch.float16)
        theirs = copy_of(ours)
        for step in (1, 2):
            for path_of, own in ((path, ours), (REFERENCE_PATH, theirs)):
                apply_updates(RULES[rule](step), [own], path=path_of)
        assert_same_bits(ours, theirs)


@pytest.mark.parametrize("path", NATIVE)
@pytest.mark.parametrize("rule", RULES)
def test_special_values_in_quantized_blocks_equal_the_reference(rule: str, path: str) -> None:
    """One special value in a block of ordinary values, as gradient and as parameter.

    Every path must give the bits of the reference, for that value and for the other values of the block.
    """
    bits = [0x7FFFFFFF, -1, 0x7FF00001, -0x100000 + 1]  # NaNs to which noise cannot be added
    odd = torch.cat([torch.tensor(ODD), torch.tensor(bits, dtype=torch.int32).view(torch.float32)])
    count = 2 * odd.numel() * SCALE_BLOCK
    parameter, gradient = values(count, 1), values(count, 2)
    parameter.view(-1, SCALE_BLOCK)[: odd.numel(), 7] = odd
    gradient.view(-1, SCALE_BLOCK)[odd.numel() :, 200] = odd
    # values below the smallest code, which have to decode to 0
    gradient.view(-1, SCALE_BLOCK)[::3, 9:100] = 0
    ours = piece(RULES[rule](1), parameter, gradient, torch.uint8)
    theirs = copy_of(ours)
    for step in (1, 2):
        for path_of, own in ((path, ours), (REFERENCE_PATH, theirs)):
            apply_updates(RULES[rule](step), [own], path=path_of)
        assert_same_bits(ours, theirs)
        gradient_of = ours.gradient.view(-1, SCALE_BLOCK)
        gradient_of[:, 50:60] = values(gradient_of.shape[0] * 10, 3).view(-1, 10) * 1e-12


@pytest.mark.parametrize("path", NATIVE)
def test_rounding_to_16_bits_equals_torch(path: str) -> None:
    """Round every bf16 and fp16 number, the midpoint to the next one, and the fp32 neighbours of the midpoint."""
    halves = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.bfloat16, torch.float16):
        exact = halves.view(dtype).float()
        exact = exact[exact.isfinite()]
        other = halves.view(dtype).roll(-1).float()[halves.view(dtype).isfinite()]
        middle = (exact.double() + other.double()).div(2).float()
        up, down = (middle.nextafter(torch.full_like(middle, side)) for side in (torch.inf, -torch.inf))
        every = torch.cat([exact, middle, up, down])
        rule = RULES["sgd"](1)
        ours = piece(rule, every, torch.zeros_like(every), lowered=dtype)
        apply_updates(rule, [ours], path=path)
        assert ours.low_precision_copy is not None
        expected = every.to(dtype)
        same = (ours.low_precision_copy.view(torch.int16) == expected.view(torch.int16)) | (
            expected.isnan() & ours.low_precision_copy.isnan()
        )
        assert same.all(), every[~same][:5]


@pytest.mark.parametrize("path", NATIVE)
@pytest.mark.parametrize("rule", [name for name in RULES if not name.startswith("lamb")])
@given(cuts=st.lists(st.integers(0, 900), max_size=4), state=st.sampled_from(STATES[:2]))
@settings(max_examples=8)
def test_updating_spans_equals_updating_the_whole(rule: str, path: str, cuts: list[int], state: torch.dtype) -> None:
    count = 900
    start, gradient = values(count, 5), values(count, 6)
    full = piece(RULES[rule](1), start, gradient, state)
    edges = sorted({0, count, *cuts})
    spans = [piece(RULES[rule](1), start[a:b], gradient[a:b], state) for a, b in zip(edges, edges[1:], strict=False)]
    for step in (1, 2):
        apply_updates(RULES[rule](step), [full], path=path)
        apply_updates(RULES[rule](step), spans, path=path)
    joined = UpdateTensors(
        torch.cat([span.parameter for span in spans]),
        gradient,
        tuple(torch.cat(parts) for parts in zip(*(span.states for span in spans), strict=True)),
    )
    assert_same_bits(full, joined)


@pytest.mark.parametrize("path", NATIVE)
@pytest.mark.parametrize("rule", ["adamw", "lamb"])
def test_the_number_of_threads_does_not_matter(rule: str, path: str) -> None:
    count = 2000 * SCALE_BLOCK + 3
    item = piece(RULES[rule](1), values(count, 1), values(count, 2), torch.uint8)
    several = copy_of(item)
    apply_updates(RULES[rule](1), [item], path=path, threads=1)
    apply_updates(RULES[rule](1), [several], path=path, threads=7)
    assert_same_bits(item, several)


@pytest.mark.parametrize("path", NATIVE)
@pytest.mark.parametrize("shift", range(3))
def test_nothing_outside_the_span_is_written(path: str, shift: int) -> None:
    for count in (0, 1, 7, 255, 257, 600):
        for dtype, state in (
            (torch.float32, torch.float32),
            (torch.bfloat16, torch.bfloat16),
            (torch.float16, torch.uint8),
        ):
            rule = RULES["adamw"](1)
            wide = piece(rule, values(count + 128, 3).to(dtype), values(count + 128, 4).to(dtype), state, torch.float16)
            inside = slice(64 + shift, 64 + shift + count)
            scales = tuple(scale[: -(-count // SCALE_BLOCK)].clone() for scale in wide.scales)
            assert wide.low_precision_copy is not None
            states = tuple(kept[inside] for kept in wide.states)
            narrow = UpdateTensors(
                wide.parameter[inside], wide.gradient[inside], states, scales, wide.low_precision_copy[inside]
            )
            before = copy_of(wide)
            apply_updates(rule, [narrow], path=path)
            for own, old in zip(
                wide.states + (wide.parameter, wide.low_precision_copy),
                before.states + (before.parameter, before.low_precision_copy),
                strict=True,
            ):
                assert old is not None
                own[inside] = old[inside]
                assert torch.equal(own, old)
