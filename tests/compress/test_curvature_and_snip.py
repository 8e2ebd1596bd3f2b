"""Tests of compression by gradients and curvature: eigenvalues of blocks, bits (MoQ), and masks (snip_momentum)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from windlass.base.errors import ConfigError, ModelError
from windlass.compress.compression_training import compression_clock, end_compression_step, init_compression
from windlass.compress.fake_rounding import rounded_values
from windlass.compress.quantize_training import SCHEDULE, bit_planner, prepare_quantize_training
from windlass.compress.redundancy_clean import redundancy_clean
from windlass.config.compression_section import Eigenvalue
from windlass.config.config_loading import load_config
from windlass.config.quantize_training_section import QuantizeTraining


class Blocks(nn.Module):
    """Blocks of two matrices; the forward returns the loss."""

    def __init__(self, blocks: int = 2, width: int = 4) -> None:
        super().__init__()
        self.layer = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(width, width), "down": nn.Linear(width, width)}) for _ in range(blocks)
        )

    def forward(self, x: Tensor) -> Tensor:
        for place, block in enumerate(self.layer):
            x = x + (place + 1) * block["down"](torch.tanh(block["up"](x)))
        return (x - 1).square().mean()


def model_and_batch() -> tuple[Blocks, Tensor]:
    torch.manual_seed(0)
    return Blocks(), torch.randn(6, 4)


def exact(model: Blocks, x: Tensor, block: int) -> float:
    """Return the eigenvalue of largest magnitude of the whole Hessian of a block's matrices."""
    names = [f"layer.{block}.{name}.weight" for name in ("up", "down")]
    start = torch.cat([model.get_parameter(name).detach().double().flatten() for name in names])
    model, x = copy.deepcopy(model).double(), x.double()

    def loss(flat: Tensor) -> Tensor:
        parts = dict(zip(names, (part.view(4, 4) for part in flat.split(16)), strict=True))
        found: Tensor = torch.func.functional_call(model, parts, x)
        return found

    values = torch.linalg.eigvalsh(torch.autograd.functional.hessian(loss, start))
    return float(values[values.abs().argmax()])


def moq(**more: Any) -> QuantizeTraining:
    bits = {"start_bits": 8, "target_bits": 3}
    schedule = {"quantize_period": 2, "schedule_offset": 1}
    return QuantizeTraining.model_validate({"quantize_bits": bits, "quantize_schedule": schedule, **more})


EIGENVALUE = Eigenvalue(enabled=True, layer_name="layer", tol=1e-4)


@pytest.mark.parametrize("is_zero", [False, True])
def test_power_iteration_finds_the_largest_eigenvalue_of_each_block(is_zero: bool) -> None:
    model, x = model_and_batch()
    if is_zero:
        for name in ("up", "down"):
            nn.init.zeros_(model.layer[1][name].weight)
    twin = copy.deepcopy(model)
    prepare_quantize_training(model, moq(quantize_schedule={"schedule_offset": 1000}), EIGENVALUE)
    planner = bit_planner(model)
    assert planner is not None
    model(x)
    model.layer[0].eval()
    gradients = [p.grad for p in model.parameters()]
    assert planner.eigenvalues(model) == pytest.approx([exact(twin, x, 0), exact(twin, x, 1)], rel=1e-2)
    assert gradients == [None] * 8 == [p.grad for p in model.parameters()]
    assert model.training and not model.layer[0].training and model.layer[1].training


def test_bits_of_curved_blocks_fall_later() -> None:
    model, x = model_and_batch()
    prepare_quantize_training(model, moq(), EIGENVALUE)
    planner, schedule = bit_planner(model), model.get_buffer(SCHEDULE)
    assert planner is not None and schedule.tolist() == [[8, 3, 2], [8, 3, 2]]
    assert not schedule.is_floating_point(), "a buffer of the model's 16-bit dtype could not hold its steps"
    values = [0.3, -2.0]
    planner.eigenvalues = lambda *_: values  # type: ignore[method-assign]
    for step in (1, 2):
        model(x)
        planner.end_step(model, step)
    assert schedule.tolist() == [[8, 3, 2], [8, 3, 2]]
    planner.end_step(model, 3)
    assert schedule.tolist() == [[7, 7, 4], [7, 3 + 20, 20]], "factors 1 + floor(4 * 0.15) and 1 + 4"
    for step in range(4, 200):
        planner.end_step(model, step)
    assert schedule[:, 0].tolist() == [3, 6] and schedule[1, 1:].tolist() == [223, 200]
    compression_clock(model).step = 1
    assert len(model.layer[0]["up"].compressed_weight().detach().unique()) <= 2**3


