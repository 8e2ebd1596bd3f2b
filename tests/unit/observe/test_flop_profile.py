"""Tests that counted FLOPs of forward, backward and recomputation equal the formulas of six families of models."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import library, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.causal_models import model_of
from windlass.kernels.packed_linear import PackedLinear
from windlass.observe.device_peak import device_peak, known_peak
from windlass.observe.flop_counter import FlopCounter
from windlass.observe.flop_profile import ModelProfile, build_profile
from windlass.observe.flop_report import (
    ReportOptions,
    StepFacts,
    duration_to_string,
    flops_to_string,
    macs_to_string,
    number_to_string,
    params_to_string,
    report_lines,
)

CPU = torch.device("cpu")
B, L, H, WIDE, V, HEADS, KV, D = 2, 16, 32, 48, 40, 4, 2, 8
T = B * L


def count(model: nn.Module, loss: Callable[[], torch.Tensor], ignored: Any = ()) -> ModelProfile:
    counter = FlopCounter(model, CPU, ignored)
    counter.attach()
    with counter.counting():
        value = loss()
        value.backward()
    counter.detach()
    return build_profile(model, counter)


def attention(queries: int, keys: int, width: int) -> int:
    return 4 * B * queries * keys * width


def llama(experts: int = 0) -> tuple[nn.Module, int]:
    sizes: dict[str, Any] = {"hidden_size": H, "intermediate_size": WIDE, "num_hidden_layers": 2, "vocab_size": V}
    heads: dict[str, Any] = {"num_attention_heads": HEADS, "num_key_value_heads": KV, "attn_implementation": "sdpa"}
    layer = 2 * T * (2 * H * HEADS * D + 2 * H * KV * D) + attention(L, L, HEADS * D)
    if not experts:
        model = model_of("LlamaForCausalLM", **sizes, **heads)
        return model, 2 * (layer + 6 * T * H * WIDE) + 2 * T * H * V
    chosen = 2
    model = model_of(
        "MixtralForCausalLM", num_local_experts=experts, num_experts_per_tok=chosen, head_dim=D, **sizes, **heads
    )
    return model, 2 * (layer + chosen * 6 * T * H * WIDE + 2 * T * H * experts) + 2 * T * H * V


def gpt2() -> tuple[nn.Module, int]:
    sizes: dict[str, Any] = {
        "n_embd": H,
        "n_layer": 2,
        "n_head": HEADS,
        "n_positions": 32,
        "vocab_size": V,
        "attn_implementation": "eager",
    }
    model = model_of("GPT2LMHeadModel", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **sizes)
    return model, 2 * (2 * T * 12 * H * H + attention(L, L, H)) + 2 * T * H * V


def t5() -> tuple[nn.Module, int]:
    model = model_of(
        "T5ForConditionalGeneration",
        d_model=H,
        d_kv=D,
        d_ff=WIDE,
        num_layers=2,
        num_heads=HEADS,
        vocab_size=V,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    block = 2 * T * 4 * H * HEADS * D + attention(L, L, HEADS * D)  # self-attention, and equally cross-attention
    return model, 2 * (3 * block + 2 * 4 * T * H * WIDE) + 2 * T * H * V


def bert() -> tuple[nn.Module, int]:
    sizes: dict[str, Any] = {
        "hidden_size": H,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "intermediate_size": WIDE,
    }
    model = model_of("BertForMaskedLM", "BertConfig", vocab_size=V, attn_implementation="sdpa", **sizes)
    layers = 2 * (2 * T * (4 * H * H + 2 * H * WIDE) + attention(L, L, H))
    return model, layers + 2 * T * H * H + 2 * T * H * V


def vit() -> tuple[nn.Module, int]:
    sizes: dict[str, Any] = {
        "hidden_size": H,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "intermediate_size": WIDE,
    }
    model = model_of("ViTForImageClassification", "ViTConfig", image_size=16, patch_size=4, num_labels=V, **sizes)
    tokens = 16 + 1
    layers = 2 * (2 * B * tokens * (4 * H * H + 2 * H * WIDE) + attention(tokens, tokens, H))
    return model, layers + 2 * B * 16 * H * 3 * 16 + 2 * B * H * V


@pytest.mark.parametrize(
    "family", [llama, lambda: llama(4), gpt2, t5, bert, vit], ids=["llama", "mixtral", "gpt2", "t5", "bert", "vit"]
)
def test_counts_equal_formulas(family: Callable[[], tuple[nn.Module, int]]) -> None:
    torch.manual_seed(0)
    model, expected = family()
    ids = torch.randint(1, V, (B, L))
    batch: dict[str, Any] = {"input_ids": ids, "labels": ids}
    if "ViT" in type(model).__name__:
        batch = {"pixel_values": torch.randn(B, 3, 16, 16), "labels": ids[:, 0]}
    state = torch.get_rng_state()
    plain = model(**batch).loss
    plain.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    torch.set_rng_state(state)
    losses: list[torch.Tensor] = []

    def loss() -> torch.Tensor:
        losses.append(model(**batch).loss)
        return losses[0]

    found = count(model, loss)
    # some releases of transformers compute rotary angles by a matrix product, which the formula leaves out
    assert 0 <= found.root.forward - expected <= (0.02 * expected if hasattr(model.config, "rope_parameters") else 0)
    first = 2 * B * 16 * H * 3 * 16 if "ViT" in type(model).__name__ else 0  # no gradient of the pixels
    assert found.root.backward == 2 * expected - first
    assert found.root.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert torch.equal(plain, losses[0])
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert gradient is None or (parameter.grad is not None and torch.equal(parameter.grad, gradient))
    assert not found.uncounted


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(H, WIDE), nn.Linear(WIDE, H)

    def forward(self, x: torch.Tensor) -> Any:
        return x + self.second(torch.relu(self.first(x)))


class Stack(nn.Module):
    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(H, V)
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> Any:
        for layer in self.layers:
            x = layer(x) if self.reentrant is None else checkpoint(layer, x, use_reentrant=self.reentrant)
        return self.head(x)


@pytest.mark.parametrize("groups", [1, 4, 8])
@pytest.mark.parametrize(
    ("kind", "side"), [(nn.Conv1d, 1), (nn.Conv2d, 2), (nn.ConvTranspose1d, 1), (nn.ConvTranspose2d, 2)]
)
def test_gradients_of_a_convolution_cost_twice_its_forward(kind: Any, side: int, groups: int) -> None:
    layer = kind(8, 16, 3, stride=2, groups=groups)
    rows = torch.randn(2, 8, *[9] * side, requires_grad=True)
    root = count(layer, lambda: layer(rows).sum()).root
    positions = rows.numel() // 8 if "Transpose" in kind.__name__ else layer(rows).numel() // 16
    assert root.forward == 2 * positions * 8 * 16 // groups * 3**side
    assert root.backward == 2 * root.forward


def test_layers_whose_products_are_inside_of_one_operation() -> None:
    left, right = torch.randn(5, 8, requires_grad=True), torch.randn(5, 12, requires_grad=True)
    pair = nn.Bilinear(8, 12, 6)
    root = count(pair, lambda: pair(left, right).sum()).root
    assert root.forward == 2 * 5 * 6 * (8 * 12 + 12)
    assert root.backward >= 2 * root.forward  # a gradient for each of three factors

    def counted(call: Callable[[], torch.Tensor]) -> int:
        counter = FlopCounter(nn.Identity(), CPU)
        with counter.counting():
            call()
        return counter.outside.forward

    many, few = torch.randn(40, 6), torch.randn(9, 6)
    assert counted(lambda: torch.cdist(many, few)) == 2 * 40 * 9 * 8
    assert counted(lambda: torch.cdist(few, few)) == counted(lambda: torch.cdist(many, few, p=1.0)) == 0
    series, filters = torch.randn(10, 2, 4), torch.randn(3, 4, 8)
    assert counted(lambda: torch.conv_tbc(series, filters, torch.randn(8), 1)) == 2 * 10 * 2 * 3 * 4 * 8


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_operations_belong_to_the_module_that_created_their_nodes(reentrant: bool | None) -> None:
    model, x = Stack(reentrant), torch.randn(T, H, requires_grad=True)
    target = torch.randint(0, V, (T,))
    found = count(model, lambda: functional.cross_entropy(model(x), target))
    modules = {module.name: module for _, module in found.root.walk()}
    product = 2 * T * H * WIDE
    for index in range(2):
        for name in ("first", "second"):
            layer = modules[f"layers.{index}.{name}"]
            assert (layer.forward, layer.backward) == (product, 2 * product)
            # Non-reentrant checkpointing stops recomputing at the last saved tensor, the input of the second product.
            repeated = {None: 0, True: product, False: product if name == "first" else 0}[reentrant]
            assert layer.recomputed == repeated
    assert modules["head"].backward == 4 * T * H * V and modules["head"].recomputed == 0
    assert found.root.forward == 4 * product + 2 * T * H * V and found.root.macs == found.root.forward // 2
    assert modules["layers"].forward == 4 * product and modules["layers"].seconds == pytest.approx(
        modules["layers.0"].seconds + modules["layers.1"].seconds
    )
    assert modules["layers.0"].seconds > 0 and modules["layers.0"].calls == 1


def test_recomputed_function_without_a_module() -> None:
    first, second = nn.Linear(H, WIDE), nn.Linear(WIDE, H)
    model = nn.ModuleList([first, second])
    x = torch.randn(T, H, requires_grad=True)

    def mlp(x: torch.Tensor) -> torch.Tensor:
        hidden = functional.linear(x, first.weight)
        return functional.linear(torch.tanh(hidden), second.weight).square()

    found = count(model, lambda: checkpoint(mlp, x, use_reentrant=False).sum())
    product = 2 * T * H * WIDE
    assert (found.root.forward, found.root.backward, found.root.recomputed) == (2 * product, 4 * product, 2 * product)


class Force(nn.Module):
    """Gradient of an energy: the forward runs a backward of the inner layers."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = Stack(None)

    def forward(self, x: torch.Tensor) -> Any:
        moved = x.detach().requires_grad_()
        return torch.autograd.grad(self.energy(moved).tanh().sum(), moved, create_graph=True)[0]


