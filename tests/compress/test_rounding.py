"""Tests of post-training rounding: each method against a plain loop, and none worse than rounding to nearest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaForSequenceClassification

from tests.causal_models import VOCABULARY, build
from windlass.base.errors import ConfigError, ModelError
from windlass.compress import post_training
from windlass.compress.block_calibration import CalibratedBlock
from windlass.compress.gptq import DAMPING, ColumnOrder, gptq_codes
from windlass.compress.input_scales import activation_aware_scales, fold_scales, output_error, smoothing_scales
from windlass.compress.integer_grid import (
    CLIP_STEPS,
    IntegerGrid,
    clipped_grid,
    half_quadratic_grid,
    plain_grid,
)
from windlass.compress.low_rank import factorize_linear_layers
from windlass.compress.model_directory import ModelDirectory
from windlass.compress.packed_model import load_packed_model
from windlass.compress.post_training import METHODS, RoundingOptions, compress_directory
from windlass.compress.rotation import RotatedDirectory, random_hadamard
from windlass.kernels.weight_format import get_weight_format

FORMATS = ("int8", "int4_g32", "int4_g32_zp", "int3", "int2_g64_zp")


def matrix(rows: int = 12, columns: int = 96) -> Tensor:
    torch.manual_seed(1)
    weight = torch.randn(rows, columns) * 0.05
    weight[torch.rand(rows, columns) < 0.02] *= 8  # outliers
    return weight


def correlated_inputs(columns: int = 96, rows: int = 400) -> Tensor:
    torch.manual_seed(2)
    return torch.randn(rows, columns // 3) @ torch.randn(columns // 3, columns) + 0.3 * torch.randn(rows, columns)


def error_on(inputs: Tensor, weight: Tensor, grid: IntegerGrid, codes: Tensor) -> float:
    return float((inputs @ (grid.values(codes) - weight).t()).square().sum())


@pytest.mark.parametrize("name", FORMATS)
def test_a_whole_range_is_the_formats_own_rounding(name: str) -> None:
    form, weight = get_weight_format(name), matrix()
    grid = plain_grid(form, weight)
    packed = grid.pack(grid.codes(weight))
    own = form.pack(weight)
    assert all(torch.equal(packed[part], own[part]) for part in own) and packed.keys() == own.keys()
    assert torch.equal(grid.values(grid.codes(weight)), form.unpack(own))


@pytest.mark.parametrize("name", FORMATS)
def test_the_searched_clip_is_the_best_of_all_candidates(name: str) -> None:
    form, weight = get_weight_format(name), matrix(3)
    importance = torch.rand(96) + 0.1
    grid = clipped_grid(form, weight, importance)
    for row in range(3):
        for group in range(grid.scale.shape[1]):
            part = slice(group * grid.group, min((group + 1) * grid.group, 96))
            errors = []
            for step in range(CLIP_STEPS):
                one = plain_grid(form, weight, 1 - step * 0.5 / (CLIP_STEPS - 1))
                change = (one.values(one.codes(weight)) - weight)[row, part]
                errors.append(float((change.square() * importance[part]).sum()))
            found = (grid.values(grid.codes(weight)) - weight)[row, part]
            assert float((found.square() * importance[part]).sum()) == pytest.approx(min(errors), rel=1e-4)


@pytest.mark.parametrize("name", ["int4_g32_zp", "int3_g32"])
def test_half_quadratic_steps_equal_a_plain_loop(name: str) -> None:
    form, weight = get_weight_format(name), matrix(2, 32)
    top, zp = 2**form.bits - 1, form.has_zeros
    start, best = plain_grid(form, weight), []
    for row, values in enumerate(weight.double()):
        scale, zero, beta = float(start.scale[row, 0]), float(start.zero[row, 0]), 10.0
        rounded = []
        for _ in range(21):
            codes = [min(max(round(float(w) / scale) + zero, 0), top) for w in values]
            errors = [float(w) - (q - zero) * scale for w, q in zip(values, codes, strict=True)]
            rounded.append(sum(abs(e) ** 0.7 for e in errors))
            shrunk = [(1 if e > 0 else -1) * max(abs(e) - max(abs(e), 1e-12) ** -0.3 / beta, 0) for e in errors]
            rest = [float(w) - e for w, e in zip(values, shrunk, strict=True)]
            if zp:
                zero = float(round(sum(q - r / scale for q, r in zip(codes, rest, strict=True)) / len(rest)))
                zero = min(max(zero, 0), top)
            squares = sum((q - zero) ** 2 for q in codes)
            scale = sum(r * (q - zero) for q, r in zip(codes, rest, strict=True)) / squares
            scale, beta = float(torch.tensor(scale).half()), beta * 1.01
        best.append(min(rounded))
    grid = half_quadratic_grid(form, weight)
    losses = (grid.values(grid.codes(weight)) - weight).abs().pow(0.7).sum(1)
    assert losses.tolist() == pytest.approx(best, rel=1e-3)
    plain = (start.values(start.codes(weight)) - weight).abs().pow(0.7).sum(1)
    assert bool((losses < plain).all())


def textbook_gptq(form: Any, weight: Tensor, hessian: Tensor, order: Tensor) -> tuple[IntegerGrid, Tensor]:
    """Round column by column with the inverse Hessian of the remaining columns, without factors and blocks, float64."""
    grid = clipped_grid(form, weight, hessian.diagonal().float())
    wide = hessian.double() + DAMPING * hessian.diagonal().mean() * torch.eye(len(hessian), dtype=torch.float64)
    scale, zero = grid.spread(grid.scale, weight.shape[1]), grid.spread(grid.zero, weight.shape[1])
    left, codes = weight.double().clone(), torch.empty_like(weight)
    for place, column in enumerate(order.tolist()):
        remaining = order[place:]
        inverse = torch.linalg.inv(wide[remaining][:, remaining])
        codes[:, column] = grid.column_codes(left[:, column].float(), scale[:, column], zero[:, column])
        value = (codes[:, column] - zero[:, column]) * scale[:, column]
        error = (left[:, column] - value) / inverse[0, 0]
        left[:, remaining] -= error[:, None] * inverse[0]
    return grid, codes


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("name", ["int4_g32", "int3", "int2_g64_zp"])
def test_gptq_equals_the_textbook_loop(name: str, ordered: bool) -> None:
    form, weight, inputs = get_weight_format(name), matrix(12, 160), correlated_inputs(160)
    inputs[:, 5] = 0  # a feature that is 0 in all inputs
    hessian = (inputs.t() @ inputs).double()
    reference = hessian.clone()
    reference[5, 5] = 1.0
    order = torch.argsort(hessian.diagonal(), descending=True, stable=True) if ordered else torch.arange(160)
    grid, codes = gptq_codes(form, weight, ColumnOrder.of(hessian, activation_order=ordered))
    wanted_grid, wanted = textbook_gptq(form, weight, reference, order)
    assert torch.equal(grid.scale, wanted_grid.scale)
    assert float((codes != wanted).float().mean()) < 0.01, "codes differ only where float32 decides a tie"
    nearest = clipped_grid(form, weight, hessian.diagonal().float())
    assert error_on(inputs, weight, grid, codes) < 0.7 * error_on(inputs, weight, nearest, nearest.codes(weight))


def test_gptq_refuses_inputs_that_are_not_finite() -> None:
    hessian = torch.full((96, 96), float("nan"), dtype=torch.float64)
    with pytest.raises(ModelError, match="not finite"):
        ColumnOrder.of(hessian)


def test_activation_aware_scales_equal_a_search_on_the_inputs() -> None:
    form, inputs = get_weight_format("int3_g32"), correlated_inputs() * torch.logspace(-1.5, 0.5, 96)
    weights = [matrix(), matrix(7).flip(1).contiguous()]
    hessian = (inputs.t() @ inputs).double()
    scales, before, after = activation_aware_scales(inputs.abs().mean(0), weights, [form, form], hessian)
    errors = []
    for step in range(20):
        s = inputs.abs().mean(0) ** (step / 20)
        s = s / (s.max() * s.min()).sqrt()
        rounded = [form.unpack(form.pack(weight * s)) for weight in weights]
        outputs = [(inputs / s) @ r.t() - inputs @ w.t() for r, w in zip(rounded, weights, strict=True)]
        errors.append(float(sum(one.square().sum() for one in outputs)))
    assert before == pytest.approx(errors[0], rel=1e-2) and after == pytest.approx(min(errors), rel=1e-2)
    best = inputs.abs().mean(0) ** (errors.index(min(errors)) / 20)
    torch.testing.assert_close(scales, best / (best.max() * best.min()).sqrt())
    assert after < 0.8 * before


def test_smoothing_takes_outliers_from_the_inputs() -> None:
    inputs, weight = correlated_inputs(), matrix()
    inputs[:, 7] *= 50
    scales = smoothing_scales(inputs.abs().amax(0), [weight[:5], weight[5:]])
    torch.testing.assert_close(scales, (inputs.abs().amax(0) / weight.abs().amax(0)).sqrt())
    norm, layer = nn.LayerNorm(96), nn.Linear(96, 12)
    with torch.no_grad():
        norm.weight.copy_(torch.rand(96) + 0.5)
        norm.bias.copy_(torch.randn(96))
        before = layer(norm(inputs))
        fold_scales(norm, [layer], scales)
        torch.testing.assert_close(layer(norm(inputs)), before, rtol=1e-5, atol=1e-5)


# --------------------------------------------------------------------------------------------------- whole directories


def saved(directory: Path, name: str = "llama", **changes: Any) -> Any:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": 64, **changes}
    model = build(name, 3, **sizes).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # uneven norms, as trained models have them
                parameter.mul_(torch.logspace(-0.6, 0.6, len(parameter))[torch.randperm(len(parameter))])
    model.save_pretrained(directory)
    return model


def text(rows: int = 8, length: int = 32) -> list[Tensor]:
    torch.manual_seed(5)
    return list(torch.randint(0, VOCABULARY, (rows, length)).split(2))


def divergence(model: Any, other: Any) -> float:
    """Return the mean KL divergence of next tokens on other text than the calibration's."""
    torch.manual_seed(6)
    ids = torch.randint(0, VOCABULARY, (8, 32))
    with torch.no_grad():
        p, q = (one(ids).logits.float().log_softmax(-1) for one in (model, other))
    return float((p.exp() * (p - q)).sum(-1).mean())


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    directory = tmp_path_factory.mktemp("models") / "wide"
    return directory, saved(directory)


