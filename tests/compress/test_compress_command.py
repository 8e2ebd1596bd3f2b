"""Tests of `windlass compress`: a table of savings and losses, and messages for unusable input."""

from __future__ import annotations

import itertools
import json
import re
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from safetensors.torch import load_file

from tests.causal_models import build
from windlass.base.errors import ModelError
from windlass.cli import compression_choice, compression_figures, compression_stages
from windlass.cli.checkpoints import format_size
from windlass.cli.compression_figures import ModelFigures, choose_method, figure_lines, format_name
from windlass.cli.main import main
from windlass.cli.model_run import RunFigures, run_model
from windlass.compress import partial_directory, post_training
from windlass.compress.calibration_text import bits_per_byte, read_calibration_text
from windlass.compress.compression_workspace import CompressionWorkspace
from windlass.compress.layer_distillation import LayerDistillationOptions, distil_directory
from windlass.compress.model_directory import ModelDirectory
from windlass.compress.packed_model import load_packed_model
from windlass.data.tokenizer import train_tokenizer
from windlass.inference.llm import LLM
from windlass.inference.sampling_params import SamplingParams
from windlass.kernels.packed_linear import PackedLinear

LINES = [
    f"the {a} {b} the {c} number {n}" for n in range(12) for a, b, c in (("fox", "sees", "dog"), ("cat", "is", "hen"))
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny model with a tokenizer; text.txt is next to it."""
    folder = tmp_path_factory.mktemp("compress")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "max_position_embeddings": 64, "vocab_size": 300}
    build("llama", **sizes).save_pretrained(folder / "wide")
    train_tokenizer(LINES, 300, folder / "wide")
    (folder / "text.txt").write_text("\n".join(LINES * 4))
    return folder / "wide"


@pytest.fixture(autouse=True)
def runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Measure runs in this process, by a clock that advances by 64 ms at each reading. Return the measured names."""
    measured: list[str] = []

    def measure_run(path: Path, **options: Any) -> RunFigures:
        measured.append(path.name)
        return run_model(path, clock=itertools.count(step=0.064).__next__, **options)

    for module in (compression_choice, compression_figures):
        monkeypatch.setattr(module, "measure_run", measure_run)
    return measured


def failed(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["compress", *map(str, arguments)])
    assert ended.value.code in (1, 2)
    return capsys.readouterr().err


def test_a_model_is_compressed_and_measured(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], runs: list[str]
) -> None:
    text = model.parent / "text.txt"
    with pytest.raises(SystemExit) as ended:
        main(["compress", str(model), str(tmp_path / "out"), "--group", "32", "--data", str(text), "--sequences", "8"])
    assert not ended.value.code
    out, err = capsys.readouterr()
    assert "14 layers as int4_g32 by gptq" in out and "not packed: lm_head: the output head stays unquantized" in out
    assert "largest error of a layer's outputs" in out
    ratio = float(out.partition("packed weights: ")[2].partition("x smaller than float32")[0])
    assert ratio == pytest.approx(32 / 4.5, rel=0.01)
    assert "14 of 14 layers" in err
    found = read_calibration_text([str(text)], model, sequences=8, length=64)
    assert all(batch.shape[1] == 64 for batch in found.batches) and found.tokens <= 8 * 64
    line = next(line for line in out.splitlines() if "held-out bits per byte" in line)
    wide = bits_per_byte(load(model), found.held_out)
    assert float(line.split()[-4]) == pytest.approx(wide, abs=1e-3)
    rows = {line[2:28].strip(): line[28:].split() for line in out.splitlines() if line.startswith("  ")}
    tokens = 64 - 8  # as many as the model has positions after the prompt
    assert rows["tokens/s, one request"] == [f"{tokens / 0.064:.1f}"] * 2 + ["1.00x"] and "all tensors" in rows
    assert rows["ms a token"] == [f"{64 / tokens:.3g}"] * 2 + ["1.00x", "less"] and runs == ["wide", "out"]
    report = json.loads((tmp_path / "out" / "compression.json").read_text())
    for name, column in (("before", 0), ("after", 2)):
        one = report[name]
        assert one["ms_per_token"] == pytest.approx(64 / tokens) and one["memory"] > one["idle_memory"] > 1 << 20
        memory = " ".join(rows["peak memory, one request"][column : column + 2])
        drawn = titles(tmp_path / "out")
        assert memory == format_size(one["memory"]) and f"peak memory, {name}: {memory}" in drawn
        assert f"held-out bits per byte, {name}: {one['bits']:.4f}" in drawn
        assert f"tokens/s, one request, {name}: {one['speed']:.1f}" in drawn
    sizes = {one["names"][0]: one for one in report["layers"]}
    packed = [name for name, one in sizes.items() if one["format"] == "int4_g32"]
    assert len(packed) == 14 and len(sizes) == 16 and sizes["lm_head"]["nbytes"] == 4 * 300 * 64
    assert "model.layers.1.mlp.up_proj: int4_g32, 32.8 kB -> 4.6 kB" in drawn
    written = (tmp_path / "out" / "compression.md").read_text()
    assert re.search(r"model\.layers\.1\.mlp\.up_proj +int4_g32 +32,768 +4,624\n", written)
    assert torch.isfinite(load_packed_model(tmp_path / "out")(torch.arange(8)[None]).logits).all()
    message = failed(capsys, model, tmp_path / "out")
    assert f"{tmp_path / 'out'} exists; choose another directory" in message