def test_gradients_of_gradients_are_not_recomputed() -> None:
    model, x = Force(), torch.randn(T, H)
    once = 4 * 2 * T * H * WIDE + 2 * T * H * V

    def penalty() -> torch.Tensor:
        moved = x.clone().requires_grad_()
        gradient = torch.autograd.grad(model.energy(moved).tanh().sum(), moved, create_graph=True)[0]
        return gradient.square().sum()

    for loss in (lambda: model(x).square().sum(), penalty):
        found = count(model, loss).root
        assert (found.forward, found.recomputed) == (once, 0)
        # Gradients of inputs; then gradients of both factors of these products, and of both factors of the forward's.
        assert found.backward == (1 + 2 + 2) * once
    assert found.children["energy"].recomputed == 0
    counter = FlopCounter(model.energy, CPU)
    counter.attach()
    with counter.counting(), pytest.warns(UserWarning, match="create_graph=True"):
        model.energy(x).sum().backward(create_graph=True)
    counter.detach()
    root = build_profile(model.energy, counter).root
    assert (root.forward, root.backward, root.recomputed) == (once, 2 * once - 2 * T * H * WIDE, 0)


def test_time_of_a_module_that_runs_in_some_micro_batches() -> None:
    model = Stack(None)
    counter = FlopCounter(model, CPU)
    counter.attach()
    with counter.counting():
        model(torch.randn(T, H)).sum().backward()  # one of two micro-batches
    counter.detach()
    layer = build_profile(model, counter, micro_batches=2).root.children["layers"].children["0"]
    assert layer.seconds == pytest.approx(counter.modules["layers.0"].seconds / 2) and layer.seconds > 0


