"""Tests of recognizing transformers' masks: each description has the mask function's pattern and dense values."""

from __future__ import annotations

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
        yield kind, expected, {"block_sequence_ids": torch.full_like(BLOCKS, -1)}  # text alone
    yield "bidirectional", BIDIRECTIONAL, {}
    yield "bidirectional", BIDIRECTIONAL, {"attention_mask": PADDING}
    yield "bidirectional", MaskPredicate, {"and_mask_function": lambda b, h, q, k: (q - k).abs() < 2}


def make(kind: str, implementation: str, arguments: dict[str, Any]) -> Any:
    from transformers import masking_utils

    factory = getattr(masking_utils, f"create_{kind}_mask")
    more = {} if "bidirectional" in kind else {"allow_is_causal_skip": False}
    given = {"past_key_values": None, "attention_mask": None, **more, **arguments}
    return factory(config=config(implementation), inputs_embeds=torch.zeros(SAMPLES, LENGTH, 8), **given)


def full(mask: Tensor | None) -> Tensor:
    return torch.ones(SAMPLES, 1, LENGTH, LENGTH, dtype=torch.bool) if mask is None else mask


@pytest.mark.parametrize(("kind", "pattern", "arguments"), list(masks()))
def test_mask_description_equals_dense_sdpa_mask(kind: str, pattern: Any, arguments: dict[str, Any]) -> None:
    with use_backend(Describing()):
        result = make(kind, ATTENTION_NAME, arguments)
    assert isinstance(result, BoundMask) and isinstance(result.mask, AttentionMask)
    description = result.mask
    assert isinstance(description.pattern, pattern) if isinstance(pattern, type) else description.pattern == pattern
    assert (description.padding is not None) == ("attention_mask" in arguments)
    packed = "position_ids" in arguments and not isinstance(description.pattern, MaskPredicate)
    assert (description.sequence_ids is not None) == packed
    assert torch.equal(description.to_dense(), full(make(kind, "sdpa", arguments)))


def test_bidirectional_windows() -> None:
    with use_backend(Describing()):
        actual = make("bidirectional_sliding_window", ATTENTION_NAME, {"attention_mask": PADDING})
    expected = make("bidirectional_sliding_window", "sdpa", {"attention_mask": PADDING})
    assert actual.mask.pattern == MaskBand(-4, 4)
    assert torch.equal(actual.mask.to_dense(), expected)


@pytest.mark.parametrize("kind", ["causal", "sliding_window_causal"])
@pytest.mark.parametrize("steps", [1, 3])
def test_masks_with_a_cache_have_offsets(kind: str, steps: int) -> None:
    from transformers import masking_utils
    from transformers.cache_utils import DynamicCache

    made = []
    for name in (ATTENTION_NAME, "sdpa"):
        cache = DynamicCache(config=config(name))
        cache.update(torch.zeros(SAMPLES, 2, 7, 4), torch.zeros(SAMPLES, 2, 7, 4), 0)
        with use_backend(Describing() if name == ATTENTION_NAME else None):
            made.append(
                getattr(masking_utils, f"create_{kind}_mask")(
                    config=config(name),
                    inputs_embeds=torch.zeros(SAMPLES, steps, 8),
                    attention_mask=PADDING[:, : 7 + steps],
                    past_key_values=cache,
                    allow_is_causal_skip=False,
                )
            )
    dense = made[0].mask.to_dense()
    assert made[0].mask.q_offset == 7
    assert torch.equal(dense, made[1])


def test_mask_without_a_backend_equals_sdpa_mask() -> None:
    for arguments in ({}, {"attention_mask": PADDING}, {"position_ids": POSITIONS}):
        assert torch.equal(make("causal", ATTENTION_NAME, arguments), make("causal", "sdpa", arguments))


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
