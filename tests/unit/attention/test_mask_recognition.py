"""Tests of recognizing transformers' masks: each description has the mask function's pattern and dense values."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from windlass.attention import (
    BIDIRECTIONAL,
    CAUSAL,
    AttentionBackend,
    AttentionMask,
    ChunkedMask,
    MaskBand,
    MaskPredicate,
    use_backend,
)
from windlass.attention.active_backend import BoundMask
from windlass.attention.transformers_dispatch import ATTENTION_NAME, make_transformers_mask, register_attention
from windlass.base.errors import ModelError

SAMPLES, LENGTH = 2, 11
PADDING = torch.ones(SAMPLES, LENGTH, dtype=torch.long)
PADDING[0, :3] = 0
PADDING[1, 9:] = 0
POSITIONS = torch.cat([torch.arange(6), torch.arange(5)]).unsqueeze(0)
BLOCKS = torch.tensor([[-1, -1, 0, 0, 0, -1, -1, 1, 1, -1, -1]]).expand(SAMPLES, -1)


class Describing(AttentionBackend):
    """Backend that uses the mask description as the mask."""

    name = "describing"

    def attend(self, *arguments: Any, **named: Any) -> torch.Tensor:
        raise NotImplementedError


def config(name: str = ATTENTION_NAME) -> Any:
    import transformers as hf

    register_attention()
    result = hf.LlamaConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=1)
    result.sliding_window, result.attention_chunk_size = 4, 3
    result._attn_implementation = name
    return result


def masks() -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Yield each mask function of transformers, the expected pattern, and arguments of every kind."""
    window = MaskBand(0, 3)
    for kind, expected in (("causal", CAUSAL), ("sliding_window_causal", window), ("chunked_causal", ChunkedMask)):
        yield kind, expected, {}
        yield kind, expected, {"attention_mask": PADDING}
        yield kind, expected, {"position_ids": POSITIONS}
        yield kind, MaskPredicate, {"or_mask_function": lambda b, h, q, k: (q < 2) & (k < 2)}
        yield kind, MaskPredicate, {"and_mask_function": lambda b, h, q, k: k != 1, "attention_mask": PADDING}
        yield kind, MaskPredicate, {"block_sequence_ids": BLOCKS}
        yield kind, expected, {"block_sequence_ids": torch.full_like(BLOCKS, -1)}  # text without blocks
    yield "bidirectional", BIDIRECTIONAL, {}
    yield "bidirectional", BIDIRECTIONAL, {"attention_mask": PADDING}
    yield "bidirectional", MaskPredicate, {"and_mask_function": lambda b, h, q, k: (q - k).abs() < 2}


def make(kind: str, implementation: str, given: dict[str, Any], *, first: int = 0, queries: int = LENGTH) -> Any:
    """Make a mask with the installed transformers. Skip the test if this release cannot make it.

    Args:
        first: position of the first query.
    """
    from transformers import masking_utils

    arguments = dict(given)
    factory = getattr(masking_utils, f"create_{kind}_mask", None)
    if factory is None:
        pytest.skip(f"this transformers has no create_{kind}_mask")
    takes = inspect.signature(factory).parameters
    embeds = torch.zeros(SAMPLES, queries, 8)
    optional = {"allow_is_causal_skip": False, "inputs_embeds": embeds, "input_embeds": embeds}
    optional |= dict.fromkeys(("past_key_values", "cache"), arguments.pop("past_key_values", None))
    if missing := [name for name in arguments if name not in takes]:
        pytest.skip(f"create_{kind}_mask of this transformers takes no {missing}")
    if "inputs_embeds" not in takes:  # transformers 5.0 and older: positions are not optional
        optional["cache_position"] = torch.arange(first, first + queries)
    known = {name: value for name, value in optional.items() if name in takes}
    return factory(config=config(implementation), **{"attention_mask": None, **known, **arguments})


def full(kind: str, mask: Tensor | None, queries: int = LENGTH, keys: int = LENGTH) -> Tensor:
    """Return the dense mask. Older releases give None for a causal or full mask, which a kernel flag replaces."""
    ones = torch.ones(SAMPLES, 1, queries, keys, dtype=torch.bool)
    if mask is None:
        return ones if "bidirectional" in kind else ones.tril(keys - queries)
    return mask


@pytest.mark.parametrize(("kind", "pattern", "arguments"), list(masks()))
def test_mask_description_equals_dense_sdpa_mask(kind: str, pattern: Any, arguments: dict[str, Any]) -> None:
    with use_backend(Describing()):
        result = make(kind, ATTENTION_NAME, arguments)
    assert isinstance(result, BoundMask) and isinstance(result.mask, AttentionMask)
    with pytest.raises(AttributeError, match="reads 'dtype' of its attention mask, which is not a tensor while"):
        _ = result.dtype
    description = result.mask
    assert isinstance(description.pattern, pattern) if isinstance(pattern, type) else description.pattern == pattern
    assert (description.padding is not None) == ("attention_mask" in arguments)
    packed = "position_ids" in arguments and not isinstance(description.pattern, MaskPredicate)
    assert (description.sequence_ids is not None) == packed
    assert torch.equal(description.to_dense(), full(kind, make(kind, "sdpa", arguments)))


