"""Products of bf16 tensors on a CPU without bf16 instructions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from tests.causal_models import build
from windlass.inference.llm import LLM
from windlass.inference.sampling_params import SamplingParams
from windlass.inference.widened_products import fast_operator, multiplies_bf16_slowly, widened_products


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


PRODUCTS: dict[str, Callable[..., torch.Tensor]] = {
    "linear": lambda cast: functional.linear(cast(drawn(2, 9, 16)), cast(drawn(12, 16)), cast(drawn(12))),
    "large linear": lambda cast: functional.linear(cast(drawn(9, 1024)), cast(drawn(700, 1024)), cast(drawn(700))),
    "linear by name": lambda cast: functional.linear(cast(drawn(9, 16)), weight=cast(drawn(12, 16))),
    "operator": lambda cast: cast(drawn(9, 16)) @ cast(drawn(16, 12)),
    "matmul": lambda cast: torch.matmul(cast(drawn(3, 9, 16)), cast(drawn(3, 16, 12))),
    "addmm": lambda cast: torch.addmm(cast(drawn(12)), cast(drawn(9, 16)), cast(drawn(16, 12))),
    "baddbmm": lambda cast: cast(drawn(3, 9, 12)).baddbmm(cast(drawn(3, 9, 16)), cast(drawn(3, 16, 12)), beta=0.5),
    "conv1d": lambda cast: functional.conv1d(cast(drawn(1, 16, 9)), cast(drawn(16, 1, 4)), groups=16),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_equals_the_float32_product_rounded_once(name: str) -> None:
    expected = PRODUCTS[name](torch.Tensor.float).bfloat16()
    with widened_products(16, enabled=True):
        found = PRODUCTS[name](lambda tensor: tensor)
        assert torch.equal(PRODUCTS[name](torch.Tensor.float).bfloat16(), expected)  # other dtypes stay
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, rtol=8e-3, atol=1e-2)
    assert (found != expected).float().mean() < 0.02  # slices of a weight may add up in another order


def test_products_that_torch_refuses_are_refused() -> None:
    with widened_products(16, enabled=True):
        with pytest.raises(RuntimeError, match="dtype"):
            functional.linear(drawn(9, 16), weight=drawn(12, 16).float())
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            functional.linear(drawn(9, 15), drawn(12, 16))
        with pytest.raises(TypeError):
            drawn(9, 16) @ 2
        by_name = torch.mm(drawn(9, 16), mat2=drawn(16, 12))
        assert by_name.dtype == torch.bfloat16 and by_name.shape == (9, 12)
        with pytest.raises(RuntimeError, match="BFloat16"):
            torch.matmul(torch.ones(9, 16, dtype=torch.long), drawn(16, 12))


def test_each_group_of_rows_is_multiplied_with_its_matrix() -> None:
    rows, weight, ends = (
        drawn(32, 16),
        drawn(4, 8, 16).transpose(1, 2),
        torch.tensor([9, 12, 12, 32], dtype=torch.int32),
    )
    parts = zip(rows.split([9, 3, 0, 20]), weight, strict=True)
    expected = torch.cat([part.float() @ matrix.float() for part, matrix in parts])
    with widened_products(16, enabled=True):
        found = functional.grouped_mm(rows, weight, offs=ends)
    torch.testing.assert_close(found.float(), expected, rtol=8e-3, atol=0.0)
    replayed = fast_operator(torch.ops.aten._grouped_mm.default)(rows, weight, ends)
    torch.testing.assert_close(replayed.float(), expected, rtol=8e-3, atol=0.0)
    assert fast_operator(torch.ops.aten.mm.default) is torch.ops.aten.mm.default


def test_a_large_weight_is_never_whole_in_float32() -> None:
    weight, rows = drawn(4096, 1024), drawn(9, 1024)
    created: list[int] = []

    class RecordSizes(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            out = func(*args, **(kwargs or {}))
            created.append(out.numel() if isinstance(out, torch.Tensor) and out.dtype == torch.float32 else 0)
            return out

    with widened_products(16, enabled=True), RecordSizes():
        functional.linear(rows, weight)
    assert 0 < max(created) <= 2**18


def test_few_rows_are_left_to_torch() -> None:
    row, weight = drawn(2, 512), drawn(64, 512)
    expected = functional.linear(row, weight), row @ weight.T
    seen = RecordProducts()
    with widened_products(16, enabled=True), seen:
        found = functional.linear(row, weight), row @ weight.T
    assert all(map(torch.equal, found, expected)) and seen.products == [(2, torch.bfloat16)] * 2


class RecordProducts(TorchDispatchMode):
    """Context that stores the number of rows and the dtype of each matrix product."""

    def __init__(self) -> None:
        super().__init__()
        self.products: list[tuple[int, torch.dtype]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in ("linear", "mm", "addmm", "bmm", "baddbmm", "_grouped_mm"):
            self.products.append((out.numel() // out.shape[-1], out.dtype))
        return out


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral", "bloom"])
def test_a_prefill_has_no_bf16_products_where_torch_is_slow(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    torch.manual_seed(0)
    model = build(family).eval().bfloat16()
    prompt = [5 + n % 20 for n in range(24)]
    greedy = SamplingParams(temperature=0, max_tokens=1, logprobs=1)
    with LLM(model, check_at_load=False) as llm:
        seen = RecordProducts()
        with seen:
            (output,) = llm.generate([prompt], greedy)
    many = [dtype for rows, dtype in seen.products if rows >= 8]
    assert len(many) >= 8 and set(many) == {torch.float32}
    with torch.no_grad():
        expected = model.float()(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
    assert output.outputs[0].logprobs is not None
    (logprobs,) = output.outputs[0].logprobs
    for token, found in logprobs.items():
        assert found.logprob == pytest.approx(float(expected[token]), abs=0.05)


def test_only_models_with_bf16_parameters_are_widened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    assert multiplies_bf16_slowly(nn.Linear(2, 2).bfloat16()) and not multiplies_bf16_slowly(nn.Linear(2, 2))
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    assert not multiplies_bf16_slowly(nn.Linear(2, 2).bfloat16())
