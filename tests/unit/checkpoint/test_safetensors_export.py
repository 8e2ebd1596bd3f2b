"""Tests of exports: saved values and names, files that other libraries load, and files that are kept or replaced."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, load_model

from windlass.base.errors import CheckpointError
from windlass.checkpoint import FlatShard, SavedState, list_tags, save
from windlass.checkpoint.safetensors_export import export_safetensors
from windlass.cli.export import parse_size
from windlass.cli.main import main

PLAIN = {"tied": {"head.weight": "embed.weight"}, "dtypes": {"embed.weight": "bfloat16"}}


def values(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Checkpoint of a float32 master weight of a 16-bit parameter, an fp32 parameter, states and two buffers."""
    embed, norm = values((30, 7), 1), values((7,), 2)
    cut = [FlatShard("param/embed.weight", (30, 7), 0, embed.view(-1)[:100].clone())]
    cut.append(FlatShard("param/embed.weight", (30, 7), 100, embed.view(-1)[100:].clone()))
    cut.append(FlatShard("param/norm.weight", (7,), 0, norm))
    cut.append(FlatShard("state/norm.weight/exp_avg", (7,), 0, norm))
    buffers = {"buffer/mean": values((5,), 3), "buffer/count": torch.tensor(4)}
    root = tmp_path / "run"
    save(root, "t", SavedState(cut, buffers, {**PLAIN, "trainable_only": False}))
    return root


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    return int(ended.value.code or 0)


def test_values_names_and_dtypes_are_those_of_the_model(saved: Path, tmp_path: Path) -> None:
    result = export_safetensors(saved, tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert set(written) == {"embed.weight", "norm.weight", "mean", "count"}, "tied weights once, states not at all"
    assert torch.equal(written["embed.weight"], values((30, 7), 1).bfloat16())
    assert torch.equal(written["norm.weight"], values((7,), 2)) and written["norm.weight"].dtype is torch.float32
    assert torch.equal(written["mean"], values((5,), 3)) and written["count"].item() == 4
    assert result.tied == {"head.weight": "embed.weight"} and not result.absent


@pytest.mark.parametrize("form", ["int4_g32", "range4_g64", "float8_e4m3_g64"])
def test_packed_weights_are_refused(form: str, tmp_path: Path) -> None:
    packed = torch.zeros(8, dtype=torch.uint8)
    names = f"param/up.{form}_weight_scale", "param/plain.mask_weight"
    save(tmp_path / "run", "t", SavedState([FlatShard(name, (8,), 0, packed) for name in names], {}, PLAIN))
    export_safetensors(tmp_path / "run", tmp_path / "of_any_class")
    (tmp_path / "run" / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=rf"'up\.{form}_weight_scale' \(torch\.uint8\), .* to_linear"):
        export_safetensors(tmp_path / "run", tmp_path / "out")


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(30, 7), torch.nn.Linear(7, 30, bias=False)
        self.norm = torch.nn.LayerNorm(7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mean", torch.zeros(5))
        self.register_buffer("count", torch.tensor(0))


@pytest.mark.parametrize("shard_size", ["1GB", "300B"])
def test_every_name_of_a_tied_weight_is_restored(saved: Path, tmp_path: Path, shard_size: str) -> None:
    assert run("export", str(saved / "t"), str(tmp_path / "out"), "--dtype", "fp32", "--shard-size", shard_size) == 0
    model = Tied()
    if shard_size == "1GB":
        load_model(model, tmp_path / "out" / "model.safetensors", strict=True)
    else:
        index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
        files = sorted(set(index["weight_map"].values()))
        assert len(files) == 2 and files[0] == "model-00001-of-00002.safetensors"
        assert set(index["weight_map"]) == {"embed.weight", "norm.weight", "mean", "count"}
        full = {name: load_file(tmp_path / "out" / file)[name] for name, file in index["weight_map"].items()}
        assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in full.values())
        model.load_state_dict({**full, "head.weight": full[index["metadata"]["head.weight"]]}, strict=True)
    assert torch.equal(model.head.weight, values((30, 7), 1))
    assert torch.equal(model.mean, values((5,), 3))


def test_configuration_and_tokenizer_are_copied(saved: Path, tmp_path: Path) -> None:
    (saved / "config.json").write_text('{"dtype": "float32", "n": 1}')
    (saved / "t" / "tokenizer.json").write_text("{}")
    (saved / "notes.txt").write_text("mine")
    result = export_safetensors(saved, tmp_path / "out", dtype=torch.float16)
    assert result.companions == ("config.json", "tokenizer.json")
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"dtype": "float16", "n": 1}
    assert {path.name for path in (tmp_path / "out").iterdir()} == {*result.companions, "model.safetensors"}