def test_methods_lose_less_than_rounding_to_nearest(wide: tuple[Path, Any], tmp_path: Path) -> None:
    directory, model = wide
    losses, errors = {}, {}
    for method in METHODS:
        calls: list[tuple[int, int]] = []
        _, results = compress_directory(
            directory,
            tmp_path / method,
            "int3_g32",
            RoundingOptions(method),
            batches=text() if method in ("gptq", "awq") else (),
            progress=lambda done, total, calls=calls: calls.append((done, total)),
        )
        assert calls[-1] == (14, 14) and len(results) == 14
        losses[method] = divergence(model, load_packed_model(tmp_path / method))
        errors[method] = sum(one.error or 0.0 for one in results)
    plain = get_weight_format("int3_g32")
    nearest = AutoModelForCausalLM.from_pretrained(directory)
    with torch.no_grad():
        for name, module in nearest.named_modules():
            if isinstance(module, nn.Linear) and name != "lm_head":
                module.weight.copy_(plain.unpack(plain.pack(module.weight)))
    losses["plain"] = divergence(model, nearest)
    assert losses["rtn"] < losses["plain"] and losses["awq"] < losses["rtn"], losses
    assert losses["gptq"] < 0.7 * losses["plain"] and errors["gptq"] < errors["awq"], (losses, errors)