def test_bidirectional_windows() -> None:
    with use_backend(Describing()):
        actual = make("bidirectional_sliding_window", ATTENTION_NAME, {"attention_mask": PADDING})
    expected = make("bidirectional_sliding_window", "sdpa", {"attention_mask": PADDING})
    assert actual.mask.pattern == MaskBand(-4, 4)
    assert torch.equal(actual.mask.to_dense(), expected)


@pytest.mark.parametrize("kind", ["causal", "sliding_window_causal"])
@pytest.mark.parametrize("steps", [1, 3])
def test_masks_with_a_cache_have_offsets(kind: str, steps: int) -> None:
    from transformers.cache_utils import DynamicCache

    made = []
    for name in (ATTENTION_NAME, "sdpa"):
        cache = DynamicCache(config=config(name))
        cache.update(torch.zeros(SAMPLES, 2, 7, 4), torch.zeros(SAMPLES, 2, 7, 4), 0)
        given = {"attention_mask": PADDING[:, : 7 + steps], "past_key_values": cache}
        with use_backend(Describing() if name == ATTENTION_NAME else None):
            made.append(make(kind, name, given, first=7, queries=steps))
    dense = made[0].mask.to_dense()
    assert made[0].mask.q_offset == 7
    assert torch.equal(dense, full(kind, made[1], *dense.shape[2:]))


def test_mask_without_a_backend_equals_sdpa_mask() -> None:
    for arguments in ({}, {"attention_mask": PADDING}, {"position_ids": POSITIONS}):
        found, expected = (full("causal", make("causal", name, arguments)) for name in (ATTENTION_NAME, "sdpa"))
        assert torch.equal(found, expected)


@pytest.mark.parametrize(("first", "queries"), [(0, LENGTH), (7, 1), (7, 3)])
def test_positions_of_the_queries_describe_the_mask_of_an_offset(first: int, queries: int) -> None:
    """transformers 5.0 and older give `cache_position` instead of a number of queries and an offset."""
    sizes = {"batch_size": SAMPLES, "kv_length": first + queries, "attention_mask": PADDING[:, : first + queries]}
    positions = torch.arange(first, first + queries)
    with use_backend(Describing()):
        for function in (None, lambda b, h, q, k: (q + 2 * k) % 3 > 0):
            by_positions = make_transformers_mask(**sizes, cache_position=positions, mask_function=function)
            by_offset = make_transformers_mask(
                **sizes, q_length=queries, q_offset=first, mask_function=function, use_vmap=function is not None
            )
            assert by_positions.mask.q_offset == first
            assert torch.equal(by_positions.mask.to_dense(), by_offset.mask.to_dense())
        with pytest.raises(ModelError, match="without q_length and without cache_position"):
            make_transformers_mask(**sizes)


def test_unknown_argument_is_refused_by_name() -> None:
    sizes = {"batch_size": 1, "q_length": 3, "kv_length": 3}
    with use_backend(Describing()):
        assert make_transformers_mask(**sizes, new_feature=None, local_size=3).mask.pattern == CAUSAL
        with pytest.raises(ModelError, match=r"\['new_feature'\].*describing"):
            make_transformers_mask(**sizes, new_feature=3)


def test_descriptions_of_wrong_shapes_are_refused() -> None:
    with pytest.raises(ModelError, match=r"padding .* \[2, 3\]; pass one of shape \[2, 4\]"):
        AttentionMask(2, 4, 4, padding=torch.ones(2, 3))
    with pytest.raises(ModelError, match="packed documents need queries and keys of the same tokens"):
        AttentionMask(2, 4, 5, sequence_ids=torch.ones(2, 4))
    with pytest.raises(ModelError, match=r"4 queries and 5 keys has position_ids; packed documents need"):
        AttentionMask(2, 4, 5, position_ids=torch.ones(2, 4))


@pytest.mark.parametrize("needs_vmap", [False, True])
def test_positions_of_a_predicate_are_refused(needs_vmap: bool) -> None:
    predicate = MaskPredicate(lambda sample, head, query, key: query >= key, needs_vmap)
    with pytest.raises(ModelError, match="MaskPredicate has position_ids, .*; leave position_ids out"):
        AttentionMask(2, 11, 11, pattern=predicate, position_ids=POSITIONS.expand(2, -1))