def test_matrices_that_are_not_rounded_are_named(caplog: pytest.LogCaptureFixture) -> None:
    from transformers.models.falcon.modeling_falcon import FalconLinear
    from transformers.pytorch_utils import Conv1D

    model = nn.ModuleDict({"falcon": FalconLinear(8, 8), "gpt": Conv1D(8, 8), "plain": nn.Linear(8, 8)})
    prepare_quantize_training(model, moq(), Eigenvalue())
    compression_clock(model).step = 100
    for name in ("falcon", "plain"):
        assert len(model[name].compressed_weight().unique()) <= 2**3
    assert "1 matrices of other modules stay as they are: gpt.weight" in caplog.text


def test_a_cleaned_model_has_no_schedule() -> None:
    model, x = model_and_batch()
    groups = {"all": {"params": {"bits": 8}, "modules": ["up"]}}
    shared = {"enabled": True, "schedule_offset": 10**6}
    config = {"compression_training": {"activation_quantization": {"shared_parameters": shared}}}
    config["compression_training"]["activation_quantization"]["different_groups"] = groups  # type: ignore[assignment]
    init_compression(model, {"train_batch_size": 1, **config})
    prepare_quantize_training(model, moq(), EIGENVALUE)
    model.get_buffer(SCHEDULE)[:, 0] = 4
    compression_clock(model).step = 100  # inputs are not rounded yet
    expected = model(x)
    redundancy_clean(model, {"train_batch_size": 1, **config})
    assert list(model.state_dict()) == list(Blocks().state_dict())
    assert torch.equal(copy.deepcopy(model)(x), expected) and bit_planner(model) is None


def test_without_eigenvalues_bits_follow_the_steps_alone() -> None:
    model, x = model_and_batch()
    plain = model(x)
    prepare_quantize_training(model, moq(quantize_algo={"q_type": "asymmetric"}), Eigenvalue())
    assert bit_planner(model) is None and list(model.state_dict()) == list(Blocks().state_dict())
    clock = compression_clock(model)
    assert torch.equal(model(x), plain)
    for step, bits in ((1, 8), (2, 8), (3, 7), (7, 6), (15, 5), (1000, 3)):
        clock.step = step
        used = model.layer[0]["up"].compressed_weight().detach()
        assert len(used.unique()) <= 2**bits
        assert model.layer[0]["up"].compression.weight.bits(step) == bits


def test_another_section_replaces_the_first() -> None:
    model, x = model_and_batch()
    plain = model(x)
    layer = model.layer[0]["up"]
    for section, eigenvalue, bits in (
        (moq(), EIGENVALUE, 8),
        (moq(quantize_bits={"start_bits": 4, "target_bits": 4}), Eigenvalue(), 4),
        (moq(quantize_bits={"start_bits": 6, "target_bits": 3}), EIGENVALUE, 6),
    ):
        for _ in range(2):  # a second call, as by a second engine of the model, changes nothing
            prepare_quantize_training(model, section, eigenvalue)
            assert (bit_planner(model) is not None) == (SCHEDULE in model.state_dict()) == eigenvalue.enabled
            compression_clock(model).step = 1
            expected = rounded_values(layer.weight, bits, 1)
            assert torch.equal(layer.compressed_weight().detach(), expected)
            if eigenvalue.enabled:
                model.get_buffer(SCHEDULE)[:, 0] = bits = 3
    prepare_quantize_training(model, QuantizeTraining(enabled=False), EIGENVALUE)
    assert torch.equal(model(x), plain) and list(model.state_dict()) == list(Blocks().state_dict())


@pytest.mark.parametrize("rule", [{"quantize-algo": {"q_type": "asymmetric"}}, {"quantize_type": "asymmetric"}])
def test_the_spellings_of_the_tutorial_are_read(rule: dict[str, Any]) -> None:
    section = {
        "enabled": True,
        "quantize_verbose": True,
        "quantizer_kernel": True,
        "quantize_bits": {"start_bits": 8, "target_bits": 8},
        "quantize_schedule": {"quantize_period": 400, "schedule_offset": 0},
        "quantize_groups": 8,
        **rule,
    }
    model = Blocks()
    found = load_config({"train_batch_size": 1, "quantize_training": section}).quantize_training
    prepare_quantize_training(model, found, Eigenvalue())
    layer = model.layer[0]["up"]
    expected = rounded_values(layer.weight, 8, 8, symmetric=False)
    assert torch.equal(layer.compressed_weight().detach(), expected)