@pytest.mark.parametrize("name", ["llama", "qwen3", "cohere", "gemma2", "phi3"])
def test_folded_scales_preserve_every_family(name: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": 64}
    model = saved(tmp_path / "wide", name, **({} if name == "qwen3" else sizes))
    options = RoundingOptions("rtn", smooth=True)
    compress_directory(tmp_path / "wide", tmp_path / "int8", "int8", options, batches=text())
    assert divergence(model, load_packed_model(tmp_path / "int8")) < 2e-3


@pytest.mark.parametrize(("name", "folds"), [("gemma3", False), ("llama", True)])
def test_folds_are_checked_beside_a_token_of_large_hidden_states(name: str, folds: bool, tmp_path: Path) -> None:
    model = saved(tmp_path / "wide", name, head_dim=16)
    with torch.no_grad():
        model.model.embed_tokens.weight[1, 5] = 4000.0  # as first tokens of trained models have them
    model.save_pretrained(tmp_path / "wide")
    batches = [torch.cat([torch.ones_like(batch[:, :1]), batch[:, 1:].clamp(min=2)], 1) for batch in text()]
    options = RoundingOptions("rtn", smooth=True)
    compress_directory(tmp_path / "wide", tmp_path / "int8", "int8_g32", options, batches=batches)
    before, after = (load_file(tmp_path / one / "model.safetensors") for one in ("wide", "int8"))
    norms = [one for one in before if one.endswith("input_layernorm.weight")]
    assert [not torch.equal(before[one], after[one]) for one in norms] == [folds] * len(norms)
    with torch.no_grad():
        wanted, found = (one(batches[0]).logits[:, 1:] for one in (model, load_packed_model(tmp_path / "int8")))
    assert float((found - wanted).norm() / wanted.norm()) < 0.1


def test_smoothing_preserves_the_function_before_rounding(
    wide: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, model = wide
    # "fp32" rounds nothing, so that only folded scales change the weights
    monkeypatch.setattr("windlass.compress.post_training.is_integer_format", lambda form: True)
    changed: list[str] = []
    from windlass.compress import post_training

    monkeypatch.setattr(
        post_training.PostTraining,
        "_round_layer",
        lambda self, layer, linear, form, statistics: changed.append(layer) or form.pack(linear.weight),
    )
    options = RoundingOptions("rtn", smooth=True)
    compress_directory(directory, tmp_path / "same", "fp32", options, batches=text())
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "same")
    ids = text()[0]
    with torch.no_grad():
        torch.testing.assert_close(found(ids).logits, model(ids).logits, rtol=1e-5, atol=1e-5)
    norm = found.model.layers[0].input_layernorm.weight
    assert not torch.allclose(norm, model.model.layers[0].input_layernorm.weight) and len(changed) == 14


class Expert(nn.Module):
    """Two layers around a square, so that scales cannot be folded, for inputs with a positive first feature."""

    def __init__(self) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(4, 6), nn.Linear(6, 4)
        self.empty_calls = False

    def forward(self, hidden: Tensor) -> Tensor:
        rows = hidden[..., 0] > 0
        if not rows.any() and not self.empty_calls:
            return hidden
        out = hidden.clone()
        out[rows] = hidden[rows] + self.down_proj(torch.relu(self.up_proj(hidden[rows])).square())
        return out


@pytest.mark.parametrize("empty_calls", [False, True])
@torch.no_grad()
def test_scales_of_layers_that_the_first_batch_does_not_reach_are_not_folded(empty_calls: bool) -> None:
    torch.manual_seed(0)
    module = Expert()
    module.empty_calls = empty_calls
    hidden = [torch.randn(1, 3, 4) for _ in range(2)]
    for one, sign in zip(hidden, (-1, 1), strict=True):
        one[..., 0] = sign
    block = CalibratedBlock("layers.0", module, hidden, [((), {})] * 2)
    before = [block.run(batch) for batch in range(2)]
    scales = torch.linspace(0.5, 2.0, 6)
    assert not post_training._fold_if_preserved(block, module.up_proj, [module.down_proj], scales, before[0])
    torch.testing.assert_close(block.run(1), before[1])


@pytest.mark.parametrize(("name", "tied"), [("llama", False), ("llama", True), ("qwen3", False)])
def test_rotation_preserves_the_function_and_spreads_outliers(name: str, tied: bool, tmp_path: Path) -> None:
    model = saved(tmp_path / "wide", name, tie_word_embeddings=tied)
    directory = RotatedDirectory(ModelDirectory(tmp_path / "wide"))
    assert not any(directory.can_map(place) for place in directory.places)  # rotated values are not in the file
    twin = type(model)(type(model.config)(**{**model.config.to_dict(), "tie_word_embeddings": False})).eval()
    twin.load_state_dict({place: directory.read(place) for place in directory.places})
    ids = text()[0]
    with torch.no_grad():
        torch.testing.assert_close(twin(ids).logits, model(ids).logits, rtol=1e-5, atol=1e-5)
    options = RoundingOptions("rtn", rotate=True)
    compress_directory(tmp_path / "wide", tmp_path / "int8", "int8", options)
    assert divergence(model, load_packed_model(tmp_path / "int8")) < 2e-3
    report, _ = compress_directory(tmp_path / "wide", tmp_path / "head", "int8", options, head=True)
    assert "lm_head" in report.layers and not report.kept
    assert divergence(model, load_packed_model(tmp_path / "head")) < 2e-3


def test_a_stored_copy_of_a_tied_head_is_rotated_to_a_head_of_its_own(tmp_path: Path) -> None:
    model = saved(tmp_path / "wide", "llama", tie_word_embeddings=True)
    file = tmp_path / "wide" / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, file, {"format": "pt"})
    compress_directory(tmp_path / "wide", tmp_path / "int8", "int8", RoundingOptions("rtn", rotate=True))
    assert divergence(model, load_packed_model(tmp_path / "int8")) < 2e-3


