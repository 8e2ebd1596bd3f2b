"""Tests of DeepSpeed's section `weight_quantization` in one process."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import windlass
from tests.causal_models import build
from windlass.base.errors import ConfigError, ModelError
from windlass.compat.inference_engine import init_inference
from windlass.compat.module_quantization import init_group_wise_weight_quantization
from windlass.kernels.grouped_formats import RangeWeightFormat
from windlass.kernels.inference_path import list_inference_paths
from windlass.kernels.packed_gemm import pack_panels, packed_linear
from windlass.kernels.packed_linear import PackedEmbedding, PackedLinear, PackedMatrix

IDS = torch.arange(10)[None]


@pytest.fixture(autouse=True, scope="module")
def _no_group_is_left() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def section(**keys: Any) -> dict[str, Any]:
    return {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0, "weight_quantization": keys}


def group(bits: int = 4, size: int = 16, dim: int = 1, symmetric: bool = False) -> dict[str, Any]:
    return {"num_bits": bits, "group_size": size, "group_dim": dim, "symmetric": symmetric}


RULES = {
    "mlp": group(4, 16, 0),
    "self_attn": group(8, 16, 1),
    "embed_tokens": group(4, 8, 1),
    "lm_head": group(4, 8, 1),
}


def wide(model: nn.Module) -> Any:
    """Return a copy whose packed modules are plain ones with the same values."""
    made = copy.deepcopy(model)
    for name, module in list(made.named_modules()):
        if isinstance(module, PackedLinear):
            made.set_submodule(name, module.to_linear())
        elif isinstance(module, PackedEmbedding):
            made.set_submodule(name, nn.Embedding.from_pretrained(module.weight))
    return made


def packed(model: nn.Module) -> dict[str, PackedMatrix]:
    return {name: module for name, module in model.named_modules() if isinstance(module, PackedMatrix)}


@pytest.mark.parametrize("tied", [False, True])
def test_named_modules_are_packed(tied: bool) -> None:
    model: Any = build("llama", tie_word_embeddings=tied)
    plain = copy.deepcopy(model)
    engine = windlass.initialize(model=model, config=section(post_init_quant=RULES))[0]
    found = packed(engine.module)
    kinds = ("mlp.", "self_attn.", "embed_tokens", "lm_head")
    assert all(any(kind in name for name in found) for kind in kinds)
    for name, module in found.items():
        rule = next(rule for key, rule in RULES.items() if key in name)
        form = RangeWeightFormat(rule["num_bits"], rule["group_size"], rule["group_dim"])
        assert torch.equal(module.unpack(), form.unpack(form.pack(plain.get_submodule(name).weight))), name
    if tied:
        table, head = found["model.embed_tokens"], found["lm_head"]
        assert all(a is b for a, b in zip(table.parameters(), head.parameters(), strict=True))
    torch.testing.assert_close(engine(IDS).logits, wide(engine.module)(IDS).logits, rtol=1e-5, atol=1e-5)
    with pytest.raises(ModelError, match="save_pretrained would write layer"):
        engine.module.save_pretrained("never")
    engine.destroy()


def test_what_stays_wide_is_trained() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    twin = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = section(post_init_quant={"0": group(8, 8, 0)})
    engine = windlass.initialize(model=model, optimizer=optimizer, config=config)[0]
    twin[0] = engine.module[0].to_linear()
    twin[0].weight.requires_grad_(False)
    own = torch.optim.SGD([p for p in twin.parameters() if p.requires_grad], lr=0.1)
    for _ in range(3):
        x = torch.randn(5, 16)
        loss = engine(x).square().sum()
        engine.backward(loss)
        engine.step()
        expected = twin(x).square().sum()
        expected.backward()
        own.step()
        own.zero_grad()
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(engine.module[0].bias, twin[0].bias)
    engine.destroy()


def test_a_model_is_packed_while_it_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[int] = []

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            held.append(len(alive()))
            self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(self.up(x).tanh())

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(8, 16)
            self.blocks = nn.ModuleList()
            for _ in range(4):
                self.blocks.append(Block())
            self.odd = nn.Linear(16, 3)
            self.head = nn.Linear(16, 8, bias=False)
            self.head.weight = self.table.weight

        def forward(self, ids: Tensor) -> Tensor:
            x = self.table(ids)
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    made: list[Any] = []
    plain_init = nn.Linear.__init__

    def note(self: nn.Linear, *args: Any, **options: Any) -> None:
        plain_init(self, *args, **options)
        made.append(weakref.ref(self))

    def alive() -> list[nn.Linear]:
        return [one for ref in made if (one := ref()) is not None]

    monkeypatch.setattr(nn.Linear, "__init__", note)
    config = section(quantized_initialization=group(4, 8, 0))
    with windlass.zero.Init(config_dict_or_path=config):
        torch.manual_seed(0)
        model = Model()
    monkeypatch.undo()
    assert held == [0, 0, 0, 0], "the layers of earlier blocks are packed already"
    assert len(packed(model)) == 10 and type(model.odd) is nn.Linear, "3 outputs are not groups of 8"
    assert all(a is b for a, b in zip(model.table.parameters(), model.head.parameters(), strict=True))
    torch.manual_seed(0)
    twin = Model()
    for name, module in packed(model).items():
        form: Any = module.format
        assert torch.equal(module.unpack(), form.unpack(form.pack(twin.get_submodule(name).weight))), name
    torch.manual_seed(5)
    other = Model()
    model.load_state_dict(other.state_dict())
    assert torch.equal(model.blocks[2].up.unpack(), form.unpack(form.pack(other.blocks[2].up.weight)))
    engine = windlass.initialize(model=model, config=config)[0]
    assert len(packed(engine.module)) == 10
    torch.testing.assert_close(engine(IDS % 8), wide(engine.module)(IDS % 8), rtol=1e-5, atol=1e-5)
    engine.destroy()


@pytest.mark.parametrize("tied", [False, True])
def test_a_directory_is_packed_while_it_is_read(tied: bool, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    plain: Any = build("llama", tie_word_embeddings=tied)
    plain.save_pretrained(tmp_path)
    config = section(quantized_initialization=group(8, 16, 1))
    model = windlass.from_pretrained(AutoModelForCausalLM, tmp_path, config=config)
    linear = [n for n, m in plain.named_modules() if type(m) in (nn.Linear, nn.Embedding)]
    assert sorted(packed(model)) == sorted(linear)
    form = RangeWeightFormat(8, 16, 1)
    for name, module in packed(model).items():
        assert torch.equal(module.unpack(), form.unpack(form.pack(plain.get_submodule(name).weight)))
    with torch.no_grad():
        torch.testing.assert_close(model(IDS).logits, wide(model)(IDS).logits, rtol=1e-5, atol=1e-5)
    with windlass.zero.Init(config_dict_or_path=config):
        later = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert sorted(packed(later)) == sorted(linear)
    assert torch.equal(later.lm_head.unpack(), model.lm_head.unpack())


def test_symmetric_groups_take_the_native_formats() -> None:
    model = nn.Sequential(nn.Linear(64, 32))
    init_group_wise_weight_quantization(model, section(post_init_quant={"0": group(4, 32, 1, True)}))
    assert model[0].format.name == "int4_g32"
    packed_once = model[0]
    init_group_wise_weight_quantization(model, section(post_init_quant={"0": group(4, 32, 1, True)}))
    assert model[0] is packed_once, "a packed layer stays as it is"


def test_an_inference_engine_packs_too() -> None:
    model: Any = build("llama", tie_word_embeddings=False)
    quant = {"weight": {"post_init_quant": {"mlp": group(8, 16, 1)}}}
    engine = init_inference(model, {"dtype": "torch.float32", "quant": quant})
    assert len(packed(engine.module)) == 3 * model.config.num_hidden_layers
    expected = wide(engine.module).generate(IDS, do_sample=False, max_new_tokens=6, pad_token_id=0)
    assert torch.equal(engine.generate(IDS, do_sample=False, max_new_tokens=6, pad_token_id=0), expected)
    engine.destroy()


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"fc": group()}, "post_init_quant.fc: no linear layer or embedding"),
        ({"0": group(4, 7)}, "post_init_quant.0: '0' cannot be packed: groups of 7 do not divide dimension 1"),
        ({"0": {"group_size": 8}}, "post_init_quant.0.num_bits: missing"),
        ({"0": group(4, 16, 0, True)}, "no such weight format"),
    ],
)
def test_bad_rules_are_refused(rules: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        windlass.initialize(model=nn.Sequential(nn.Linear(16, 16)), config=section(post_init_quant=rules))


def test_two_rules_for_one_module_are_refused() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(16, 16)))
    with pytest.raises(ConfigError, match="contains the keys"):
        windlass.initialize(model=model, config=section(post_init_quant={"0.0": group(), "0": group(8)}))


def test_a_disabled_section_packs_nothing() -> None:
    model = nn.Sequential(nn.Linear(16, 16))
    config = section(enabled=False, post_init_quant={"0": group()}, quantized_initialization=group())
    engine = windlass.initialize(model=model, config=config)[0]
    assert type(engine.module[0]) is nn.Linear
    engine.destroy()


def test_quantized_gathers_of_a_construction_are_those_of_the_engine() -> None:
    config = {"zero_optimization": {"stage": 3, "zero_quantized_weights": True}}
    with windlass.zero.Init(config_dict_or_path=config, zero_quantized_weights=True):
        nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="does not set zero_optimization.zero_quantized_weights"):
        windlass.zero.Init(zero_quantized_weights=True)


@pytest.mark.parametrize("path", [path for path in list_inference_paths() if path != "reference"])
@pytest.mark.parametrize("bits", [2, 3, 4, 6, 8])
@pytest.mark.parametrize("group", [32, 64, 128, 256])
def test_native_products_of_ranges_are_those_of_the_unpacked_weight(path: str, bits: int, group: int) -> None:
    torch.manual_seed(bits)
    form = RangeWeightFormat(bits, group)
    weight = torch.randn(37, 256) + 3 * torch.randn(37, 1)  # ranges that do not contain 0
    weight[5] = 0.25
    packed = form.pack(weight)
    panels = pack_panels(packed, form, (37, 256), path=path)
    assert panels.path == path
    wide, bias = form.unpack(packed).double(), torch.randn(37)
    for rows in (1, 3, 8, 12, 40):
        x = torch.randn(rows, 256)
        wanted = x.double() @ wide.t() + bias
        found = packed_linear(x, panels, bias)
        assert float((found - wanted).abs().max()) < 2e-6 * float((x.abs().double() @ wide.abs().t()).max())
        assert torch.equal(found[:1], packed_linear(x[:1], panels, bias)), "a row does not depend on the others"
        half = packed_linear(x.bfloat16(), panels, bias)
        exact = x.bfloat16().double() @ wide.t() + bias
        torch.testing.assert_close(half.double(), exact, rtol=1e-2, atol=1e-1)


def test_layers_of_ranges_use_native_products_where_their_groups_do() -> None:
    torch.manual_seed(0)
    for form, native in (
        (RangeWeightFormat(4, 64), True),
        (RangeWeightFormat(4, 48), False),
        (RangeWeightFormat(4, 32, 0), False),
    ):
        layer = nn.Linear(192, 64)
        packed = PackedLinear.from_linear(layer, form)
        x = torch.randn(5, 192, requires_grad=True)
        for _ in range(3):
            out = packed(x)
            torch.testing.assert_close(out, nn.functional.linear(x, packed.weight, packed.bias), rtol=1e-5, atol=1e-5)
        assert (packed._panels._panels is not None) == native
        out.sum().backward()
        torch.testing.assert_close(x.grad, packed.weight.sum(0).expand(5, 192), rtol=1e-5, atol=1e-5)
