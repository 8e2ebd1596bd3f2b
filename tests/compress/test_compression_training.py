"""Tests of `compression_training`: rounding, masks, schedules, and the plain smaller models that remain."""

from __future__ import annotations

import copy
import gc
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import windlass
from windlass.base.errors import ConfigError
from windlass.compress.compressed_layers import CompressedLayer, WeightRounding
from windlass.compress.compression_training import compression_clock, init_compression, student_initialization
from windlass.compress.engine_steps import check_compression
from windlass.compress.fake_rounding import round_straight_through, rounded_values, top_share
from windlass.compress.format_rounding import pack_trained_layers
from windlass.compress.quantize_training import prepare_quantize_training
from windlass.compress.redundancy_clean import redundancy_clean
from windlass.config.compression_section import CompressionTraining, Eigenvalue
from windlass.config.quantize_training_section import QuantizeTraining
from windlass.kernels.packed_linear import PackedLinear


def section(**techniques: Any) -> dict[str, Any]:
    return {"train_batch_size": 4, "compression_training": techniques}


def technique(shared: dict[str, Any], params: dict[str, Any], modules: Any, **more: Any) -> dict[str, Any]:
    groups = {"group": {"params": params, "modules": modules, **more}}
    return {"shared_parameters": {"enabled": True, "schedule_offset": 0, **shared}, "different_groups": groups}


class Attention(nn.Module):
    """Plain attention of four heads."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 4
        self.query, self.key, self.value, self.out = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            one(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for one in (self.query, self.key, self.value)
        )
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Encoder(nn.Module):
    """Layers of attention and two matrices."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 16)
        self.layer = nn.ModuleList(
            nn.ModuleDict({"attention": Attention(), "fc1": nn.Linear(16, 24), "fc2": nn.Linear(24, 16)})
            for _ in range(layers)
        )

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layer:
            x = x + layer["attention"](x)
            x = x + layer["fc2"](torch.relu(layer["fc1"](x)))
        return x


def encoder(layers: int = 2) -> Encoder:
    torch.manual_seed(0)
    return Encoder(layers)


IDS = torch.arange(22).view(2, 11) % 11


def reference(values: Tensor, bits: int, groups: int, symmetric: bool) -> Tensor:
    """Round one element after the other, by the formulas."""
    out = []
    for part in values.double().flatten().split(values.numel() // groups):
        if bits == 1:
            out += [math.copysign(1, w) * float(part.abs().mean()) if w else 0.0 for w in part.tolist()]
        elif bits == 2:
            limit = 0.7 * float(part.abs().mean())
            kept = [abs(w) for w in part.tolist() if abs(w) > limit]
            out += [math.copysign(sum(kept) / len(kept), w) if abs(w) > limit else 0.0 for w in part.tolist()]
        elif symmetric:
            scale = 2 * float(part.abs().max()) / 2**bits
            out += [min(max(round(w / scale), -(2 ** (bits - 1))), 2 ** (bits - 1) - 1) * scale for w in part.tolist()]
        else:
            low, high = float(part.min()), float(part.max())
            scale = (high - low) / 2**bits
            zero = round(low / scale) * scale
            out += [min(max(round((w - zero) / scale), 0), 2**bits - 1) * scale + zero for w in part.tolist()]
    return torch.tensor(out).view(values.shape)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [1, 2, 3, 8])
@pytest.mark.parametrize("groups", [1, 6])
def test_rounding_equals_the_formulas_and_its_gradient_the_identity(bits: int, groups: int, symmetric: bool) -> None:
    torch.manual_seed(1)
    values = torch.randn(6, 10, requires_grad=True)
    rounded = round_straight_through(values, bits, groups, symmetric=symmetric)
    torch.testing.assert_close(rounded, reference(values.detach(), bits, groups, symmetric), rtol=1e-5, atol=1e-6)
    weights = torch.randn(6, 10)
    (rounded * weights).sum().backward()
    assert torch.equal(values.grad, weights)


def test_stochastic_rounding_is_unbiased() -> None:
    values = torch.full((4000,), 0.3)
    values[0] = 1.0
    mean = round_straight_through(values, 3, 1, noise=torch.Generator().manual_seed(0))[1:].mean()
    assert abs(float(mean) - 0.3) < 0.01
    assert float(round_straight_through(values, 3, 1)[1]) == 0.25


