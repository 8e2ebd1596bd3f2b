"""Law: packed experts equal products with their unpacked weights, with the same bits for a token in any batch."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from windlass.base.errors import ModelError
from windlass.kernels.inference_path import get_inference_path
from windlass.kernels.packed_experts import PackedExperts
from windlass.kernels.packed_gemm import pack_weight
from windlass.kernels.weight_format import get_weight_format

FEATURES, INNER, EXPERTS = 48, 40, 5


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def matrices(expert: int) -> tuple[torch.Tensor, torch.Tensor]:
    return random(2 * INNER, FEATURES, seed=2 * expert) / 7, random(FEATURES, INNER, seed=2 * expert + 1) / 7


def make_experts(form: str, path: str | None = None, gate: str = "silu") -> PackedExperts:
    name, _, inputs = form.partition(", ")
    packed = [
        tuple(pack_weight(one, name, quantize_inputs=bool(inputs), path=path) for one in matrices(expert))
        for expert in range(EXPERTS)
    ]
    return PackedExperts(packed, gate)


def make_choices(tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return choices of every expert but the last, a number beyond them, and an expert that a token chooses twice."""
    index = torch.randint(0, EXPERTS - 1, (tokens, 3), generator=torch.Generator().manual_seed(seed))
    index[0] = torch.tensor([1, EXPERTS, 1])
    return index, random(tokens, 3, seed=seed + 1).softmax(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gate", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("form", ["int4_g32", "int8", "ternary", "int3_g64", "bf16", "fp32", "int4_g32, int8 inputs"])
@pytest.mark.parametrize("path", [None, "reference"])
def test_experts_equal_products_with_unpacked_weights(
    form: str, gate: str, dtype: torch.dtype, path: str | None
) -> None:
    experts = make_experts(form, path, gate)
    native = experts.native(dtype) is not None
    assert native == (path is None and get_inference_path().module is not None)
    x = random(700, FEATURES, seed=99).to(dtype)  # an expert has more rows than are computed at once
    index, weights = make_choices(len(x))
    found = experts(x, index, weights.to(dtype))
    assert found.dtype == dtype
    if native:
        assert torch.equal(found, experts._compute_each(x, index, weights.to(dtype)))
    chosen = get_weight_format(form.partition(",")[0])
    total = torch.zeros(x.shape, dtype=torch.float64)
    for expert in range(EXPERTS):
        up, down = (chosen.unpack(chosen.pack(one)).double() for one in matrices(expert))
        first, second = (x.double() @ up.T).chunk(2, -1)
        active = F.silu(first) if gate == "silu" else F.gelu(first, approximate="tanh")
        share = torch.where(index == expert, weights.to(dtype).double(), 0.0).sum(-1, keepdim=True)
        total += (active * second) @ down.T * share
    tolerance = 2e-2 if dtype == torch.bfloat16 or "inputs" in form else 1e-5
    torch.testing.assert_close(found.double(), total, rtol=tolerance, atol=tolerance * float(total.abs().max()))


@pytest.mark.parametrize("form", ["int4_g32", "int8", "int4_g32, int8 inputs"])
def test_a_token_has_the_same_bits_whatever_tokens_are_beside_it(form: str) -> None:
    experts, x = make_experts(form), random(300, FEATURES, seed=7)
    index, weights = make_choices(len(x), seed=5)
    whole, threads = experts(x, index, weights), torch.get_num_threads()
    assert len(experts(x[:0], index[:0], weights[:0])) == 0
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            for chosen in (torch.tensor([17]), torch.tensor([299, 0, 3]), torch.arange(250).flip(0)):
                assert torch.equal(experts(x[chosen], index[chosen], weights[chosen]), whole[chosen])
    finally:
        torch.set_num_threads(threads)


def test_inputs_and_sizes_that_do_not_fit_are_refused() -> None:
    experts = make_experts("int8")
    index, weights = make_choices(4)
    with pytest.raises(
        ModelError, match=r"input of experts is torch.float32 of shape \(4, 47\); give .*\[tokens, 48\]"
    ):
        experts(random(4, 47), index, weights)
    with pytest.raises(ModelError, match=r"choices of experts are torch.int32 .*give torch.int64"):
        experts(random(4, FEATURES), index.int(), weights)
    up, down = (pack_weight(one) for one in matrices(0))
    with pytest.raises(ModelError, match="48 -> 80, 48 -> 80 features is not a gated feed-forward"):
        PackedExperts([(up, up)], "silu")
    with pytest.raises(ModelError, match=r"experts have the sizes \[\(40"):
        PackedExperts([(up, down), (pack_weight(random(40, 48)), down)], "silu")
