"""Tests that attention merged from tiles equals masked attention, with every kernel, forward and backward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from windlass.attention.mask_pattern import BIDIRECTIONAL, CAUSAL, MaskBand
from windlass.comm.mesh_axis import single_rank_axis
from windlass.parallel.sequence.attention_dropout import AttentionDropout
from windlass.parallel.sequence.sequence_attention import SequenceMask, sequence_attention
from windlass.parallel.sequence.sequence_shard import SequenceShard
from windlass.parallel.sequence.sequence_sharding import SequenceSharding, SequenceShardPattern
from windlass.parallel.sequence.tile_kernels import FlashTileKernel, MatmulTileKernel, ScoreSpec, TileKernels
from windlass.parallel.sequence.visible_ranges import BatchMask, make_document_mask, make_full_mask, make_padding_mask

LENGTH, SAMPLES, HEADS, KEYS, FEATURES = 37, 2, 4, 2, 8

POSITIONS = torch.cat([torch.arange(9), torch.arange(1), torch.arange(27)]).unsqueeze(0)
PADDING = torch.ones(SAMPLES, LENGTH, dtype=torch.long)
PADDING[0, :6] = 0
PADDING[1, 20:] = 0


def reference(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float, cap: float | None) -> Tensor:
    """Compute attention with a mask `[samples, queries, keys]` in fp64."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = (q @ k.transpose(-1, -2)) * scale
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    scores = scores.masked_fill(~seen[:, None], -torch.inf)
    return torch.nan_to_num(scores.softmax(-1)) @ v  # a query that sees no key gets zeros


def sight_and_mask(kind: str) -> tuple[BatchMask, Tensor]:
    """Return the mask description and the dense mask of a batch of this kind, both without a causal or window band."""
    if kind == "packed":
        number = (POSITIONS == 0).cumsum(1).expand(SAMPLES, -1)
        return make_document_mask(POSITIONS, SAMPLES), number[:, :, None] == number[:, None, :]
    if kind == "padded":
        return make_padding_mask(PADDING), (PADDING != 0)[:, None, :].expand(-1, LENGTH, -1)
    return make_full_mask(SAMPLES, LENGTH), torch.ones(SAMPLES, LENGTH, LENGTH, dtype=torch.bool)


def mask_of(sight: BatchMask, band: MaskBand, cut: SequenceSharding | None = None) -> SequenceMask:
    cut = SequenceShardPattern(1, 1).shard(LENGTH) if cut is None else cut
    return SequenceMask(
        SequenceShard(cut, sight, single_rank_axis("sp"), full_length=LENGTH, gathers_outputs=True), band
    )


def inputs(dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(3)
    sizes = (HEADS, KEYS, KEYS)
    return [torch.randn(SAMPLES, heads, LENGTH, FEATURES, dtype=dtype).requires_grad_() for heads in sizes]


@pytest.mark.parametrize("kernels", ["torch's", "plain"])
@pytest.mark.parametrize(
    "band", [CAUSAL, BIDIRECTIONAL, MaskBand(0, 4), MaskBand(-3, 3)], ids=["causal", "both", "window", "near"]
)
@pytest.mark.parametrize("kind", ["all", "packed", "padded"])
@pytest.mark.parametrize("cap", [None, 1.5])
def test_merged_tiles_equal_attention(kernels: str, band: MaskBand, kind: str, cap: float | None, monkeypatch) -> None:
    if kernels == "plain":
        monkeypatch.setattr("windlass.parallel.sequence.tile_kernels._supports_flash", lambda *_: False)
        monkeypatch.setattr(MatmulTileKernel, "max_tile_size", 7)
    sight, mask = sight_and_mask(kind)
    actual, requested = inputs(torch.float64), inputs(torch.float64)
    distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    output = sequence_attention(*actual, mask_of(sight, band), scale=0.3, softcap=cap)
    expected = reference(*requested, mask & band.allows(distance), 0.3, cap)
    torch.testing.assert_close(output, expected, rtol=1e-9, atol=1e-10)
    gradient = torch.randn_like(output)
    output.backward(gradient)
    expected.backward(gradient)
    for item, other in zip(actual, requested, strict=True):
        torch.testing.assert_close(item.grad, other.grad, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merging_keeps_accuracy(dtype: torch.dtype) -> None:
    """Attention merged from many tiles is close to fp64: to 2e-6 in fp32 and to 2e-2 in bf16."""
    sight, mask = sight_and_mask("packed")
    q, k, v = inputs(dtype)
    output = sequence_attention(q, k, v, mask_of(sight, MaskBand(0, 30)), scale=0.3)
    close = 2e-6 if dtype is torch.float32 else 2e-2
    assert output.dtype == dtype
    distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    exact = reference(q.double(), k.double(), v.double(), mask & MaskBand(0, 30).allows(distance), 0.3, None)
    assert float((output.double() - exact).detach().abs().max()) < close


def test_head_size_of_values_may_differ_from_keys() -> None:
    q, k, _ = inputs(torch.float64)
    v = torch.randn(SAMPLES, KEYS, LENGTH, 5, dtype=torch.float64)
    sight, mask = sight_and_mask("padded")
    output = sequence_attention(q, k, v, mask_of(sight, CAUSAL))
    expected = reference(q, k, v, mask & torch.ones(LENGTH, LENGTH).tril().bool(), FEATURES**-0.5, None)
    torch.testing.assert_close(output, expected, rtol=1e-9, atol=1e-10)


def test_features_need_not_be_contiguous() -> None:
    heads_last = [tensor.detach().transpose(2, 3).contiguous().transpose(2, 3) for tensor in inputs(torch.float32)]
    actual = [tensor.requires_grad_() for tensor in heads_last]
    assert all(tensor.stride(-1) > 1 for tensor in actual)
    expected = inputs(torch.float32)
    sight, _ = sight_and_mask("packed")
    for tensors in (actual, expected):
        sequence_attention(*tensors, mask_of(sight, CAUSAL)).square().sum().backward()
    for item, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(item.grad, other.grad)


def test_torch_kernels_are_used_where_supported() -> None:
    q, k, v = inputs(torch.float32)
    assert isinstance(TileKernels(q, k, v, ScoreSpec(1.0, None, CAUSAL))._fused, FlashTileKernel)
    assert TileKernels(q, k, v, ScoreSpec(1.0, 2.0, CAUSAL))._fused is None
    assert TileKernels(q, k, v[..., :4], ScoreSpec(1.0, None, CAUSAL))._fused is None
    assert TileKernels(q, k.double(), v, ScoreSpec(1.0, None, CAUSAL))._fused is None
    assert TileKernels(q, k, v, ScoreSpec(1.0, None, CAUSAL, AttentionDropout(0.1, 3)))._fused is None


def test_tokens_of_other_ranks_are_refused() -> None:
    from windlass.base.errors import ModelError

    q, k, v = inputs(torch.float32)
    mask = mask_of(make_full_mask(SAMPLES, LENGTH), CAUSAL)
    with pytest.raises(ModelError, match="key of 2 samples and 30 tokens.* has 2 and 37"):
        sequence_attention(q, k[:, :, :30], v, mask)
    with pytest.raises(ModelError, match="3 key heads do not divide 4 query heads"):
        sequence_attention(q, torch.cat([k, k[:, :1]], dim=1), v, mask)