def test_existing_files_are_kept_without_overwrite(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine").write_text("keep")
    assert run("export", str(saved), str(out)) == 1
    assert "out exists; choose another directory" in capsys.readouterr().err
    assert (out / "mine").read_text() == "keep"
    assert run("export", str(saved), str(out), "--overwrite") == 0
    assert {path.name for path in tmp_path.iterdir()} == {"run", "out"}
    assert {path.name for path in out.iterdir()} == {"model.safetensors"}


@pytest.mark.parametrize("out", ["run", "run/t", "run/u", "."])
def test_overwrite_removes_no_checkpoint(saved: Path, tmp_path: Path, out: str) -> None:
    save(saved, "u", SavedState(), save_latest=False)
    with pytest.raises(CheckpointError, match="holds checkpoints, which would be removed"):
        export_safetensors(saved, tmp_path / out, overwrite=True)
    assert list_tags(saved) == ["t", "u"] and {path.name for path in tmp_path.iterdir()} == {"run"}
    export_safetensors(saved, saved / "hf")  # a new folder next to the folders of the tags is accepted


@pytest.mark.parametrize(
    "inner", ["checkpoint/t/checkpoint.json", ".t.replaced/checkpoint.json", "a/mp_rank_00_model_states.pt"]
)
def test_overwrite_removes_no_checkpoint_at_any_depth(saved: Path, tmp_path: Path, inner: str) -> None:
    kept = tmp_path / "other" / inner
    kept.parent.mkdir(parents=True)
    kept.write_text("{}")
    with pytest.raises(CheckpointError, match="holds checkpoints, which would be removed"):
        export_safetensors(saved, tmp_path / "other", overwrite=True)
    assert kept.exists()


def test_file_at_the_directory_path_is_replaced(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("old")
    export_safetensors(saved, tmp_path / "out", overwrite=True)
    assert {path.name for path in tmp_path.iterdir()} == {"run", "out"}


def test_export_of_trained_parameters_only_reports_the_missing_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    plain = {"trainable_only": True, "absent": ["base.weight", "base.bias"]}
    save(tmp_path / "run", "t", SavedState(tensors={"param/up.weight": torch.ones(2)}, plain=plain))
    assert run("export", str(tmp_path / "run"), str(tmp_path / "out")) == 1
    assert "2 of the model are missing: base.weight, base.bias" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert run("export", str(tmp_path / "run"), str(tmp_path / "out"), "--partial") == 0
    assert "absent, not trained (2): base.weight, base.bias" in capsys.readouterr().out
    assert set(load_file(tmp_path / "out" / "model.safetensors")) == {"up.weight"}


def test_failed_export_leaves_no_files(saved: Path, tmp_path: Path) -> None:
    path = saved / "t" / "rank_00000.safetensors"
    good = path.read_bytes()
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    with pytest.raises(CheckpointError, match="is damaged: entry"):
        export_safetensors(saved, tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"run"}


@pytest.mark.parametrize(
    ("text", "size"), [("5GB", 5 * 10**9), ("1.5 MiB", 3 * 2**19), ("7", 7), ("2kb", 2000), ("1TB", 10**12)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "0", "GB", "-1GB", "1TB!", "5 zettabytes"])
def test_invalid_sizes_are_refused(text: str) -> None:
    with pytest.raises(CheckpointError, match="is not a size"):
        parse_size(text)
