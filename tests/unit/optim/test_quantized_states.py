"""Tests of resharding 8-bit states: unchanged blocks keep every bit, others stay within half a quantization step."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from windlass.kernels import reference
from windlass.kernels.update_tensors import SCALE_BLOCK, count_scales
from windlass.optim import quantized_states


def state(numel: int, signed: bool, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes and scales as training leaves them: rounded stochastically, over many magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(numel, generator=generator) * torch.exp(3 * torch.randn(numel, generator=generator))
    noise = torch.randint(0, 1 << 20, (numel,), generator=generator)
    return reference.quantize_blockwise(values if signed else values.square(), noise, signed)


def saved_as(
    spans: list[tuple[int, int]], signed: bool, seed: int
) -> tuple[torch.Tensor, list[quantized_states.BlockScales]]:
    """Return a state of several spans, each with its own blocks: all codes, and the scales of each span."""
    parts = [state(stop - start, signed, seed + start) for start, stop in spans]
    scales = [quantized_states.BlockScales(*span, 0, result) for span, (_, result) in zip(spans, parts, strict=True)]
    return torch.cat([codes for codes, _ in parts]), scales


def recoded(
    codes: torch.Tensor, span: tuple[int, int], scales: list[quantized_states.BlockScales], signed: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    start, stop = span
    into, result = torch.empty(stop - start, dtype=torch.uint8), torch.empty(count_scales(stop - start))
    quantized_states.requantize_state(codes[start:stop], start, scales, signed, into, result)
    return into, result


def decoded(
    codes: torch.Tensor, span: tuple[int, int], scales: list[quantized_states.BlockScales], signed: bool
) -> torch.Tensor:
    into = torch.empty(span[1] - span[0])
    quantized_states.dequantize_state(codes[slice(*span)], span[0], scales, signed, into)
    return into


@given(cuts=st.lists(st.integers(1, 2000), min_size=1, max_size=4), signed=st.booleans(), seed=st.integers(0, 999))
def test_same_sharding_restores_every_bit(cuts: list[int], signed: bool, seed: int) -> None:
    ends = [0, *torch.tensor(cuts).cumsum(0).tolist()]
    spans = list(zip(ends, ends[1:], strict=False))
    codes, scales = saved_as(spans, signed, seed)
    for item in scales:
        into, result = recoded(codes, (item.start, item.stop), scales, signed)
        assert torch.equal(into, codes[item.start : item.stop])
        assert torch.equal(result, item.values)


@pytest.mark.parametrize("signed", [True, False])
@given(data=st.data(), numel=st.integers(2, 3000), seed=st.integers(0, 999))
def test_other_sharding_is_within_half_a_quantization_step(
    signed: bool, data: st.DataObject, numel: int, seed: int
) -> None:
    middle = data.draw(st.integers(1, numel - 1))
    codes, scales = saved_as([(0, middle), (middle, numel)], signed, seed)
    start = data.draw(st.integers(0, numel - 1))
    span = (start, data.draw(st.integers(start + 1, numel)))
    was = decoded(codes, span, scales, signed)
    into, result = recoded(codes, span, scales, signed)
    now = reference.dequantize_blockwise(into, result, signed)
    blocks = result.repeat_interleave(SCALE_BLOCK)[: was.numel()]
    least = (2.0**-15 if signed else 2.0**-31) * 1.125 * blocks  # magnitudes below it have one code besides 0
    assert bool(((now - was).abs() <= was.abs() / 16 * 1.0001 + least).all())
    if not signed:
        assert bool(((now == 0) == (was == 0)).all())  # updates divide by the root of this state


@given(numel=st.integers(1, 3000), data=st.data())
def test_only_the_requested_scales_are_read(numel: int, data: st.DataObject) -> None:
    codes, (full,) = saved_as([(0, numel)], True, 5)
    begin = data.draw(st.integers(0, numel - 1))
    end = data.draw(st.integers(begin + 1, numel))
    first, last = quantized_states.blocks_between(0, numel, begin, end)
    part = [quantized_states.BlockScales(0, numel, first, full.values[first:last])]
    assert torch.equal(decoded(codes, (begin, end), part, True), decoded(codes, (0, numel), [full], True)[begin:end])
    for item, other in zip(
        recoded(codes, (begin, end), part, True), recoded(codes, (begin, end), [full], True), strict=True
    ):
        assert torch.equal(item, other)


def test_long_state_is_quantized_as_a_short_one(monkeypatch: pytest.MonkeyPatch) -> None:
    codes, scales = saved_as([(0, 1000), (1000, 5000)], False, 3)
    expected = recoded(codes, (300, 4900), scales, False)
    monkeypatch.setattr(quantized_states, "_CHUNK_ELEMENTS", 2 * SCALE_BLOCK)
    for item, other in zip(recoded(codes, (300, 4900), scales, False), expected, strict=True):
        assert torch.equal(item, other)