def test_masks_keep_the_share_of_the_largest() -> None:
    scores = torch.tensor([0.5, -2.0, 3.0, 1.0, 0.0], requires_grad=True)
    mask = top_share(scores, 0.5)
    assert mask.tolist() == [1, 0, 1, 1, 0]
    (mask * torch.arange(5.0)).sum().backward()
    assert scores.grad.tolist() == [0, 1, 2, 3, 4]


def test_bits_fall_by_periods_that_double() -> None:
    rounding = WeightRounding(8, 5, period=10, offset=100)
    assert [rounding.bits(step) for step in (100, 109, 110, 129, 130, 169, 170, 10**6)] == [8, 8, 7, 7, 6, 6, 5, 5]


def test_weights_and_inputs_are_rounded_from_their_offsets_on() -> None:
    model, plain = encoder(), encoder()
    config = section(
        weight_quantization=technique(
            {"quantize_groups": 4, "schedule_offset": 2}, {"start_bits": 8, "target_bits": 8}, ["fc1", "embedding"]
        ),
        activation_quantization=technique({"schedule_offset": 3}, {"bits": 8}, "fc1"),
    )
    names = list(model.state_dict())
    assert init_compression(model, config) is model and list(model.state_dict()) == names
    compressed = [name for name, module in model.named_modules() if isinstance(module, CompressedLayer)]
    assert compressed == ["embedding", "layer.0.fc1", "layer.1.fc1"]
    clock = compression_clock(model)
    clock.step = 1
    assert torch.equal(model(IDS), plain(IDS))
    clock.step = 2
    with torch.no_grad():
        for module in (plain.embedding, plain.layer[0]["fc1"], plain.layer[1]["fc1"]):
            groups = 11 if module is plain.embedding else 4  # a scale for each token, as in DeepSpeed
            module.weight.copy_(reference(module.weight, 8, groups, True))
    torch.testing.assert_close(model(IDS), plain(IDS), rtol=1e-5, atol=1e-5)
    clock.step = 3
    for layer in plain.layer:
        layer["fc1"].register_forward_pre_hook(lambda m, i: (reference(i[0].detach(), 8, i[0][..., 0].numel(), True),))
    torch.testing.assert_close(model(IDS), plain(IDS), rtol=1e-5, atol=1e-5)
    twin = copy.deepcopy(model)
    compression_clock(twin).step = 0
    assert compression_clock(model).step == 3 and not torch.equal(twin(IDS), model(IDS)), "a copy has its own clock"


def test_mixed_weights_turn_into_rounded_ones() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    weight = model[0].weight.detach().clone()
    mixed = {"enabled": True, "quantize_change_ratio": 0.25}
    init_compression(
        model, section(weight_quantization=technique({"fp16_mixed_quantize": mixed}, {"target_bits": 2}, "*"))
    )
    rounded = reference(weight, 2, 1, True)
    for step, wide in ((0, 1.0), (1, 0.75), (3, 0.25), (4, 0.0), (9, 0.0)):
        compression_clock(model).step = step
        torch.testing.assert_close(model[0].compressed_weight(), wide * weight + (1 - wide) * rounded)


