"""Tests that a calibration computes the hidden states of the whole model, or raises an error with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.tiny_causal_configs import VOCABULARY, make_tiny_model
from windlass.base.errors import ModelError
from windlass.compress.block_calibration import BlockCalibration, CalibratedBlock, InputStatistics
from windlass.compress.model_directory import ModelDirectory
from windlass.compress.post_training import RoundingOptions, compress_directory


def batches() -> list[Tensor]:
    ids = torch.randint(5, VOCABULARY, (2, 2, 12), generator=torch.Generator().manual_seed(0))
    return list(ids)


def calibration(name: str, path: Path) -> tuple[BlockCalibration, torch.nn.Module]:
    model = make_tiny_model(name)
    model.save_pretrained(path)
    return BlockCalibration(ModelDirectory(path), batches()), model


def test_calibration_ends_before_layers_that_the_files_lack(tmp_path: Path) -> None:
    import transformers

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.BertConfig(vocab_size=VOCABULARY, **sizes)
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path)
    found = BlockCalibration(ModelDirectory(tmp_path), batches())
    assert found.model.cls.predictions.transform.dense.weight.is_meta
    found.start()
    assert [block.shape for block in found.block(0, found.directory.read).hidden] == [(2, 12, 32)] * 2


@pytest.mark.parametrize(
    "name",
    [
        "gemma3n_text",  # token embeddings for each block; keys and values of an earlier block
        "gemma4_text",
        "zamba2",  # weights that several blocks share; the first hidden states as input of each block
        "cpmant",  # blocks with further outputs, which no other block reads
        "prophetnet",  # an embedding whose tensor has the name of the head
    ],
)
def test_every_batch_has_the_hidden_states_of_the_whole_model(name: str, tmp_path: Path) -> None:
    found, model = calibration(name, tmp_path)
    wanted: list[Tensor] = []
    last = model.get_submodule(found.prefix)[-1]  # type: ignore[index]
    last.register_forward_hook(lambda module, given, out: wanted.append(out[0] if isinstance(out, tuple) else out))
    with torch.no_grad():
        found.start()
        for number in range(len(found.blocks)):
            block = found.block(number, found.directory.read)
            seen = [block.run(batch) for batch in range(2)]
            found.advance(block)
        for batch in batches():
            model(batch, use_cache=False)
    for one, other in zip(seen, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("hy_v4", "a block passes more to the next one"),
        ("blt", "hidden states change between two blocks"),
        ("hrm_text", "blocks run more than once"),
        ("reformer", "a block takes other arguments"),
    ],
)
def test_models_that_are_no_chain_of_blocks_are_refused(name: str, said: str, tmp_path: Path) -> None:
    found, _ = calibration(name, tmp_path)
    with pytest.raises(ModelError, match=f"{said}; use method rtn or hqq"):
        found.start()


class Experts(nn.Module):
    """Two experts, the second for tokens with a positive first feature. An expert without tokens is not called."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(4), nn.Linear(4, 4)
        self.experts = nn.ModuleList(
            nn.ModuleDict({"gate": nn.Linear(4, 6), "up": nn.Linear(4, 6), "down": nn.Linear(6, 4)}) for _ in range(2)
        )
        self.last = nn.Linear(4, 4)

    def forward(self, hidden: Tensor) -> Tensor:
        out = self.gate(self.norm(hidden))
        for number, expert in enumerate(self.experts):
            rows = (hidden[..., 0] > 0) == bool(number)
            if rows.any():
                given = hidden[rows]
                out[rows] = out[rows] + expert["down"](torch.relu(expert["gate"](given)) * expert["up"](given))
        found: Tensor = self.last(out)
        return found


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ([torch.arange(6, 18)], r"batch 0 is torch.int64 \(12,\); give ids"),
        ([torch.ones(2, 12)], r"batch 0 is torch.float32 \(2, 12\)"),
        ([[5, 6, 7]], "batch 0 is list"),
        ([torch.full((2, 12), 6), torch.full((1, 12), 6)], r"batch 1 is \(1, 12\), the first one \(2, 12\)"),
        ([torch.full((0, 12), 6)], r"batch 0 is \(0, 12\)"),
        ([torch.full((2, 12), 6), torch.full((2, 12), VOCABULARY)], rf"batch 1 of 2 rows .* ids up to {VOCABULARY}"),
    ],
    ids=str,
)
def test_batches_that_are_no_text_of_the_model_are_refused(wrong: list[Tensor], said: str, tmp_path: Path) -> None:
    make_tiny_model("llama").save_pretrained(tmp_path / "wide")
    with pytest.raises(ModelError, match=said):
        compress_directory(tmp_path / "wide", tmp_path / "out", "int8", RoundingOptions("gptq"), batches=wrong)


def test_experts_that_only_later_batches_reach_are_calibrated() -> None:
    torch.manual_seed(0)
    hidden = [torch.randn(1, 3, 4) for _ in range(3)]
    for one, sign in zip(hidden, (1, -1, -1), strict=True):
        one[..., 0] = sign
    block = CalibratedBlock("layers.0", Experts(), hidden, [((), {})] * 3)
    with torch.no_grad():
        groups = block.groups()
        statistics = block.statistics([group.names[0] for group in groups])
    assert [(group.names, group.producer) for group in groups] == [
        (["gate"], "norm"),
        (["experts.0.gate", "experts.0.up"], None),
        (["experts.0.down"], None),
        (["experts.1.gate", "experts.1.up"], None),
        (["experts.1.down"], None),
        (["last"], None),
    ]
    assert {name: one.rows for name, one in statistics.items()} == {
        "gate": 9,
        "experts.0.gate": 6,
        "experts.0.down": 6,
        "experts.1.gate": 3,
        "experts.1.down": 3,
        "last": 9,
    }
    expected = torch.cat(hidden[1:]).flatten(0, 1)
    torch.testing.assert_close(statistics["experts.0.gate"].hessian.float(), expected.t() @ expected)


def test_inputs_without_rows_add_nothing() -> None:
    statistics = InputStatistics.of(3)
    statistics.add(torch.ones(2, 3))
    statistics.add(torch.zeros(0, 3))
    assert statistics.rows == 2 and statistics.largest.tolist() == [1, 1, 1] and statistics.total.tolist() == [2, 2, 2]