def load(path: Path) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    found: torch.nn.Module = AutoModelForCausalLM.from_pretrained(path)
    return found


def titles(path: Path) -> list[str]:
    """Return the titles of the shapes in a directory's picture, which must be well-formed."""
    root = ElementTree.fromstring((path / "compression.svg").read_text())
    return [one.text or "" for one in root.iter("{http://www.w3.org/2000/svg}title")]


def test_an_interruption_is_continued(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    packed: list[str] = []
    pack = post_training.pack_source

    def record(directory: Any, name: str, layers: Any, round_weight: Any) -> Any:
        packed.append(name)
        return pack(directory, name, layers, round_weight)

    monkeypatch.setattr(post_training, "pack_source", record)
    arguments = ["compress", str(model), str(tmp_path / "out"), "--no-measure", "--weights", "int4_g32_zp"]
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.setattr(compression_figures.StageProgress, "__call__", interrupt)
        main(arguments)
    assert ended.value.code == 130 and "interrupted after 3 layers; the same command" in capsys.readouterr().err
    first = len(packed)
    with pytest.raises(SystemExit):
        main(arguments)
    assert 3 <= first < len(packed) == len(set(packed)), "no tensor is packed twice"
    out = capsys.readouterr().out
    assert "14 layers as int4_g32_zp by hqq" in out and "held-out" not in out
    assert json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]


def test_an_interruption_before_the_directory_is_moved_costs_no_tensor(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["compress", str(model), str(tmp_path / "out"), "--no-measure", "--weights", "int4_g32_zp"]
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(partial_directory, "replace_directory", stop)
        main(arguments)
    journal = tmp_path / ".out.partial" / "journal"
    before = journal.read_text()
    assert before.count(" complete") >= 14
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(partial_directory, "replace_directory", stop)
        main(arguments)
    assert journal.read_text() == before
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 0 and not list(tmp_path.glob(".out*"))
    assert not {"plan.json", "journal"} & {path.name for path in (tmp_path / "out").iterdir()}


def interrupt(self: object, done: int, total: int) -> None:
    self.done = done  # type: ignore[attr-defined]
    if done == 3:
        raise KeyboardInterrupt


def test_bad_input_is_refused_with_the_reason(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert "rounding a trained model to so few bits" in failed(capsys, model, out, "--weights", "int2")
    assert "format 'int4_g48', which does not exist" in failed(capsys, model, out, "--group", "48")
    assert "needs a calibration text" in failed(capsys, model, out, "--method", "gptq", "--no-measure")
    message = failed(capsys, model, out, "--activations", "int8")
    assert "(--activations) is 'int8', which needs a calibration text; give some with --data, or leave it" in message
    assert "(--sparsity-method) is 'wanda', which needs" in failed(
        capsys, model, out, "--sparsity", "0.5", "--sparsity-method", "wanda"
    )
    assert "'int4_g64_zp', with groups of 64, and group (--group) is 128; leave" in failed(
        capsys, model, out, "--weights", "int4_g64_zp", "--group", "128"
    )
    build("gpt2").save_pretrained(tmp_path / "gpt2")
    assert "of type 'gpt2', whose hidden states are not rotated; rotation supports llama, mistral, qwen2" in failed(
        capsys, tmp_path / "gpt2", out, "--rotate", "--prune", "ffn=0.5", "--no-measure"
    )
    assert "is not a format of integers" in failed(capsys, model, out, "--weights", "fp8", "--method", "awq")
    assert "is not a model" in failed(capsys, tmp_path, out)
    assert "contains" in failed(capsys, model, model.parent, "--overwrite")
    text = model.parent / "text.txt"
    assert "is a file; choose a directory" in failed(capsys, model, text, "--overwrite")
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("ab")
    message = failed(capsys, model, tmp_path / "texts", "--overwrite", "--data", tmp_path / "texts" / "a.txt")
    assert "which is read; choose another directory" in message
    (tmp_path / "one.txt").write_text("ab")
    assert "tokens; give at least 8" in failed(capsys, model, out, "--data", tmp_path / "one.txt")
    assert not out.exists() and not (tmp_path / ".out.partial").exists()


def test_codes_are_learned_by_the_command(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = ("--data", model.parent / "text.txt", "--sequences", 4, "--length", 32, "--no-measure")
    options = ("--weights", "int3", "--group", 32)
    run(model, tmp_path / "out", *options, "--method", "lkd", "--lkd-steps", 8, *text)
    out = capsys.readouterr().out
    assert "14 layers as int3_g32 by lkd" in out and "learned codes of 2 blocks: mean error " in out
    assert "learned codes of 2 blocks" in (tmp_path / "out" / "compression.md").read_text()
    batches = read_calibration_text([str(text[1])], model, sequences=4, length=32).batches
    steps = LayerDistillationOptions(steps=8)
    distil_directory(model, tmp_path / "python", "int3_g32", distillation=steps, batches=batches)
    found, wanted = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "python"))
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in found)
    for more in (("--rotate",), ("--activations", "int8"), ("--sparsity", "0.5")):
        message = failed(capsys, model, tmp_path / "no", *options, "--method", "lkd", *more, *text)
        assert f"({more[0]}) changes weights before --method lkd learns" in message
    assert "which needs --method lkd" in failed(capsys, model, tmp_path / "no", "--lkd-steps", 3, *text)
    assert "(--method) is 'lkd', which needs a calibration" in failed(capsys, model, tmp_path / "no", "--method", "lkd")