def test_rotation_of_a_classifier_is_refused(tmp_path: Path) -> None:
    config = build("llama").config
    config.num_labels, config.pad_token_id = 3, 0
    LlamaForSequenceClassification(config).save_pretrained(tmp_path / "wide")
    with pytest.raises(ModelError, match="has the tensor 'score.weight', e.g. of a classifier"):
        compress_directory(tmp_path / "wide", tmp_path / "no", "int8", RoundingOptions(rotate=True))


def test_rotation_of_factorized_layers_is_refused(tmp_path: Path) -> None:
    model = build("llama")
    factorize_linear_layers(model, 0.5, lambda name: "mlp" in name)
    model.save_pretrained(tmp_path / "wide")
    with pytest.raises(ModelError, match="has layers in two factors.*leave out rotate"):
        compress_directory(tmp_path / "wide", tmp_path / "out", "int8", RoundingOptions("rtn", rotate=True))


def test_values_of_each_head_are_rotated_with_the_columns_that_read_them(tmp_path: Path) -> None:
    model = saved(tmp_path / "first", "llama", attention_bias=True)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.v_proj.weight[3] *= 30
            layer.self_attn.v_proj.bias[3] *= 30
    model.save_pretrained(tmp_path / "wide")
    directory = RotatedDirectory(ModelDirectory(tmp_path / "wide"))
    twin = type(model)(type(model.config)(**{**model.config.to_dict(), "tie_word_embeddings": False})).eval()
    twin.load_state_dict({place: directory.read(place) for place in directory.places})
    ids = text()[0]
    with torch.no_grad():
        torch.testing.assert_close(twin(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)
    name = "model.layers.0.self_attn.v_proj.weight"
    rows = [one.get_parameter(name).detach().norm(dim=1) for one in (model, twin)]
    assert float(rows[1].max() / rows[1].mean()) < 0.6 * float(rows[0].max() / rows[0].mean())


def test_hadamard_matrices_are_orthogonal() -> None:
    for size in (1, 2, 64, 96, 37):
        matrix = random_hadamard(size)
        torch.testing.assert_close(matrix @ matrix.t(), torch.eye(size, dtype=torch.float64))
    assert torch.equal(random_hadamard(64).abs(), torch.full((64, 64), 1 / 8, dtype=torch.float64))


def test_an_interrupted_run_continues_at_its_block(wide: tuple[Path, Any], tmp_path: Path) -> None:
    directory, _ = wide
    options = RoundingOptions("gptq")

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compress_directory(directory, tmp_path / "int4", "int4_g32", options, batches=text(), progress=stop)
    assert [path.name for path in tmp_path.iterdir()] == [".int4.partial"]
    _, results = compress_directory(directory, tmp_path / "int4", "int4_g32", options, batches=text())
    assert len(results) == 7, "the first block was complete"
    compress_directory(directory, tmp_path / "whole", "int4_g32", options, batches=text())
    for path in (tmp_path / "whole").iterdir():
        assert path.read_bytes() == (tmp_path / "int4" / path.name).read_bytes(), path.name


def test_one_block_is_in_memory_at_a_time(
    wide: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[int] = []
    calibrations: list[Any] = []

    class Watched(post_training.BlockCalibration):
        def block(self, number: int, read: Any) -> Any:
            found = super().block(number, read)
            calibrations.append(self)
            held.append(sum(p.nbytes for p in self.model.parameters() if not p.is_meta))
            return found

    monkeypatch.setattr(post_training, "BlockCalibration", Watched)
    compress_directory(wide[0], tmp_path / "out", "int4_g32", RoundingOptions("gptq"), batches=text())
    block = sum(p.nbytes for p in wide[1].model.layers[0].parameters())
    assert held == [block, block]


def test_bad_input_is_refused(wide: tuple[Path, Any], tmp_path: Path) -> None:
    directory, _ = wide
    with pytest.raises(ConfigError, match="method gptq needs a calibration text"):
        compress_directory(directory, tmp_path / "no", "int4_g32", RoundingOptions("gptq"))
    with pytest.raises(ConfigError, match="smoothing of int8 activations needs a calibration text"):
        compress_directory(directory, tmp_path / "no", "int8", RoundingOptions(smooth=True))
    with pytest.raises(ConfigError, match="method is 'obq'; write one of rtn, gptq"):
        compress_directory(directory, tmp_path / "no", "int8", RoundingOptions("obq"))  # type: ignore[arg-type]
    saved(tmp_path / "neox", "gpt_neox")
    with pytest.raises(ModelError, match="type 'gpt_neox', whose hidden states are not rotated"):
        compress_directory(tmp_path / "neox", tmp_path / "no", "int8", RoundingOptions(rotate=True))
    assert not (tmp_path / "no").exists()
    assert output_error(torch.zeros(2, 3), torch.eye(3)) == 0.0