def test_schedules_count_the_last_step_of_an_engine_that_is_freed() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    init_compression(model, section(weight_quantization=technique({"schedule_offset": 1}, {"target_bits": 2}, "*")))
    config = {"train_batch_size": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    alone = not dist.is_initialized()
    engine = windlass.initialize(model=model, config=config)[0]
    engine.backward(engine(torch.ones(1, 8)).sum())
    engine.step()
    engine.destroy()
    del engine
    gc.collect()
    if alone:
        dist.destroy_process_group()
    assert compression_clock(model).step == 1 and len(model[0].compressed_weight().unique()) <= 3


def test_evaluation_without_calibration_uses_the_range_of_its_input() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    static = technique({"range_calibration": "static"}, {"bits": 8}, "*")
    init_compression(model, section(activation_quantization=static))
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    model.eval()
    expected = F.linear(x, model[0].weight, model[0].bias)
    torch.testing.assert_close(model(x), expected, atol=0.05, rtol=0)
    assert not model[0].get_buffer("input_range").any(), "an evaluation calibrates nothing"


# torch's TransformerEncoder uses nested tensors.
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_an_encoder_of_torch_evaluates_rounded_weights() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    model: Any = nn.TransformerEncoder(layer, 2).eval()
    reference = copy.deepcopy(model)
    config = section(weight_quantization=technique({}, {"target_bits": 3}, ["linear"]))
    init_compression(model, config)
    x, padding = torch.randn(2, 5, 16), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if "linear" in name and name.endswith("weight"):
                parameter.copy_(rounded_values(parameter, 3, 1))
        for mask in (None, padding):
            expected = reference(x, src_key_padding_mask=mask)
            found = model(x, src_key_padding_mask=mask)
            cleaned = redundancy_clean(copy.deepcopy(model), config)(x, src_key_padding_mask=mask)
            seen = slice(None) if mask is None else ~mask
            torch.testing.assert_close(found[seen], expected[seen], rtol=1e-5, atol=1e-5)
            assert torch.equal(cleaned, expected)
    for one, other in zip(redundancy_clean(model, config).modules(), reference.modules(), strict=True):
        assert one.__dict__.keys() == other.__dict__.keys()


@pytest.mark.parametrize("name", ["int2_g32", "int3", "int4_g32_zp", "ternary", "ternary_g32", "binary", "int8", "fp8"])
def test_weights_are_trained_in_the_format_that_packs_them(name: str) -> None:
    model = encoder()
    config = section(weight_quantization=technique({}, {"weight_format": name}, ["fc1", "embedding"]))
    init_compression(model, config)
    before, weight = model(IDS), model.layer[0]["fc1"].weight
    before.square().sum().backward()
    gradient = weight.grad.clone()
    assert float(gradient.abs().max()) > 0
    twin = copy.deepcopy(model)
    assert pack_trained_layers(model) == ["layer.0.fc1", "layer.1.fc1"]
    packed = model.layer[0]["fc1"]
    assert isinstance(packed, PackedLinear) and packed.format.name == name
    assert torch.equal(packed.unpack(), twin.layer[0]["fc1"].compressed_weight().detach())
    redundancy_clean(model, config)
    torch.testing.assert_close(model(IDS), before, rtol=1e-4, atol=1e-5)
    redundancy_clean(twin, config)
    torch.testing.assert_close(twin(IDS), before, rtol=1e-4, atol=1e-5)
    assert len(model.embedding.weight.unique()) <= 11 * 256


def test_a_trained_layer_used_in_two_places_is_packed_in_both() -> None:
    layer = nn.Linear(32, 32)
    model = nn.Sequential(layer, layer)
    init_compression(model, section(weight_quantization=technique({}, {"weight_format": "int4_g32"}, "*")))
    assert pack_trained_layers(model) == ["0"]
    assert isinstance(model[0], PackedLinear) and model[1] is model[0]


def test_static_ranges_follow_the_inputs_while_training() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    init_compression(
        model,
        section(activation_quantization=technique({"range_calibration": "static"}, {"bits": 8}, "*")),
    )
    first, second = torch.linspace(-1, 3, 8).view(2, 4), torch.linspace(-2, 1, 8).view(2, 4)
    model(first)
    assert model[0].input_range.tolist() == [-1, 3]
    model(second)
    torch.testing.assert_close(model[0].input_range, 0.95 * torch.tensor([-1.0, 3]) + 0.05 * torch.tensor([-2.0, 1]))
    span = model[0].input_range.clone()
    x = second.clone().requires_grad_()
    out = model.eval()(x)
    assert torch.equal(model[0].input_range, span)
    scale = 2 * float(span.abs().max()) / 256
    wanted = (second / scale).round().clamp(-128, 127) * scale
    torch.testing.assert_close(out, F.linear(wanted, model[0].weight, model[0].bias))
    out.sum().backward()
    torch.testing.assert_close(x.grad, model[0].weight.sum(0).expand(2, 4))


def test_inputs_of_convolutions_have_a_range_for_each_sample() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 2))
    init_compression(model, section(activation_quantization=technique({}, {"bits": 4}, "*")))
    images = torch.randn(2, 2, 5, 6)
    for given, samples in ((images, 2), (images[0], 1)):
        wanted = F.conv2d(reference(given, 4, samples, True), model[0].weight, model[0].bias)
        torch.testing.assert_close(model(given), wanted, rtol=1e-5, atol=1e-5)


