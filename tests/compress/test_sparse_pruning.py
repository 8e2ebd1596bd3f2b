"""Tests of the removal of single weights: each method against plain loops, and their order of errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.causal_models import build
from windlass.base.errors import ConfigError
from windlass.compress.gptq import DAMPING, ColumnOrder, gptq_codes
from windlass.compress.input_scales import output_error
from windlass.compress.integer_grid import clipped_grid
from windlass.compress.packed_model import load_packed_model
from windlass.compress.post_training import RoundingOptions, compress_directory
from windlass.compress.sparse_pruning import SparsePattern, parse_pattern, sparsify
from windlass.kernels.weight_format import get_weight_format


def layer(columns: int = 32) -> tuple[Tensor, Tensor]:
    torch.manual_seed(4)
    inputs = torch.randn(300, 8) @ torch.randn(8, columns) + 0.3 * torch.randn(300, columns)
    inputs *= torch.rand(columns) * 3
    return torch.randn(10, columns), (inputs.t() @ inputs).double()


@pytest.mark.parametrize("pattern", ["0.5", "2:4", "0.3"])
@pytest.mark.parametrize("method", ["magnitude", "wanda"])
def test_scores_are_those_of_plain_loops(method: str, pattern: str) -> None:
    weight, hessian = layer()
    found = sparsify(weight, parse_pattern(pattern), method, hessian)
    for row in range(len(weight)):
        scores = [abs(float(w)) * (float(hessian[j, j]) ** 0.5 if method == "wanda" else 1) for j, w in
                  enumerate(weight[row])]  # fmt: skip
        groups = [range(s, s + 4) for s in range(0, 32, 4)] if ":" in pattern else [range(32)]
        kept: set[int] = set()
        for group in groups:
            count = 2 if ":" in pattern else 32 - round(float(pattern) * 32)
            kept |= set(sorted(group, key=lambda j: -scores[j])[:count])
        assert {j for j in range(32) if found[row, j] != 0} == kept
        assert all(found[row, j] == weight[row, j] for j in kept)


def test_sparsegpt_equals_the_textbook() -> None:
    """The textbook chooses the mask, then prunes column by column with the inverse Hessian of the remaining columns."""
    weight, hessian = layer()
    wide = hessian + DAMPING * hessian.diagonal().mean() * torch.eye(32, dtype=torch.float64)
    left, found = weight.double().clone(), torch.zeros_like(weight, dtype=torch.float64)
    diagonal = torch.stack([torch.linalg.inv(wide[c:, c:])[0, 0] for c in range(32)])
    stays = torch.zeros(10, 32, dtype=torch.bool)
    scores = left.square() / diagonal
    stays.scatter_(1, scores.argsort(1, descending=True)[:, :16], True)
    for column in range(32):
        inverse = torch.linalg.inv(wide[column:, column:])
        found[:, column] = left[:, column] * stays[:, column]
        error = (left[:, column] - found[:, column]) / inverse[0, 0]
        left[:, column:] -= error[:, None] * inverse[0]
    ours = sparsify(weight, SparsePattern(0.5), "sparsegpt", hessian)
    torch.testing.assert_close(ours.double(), found, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("pattern", ["0.5", "2:4"])
def test_methods_that_see_the_inputs_lose_less(pattern: str) -> None:
    weight, hessian = layer(256)
    errors = []
    for method in ("sparsegpt", "wanda", "magnitude"):
        found = sparsify(weight, parse_pattern(pattern), method, hessian)
        assert int((found == 0).sum()) == weight.numel() // 2
        errors.append(output_error(found - weight, hessian))
    assert errors == sorted(errors) and errors[0] < 0.7 * errors[1]


@pytest.mark.parametrize("pattern", ["0.5", "2:4"])
def test_of_features_that_the_text_never_uses_the_largest_weights_stay(pattern: str) -> None:
    torch.manual_seed(6)
    weight, unused = torch.randn(10, 32), torch.zeros(32, 32, dtype=torch.float64)
    found = sparsify(weight, parse_pattern(pattern), "sparsegpt", unused)
    assert torch.equal(found, sparsify(weight, parse_pattern(pattern), "magnitude", None))


@pytest.mark.parametrize("pattern", ["0.5", "2:4"])
def test_weights_of_features_that_are_always_zero_are_removed_first(pattern: str) -> None:
    torch.manual_seed(5)
    inputs = torch.randn(400, 32) * 0.02
    inputs[:, ::2] = 0  # e.g. dead neurons of a ReLU
    weight, hessian = torch.randn(10, 32), (inputs.t() @ inputs).double()
    for method in ("wanda", "sparsegpt"):
        found = sparsify(weight, parse_pattern(pattern), method, hessian)
        assert torch.equal(found[:, 1::2], weight[:, 1::2])
        assert not found[:, ::2].any()


@pytest.mark.parametrize("method", ["sparsegpt", "magnitude"])
def test_a_sparse_directory_loads_with_transformers(method: str, tmp_path: Path) -> None:
    model: Any = build("llama", hidden_size=32).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "wide")
    batches = [torch.arange(40).view(2, 20)]
    options = RoundingOptions(sparsity="2:4", sparsity_method=method)
    report, _ = compress_directory(tmp_path / "wide", tmp_path / "sparse", "bf16", options, batches=batches)
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "sparse", dtype=torch.bfloat16)
    assert report.bytes_after == report.bytes_before and not hasattr(found.config, "quantization_config")
    for name in report.layers:
        weight = found.get_submodule(name).weight
        assert int((weight.view(-1, 4) != 0).sum(1).max()) <= 2


@pytest.mark.parametrize("form", ["int4_g32", "int4_g32_zp", "int3", "int8", "fp8", "ternary_g32"])
@pytest.mark.parametrize("method", ["rtn", "hqq", "awq", "gptq"])
def test_removed_weights_stay_zero_in_every_format(form: str, method: Any, tmp_path: Path) -> None:
    model: Any = build("llama", hidden_size=64, intermediate_size=96)
    model.save_pretrained(tmp_path / "wide")
    batches = [torch.randint(0, 40, (4, 20), generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
    options = RoundingOptions(method, sparsity="2:4")
    report, results = compress_directory(tmp_path / "wide", tmp_path / "sparse", form, options, batches=batches)
    found = load_packed_model(tmp_path / "sparse")
    dense, _ = compress_directory(tmp_path / "wide", tmp_path / "dense", form, RoundingOptions(method), batches=batches)
    assert report.layers == dense.layers and max(one.error or 0 for one in results) < 0.6
    for name in report.layers:
        layer: Any = found.get_submodule(name)
        weight = layer.unpack()
        assert int((weight.view(-1, 4) != 0).sum(1).max()) <= 2, name
        assert float((weight != 0).float().mean()) > 0.25, name


def test_gptq_compensates_around_removed_weights() -> None:
    weight, hessian = layer(128)
    form = get_weight_format("int4_g32")
    kept = sparsify(weight, parse_pattern("2:4"), "sparsegpt", hessian)
    grid, codes = gptq_codes(form, kept, ColumnOrder.of(hessian), kept != 0)
    assert not grid.values(codes)[kept == 0].any()
    nearest = clipped_grid(form, kept, hessian.diagonal().float())
    errors = [output_error(one - weight, hessian) for one in (grid.values(codes), nearest.values(nearest.codes(kept)))]
    assert errors[0] < errors[1]


def test_bad_input_is_refused_with_the_reason(tmp_path: Path) -> None:
    weight, hessian = layer(30)
    for text in ("0", "1.5", "4:2", "half"):
        with pytest.raises(ConfigError, match="write a share like 0.5, or n:m like 2:4"):
            parse_pattern(text)
    with pytest.raises(ConfigError, match="2:4 does not divide the 30 input features"):
        sparsify(weight, parse_pattern("2:4"), "magnitude")
    with pytest.raises(ConfigError, match="wanda needs a calibration text"):
        sparsify(weight, SparsePattern(0.5), "wanda")
    with pytest.raises(ConfigError, match="sparsity method is 'l1'"):
        sparsify(weight, SparsePattern(0.5), "l1", hessian)
    build("llama").save_pretrained(tmp_path / "wide")
    with pytest.raises(ConfigError, match="sparsity_method wanda needs a calibration text"):
        options = RoundingOptions(sparsity="0.5", sparsity_method="wanda")
        compress_directory(tmp_path / "wide", tmp_path / "sparse", "fp32", options)
    with pytest.raises(ConfigError, match=r"format 'binary_g32' has no code for 0; choose another"):
        options = RoundingOptions(sparsity="0.5", sparsity_method="magnitude")
        compress_directory(tmp_path / "wide", tmp_path / "sparse", "binary_g32", options)
    with pytest.raises(ConfigError, match=r"3:5 does not divide the 32 input features of layer 'model\.layers\.0"):
        options = RoundingOptions(sparsity="3:5", sparsity_method="magnitude")
        compress_directory(tmp_path / "wide", tmp_path / "sparse", "fp32", options)
    with pytest.raises(ConfigError, match="smoothing of int8 activations needs .* give some, or leave the activations"):
        compress_directory(tmp_path / "wide", tmp_path / "sparse", "int8", RoundingOptions("rtn", smooth=True))
