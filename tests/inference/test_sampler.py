"""Tests of the sampler: each parameter against transformers' logits processor, and draws against their distribution."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation import logits_process as hf

from windlass.inference.sampler import SequenceSampler, sample
from windlass.inference.sampling_params import SamplingParams
from windlass.inference.token_draw import draw_together, draw_tokens, greatest
from windlass.kernels.inference_path import list_inference_paths

VOCABULARY = 53
PATHS = list_inference_paths()


def sampler(params: SamplingParams, prompt: list[int] = [3], generated: tuple[int, ...] = (), **more: Any) -> Any:  # noqa: B006
    made = SequenceSampler(params, prompt, list(generated), params.seed or 0, **more)
    for token in generated:
        made.count(token)
    return made


def logits_of(seed: int, size: int = VOCABULARY, spread: float = 2.0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) * spread


def changed(logits: torch.Tensor, made: SequenceSampler) -> torch.Tensor:
    result = logits.clone()
    made.change_logits(result)
    return result


def draw(path: str, logits: torch.Tensor, params: SamplingParams, uniforms: Sequence[float]) -> list[int]:
    """Return the tokens that a path of the kernels draws from one row, for each uniform number."""
    with mock.patch.dict(os.environ, WINDLASS_KERNELS=path):
        return draw_tokens(logits.expand(len(uniforms), -1), [params] * len(uniforms), uniforms)


def support(logits: torch.Tensor, params: SamplingParams) -> set[int]:
    """Return the tokens that are drawn for a fine grid of uniform numbers, which all paths agree about."""
    grid = [(step + 0.5) / 4000 for step in range(4000)]
    first, *others = (set(draw(path, logits, params, grid)) for path in PATHS)
    assert all(other == first for other in others)
    return first


def wanted_support(processor: Any, logits: torch.Tensor) -> set[int]:
    scores = processor(torch.zeros(1, 1, dtype=torch.long), logits[None].clone())[0]
    probabilities = scores.softmax(-1)
    return set((probabilities > 1 / 3000).nonzero()[:, 0].tolist())


@settings(max_examples=9, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.sampled_from(["top_k", "top_p", "min_p"]), st.floats(0.02, 0.98))
def test_tokens_that_are_drawn_are_those_that_transformers_keeps(seed: int, name: str, value: float) -> None:
    logits = logits_of(seed)
    count = max(int(value * VOCABULARY), 1)
    processor, params = {
        "top_k": (hf.TopKLogitsWarper(count), SamplingParams(top_k=count)),
        "top_p": (hf.TopPLogitsWarper(value), SamplingParams(top_p=value)),
        "min_p": (hf.MinPLogitsWarper(value), SamplingParams(min_p=value)),
    }[name]
    kept = processor(torch.zeros(1, 1, dtype=torch.long), logits[None].clone())[0] > -math.inf
    drawn = support(logits, params)
    assert drawn <= set(kept.nonzero()[:, 0].tolist())
    assert wanted_support(processor, logits) <= drawn


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    st.integers(0, 10**6),
    st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=9),
    st.lists(st.integers(0, VOCABULARY - 1), max_size=9),
    st.floats(0.2, 3),
)
def test_repetition_penalty_is_that_of_transformers(seed: int, prompt: list[int], new: list[int], value: float) -> None:
    logits = logits_of(seed)
    processor = hf.RepetitionPenaltyLogitsProcessor(value)
    expected = processor(torch.tensor([prompt + new]), logits[None].clone())[0]
    found = changed(logits, sampler(SamplingParams(repetition_penalty=value), prompt, tuple(new)))
    torch.testing.assert_close(found, expected)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    st.integers(0, 10**6),
    st.lists(st.integers(0, VOCABULARY - 1), max_size=20),
    st.floats(-2, 2),
    st.floats(-2, 2),
)
def test_presence_and_frequency_penalties_follow_their_formula(
    seed: int, new: list[int], presence: float, frequency: float
) -> None:
    logits = logits_of(seed)
    counts = torch.bincount(torch.tensor(new, dtype=torch.long), minlength=VOCABULARY).float()
    params = SamplingParams(presence_penalty=presence, frequency_penalty=frequency)
    found = changed(logits, sampler(params, [1, 2], tuple(new)))
    torch.testing.assert_close(found, logits - frequency * counts - presence * (counts > 0))


def test_bad_words_and_the_shortest_length_are_those_of_transformers() -> None:
    logits, words, new = logits_of(1), ((7,), (4, 5), (5, 4, 9)), (8, 5, 4)
    found = changed(logits, sampler(SamplingParams(), [3], new, bad_words=words))
    processor: Any = hf.NoBadWordsLogitsProcessor([list(word) for word in words], eos_token_id=2)
    torch.testing.assert_close(found, processor(torch.tensor([[3, *new]]), logits[None].clone())[0])
    found = changed(logits, sampler(SamplingParams(min_tokens=4), [3], new, stop_ids=frozenset({2, 11})))
    processor = hf.MinNewTokensLengthLogitsProcessor(1, 4, eos_token_id=[2, 11], device="cpu")
    torch.testing.assert_close(found, processor(torch.tensor([[3, *new]]), logits[None].clone())[0])


def test_biases_and_allowed_tokens() -> None:
    logits = logits_of(2)
    found = changed(logits, sampler(SamplingParams(logit_bias={3: 5.0, 9: -100.0}, allowed_token_ids=[3, 9, 50])))
    assert (found > -math.inf).nonzero()[:, 0].tolist() == [3, 9, 50]
    assert found[[3, 9, 50]].tolist() == [logits[3] + 5, logits[9] - 100, logits[50]]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.5),
        SamplingParams(temperature=1.7, top_p=0.8),
        SamplingParams(top_k=6, min_p=0.02),
        SamplingParams(top_k=20, top_p=0.7),
    ],
)
@pytest.mark.parametrize("path", PATHS)
def test_draws_follow_their_distribution(path: str, params: SamplingParams) -> None:
    """Chi-square test of 10,000 draws with the sampler's own random numbers."""
    logits, draws = logits_of(3, 23), 10_000
    scores = logits / params.temperature
    if params.min_p:
        scores = hf.MinPLogitsWarper(params.min_p)(None, scores[None])[0]
    if params.top_k:
        scores = hf.TopKLogitsWarper(params.top_k)(None, scores[None])[0]
    if params.top_p < 1:
        scores = hf.TopPLogitsWarper(params.top_p)(None, scores[None])[0]
    expected = scores.double().softmax(-1) * draws
    made = sampler(params.replace(seed=5))
    drawn = draw(path, logits, params, [made.draw() for _ in range(draws)])
    counts = torch.tensor(drawn).bincount(minlength=23).double()
    assert counts[expected == 0].sum() == 0
    likely = expected >= 5
    statistic = ((counts - expected)[likely] ** 2 / expected[likely]).sum().item()
    degrees = int(likely.sum()) - 1
    assert statistic < degrees + 5 * math.sqrt(2 * degrees), statistic


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    st.integers(0, 10**6),
    st.floats(0.05, 3),
    st.floats(0.05, 1),
    st.integers(0, 60),
    st.floats(0, 0.4),
    st.floats(0, 1, exclude_max=True),
    st.sampled_from([5, 600, 3000]),
)
def test_one_row_at_a_time_draws_what_all_rows_together_do(
    seed: int, temperature: float, top_p: float, top_k: int, min_p: float, uniform: float, size: int
) -> None:
    """All ways invert the cumulative distribution of one nucleus, whose last token rounding may add or remove."""
    params = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)
    logits = logits_of(seed, size)
    uniforms = [(k + uniform) / 64 for k in range(64)]
    weights = ((logits.double() - logits.double().max()) / temperature).exp()
    allowed = weights >= max(min_p, float(weights.topk(min(top_k or size, size)).values[-1]))
    weights = weights.where(allowed, 0)
    if top_p < 1:
        ordered, ids = weights.sort(descending=True, stable=True)
        dropped = ordered.cumsum(0) - ordered >= top_p * weights.sum()
        dropped[0] = False
        weights[ids[dropped]] = 0
    ends = weights.cumsum(0) / weights.sum()
    starts, last = ends - weights / weights.sum(), float(weights[weights > 0].min() / weights.sum()) + 1e-5
    ways = [draw(path, logits, params, uniforms) for path in PATHS]
    ways.append(draw_together(logits.expand(64, -1), [params] * 64, uniforms).tolist())
    for number, *tokens in zip(uniforms, *ways, strict=True):
        for token in tokens:
            assert starts[token] - last <= number <= ends[token] + last


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("size", [1500, 4000, 40_000])
def test_a_nucleus_of_nearly_all_tokens_may_exceed_their_rounded_sum(size: int, path: str) -> None:
    """`top_p` times the sum of all weights can exceed the sum of the same weights in another order."""
    nearly_all = SamplingParams(top_p=1 - 1e-8)
    for seed in range(40):
        logits = logits_of(seed, size)
        for token in draw(path, logits, nearly_all, [0.0, 0.5, 1 - 2**-53]):
            assert 0 <= token < size


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("top_p", [0.001, 0.5, 0.95, 0.9999])
@pytest.mark.parametrize("spread", [0.0, 0.001, 1.0, 3.0, 8.0])
@pytest.mark.parametrize("top_k", [0, 5000])
def test_a_nucleus_is_that_by_sorting_everything(top_k: int, spread: float, top_p: float, path: str) -> None:
    logits = logits_of(4, 20_000, spread)
    logits[::7] = logits[3]  # ties: the first tied tokens are kept
    logits[1::50] = -math.inf
    weights = (logits - logits.max()).double().exp()
    if top_k:
        weights = weights.where(logits >= logits.topk(top_k).values[-1], 0)
    ordered, ids = weights.sort(descending=True, stable=True)
    cumulative = ordered.cumsum(0)
    count = max(int((cumulative - ordered < weights.sum() * top_p).sum()), 1)
    kept = ids[:count].sort().values
    ends = weights[kept].cumsum(0)
    middles = (ends - weights[kept] / 2) / ends[-1]
    some = torch.linspace(0, count - 1, min(count, 25)).long()
    drawn = draw(path, logits, SamplingParams(top_p=top_p, top_k=top_k), middles[some].tolist())
    # Sums in another order may keep one token more or less, which moves the interval of a rare token past its middle.
    assert set(drawn) <= set(ids[: count + 1].tolist())
    certain = weights[kept[some]] >= (4 * ordered[count - 1] if count >= 100 else 0)
    assert torch.equal(torch.tensor(drawn)[certain], kept[some][certain])