def test_quantize_training_keeps_the_bits_of_the_last_step_beside_a_later_technique() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    later = {"schedule_offset": 1000, "method": "l1"}
    config = section(sparse_pruning=technique(later, {"dense_ratio": 0.5}, "^1$"))
    init_compression(model, config)
    bits, schedule = {"start_bits": 8, "target_bits": 3}, {"quantize_period": 10, "schedule_offset": 2}
    training = QuantizeTraining.model_validate({"quantize_bits": bits, "quantize_schedule": schedule})
    prepare_quantize_training(model, training, Eigenvalue())
    compression_clock(model).step = 12
    wanted = [reference(layer.weight.detach(), 7, 1, True) for layer in model]
    wanted[1] *= model[1].get_buffer("sparse_pruning_mask")
    redundancy_clean(model, config)
    for layer, one in zip(model, wanted, strict=True):
        torch.testing.assert_close(layer.weight.detach(), one)


@pytest.mark.parametrize("calibration", ["static", "dynamic"])
@pytest.mark.parametrize("form", ["symmetric", "asymmetric"])
def test_empty_input_changes_no_state(calibration: str, form: str) -> None:
    model = nn.Sequential(nn.Linear(4, 3))
    options = {"range_calibration": calibration, "quantization_type": form}
    init_compression(model, section(activation_quantization=technique(options, {"bits": 8}, "*")))
    state = copy.deepcopy(model.state_dict())
    x = torch.zeros(0, 4, requires_grad=True)
    model(x).sum().backward()
    assert x.grad is not None and not model[0].weight.grad.any()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("method", ["l1", "topk"])
def test_sparse_and_row_masks(method: str) -> None:
    model, plain = encoder(), encoder()
    config = section(
        sparse_pruning=technique({"method": method, "schedule_offset": 5}, {"dense_ratio": 0.25}, ["query"]),
        row_pruning=technique({"method": method}, {"dense_ratio": 0.5}, ["fc1"], related_modules=[["fc2"]]),
    )
    init_compression(model, config)
    compression_clock(model).step = 5
    with torch.no_grad():
        for layer in plain.layer:
            weight = layer["attention"].query.weight
            limit = weight.abs().flatten().sort(descending=True).values[63]
            weight.mul_(weight.abs() >= limit)
            norms = layer["fc1"].weight.abs().sum(1)
            mask = norms >= norms.sort(descending=True).values[11]
            layer["fc1"].weight.mul_(mask[:, None])
            layer["fc1"].bias.mul_(mask)
    torch.testing.assert_close(model(IDS), plain(IDS), rtol=1e-5, atol=1e-5)
    trained = dict(model.named_parameters())
    assert any("scores" in name for name in trained) == (method == "topk")
    model(IDS).square().mean().backward()
    assert all(p.grad is not None for name, p in trained.items())
    before = model(IDS).detach()
    redundancy_clean(model, config)
    assert (
        not any(isinstance(module, CompressedLayer) for module in model.modules()) and compression_clock(model) is None
    )
    assert list(model.state_dict()) == list(plain.state_dict())
    for layer in model.layer:
        assert layer["fc1"].weight.shape == (12, 16) and layer["fc2"].weight.shape == (16, 12)
        assert (layer["fc1"].out_features, layer["fc2"].in_features, len(layer["fc1"].bias)) == (12, 12, 12)
    torch.testing.assert_close(model(IDS), before, rtol=1e-5, atol=1e-5)


def test_heads_are_removed() -> None:
    model = encoder()
    related = [["query", "key", "value"]]
    config = section(
        head_pruning=technique(
            {"num_heads": 4, "method": "topk"}, {"dense_ratio": 0.5}, ["out"], related_modules=related
        )
    )
    init_compression(model, config)
    before = model(IDS).detach()
    with torch.no_grad():
        assert not torch.equal(before, encoder()(IDS))
    redundancy_clean(model, config)
    for layer in model.layer:
        attention = layer["attention"]
        assert attention.num_heads == 2 and attention.out.weight.shape == (16, 8)
        assert all(one.weight.shape == (8, 16) for one in (attention.query, attention.key, attention.value))
    torch.testing.assert_close(model(IDS), before, rtol=1e-5, atol=1e-5)