def test_fused_kernels() -> None:
    grid = torch.randn(B, 3, 8, 8)
    rows, experts = torch.randn(T, H, requires_grad=True), torch.randn(3, H, WIDE, requires_grad=True)
    ends = torch.tensor([4, 9, T], dtype=torch.int32)
    query, key = (torch.randn(B, heads, L, D, requires_grad=True) for heads in (HEADS, KV))

    class Everything(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.lstm = nn.Conv2d(3, 5, 3), nn.LSTM(H, D)

        def forward(self) -> Any:
            attended = functional.scaled_dot_product_attention(query, key, key, is_causal=True, enable_gqa=True)
            mixed = functional.grouped_mm(rows, experts, offs=ends)
            states = self.lstm(rows.view(L, B, H))[0]
            return attended.sum() + mixed.square().sum() + states.sum() + self.conv(grid).sum()

    model = Everything()
    found = count(model, model)
    conv = 2 * B * 5 * 6 * 6 * 3 * 9
    lstm = 2 * T * 4 * D * (H + D)
    fixed, grouped = attention(L, L, HEADS * D), 2 * T * H * WIDE
    assert found.root.forward == conv + lstm + fixed + grouped
    assert found.root.backward == conv + 2 * (lstm + fixed + grouped)
    assert found.root.recomputed == fixed // 2  # the fused backward recomputes the scores, half of the FLOPs
    assert found.root.children["lstm"].forward == lstm


def test_products_of_native_kernels() -> None:
    packed = PackedLinear.from_linear(nn.Linear(H, WIDE), "int8")
    x = torch.randn(T, H, requires_grad=True)
    found = count(nn.Sequential(packed), lambda: packed(x).sum())
    assert (found.root.forward, found.root.backward) == (
        2 * T * H * WIDE,
        2 * T * H * WIDE,
    )  # the packed weight is frozen: only the input has a gradient


def test_fused_encoder_layer_of_inference() -> None:
    model = nn.TransformerEncoderLayer(H, HEADS, WIDE, batch_first=True).eval()
    counter = FlopCounter(model, CPU)
    counter.attach()
    with torch.inference_mode(), counter.counting():
        model(torch.randn(B, L, H))
    counter.detach()
    assert build_profile(model, counter).root.forward == 2 * T * (4 * H * H + 2 * H * WIDE) + attention(L, L, H)


def test_ignored_modules_and_unknown_kernels() -> None:
    @library.custom_op("windlass_tests::mystery", mutates_args=())
    def mystery(x: torch.Tensor) -> torch.Tensor:
        return x @ x.T

    model = Stack(None)
    x = torch.randn(T, H)

    def loss() -> torch.Tensor:
        mystery(x)
        out: torch.Tensor = model(x).sum()
        return out

    found = count(model, loss, [Layer])
    assert found.root.forward == 2 * T * H * V  # FLOPs of the head alone
    assert found.uncounted == ("windlass_tests.mystery",)
    assert "windlass_tests.mystery" in "\n".join(report_lines(found, ReportOptions()))


def test_report_has_deepspeeds_layout() -> None:
    found = count(model := Stack(None), lambda: model(torch.randn(T, H)).sum())
    facts = StepFacts(
        step=5,
        world_size=4,
        data_size=2,
        model_size=2,
        micro_batch=B,
        samples=8,
        backward_seconds=0.2,
        step_seconds=0.1,
    )
    lines = list(report_lines(found, ReportOptions(facts=facts)))
    text = "\n".join(lines)
    for label in (
        "Profile Summary at step 5:",
        "world size:",
        "data parallel size:",
        "model parallel size:",
        "batch size per GPU:",
        "params per GPU:",
        "params of model = params per GPU * mp_size:",
        "fwd MACs per GPU:",
        "fwd flops per GPU:",
        "fwd flops of model = fwd flops per GPU * mp_size:",
        "fwd latency:",
        "bwd latency:",
        "step latency:",
        "iter latency:",
        "samples/second:",
        "Top 1 modules in terms of params, MACs or fwd latency at different model depths:",
        "depth 3:\n    params      - {'Linear': '",
    ):
        assert label in text, label
    assert "(layers): ModuleList(" in text and "    (0): Layer(" in text and ", 100.00% Params, " in text
    short = list(report_lines(found, ReportOptions(module_depth=1, top_modules=2, detailed=False)))
    assert "depth 1:" in short and "depth 0:" not in short and "depth 2:" not in short
    assert not any("ModuleList(" in line for line in short)
    assert "'ModuleList': '" in "\n".join(short) and "'Linear': '" in "\n".join(short)


def test_formats_of_numbers() -> None:
    assert number_to_string(714_690_000) == "714.69 M" and number_to_string(0) == "0.0 "
    assert macs_to_string(1.5e9) == "1.5 GMACs" and flops_to_string(81.9e12) == "81.9 TFLOPS"
    assert params_to_string(3.36e9) == "3.36 B" and params_to_string(61.1e6, "M", 1) == "61.1 M"
    assert duration_to_string(76.39e-3) == "76.39 ms" and duration_to_string(34.09e-6) == "34.09 us"


def test_peaks() -> None:
    assert known_peak("NVIDIA H100 80GB HBM3", torch.bfloat16, tf32=False) == 989.4e12
    assert known_peak("NVIDIA H100 PCIe", torch.bfloat16, tf32=False) == 756e12
    assert known_peak("NVIDIA A100-SXM4-80GB", torch.float32, tf32=True) == 156e12
    assert known_peak("NVIDIA GH200 480GB", torch.bfloat16, tf32=False) == 989.4e12
    assert known_peak("NVIDIA H100 PCIe", torch.float64, tf32=True) is None
    assert known_peak("NVIDIA GB200", torch.bfloat16, tf32=False) == 2500e12
    for name in ("some other device", "NVIDIA L40", "NVIDIA RTX A1000", "NVIDIA T400 4GB"):
        assert known_peak(name, torch.float32, tf32=False) is None, name
    state = torch.get_rng_state()
    measured = device_peak(CPU, torch.float32)
    assert measured.source == "measured" and math.isfinite(measured.flops) and measured.flops > 1e8
    assert torch.equal(torch.get_rng_state(), state)


SPARSE_ROWS, SPARSE_COLUMNS, DENSE_COLUMNS = 6, 5, 3


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("layout", ["coo", "csr"])
@pytest.mark.parametrize("product", ["mm", "sparse.mm", "mv", "right factor", "both sparse", "bmm"])
def test_products_with_a_sparse_matrix_count_its_stored_elements(layout: str, product: str) -> None:
    dense = torch.zeros(SPARSE_ROWS, SPARSE_COLUMNS)
    dense[[0, 1, 1, 4], [2, 0, 4, 2]] = 1.0
    stored = 4
    convert = {"coo": torch.Tensor.to_sparse, "csr": torch.Tensor.to_sparse_csr}[layout]
    matrix, factor = convert(dense), torch.ones(SPARSE_COLUMNS, DENSE_COLUMNS, requires_grad=True)
    other = torch.zeros(SPARSE_COLUMNS, DENSE_COLUMNS)
    other[[2, 2, 4], [0, 1, 2]] = 1.0  # 5 products: 2, 1 and 2 in rows 0, 1 and 4 of the result
    forward, loss = {
        "mm": (2 * stored * DENSE_COLUMNS, lambda: (matrix @ factor).sum()),
        "sparse.mm": (2 * stored * DENSE_COLUMNS, lambda: torch.sparse.mm(matrix, factor).sum()),
        "mv": (2 * stored, lambda: (matrix @ factor[:, 0]).sum()),
        "right factor": (2 * stored * DENSE_COLUMNS, lambda: (factor.t() @ convert(dense.t().contiguous())).sum()),
        "both sparse": (2 * 5, lambda: torch.sparse.mm(matrix, convert(other)).to_dense().sum() + factor.sum()),
        "bmm": (
            2 * 2 * stored * DENSE_COLUMNS,
            lambda: torch.bmm(torch.stack([dense, dense]).to_sparse(), torch.stack([factor, factor])).sum(),
        ),
    }[product]
    found = count(nn.Identity(), loss).root
    assert (found.forward, found.backward) == (forward, 0 if product == "both sparse" else forward)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_a_sampled_product_counts_its_stored_elements() -> None:
    mask = torch.eye(4).to_sparse_csr().requires_grad_()
    factor = torch.ones(4, DENSE_COLUMNS, requires_grad=True)
    found = count(nn.Identity(), lambda: torch.sparse.mm(mask, factor).sum()).root
    assert found.forward == 2 * 4 * DENSE_COLUMNS
    assert found.backward == 2 * found.forward  # gradients of the sparse matrix (stored elements) and of the factor