@pytest.mark.parametrize("path", PATHS)
def test_smooth_logits_have_the_same_nucleus(path: str) -> None:
    """Logits that rise and fall with the token's number: a selection with pivots at fixed places is quadratic here."""
    places = torch.arange(20_000) / 20_000 * 4 - 2.8
    logits = -places.square() / 2
    weights = logits.double().exp()
    ordered, ids = weights.sort(descending=True, stable=True)
    count = int((ordered.cumsum(0) - ordered < weights.sum() * 0.95).sum())
    drawn = draw(path, logits, SamplingParams(top_p=0.95), [0.0, 1 - 2**-53])
    expected = ids[:count].sort().values[[0, -1]]
    assert (torch.tensor(drawn) - expected).abs().max() <= 1  # sums in another order may move an end by one token


def test_a_limit_beyond_the_vocabulary_excludes_nothing() -> None:
    logits, uniforms = logits_of(6), [0.1, 0.5, 0.9]
    for path in PATHS:
        expected = draw(path, logits, SamplingParams(), uniforms)
        for top_k in (VOCABULARY, 10**20, 10**400):
            assert draw(path, logits, SamplingParams(top_k=top_k), uniforms) == expected


def test_a_row_draws_the_same_token_in_any_batch() -> None:
    rows = torch.stack([logits_of(seed, 3000) for seed in range(8)])
    params = [SamplingParams(seed=row, temperature=0.5 + row / 4, top_p=[1, 0.9][row % 2]) for row in range(8)]
    together = [found.token for found in sample(rows, [sampler(p) for p in params])]
    alone = [sample(rows[row : row + 1], [sampler(params[row])])[0].token for row in range(8)]
    assert together == alone
    assert together != [found.token for found in sample(rows, [sampler(p.replace(seed=99)) for p in params])]