def test_channels_are_removed() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3)).eval()
    with torch.no_grad():
        model[1].running_var.uniform_(0.5, 2)
        model[1].bias.zero_()
        model[1].running_mean.zero_()  # a masked channel is zero after the norm too
    config = section(
        channel_pruning=technique({"method": "l1"}, {"dense_ratio": 0.5}, ["^0$"], related_modules=[["^1$", "^3$"]])
    )
    init_compression(model, config)
    image = torch.randn(2, 3, 9, 9)
    before = model(image).detach()
    redundancy_clean(model, config)
    assert model[0].weight.shape[0] == model[1].num_features == model[3].in_channels == 4
    torch.testing.assert_close(model(image), before, rtol=1e-5, atol=1e-5)


def test_a_related_norm_that_the_model_lacks_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.ReLU(), nn.Conv2d(8, 4, 3)).eval()
    related = [["^2$", "bn1"]]
    config = section(channel_pruning=technique({}, {"dense_ratio": 0.5}, ["^0$"], related_modules=related))
    init_compression(model, config)
    image = torch.randn(2, 3, 9, 9)
    before = model(image).detach()
    redundancy_clean(model, config)
    assert model[0].weight.shape[0] == model[2].in_channels == 4
    torch.testing.assert_close(model(image), before, rtol=1e-5, atol=1e-5)
    assert "related_modules has 'bn1', which matches no layer" in caplog.text