def test_bad_sections_name_the_key() -> None:
    def refused(match: str, section: QuantizeTraining, eigenvalue: Eigenvalue = EIGENVALUE) -> None:
        with pytest.raises(ConfigError, match=match):
            prepare_quantize_training(Blocks(), section, eigenvalue)

    refused("start_bits 3 and target_bits 8", moq(quantize_bits={"start_bits": 3, "target_bits": 8}))
    refused("quantize_groups is 3, which does not divide the 16 weights of 'layer.0.up'", moq(quantize_groups=3))
    refused("'bert.encoder.layer' and layer_num 0, but the model has 0 blocks", moq(), Eigenvalue(enabled=True))
    refused("layer_num 3, but the model has 2 blocks", moq(), Eigenvalue(enabled=True, layer_name="layer", layer_num=3))
    both = moq(quantize_type="symmetric", quantize_algo={"q_type": "asymmetric"})
    refused("quantize_type is 'symmetric' and quantize_algo.q_type 'asymmetric'; delete one", both)
    model = Blocks()
    prepare_quantize_training(model, moq(), EIGENVALUE)
    with pytest.raises(ModelError, match="copy it before initialize"):
        copy.deepcopy(model)


def snip(**shared: Any) -> dict[str, Any]:
    settings = {"enabled": True, "method": "snip_momentum", "schedule_offset": 1, "schedule_offset_end": 5}
    groups = {"group": {"params": {}, "modules": ["up"]}}
    section = {"shared_parameters": settings | {"dense_ratio": 0.25} | shared, "different_groups": groups}
    return {"train_batch_size": 6, "compression_training": {"sparse_pruning": section}}


def test_snip_prunes_by_weights_times_gradients_in_steps() -> None:
    model, x = model_and_batch()
    config = snip(schedule_offset_stride=2, block_pattern="2x1", excluded_modules=["1.up"])
    init_compression(model, config)
    layer, rate = model.layer[0]["up"], 0.1
    mask, score = torch.ones(4, 4), torch.zeros(4, 4)
    for step in range(7):
        loss = model(x)
        loss.backward()
        used = layer.weight.detach() * mask
        reference = Blocks()
        reference.load_state_dict({n: p for n, p in model.state_dict().items() if "sparse" not in n})
        reference.layer[0]["up"].weight.data.copy_(used)
        torch.testing.assert_close(loss, reference(x))
        reference(x).backward()
        product = (layer.weight.detach() * reference.layer[0]["up"].weight.grad).abs()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= rate * parameter.grad
                parameter.grad = None
        end_compression_step(model)
        if 1 <= step <= 5:
            score = 0.9 * score + product / product.mean()
            if step in (1, 3, 5):
                share = 0.25 + 0.75 * (1 - (step - 1) / 4) ** 3
                sums = score.view(2, 2, 4).sum(1)
                kept = -(-share * 8 // 1)
                limit = sums.flatten().sort(descending=True).values[int(kept) - 1]
                mask = (sums >= limit).float().repeat_interleave(2, 0)
        torch.testing.assert_close(layer.get_buffer("sparse_pruning_mask").float(), mask)
    assert mask.sum() == 4 and compression_clock(model).step == 7
    assert model.layer[1]["up"].compression.prunings == {}
    before = model(x)
    redundancy_clean(model, config)
    torch.testing.assert_close(model(x), before)
    assert int((model.layer[0]["up"].weight == 0).sum()) == 12 and list(model.state_dict()) == list(
        Blocks().state_dict()
    )
    with pytest.raises(ConfigError, match="block_pattern: .x4.; write"):
        init_compression(Blocks(), snip(block_pattern="x4"))
    with pytest.raises(ConfigError, match="block_pattern is 3x1, which does not divide the 4 outputs"):
        init_compression(Blocks(), snip(block_pattern="3x1"))


def test_snip_leaves_out_products_that_are_not_finite(caplog: pytest.LogCaptureFixture) -> None:
    model, x = model_and_batch()
    init_compression(model, snip(schedule_offset=0))
    score = model.layer[0]["up"].get_buffer("sparse_pruning_momentum")
    for rows in (x, x * torch.inf):
        model(rows).backward()
        before = score.clone()
        end_compression_step(model)
    assert float(score.sum()) > 0 and torch.equal(score, before)
    assert "step 1 has products of weights and gradients that are not finite in 'layer.0.up'" in caplog.text
