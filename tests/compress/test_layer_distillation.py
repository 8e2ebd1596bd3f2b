"""Tests of rounding that is learned block by block."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.compress.test_rounding import divergence, saved, text
from windlass.base.errors import ConfigError
from windlass.compress.block_calibration import CalibratedBlock
from windlass.compress.layer_distillation import LayerDistillation, LayerDistillationOptions, _start, distil_directory
from windlass.compress.model_directory import ModelDirectory
from windlass.compress.packed_model import load_packed_model
from windlass.compress.post_training import RoundingOptions, compress_directory
from windlass.kernels.weight_format import get_weight_format

GPTQ = RoundingOptions("gptq", input_scales=False)


def test_learned_codes_lose_less_than_those_they_begin_with(tmp_path: Path) -> None:
    model = saved(tmp_path / "wide")
    compress_directory(tmp_path / "wide", tmp_path / "gptq", "int3_g32", GPTQ, batches=text())
    _, blocks = distil_directory(
        tmp_path / "wide", tmp_path / "same", "int3_g32", GPTQ, LayerDistillationOptions(steps=0), batches=text()
    )
    first, same = (load_file(tmp_path / name / "model.safetensors") for name in ("gptq", "same"))
    assert blocks == [] and first.keys() == same.keys() and all(torch.equal(first[name], same[name]) for name in first)
    report, blocks = distil_directory(
        tmp_path / "wide", tmp_path / "learned", "int3_g32", None, LayerDistillationOptions(steps=60), batches=text()
    )
    assert len(blocks) == 2 and len(report.layers) == 14
    assert all(block.after < 0.95 * block.before for block in blocks), blocks
    assert divergence(model, load_packed_model(tmp_path / "learned")) < 0.1, "it is loaded as any packed directory"
    learned = load_file(tmp_path / "learned" / "model.safetensors")
    changed = [name for name in first if not torch.equal(first[name], learned[name])]
    assert changed and any("weight_packed" in name for name in changed)
    in_first_block = [name for name in first if "layers.0." in name and "scale" in name]
    assert all(torch.equal(first[name], learned[name]) for name in in_first_block), "scales stay"


class Routed(nn.Module):
    """Linear layer for all inputs, and another one for inputs with a positive first feature."""

    def __init__(self) -> None:
        super().__init__()
        self.all, self.some = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.all(hidden)
        rows = hidden[..., 0] > 0
        if rows.any():
            out[rows] = out[rows] + self.some(hidden[rows])
        return out


def test_batches_that_leave_out_an_expert_are_learned_from(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = Routed()
    hidden = [torch.randn(1, 8, 32) for _ in range(2)]
    for one, sign in zip(hidden, (-1, 1), strict=True):
        one[..., 0] = sign
    block = CalibratedBlock("layers.0", module, hidden, [((), {})] * 2)
    form = get_weight_format("int3_g32")
    layers = {block.layer(name): form.name for name in ("all", "some")}
    weights = {name: block.linear(name).weight.detach() for name in ("all", "some")}
    packed = {block.layer(name): form.pack(weight) for name, weight in weights.items()}
    with torch.no_grad():
        targets = [block.run(batch) for batch in range(2)]
    learned = [_start(block, name, weight, packed, layers) for name, weight in weights.items()]
    saved(tmp_path / "wide")
    options = LayerDistillationOptions(steps=20)
    producer = LayerDistillation(ModelDirectory(tmp_path / "wide"), GPTQ, distillation=options)
    producer._learn(block, targets, learned)
    assert producer.blocks[0].after < producer.blocks[0].before
    for one in learned:
        first = form.unpack_codes(packed[block.layer(one.name)]).codes
        assert not torch.equal(one.codes(), first.float()), one.name


def test_missing_text_and_other_methods_are_refused(tmp_path: Path) -> None:
    saved(tmp_path / "wide")
    with pytest.raises(ConfigError, match="needs a calibration text"):
        distil_directory(tmp_path / "wide", tmp_path / "out", "int3_g32")
    with pytest.raises(ConfigError, match="begins with gptq without input_scales"):
        distil_directory(tmp_path / "wide", tmp_path / "out", "int3_g32", RoundingOptions("awq"), batches=text())