def test_encoders_are_packed_and_not_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import transformers

    import windlass

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    kind = transformers.BertForSequenceClassification
    wide: Any = kind(transformers.BertConfig(vocab_size=50, **sizes)).eval()
    wide.save_pretrained(tmp_path / "wide")
    arguments = (tmp_path / "wide", tmp_path / "out", "--group", 32)
    assert "is a BertForSequenceClassification, whose loss and speed" in failed(capsys, *arguments)
    for options in (("--prune", "ffn=0.25", "--weights", "wide"), ("--prune", "layers=1")):
        message = failed(capsys, *arguments[:2], *options, "--no-measure")
        assert "is a BertForSequenceClassification, and only causal language models are pruned" in message
    assert not list(tmp_path.glob("*out*"))
    run(*arguments, "--no-measure")
    found: Any = windlass.from_pretrained(kind, tmp_path / "out")
    layers = {name: module for name, module in found.named_modules() if isinstance(module, PackedLinear)}
    assert len(layers) == 12
    with torch.no_grad():
        for name, module in layers.items():
            wide.get_submodule(name).weight.copy_(module.unpack())
        ids = torch.arange(5, 25).view(2, 10)
        torch.testing.assert_close(found(ids).logits, wide(ids).logits)
    transformers.ViTModel(transformers.ViTConfig(image_size=16, patch_size=8, **sizes)).save_pretrained(
        tmp_path / "vit"
    )
    message = failed(capsys, tmp_path / "vit", tmp_path / "no", "--no-measure")
    assert "for this kind of AutoModel: AutoModelForCausalLM; give a causal language model" in message


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe"])
@pytest.mark.parametrize("options", [("--weights", "int4"), ("--weights", "int8", "--group", 0), ("--sparsity", "0.5")])
def test_each_expert_is_compressed(
    name: str, options: tuple[object, ...], model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": 64, "vocab_size": 300}
    wide: Any = build(name, **sizes, tie_word_embeddings=False).eval()
    wide.save_pretrained(tmp_path / "wide")
    for path in model.glob("tokenizer*"):
        (tmp_path / "wide" / path.name).write_bytes(path.read_bytes())
    text = ("--data", model.parent / "text.txt", "--sequences", 4, "--length", 32, "--no-measure")
    group = ("--group", 32) if "int4" in options else ()
    run(tmp_path / "wide", tmp_path / "out", *options, *group, *text)
    out = capsys.readouterr().out
    report = json.loads((tmp_path / "out" / "compression.json").read_text())
    formats = {one["names"][0]: one["format"] for one in report["layers"]}
    experts = [layer for layer in ModelDirectory(tmp_path / "wide").places if ".experts." in layer]
    assert experts and all(formats[layer.removesuffix(".weight")] for layer in experts)
    for layer, chosen in formats.items():  # each matrix except the embedding is compressed or named with its reason
        assert chosen or f"{layer}," in out or f"{layer}: " in out or layer == "model.embed_tokens", layer
    ids = torch.arange(3, 23).view(1, 20)
    if "--sparsity" in options:
        found: Any = load(tmp_path / "out")
        for one in found.parameters():
            assert one.dim() != 3 or float((one == 0).float().mean()) >= 0.5
        return
    found = load_packed_model(tmp_path / "out")
    packed = {f"{n}.weight": one.unpack() for n, one in found.named_modules() if isinstance(one, PackedLinear)}
    assert len(packed) == len([one for one in formats.values() if one])
    state = {key: value for key, value in found.state_dict().items() if key in wide.state_dict()}
    for key, value in wide.state_dict().items():
        if value.dim() == 3:
            owner, _, leaf = key.rpartition(".")
            parts = ["gate_proj", "up_proj"] if leaf == "gate_up_proj" else ["down_proj"]
            rows = [torch.cat([packed.pop(f"{owner}.{n}.{part}.weight") for part in parts]) for n in range(len(value))]
            state[key] = torch.stack(rows)
    wide.load_state_dict({**state, **packed})
    with torch.no_grad():
        torch.testing.assert_close(found(ids).logits, wide(ids).logits, rtol=1e-4, atol=1e-4)
        wanted = wide.generate(ids, max_new_tokens=6, min_new_tokens=6, do_sample=False, pad_token_id=0)[0, 20:]
    with LLM(tmp_path / "out", activations="float", max_sequences=2, max_tokens_per_step=32) as llm:
        got = llm.generate([ids[0].tolist()], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
    assert list(got[0].outputs[0].token_ids) == wanted.tolist()


def test_unquantized_tensors_in_16_bits_are_reported(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(model, tmp_path / "out", "--group", 32, "--wide-dtype", "bf16", "--no-measure")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert tensors["lm_head.weight"].dtype == tensors["model.norm.weight"].dtype == torch.bfloat16
    report = json.loads((tmp_path / "out" / "compression.json").read_text())
    sizes = {one["names"][0]: one for one in report["layers"]}
    assert sizes["lm_head"]["nbytes"] == 2 * 300 * 64 == sizes["lm_head"]["wide_bytes"] // 2
    assert report["after"]["nbytes"] == sum(one.nbytes for one in tensors.values())
    run(model, tmp_path / "sparse", "--sparsity", "0.5", "--wide-dtype", "fp16", "--no-measure")
    tensors = load_file(tmp_path / "sparse" / "model.safetensors")
    assert {one.dtype for one in tensors.values()} == {torch.float16}
    wide = failed(capsys, model, tmp_path / "no", "--weights", "wide", "--prune", "layers=1", "--wide-dtype", "bf16")
    assert "wide-dtype (--wide-dtype) is 'bf16', which has no effect" in wide
    budget = ("--budget", "size=4x", "--data", model.parent / "text.txt", "--wide-dtype", "bf16")
    assert "leave wide-dtype (--wide-dtype) out" in failed(capsys, model, tmp_path / "no", *budget)


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe"])
def test_a_budget_chooses_a_format_for_all_experts_of_a_module(
    name: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": 64, "vocab_size": 300}
    build(name, **sizes, tie_word_embeddings=False).save_pretrained(tmp_path / "wide")
    for path in model.glob("tokenizer*"):
        (tmp_path / "wide" / path.name).write_bytes(path.read_bytes())
    text = ("--data", model.parent / "text.txt", "--sequences", 4, "--length", 32, "--no-measure")
    run(tmp_path / "wide", tmp_path / "out", "--budget", "size=0.5", "--head", *text)
    report = json.loads((tmp_path / "out" / "compression.json").read_text())
    got = report["after"]["nbytes"] / report["before"]["nbytes"]
    assert got <= 0.5 and report["choice"]["nbytes"] == report["after"]["nbytes"], "as expected, to the byte"
    groups = [one for one in report["choice"]["groups"] if any(".experts." in layer for layer in one["names"])]
    experts = [layer for layer in ModelDirectory(tmp_path / "wide").places if ".experts." in layer]
    assert sorted(f"{layer}.weight" for one in groups for layer in one["names"]) == sorted(experts)
    blocks = {layer.partition(".experts.")[0] for layer in experts}
    assert len(groups) == 2 * len(blocks) and any(one["format"] for one in groups)
    found = load_packed_model(tmp_path / "out")
    held = {n: m.format.name for n, m in found.named_modules() if isinstance(m, PackedLinear) and ".experts." in n}
    assert len(held) == sum(len(one["names"]) for one in groups if one["format"])
    assert torch.isfinite(found(torch.arange(8)[None]).logits).all()


def test_groups_that_do_not_divide_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build("llama", intermediate_size=96, hidden_size=64).save_pretrained(tmp_path / "wide")
    with pytest.raises(SystemExit):
        main(["compress", str(tmp_path / "wide"), str(tmp_path / "out"), "--group", "64", "--no-measure"])
    assert "groups of 64 do not divide the 96 input features of 2 layers like model" in capsys.readouterr().out


def test_names_of_formats_and_methods() -> None:
    assert format_name("int4", None) == "int4_g128" and format_name("int4_zp", 32) == "int4_g32_zp"
    assert format_name("int8", None) == "int8" and format_name("int8", 64) == "int8_g64"
    assert format_name("int3", 0) == "int3" and format_name("ternary", 0) == "ternary"
    assert format_name("int4_g64_zp", None) == "int4_g64_zp" and format_name("fp8", None) == "fp8"
    assert choose_method("auto", "int8", has_text=True) == choose_method("auto", "fp8", has_text=True) == "rtn"
    assert choose_method("auto", "int4_g128", has_text=True) == "gptq"
    assert choose_method("auto", "int4_g128", has_text=False) == "hqq"
    assert choose_method("rtn", "ternary", has_text=False) == "rtn"


def test_rows_of_the_savings_table() -> None:
    runs = RunFigures(0.1, 90_000_000, 50_000_000), RunFigures(0.04, 60_000_000, 50_000_000)
    lines = figure_lines(ModelFigures.of(8_000_000, 1.25, runs[0]), ModelFigures.of(2_000_000, 1.3, runs[1]))
    assert [re.split("  +", line.strip()) for line in lines] == [
        ["before", "after"],
        ["all tensors", "8.0 MB", "2.0 MB", "4.00x smaller"],
        ["peak memory, one request", "90.0 MB", "60.0 MB", "4.00x less without the process's 50.0 MB"],
        ["held-out bits per byte", "1.2500", "1.3000", "+4.00 %"],
        ["tokens/s, one request", "10.0", "25.0", "2.50x"],
        ["ms a token", "100", "40", "2.50x less"],
    ]
    assert len(figure_lines(ModelFigures(8), ModelFigures(2))) == 2, "what was not measured has no row"


def run(*arguments: object) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["compress", *map(str, arguments)])
    assert not ended.value.code


def test_a_pruned_model_is_an_ordinary_directory(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = ["--data", model.parent / "text.txt", "--sequences", 4, "--length", 32]
    run(model, tmp_path / "out", "--weights", "wide", "--prune", "ffn=0.25,heads=1,layers=1", *text)
    out = capsys.readouterr().out
    assert "layers: 2 -> 1" in out and "heads: 4 -> 2 in the model, 2 -> 1 for each key head" in out
    assert "ffn: 128 -> 96" in out
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["num_hidden_layers"], config["num_attention_heads"], config["intermediate_size"]) == (1, 2, 96)
    report = json.loads((tmp_path / "out" / "compression.json").read_text())
    assert report["after"]["nbytes"] < report["before"]["nbytes"] and report["after"]["bits"] > 0
    assert any(line.startswith("parameters:") for line in report["pruned"])
    assert "tokens/s" in (tmp_path / "out" / "compression.md").read_text()
    assert "model.layers.0.mlp.up_proj: wide, 24.6 kB -> 24.6 kB" in titles(tmp_path / "out")
    assert torch.isfinite(load(tmp_path / "out")(torch.arange(8)[None]).logits).all()
    assert not list(tmp_path.glob(".out*")), "no traces"
    # Prune and pack in one run; then pack the pruned model in a second run.
    run(model, tmp_path / "both", "--prune", "groups=1", "--group", 32, "--no-measure")
    found = load_packed_model(tmp_path / "both")
    assert found.config.num_key_value_heads == 1
    run(tmp_path / "out", tmp_path / "again", "--weights", "int8", "--no-measure")
    assert not (tmp_path / "again" / "compression.md").read_text().count("ffn"), "the report is that of its own run"


def test_a_budget_is_met_and_reported(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = ["--data", model.parent / "text.txt", "--sequences", 4, "--length", 32, "--no-measure"]
    arguments = [model, tmp_path / "out", "--budget", "size=0.45", *text]

    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(compression_stages, "compress_directory", stop)
        with pytest.raises(SystemExit) as ended:
            main(["compress", *map(str, arguments)])
        assert ended.value.code == 130
    capsys.readouterr()
    with monkeypatch.context() as patch:  # the choice of the interrupted run is used again
        patch.setattr(compression_choice, "choose_for_budget", None)
        run(*arguments)
    out = capsys.readouterr().out
    assert "size: asked 0.4500 of the bytes, got 0.4" in out and "model.layers.0.self_attn.q_proj +2" in out
    report = json.loads((tmp_path / "out" / "compression.json").read_text())
    got = report["after"]["nbytes"] / report["before"]["nbytes"]
    assert 0.98 * 0.45 <= got <= 0.45
    assert report["choice"]["nbytes"] == report["after"]["nbytes"], "as expected, to the byte"
    drawn = titles(tmp_path / "out")
    assert [one for one in drawn if one.startswith("bytes of all")] == [
        f"bytes of all tensors, {name}: {format_size(report[key]['nbytes'])}"
        for name, key in (("before", "before"), ("after", "after"), ("expected", "choice"))
    ]
    formats = {name: one["format"] for one in report["choice"]["groups"] for name in one["names"]}
    assert {one["names"][0]: one["format"] for one in report["layers"] if one["format"]} == formats
    for one in report["layers"]:
        assert f"{one['names'][0]}: {one['format'] or 'wide'}, " in "".join(drawn)
    assert torch.isfinite(load_packed_model(tmp_path / "out")(torch.arange(8)[None]).logits).all()
    message = failed(capsys, model, tmp_path / "no", "--budget", "size=20x", *text)
    assert "size=0.05 cannot be met: the nearest is size=" in message
    assert "--budget) needs a calibration text" in failed(capsys, model, tmp_path / "no", "--budget", "size=4x")
    assert "leave weights" in failed(capsys, model, tmp_path / "no", "--budget", "size=4x", "--weights", "int8", *text)


def test_a_latency_is_met_by_the_measured_model(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = ["--data", model.parent / "text.txt", "--sequences", 4, "--length", 32]
    timed: list[tuple[str, float]] = []

    def measure_run(path: Path, *, weights: str | None = None, **_: object) -> RunFigures:
        nbytes = compression_choice.tensor_bytes(ModelDirectory(path))  # as if reading the tensors took all the time
        timed.append((path.name, (0.3 if weights is not None else 1.0) * nbytes * 1e-8))
        return RunFigures(timed[-1][1])

    def measure(rows: int, columns: int, name: str) -> float:
        return rows * columns * (8.0 if name == "fp32" else 8 / int(name[3])) * 1e-9  # 8 bits are the fastest

    for module in (compression_choice, compression_figures):
        monkeypatch.setattr(module, "measure_run", measure_run)
    chosen = partial(compression_choice.choose_for_budget, measure=measure)
    monkeypatch.setattr(compression_choice, "choose_for_budget", chosen)
    run(model, tmp_path / "out", "--budget", "latency=2ms", *text)
    out = capsys.readouterr().out
    report = json.loads((tmp_path / "out" / "compression.json").read_text())
    got = report["after"]["ms_per_token"]
    assert got <= 2 * 1.02 and report["choice"]["seconds"] == pytest.approx(got / 1e3, rel=1e-3)
    assert f"latency: asked 2 ms a token, got {got:.3g} ms ({100 * (got / 2 - 1):+.1f} %)" in out
    places = [name for name, _ in timed]
    assert places[:2] == ["wide", "wide"] and places[-1] == "out" and set(places[2:-1]) == {"timed"}
    assert out.count(" ms a token with int") == len(places) - 3 > 1 and not list(tmp_path.glob(".out*"))
    assert "speed=50 cannot be met: the nearest is latency=" in failed(
        capsys, model, tmp_path / "no", "--budget", "speed=50", *text
    )


def test_a_size_counts_the_head_that_a_rotation_adds(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tied = load(model)
    tied.lm_head.weight, tied.config.tie_word_embeddings = tied.model.embed_tokens.weight, True  # type: ignore
    tied.save_pretrained(tmp_path / "tied")
    train_tokenizer(LINES, 300, tmp_path / "tied")
    text = ["--data", model.parent / "text.txt", "--sequences", 4, "--length", 32, "--no-measure"]
    arguments = (tmp_path / "tied", tmp_path / "out", "--rotate", "--budget", "size=0.4", *text)
    assert "size=0.4 cannot be met: the nearest is size=0." in failed(capsys, *arguments)
    run(*arguments, "--head")
    got = float(capsys.readouterr().out.partition("size: asked 0.4000 of the bytes, got ")[2].split()[0])
    assert got <= 0.4 and "lm_head.weight_scale" in load_file(tmp_path / "out" / "model.safetensors")


def test_a_loss_that_is_missed_on_held_out_text_leads_to_a_more_careful_choice(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = ["--data", model.parent / "text.txt", "--sequences", 4, "--length", 32, "--no-measure"]
    seen: list[tuple[str, bool]] = []
    bits = {"wide": 2.0, "rounded0": 2.3, "rounded1": 2.15}

    def measured(path: Path, *_: object, **__: object) -> float:
        seen.append((path.name, (tmp_path / "out").exists()))
        return bits.get(path.name, 2.085)

    monkeypatch.setattr(compression_stages, "measure_bits", measured)
    run(model, tmp_path / "out", "--budget", "loss=+0.1", *text)
    out = capsys.readouterr().out
    assert seen == [("wide", False), ("rounded0", False), ("rounded1", False), ("rounded2", False)]
    assert out.count("more than the allowed +0.1000") == 2 and "+0.0850 bits per byte, within the allowed" in out
    choices = [int(line.split()[1].replace(",", "")) for line in out.splitlines() if line.startswith("  expected: ")]
    assert choices[0] < choices[1] < choices[2], "more bytes for less loss"
    assert torch.isfinite(load_packed_model(tmp_path / "out")(torch.arange(8)[None]).logits).all()
    assert not list(tmp_path.glob(".out*"))
    bits.clear()
    bits["wide"] = 1.0
    monkeypatch.setattr(compression_choice, "ATTEMPTS", 2)
    message = failed(capsys, model, tmp_path / "no", "--budget", "loss=10%", *text)
    assert "loss=10% is missed on held-out text: reached +1.0850 bits per byte (2 choices were tried)" in message
    assert not (tmp_path / "no").exists()


def test_a_loss_that_is_far_below_its_limit_leads_to_fewer_bytes(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = ["--data", model.parent / "text.txt", "--sequences", 4, "--length", 32, "--no-measure"]
    sizes: dict[str, int] = {}
    spoiled: list[str] = []

    def measured(path: Path, *_: object, **__: object) -> float:
        if path == model:
            return 2.0
        sizes[path.name] = compression_choice.tensor_bytes(ModelDirectory(path))
        if path.name in spoiled:
            return 2.3
        return 2.0 + 0.0004 * (sizes["rounded0"] / sizes[path.name]) ** 4  # the first choice uses 40 % of the limit

    monkeypatch.setattr(compression_stages, "measure_bits", measured)
    run(model, tmp_path / "out", "--budget", "loss=+0.001", *text)
    got = json.loads((tmp_path / "out" / "compression.json").read_text())["after"]["nbytes"]
    assert got == min(sizes.values()) < sizes["rounded0"] and 2 <= len(sizes) <= 4
    assert capsys.readouterr().out.count("within the allowed +0.0010") == len(sizes)
    sizes.clear()
    spoiled.extend(("rounded1", "rounded2", "rounded3"))  # choices beyond the limit are not taken
    run(model, tmp_path / "again", "--budget", "loss=+0.001", *text)
    got = json.loads((tmp_path / "again" / "compression.json").read_text())["after"]["nbytes"]
    assert got == sizes["rounded0"] and len(sizes) > 1 and not list(tmp_path.glob(".again*"))


# Groups of 128 do not divide 64 features, so the quantization entry is in windlass's own format.
@pytest.mark.parametrize("group", ["32", "128"])
def test_int8_inputs_that_were_asked_for_are_served(group: str, model: Path, tmp_path: Path) -> None:
    options = ["--weights", "int8", "--group", group, "--no-measure"]
    text = ["--data", model.parent / "text.txt", "--sequences", 4, "--length", 32]
    served = {"skip_tokenizer_init": True, "max_sequences": 2, "max_tokens_per_step": 32}
    for name, asked in (("float", []), ("int8", ["--activations", "int8", *text])):
        run(model, tmp_path / name, *options, *asked)
        layers = [one for one in load_packed_model(tmp_path / name).modules() if isinstance(one, PackedLinear)]
        assert layers and {one.rounds_inputs for one in layers} == {name == "int8"}
        with LLM(tmp_path / name, **served) as llm:
            groups = [one for one in llm.engine.runner._packed.groups if one.panels.format.name == f"int8_g{group}"]
        assert groups and {one.panels.quantize_inputs for one in groups} == {name == "int8"}


def test_sparse_weights_stay_wide(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(model, tmp_path / "out", "--sparsity", "2:4", "--no-measure")
    assert "14 layers as wide by magnitude, 2:4" in capsys.readouterr().out
    weight = load(tmp_path / "out").get_parameter("model.layers.0.mlp.up_proj.weight")
    assert int((weight.view(-1, 4) != 0).sum(1).max()) == 2
    load(model).half().save_pretrained(tmp_path / "half")
    run(tmp_path / "half", tmp_path / "out16", "--sparsity", "0.5", "--no-measure")
    assert {tensor.dtype for tensor in load_file(tmp_path / "out16" / "model.safetensors").values()} == {torch.float16}
    run(model, tmp_path / "both", "--sparsity", "2:4", "--weights", "int4", "--group", "32", "--no-measure")
    out = capsys.readouterr().out
    assert "14 layers as int4_g32 by magnitude, 2:4, then hqq" in out and "packed weights: 7." in out
    for one in load_packed_model(tmp_path / "both").modules():
        if isinstance(one, PackedLinear):
            assert int((one.unpack().view(-1, 4) != 0).sum(1).max()) <= 2
    assert "'binary_g128', which has no code for 0" in failed(
        capsys, model, tmp_path / "no", "--sparsity", "0.5", "--weights", "binary", "--force"
    )
    assert "2:4 does not divide the 121 input features of layer 'model.layers.0.mlp.down_proj'" in failed(
        capsys, model, tmp_path / "no", "--sparsity", "2:4", "--prune", "ffn=7"
    )
    assert "nothing is pruned" in failed(capsys, model, tmp_path / "no", "--weights", "wide")
    layers = ("--prune", "layers=1", "--weights", "wide")
    for options in (("--rotate",), ("--activations", "int8"), ("--method", "gptq"), ("--group", "32")):
        assert f"{options[0]}) is " in failed(capsys, model, tmp_path / "no", *layers, *options)
    assert "'gptq', which has no effect" in failed(
        capsys, model, tmp_path / "no", "--sparsity", "0.5", "--method", "gptq"
    )
    assert "heads = 9, but" in failed(capsys, model, tmp_path / "no", "--prune", "heads=9")
    assert "has 'heads'" in failed(capsys, model, tmp_path / "no", "--prune", "heads")
    assert not (tmp_path / "no").exists() and not list(tmp_path.glob(".no*")), "no traces of what was refused"


def stop(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def test_an_interruption_of_the_measurement_is_continued(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = ["--data", str(model.parent / "text.txt"), "--sequences", "4", "--length", "32"]
    arguments = ["compress", str(model), str(tmp_path / "out"), "--budget", "loss=+9", *text, "--no-measure"]
    measure = compression_stages.measure_bits

    def measured(path: Path, *rest: Any, **options: Any) -> float:
        if path.name.startswith("rounded"):
            raise KeyboardInterrupt
        return measure(path, *rest, **options)

    with monkeypatch.context() as patch:
        patch.setattr(compression_stages, "measure_bits", measured)
        with pytest.raises(SystemExit):
            main(arguments)
    assert "the same command continues there" in capsys.readouterr().err and not (tmp_path / "out").exists()
    with monkeypatch.context() as patch:  # the rounded model is measured, not rounded again
        patch.setattr(compression_stages, "compress_directory", None)
        run(*arguments[1:])
    assert (tmp_path / "out" / "compression.json").is_file()


def test_second_open_workspace_of_a_directory_is_refused(tmp_path: Path) -> None:
    first = CompressionWorkspace(tmp_path / "out", {"prune": "layers=1"})
    assert first.value("figure", lambda: 3) == 3
    with pytest.raises(ModelError, match=r"another process writes .*\.out\.work; wait for its end"):
        CompressionWorkspace(tmp_path / "out", {"prune": "layers=2"})
    first.close()
    again = CompressionWorkspace(tmp_path / "out", {"prune": "layers=1"})
    assert again.value("figure", lambda: 4) == 3
    again.remove()
    assert not list(tmp_path.iterdir())


def test_an_interruption_of_the_report_leaves_a_complete_directory(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compression_stages, "measure_figures", stop)
    with pytest.raises(SystemExit) as ended:
        main(["compress", str(model), str(tmp_path / "out"), "--prune", "ffn=0.25", "--weights", "int8"])
    assert ended.value.code == 130 and f"{tmp_path / 'out'} is complete" in capsys.readouterr().err
    assert torch.isfinite(load_packed_model(tmp_path / "out")(torch.arange(8)[None]).logits).all()
    assert not list(tmp_path.glob(".out*"))


def test_another_budget_keeps_the_stages_before_it(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = ["--data", model.parent / "text.txt", "--sequences", 4, "--length", 32, "--no-measure"]
    arguments = [model, tmp_path / "out", "--prune", "ffn=0.25", *text]
    assert "size=0.05 cannot be met" in failed(capsys, *arguments, "--budget", "size=20x")
    with monkeypatch.context() as patch:
        patch.setattr(compression_stages, "prune_directory", None)
        run(*arguments, "--budget", "size=0.45")
    assert "size: asked 0.4500 of the bytes, got 0.4" in capsys.readouterr().out
    assert not list(tmp_path.glob(".out*"))


def test_values_that_are_not_finite_are_named(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken: Any = load(model)
    with torch.no_grad():
        broken.model.layers[1].mlp.up_proj.weight[0, 0] = float("nan")
    broken.save_pretrained(tmp_path / "wide")
    for options in (["--method", "rtn"], ["--weights", "int8"], []):
        message = failed(capsys, tmp_path / "wide", tmp_path / "out", "--group", 32, "--no-measure", *options)
        assert "'model.layers.1.mlp.up_proj'" in message and "has values that are not finite" in message
    message = failed(capsys, tmp_path / "wide", tmp_path / "out", "--weights", "wide", "--prune", "ffn=0.25")
    assert "importance of the ffn of model.layers.1.mlp is not finite" in message