class TiedHead(nn.Module):
    """Embedding and head that share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 16), nn.Linear(16, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.embedding(ids))
        return out


@pytest.mark.parametrize("groups", [1, 11])
@pytest.mark.parametrize("modules", [["embedding", "head"], ["head"], ["embedding"]])
def test_a_shared_weight_keeps_the_values_that_each_layer_uses(modules: list[str], groups: int) -> None:
    torch.manual_seed(0)
    model = TiedHead()
    with torch.no_grad():
        model.embedding.weight[3, 2] = 4.0  # a positive extreme, so that rounding twice differs from rounding once
    config = section(weight_quantization=technique({"quantize_groups": groups}, {"target_bits": 4}, modules))
    init_compression(model, config)
    before = model(IDS).detach()
    redundancy_clean(model, config)
    torch.testing.assert_close(model(IDS), before)
    # an embedding has a scale for each row, so the values are equal if the head has one too
    assert (model.head.weight is model.embedding.weight) == (len(modules) == 2 and groups == 11)


def test_a_head_with_other_values_is_untied_in_the_configuration() -> None:
    from tests.causal_models import build

    model: Any = build("llama", tie_word_embeddings=True).eval()
    config = section(weight_quantization=technique({}, {"target_bits": 3}, ["lm_head"]))
    init_compression(model, config)
    before = model(IDS).logits.detach()
    redundancy_clean(model, config)
    assert model.config.tie_word_embeddings is False
    torch.testing.assert_close(model(IDS).logits, before)


def test_a_student_begins_with_layers_of_its_teacher() -> None:
    teacher, student = encoder(4), encoder(2)
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.add_(1)
    reduction = {
        "enabled": True,
        "keep_number_layer": 2,
        "module_name_prefix": "layer",
        "teacher_layer": [1, 3],
        "other_module_name": ["embedding"],
    }
    init_compression(student, section(layer_reduction=reduction), teacher_model=teacher)
    for new, old in ((0, 1), (1, 3)):
        wanted = teacher.layer[old].state_dict()
        assert all(torch.equal(value, wanted[name]) for name, value in student.layer[new].state_dict().items())
    assert torch.equal(student.embedding.weight, teacher.embedding.weight)
    with pytest.raises(ConfigError, match="pass teacher_model"):
        init_compression(encoder(2), section(layer_reduction=reduction))
    with pytest.raises(ConfigError, match="the model has 3 layers under 'layer'"):
        student_initialization(encoder(3), teacher, section(layer_reduction=reduction))
    with pytest.raises(ConfigError, match="no module 'layer.9'"):
        student_initialization(encoder(2), teacher, section(layer_reduction={**reduction, "teacher_layer": [1, 9]}))


def test_a_name_without_layers_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    model = init_compression(encoder(), section(sparse_pruning=technique({}, {"dense_ratio": 0.5}, ["fc9", "fc1"])))
    (line,) = [one.getMessage() for one in caplog.records if "no effect" in one.getMessage()]
    assert "sparse_pruning.different_groups" in line and "'fc9', which no Linear" in line
    assert any(isinstance(module, CompressedLayer) for module in model.modules())


def test_rules_without_effect_at_few_bits_are_named(caplog: pytest.LogCaptureFixture) -> None:
    asymmetric = {"quantization_type": "asymmetric"}
    shared = {**asymmetric, "rounding": "stochastic"}
    config = section(
        weight_quantization=technique(shared, {"target_bits": 2, "start_bits": 8}, ["fc1"]),
        activation_quantization=technique(asymmetric, {"bits": 1}, ["fc2"]),
    )
    init_compression(encoder(), config)
    few = QuantizeTraining.model_validate({"quantize_type": "asymmetric", "quantize_bits": {"target_bits": 1}})
    prepare_quantize_training(encoder(), few, Eigenvalue())
    where = "compression_training.{}_quantization.shared_parameters.quantization_type 'asymmetric'"
    assert [one.getMessage() for one in caplog.records] == [
        f"{where.format('weight')} and compression_training.weight_quantization.shared_parameters.rounding "
        "'stochastic': no effect at 2 bits, where a value becomes -a, 0 or a",
        f"{where.format('activation')}: no effect at 1 bit, where a value becomes sign(x) mean|x|",
        "quantize_training.quantize_type 'asymmetric': no effect at 1 bit, where a value becomes sign(x) mean|x|",
    ]
    caplog.clear()
    for rule, bits in ((asymmetric, 3), ({"quantization_type": "symmetric"}, 1)):
        init_compression(encoder(), section(weight_quantization=technique(rule, {"target_bits": bits}, ["fc1"])))
    assert not caplog.records


def test_bad_input_names_the_key() -> None:
    def refused(match: str, **techniques: Any) -> None:
        with pytest.raises(ConfigError, match=match):
            init_compression(encoder(), section(**techniques))

    refused(r'"fc\[" is not a regular expression', row_pruning=technique({}, {"dense_ratio": 0.5}, ["fc["]))
    refused(
        "num_heads is 3, which does not divide the 16",
        head_pruning=technique({"num_heads": 3}, {"dense_ratio": 0.5}, "out"),
    )
    refused("dense_ratio: None; write", sparse_pruning=technique({}, {}, ["fc1"]))
    refused(
        "method: .movement.; write l1 or topk or snip_momentum",
        sparse_pruning=technique({"method": "movement"}, {"dense_ratio": 0.5}, "fc1"),
    )
    refused("weight_format: .*'int9'", weight_quantization=technique({}, {"weight_format": "int9"}, ["fc1"]))
    both = {"weight_format": "int4", "target_bits": 4}
    refused("weight_format beside bits", weight_quantization=technique({}, both, ["fc1"]))
    refused("target_bits: missing", weight_quantization=technique({}, {}, ["fc1"]))
    refused("quantize_groups is 7", weight_quantization=technique({"quantize_groups": 7}, {"target_bits": 8}, ["fc1"]))
    refused(
        "start_bits 4 and target_bits 8", weight_quantization=technique({}, {"start_bits": 4, "target_bits": 8}, "*")
    )
    snip = {"method": "snip_momentum", "schedule_offset": 9, "schedule_offset_end": 5}
    refused(
        "schedule_offset_end: 5, before schedule_offset 9", sparse_pruning=technique(snip, {"dense_ratio": 0.5}, "fc1")
    )
    mixed = {"fp16_mixed_quantize": {"enabled": True, "quantize_change_ratio": -1}}
    refused("quantize_change_ratio: -1.0; write", weight_quantization=technique(mixed, {"target_bits": 4}, ["fc1"]))
    two = technique({}, {"bits": 8}, ["fc1", "fc"])  # one group may name a layer twice
    init_compression(encoder(), section(activation_quantization=two))
    two["different_groups"]["more"] = {"params": {"bits": 4}, "modules": ["fc1"]}
    refused(r"different_groups.more names '.*fc1', as another group does", activation_quantization=two)
    with pytest.raises(ConfigError, match="no section 'compression_training'"):
        init_compression(encoder(), {"train_batch_size": 1})
    with pytest.raises(ConfigError, match="the model that init_compression prepared"):
        redundancy_clean(encoder(), section())
    enabled = CompressionTraining.model_validate({"row_pruning": technique({}, {"dense_ratio": 0.5}, ["fc1"])})
    with pytest.raises(ConfigError, match="the model has no compressed layers; call init_compression"):
        check_compression(encoder(), enabled)
    config = section(row_pruning=technique({}, {"dense_ratio": 0.5}, ["fc1"], related_modules=[["query"]]))
    model = init_compression(encoder(), config)
    before = copy.deepcopy(model.state_dict())
    for _ in range(2):  # the second call finds the model as it was
        with pytest.raises(
            ConfigError, match="'layer.0.attention.query', .* does not fit a mask of 24 from 'layer.0.fc1'"
        ):
            redundancy_clean(model, config)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert compression_clock(model).step == 0


def test_the_techniques_of_an_example_for_bert_leave_its_function(caplog: pytest.LogCaptureFixture) -> None:
    """Names, periods of 0 steps and expressions are those of configurations for BERT that are in use."""
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "num_attention_heads": 4, "intermediate_size": 32, "num_hidden_layers": 2}
    model: Any = BertForSequenceClassification(BertConfig(vocab_size=41, max_position_embeddings=16, **sizes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    bits = {"start_bits": 4, "target_bits": 4, "quantization_period": 0}
    late = {"schedule_offset": 2000, "method": "topk"}
    config = section(
        weight_quantization=technique({"quantize_groups": 8}, bits, ["attention.self", "word_embeddings"]),
        sparse_pruning=technique({"schedule_offset": 2000}, {"dense_ratio": 0.5}, ["pooler.dense"]),
        row_pruning=technique(
            late, {"dense_ratio": 0.5}, ["intermediate.dense"], related_modules=[["layer.\\w+.output.dense"]]
        ),
        head_pruning=technique(
            {**late, "num_heads": 4}, {"dense_ratio": 0.5}, ["attention.output.dense"],
            related_modules=[["self.query", "self.key", "self.value"]],
        ),
    )  # fmt: skip
    init_compression(model, config)
    compression_clock(model).step = 2000
    ids = torch.arange(1, 13).view(2, 6)
    before = model(ids).logits.detach()
    redundancy_clean(model, config)
    layer = model.bert.encoder.layer[1]
    assert layer.attention.self.query.weight.shape == (12, 24) and layer.output.dense.weight.shape == (24, 16)
    torch.testing.assert_close(model(ids).logits, before, rtol=1e-5, atol=1e-5)
    assert not caplog.records


def test_snip_without_groups_prunes_all_layers_that_are_not_excluded() -> None:
    shared = {"method": "snip_momentum", "block_pattern": "1x1", "dense_ratio": 0.5, "excluded_modules": ["attention"]}
    config = section(sparse_pruning={**technique(shared, {}, []), "different_groups": {}})
    model = init_compression(encoder(), config)
    found = [name for name, module in model.named_modules() if isinstance(module, CompressedLayer)]
    masked = [name for name in found if model.get_submodule(name).compression.prunings]
    assert masked == ["layer.0.fc1", "layer.0.fc2", "layer.1.fc1", "layer.1.fc2"]


def test_constant_outputs_of_masked_channels_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3)).eval()
    with torch.no_grad():
        model[1].bias.fill_(0.5)
    related = [["^1$", "^3$"]]
    config = section(channel_pruning=technique({}, {"dense_ratio": 0.5}, ["^0$"], related_modules=related))
    redundancy_clean(init_compression(model, config), config)
    assert "up to 0.5 behind a BatchNorm2d" in caplog.text


def test_channels_leave_a_norm_without_parameters() -> None:
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(8, affine=False)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), norm, nn.ReLU(), nn.Conv2d(8, 4, 3)).eval()
    related = [["^1$", "^3$"]]
    config = section(channel_pruning=technique({}, {"dense_ratio": 0.5}, ["^0$"], related_modules=related))
    image = torch.randn(2, 3, 9, 9)
    before = init_compression(model, config)(image).detach()
    redundancy_clean(model, config)
    assert len(norm.running_mean) == norm.num_features == model[3].in_channels == 4
    torch.testing.assert_close(model(image), before, rtol=1e-5, atol=1e-5)
