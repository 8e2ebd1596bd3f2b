"""Tests of `windlass plan`: its output, its files and refused options."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from windlass.base.errors import ConfigError, ModelError
from windlass.base.figure_file import write_figure
from windlass.cli.main import app
from windlass.plan.planned_model import build_from_name

LLAMA = {
    **{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 96, "hidden_size": 32},
    **{"intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64},
}


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "ds.json").write_text(
        json.dumps({"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}, "bf16": {"enabled": True}})
    )
    return str(tmp_path)


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["plan", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def test_json_and_picture(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    picture, figures = tmp_path / "plan.png", []

    def write(figure: Any, path: Path) -> None:
        figures.append(figure)
        write_figure(figure, path)

    monkeypatch.setattr("windlass.cli.plan_report.write_figure", write)
    options = ["--config", f"{model}/ds.json", "--world-size", "4", "--length", "16", "--gpu", "h200"]
    code, text = run(model, *options, "--json", "--picture", str(picture))
    found: dict[str, Any] = json.loads(text)
    assert code == 0 and found["missing"] == {} and found["micro_batch"] == 2 and found["world_size"] == 4
    assert list(found["moments"]) == ["init", "load", "forward", "backward", "step", "save"]
    held = found["moments"]["step"]["device"]
    # one of four ranks: 4 bytes / 4 = one byte for each parameter of the model, and padding
    assert 1 <= held["master weights"] / found["parameters"] < 1.05
    assert picture.read_bytes().startswith(b"\x89PNG")
    places = [place for place in ("device", "host", "disk") if any(m[place] for m in found["moments"].values())]
    (figure,) = figures
    assert [panel.get_title() for panel in figure.axes] == places and "device" in places
    for panel, place in zip(figure.axes, places, strict=True):
        assert [label.get_text() for label in panel.get_xticklabels()] == list(found["moments"])
        heights = {bars.get_label(): [bar.get_height() for bar in bars] for bars in panel.containers}
        tops = [0.0] * len(found["moments"])
        for number, (moment, amounts) in enumerate(found["moments"].items()):
            for kind, bars in zip(heights, panel.containers, strict=True):
                nbytes = amounts[place].get(kind, 0)
                assert heights[kind][number] * 2**30 == pytest.approx(nbytes), (place, moment, kind)
                assert bars[number].get_y() == pytest.approx(tops[number])  # on top of the bars of the kinds before it
                tops[number] += bars[number].get_height()
            assert tops[number] * 2**30 == pytest.approx(sum(amounts[place].values()))
    limits = [line.get_ydata()[0] for line in figure.axes[places.index("device")].get_lines()]
    assert limits == [pytest.approx(141, rel=0.1)]


def test_the_ladder_prints_its_choice_or_what_is_missing(model: str) -> None:
    options = [model, "--length", "16", "--world-size", "2", "--choose", "--host-memory"]
    code, text = run(*options, "1GB")
    assert code == 0 and "chosen: stage 0; the fastest one fits" in text and '"stage": 0' in text
    code, text = run(*options, "10K")
    assert code == 1 and "no configuration fits; the nearest is stage" in text
    assert "use more ranks, a smaller micro-batch, shorter samples or --nvme\n" in text
    code, text = run(*options, "10K", "--nvme", "/fast", "--disk-space", "10K")
    assert code == 1 and "use more ranks, a smaller micro-batch or shorter samples\n" in text
    assert " of host memory, " in text and " of disk space" in text


def test_the_ladder_prints_the_reason_of_each_stop(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    options = [model, "--length", "64", "--world-size", "2", "--choose", "--host-memory"]
    tried = json.loads(run(*options, "1K", "--json")[1])["tried"]
    names = [one["name"] for one in tried]
    peaks = [max(sum(kinds["host"].values()) for kinds in one["moments"].values()) for one in tried]
    limit = min(peaks)
    last = peaks.index(limit)
    assert last > 0
    _, text = run(*options, str(limit))
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if line.startswith("│")]
    lacks = [f"{(peak - limit) / 2**20:,.1f} MiB of host memory" for peak in peaks]
    missing = [(name, f"missing: {lack}") for name, lack in zip(names[:last], lacks, strict=False)]
    assert [(row[0], row[-1]) for row in rows] == [*missing, (names[last], "fits")]
    before = f"{names[last - 1]} lacks {lacks[last - 1]}"
    assert f"chosen: {names[last]}; the first one that fits; {before}\n" in text


def test_checkpointing_follows_the_configuration(model: str, tmp_path: Path) -> None:
    own = {"train_micro_batch_size_per_gpu": 2, "activation_checkpointing": {"enabled": True}}
    (tmp_path / "plain.json").write_text(json.dumps({"train_micro_batch_size_per_gpu": 2}))
    (tmp_path / "own.json").write_text(json.dumps(own))
    plain, option, key = (
        json.loads(run(model, "--length", "64", "--json", *options)[1])["moments"]
        for options in (
            ("--config", f"{model}/plain.json"),
            ("--config", f"{model}/plain.json", "--checkpointing"),
            ("--config", f"{model}/own.json"),
        )
    )
    assert key == option != plain


def test_the_ladder_skips_what_initialize_refuses(model: str, tmp_path: Path) -> None:
    (tmp_path / "diloco.json").write_text(
        json.dumps({"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "DiLoCo", "params": {"lr": 1e-3}}})
    )
    options = ["--config", f"{model}/diloco.json", "--length", "16", "--world-size", "2", "--host-memory", "10K"]
    code, text = run(model, *options, "--choose", "--json")
    found = json.loads(text)
    assert code == 1 and [one["name"] for one in found["tried"]] == ["stage 0", "stage 0, checkpointing"]
    assert len(found["refused"]) == 6 and all("DiLoCo" in one["problem"] for one in found["refused"])
    code, text = run(model, *options, "--choose")
    assert code == 1 and "refused, reason 3" in text and "reason 4" not in text
    assert 'reason 1: optimizer.type: "DiLoCo" at zero_optimization.stage 1, and every rank needs whole states' in text


def test_wrong_options_name_the_fix(model: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give MODEL or --shape"):
        run(model, "--shape", "7b")
    with pytest.raises(ConfigError, match="--choose needs a limit"):
        run(model, "--choose", "--disk-space", "1T")
    with pytest.raises(ConfigError, match="--nvme /fast has no effect without --choose"):
        run(model, "--nvme", "/fast")
    with pytest.raises(ModelError, match="no model at .*missing"):
        run(str(tmp_path / "missing"))
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "hidden_size": "wide"}))
    with pytest.raises(ModelError, match=r"Validation error for field 'hidden_size':.*\bint\b"):
        run(model)
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "num_attention_heads": 0}))
    with pytest.raises(ModelError, match="ZeroDivisionError"):
        run(model)


T5 = {
    **{"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "vocab_size": 96, "d_model": 32, "d_kv": 8},
    **{"d_ff": 64, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0, "pad_token_id": 0},
}
VIT = {
    **{"model_type": "vit", "architectures": ["ViTForImageClassification"], "hidden_size": 32, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "intermediate_size": 64, "image_size": 32, "patch_size": 8},
}
GPT2 = {"model_type": "gpt2", "vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}


@pytest.mark.parametrize("config", [T5, VIT, GPT2], ids=["t5", "vit", "gpt2"])
def test_models_of_other_tasks_are_planned(tmp_path: Path, config: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, text = run(str(tmp_path), "--json")
    found = json.loads(text)
    assert code == 0 and found["moments"]["forward"]["host"]["activations"] > 0


_TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
WHISPER = {
    **{"model_type": "whisper", "vocab_size": 96, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1},
    **{"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48},
    **{"max_source_positions": 16, "max_target_positions": 32, "num_mel_bins": 8, "pad_token_id": 0},
    **{"bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
}
CLIP = {
    **{"model_type": "clip", "projection_dim": 16},
    "text_config": {**_TOWER, "vocab_size": 96, "max_position_embeddings": 32, "eos_token_id": 2, "bos_token_id": 1},
    "vision_config": {**_TOWER, "image_size": 32, "patch_size": 8},
}
BERT = {"model_type": "bert", "vocab_size": 96, "max_position_embeddings": 64, **_TOWER}


@pytest.mark.parametrize(
    ("config", "architecture"),
    [
        (WHISPER, "WhisperForConditionalGeneration"),
        (CLIP, "CLIPModel"),
        (BERT, "BertModel"),
        (BERT, "BertForSequenceClassification"),
        (BERT, "BertForTokenClassification"),
    ],
)
def test_the_class_that_the_configuration_names_is_planned(
    tmp_path: Path, config: dict[str, Any], architecture: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": [architecture]}))
    assert type(build_from_name(str(tmp_path))).__name__ == architecture
    code, text = run(str(tmp_path), "--length", "16", "--json")
    assert code == 0 and json.loads(text)["moments"]["forward"]["host"]["activations"] > 0


def test_a_class_that_the_configuration_does_not_name_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BERT))
    with caplog.at_level("WARNING", logger="windlass"):
        built = build_from_name(str(tmp_path))
    assert type(built).__name__ in caplog.text


def test_an_encoder_decoder_is_planned_whole(tmp_path: Path) -> None:
    """BART also has a causal class, which contains only its decoder."""
    sizes = {"vocab_size": 96, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 48}
    heads = {"decoder_ffn_dim": 48, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bart", **sizes, **heads}))
    assert type(build_from_name(str(tmp_path))).__name__ == "BartForConditionalGeneration"


def test_a_pruned_and_factorized_model_has_the_sizes_of_its_tensors(tmp_path: Path) -> None:
    heads = {f"heads:transformer.h.{number}.attn": 3 for number in (0, 1)}
    (tmp_path / "config.json").write_text(json.dumps({**GPT2, "windlass_pruning": heads}))
    model = build_from_name(str(tmp_path))
    assert tuple(model.get_parameter("transformer.h.0.attn.c_attn.weight").shape) == (32, 3 * 24)
    ranks = {"model.layers.0.mlp.up_proj": 4}
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "windlass_low_rank": ranks}))
    model = build_from_name(str(tmp_path))
    assert tuple(model.get_parameter("model.layers.0.mlp.up_proj.0.weight").shape) == (4, 32)
    assert run(str(tmp_path), "--json")[0] == 0


def test_a_model_for_images_of_any_size_is_planned(tmp_path: Path) -> None:
    sizes = {"embedding_size": 4, "hidden_sizes": [4, 8], "depths": [1, 1], "layer_type": "basic"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "resnet", **sizes}))
    code, text = run(str(tmp_path), "--json")
    assert code == 0 and json.loads(text)["moments"]["backward"]["host"]["activations"] > 4 * 224 * 224


def test_a_failed_trace_is_one_error_and_no_log(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    sizes = {"vocab_size": 96, "n_embd": 32, "n_layer": 1, "n_head": 4, "rotary_dim": 64, "n_positions": 64}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gptj", **sizes}))
    with pytest.raises(ModelError, match=r"module 'transformer\.h\.0\.attn'"):
        run(str(tmp_path), "--length", "8")
    assert "failed while attempting" not in "".join(capfd.readouterr())


def test_more_tokens_than_a_model_has_positions_for_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GPT2))
    with pytest.raises(ConfigError, match="--length 65: the model has positions for 64 tokens"):
        run(str(tmp_path), "--length", "65")
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
    (tmp_path / "config.json").write_text(
        json.dumps(
            {"model_type": "roberta", "vocab_size": 96, "max_position_embeddings": 66, "pad_token_id": 1, **sizes}
        )
    )
    with pytest.raises(ConfigError, match="--length 65: the model has positions for 64 tokens"):
        run(str(tmp_path), "--length", "65")


def test_a_model_without_a_known_task_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "clap"}))
    with pytest.raises(ModelError, match="of type clap has no class for CausalLM"):
        run(str(tmp_path))