def test_greedy_ties_take_the_first_token_and_low_temperatures_the_highest() -> None:
    logits = torch.tensor([[1.0, 4.0, 4.0, -math.inf], [9.0, 8.0, 1e30, 3e38]])
    assert [found.token for found in sample(logits, [sampler(SamplingParams(temperature=0))] * 2)] == [1, 3]
    cold = SamplingParams(temperature=1e-6)
    assert [found.token for found in sample(logits, [sampler(cold.replace(seed=s)) for s in (1, 2)])][1] == 3
    # equal logits share the probability
    for path in PATHS:
        assert set(draw(path, logits[0], cold, [uniform / 10 for uniform in range(10)])) == {1, 2}


def test_tokens_with_a_logit_of_minus_infinity_are_never_drawn() -> None:
    logits = torch.full((700,), -math.inf)
    logits[[0, 650, 699]] = 0.0
    for path in PATHS:
        for top_p in (1.0, 0.5):
            drawn = draw(path, logits, SamplingParams(top_p=top_p), [0.0, 0.4, 1 - 2**-53])
            assert set(drawn) <= {0, 650, 699}


def test_rows_without_a_token_report_an_error_and_leave_others_alone() -> None:
    logits = torch.stack([logits_of(1), logits_of(2), torch.full((VOCABULARY,), math.nan), logits_of(4)])
    greedy = SamplingParams(temperature=0, logprobs=1)
    samplers = [
        sampler(greedy),
        sampler(greedy.replace(allowed_token_ids=[7]), bad_words=((7,),)),
        sampler(greedy),
        sampler(SamplingParams(allowed_token_ids=[7])),
    ]
    found = sample(logits, samplers)
    assert [f.error is None for f in found] == [True, False, False, True]
    assert "exclude all tokens; relax one" in str(found[1].error)
    assert "highest logit of the model is nan" in str(found[2].error)
    assert found[0].token == logits[0].argmax()
    assert found[3].token == 7


@pytest.mark.parametrize("vocabulary", [1, 15, 64, 1000])
def test_greatest_token_is_the_first_maximum(vocabulary: int) -> None:
    scores = torch.randint(0, 9, (40, vocabulary), generator=torch.Generator().manual_seed(vocabulary)).float()  # ties
    scores[3], scores[4] = -torch.inf, torch.inf
    scores[5, vocabulary // 2], scores[6] = torch.nan, torch.nan
    wide = torch.stack([scores, scores], 2)[:, :, 0]  # not contiguous
    for one in (scores, wide, scores[:0]):
        best, tokens = greatest(one)
        expected = one.max(dim=-1)
        assert tokens == expected.indices.tolist()
        assert torch.equal(torch.tensor(best).nan_to_num(nan=-1), expected.values.nan_to_num(nan=-1))
