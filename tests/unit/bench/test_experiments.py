"""Tests of `windlass bench`: verdicts, engine names and models. Real runs are marked slow."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from windlass.base.errors import ConfigError, WindlassError
from windlass.cli.bench import bench_app
from windlass.cli.benches import (
    bar_chart,
    bench_results,
    deepspeed_baseline,
    line_chart,
    load_bench,
    offload_bench,
    server_under_test,
    training_bench,
)
from windlass.cli.benches.bench_engines import check_engine_name, synchronizes_gradients
from windlass.cli.benches.bench_models import LanguageModel, linear_stack
from windlass.cli.benches.expected_order import (
    all_equal,
    compare_with_expected_order,
    describe_order,
    find_contradictions,
)
from windlass.cli.benches.server_under_test import ServerUnderTest


@given(st.dictionaries(st.sampled_from("abcdef"), st.floats(1, 100), min_size=1), st.floats(0, 0.5))
def test_described_order_has_no_contradictions(values: dict[str, float], tolerance: float) -> None:
    ranked = describe_order(values, tolerance).replace("=", "<").split(" < ")
    assert sorted(ranked) == sorted(values)
    assert find_contradictions(values, ranked, tolerance) == []


def test_order_comparison_names_the_reversed_pair() -> None:
    values = {"stage 0": 10.0, "stage 1": 8.0, "stage 2": 8.1}
    line = compare_with_expected_order("speed (ms a step)", values, ("stage 0", "stage 1", "stage 2"), 0.05)
    assert "measured stage 1 = stage 2 < stage 0" in line
    assert "does not hold: stage 1 8 is below stage 0 10" in line
    assert "holds" in compare_with_expected_order("speed", values, ("stage 1", "stage 2", "stage 0"), 0.05)


def test_sums_are_compared_relative_to_their_size() -> None:
    assert all_equal({"a": 1000.0, "b": 1000.0005}, 1e-6)
    assert not all_equal({"a": 1000.0, "b": 1000.002}, 1e-6)
    assert not all_equal({"a": 1000.0, "b": -1000.0}, 1e-6)


@pytest.mark.parametrize("name", ["windlass-0", "windlass-3-shm", "windlass-2-gloo", "ddp", "fsdp3", "none-kept"])
def test_names_of_engines(name: str) -> None:
    assert check_engine_name(name) == name
    assert synchronizes_gradients(name) == (name != "none-kept")


@pytest.mark.parametrize("name", ["windlass-4", "windlass-0-mpi", "windlass", "fsdp", ""])
def test_unknown_engine_error_lists_the_known_names(name: str) -> None:
    with pytest.raises(ConfigError, match=r"windlass-STAGE.*ddp"):
        check_engine_name(name)


def test_language_model_is_causal() -> None:
    torch.manual_seed(0)
    model = LanguageModel(vocabulary=50, hidden=64, layers=2, length=16)
    tokens = torch.randint(0, 50, (2, 16))
    grads = []
    for last in (3, 7):  # only the hidden state of the last position may depend on the last token
        changed = tokens.clone()
        changed[:, -1] = last
        grads.append([h for h in _hidden(model, changed)])
    assert torch.equal(grads[0][0][:, :-1], grads[1][0][:, :-1])
    assert not torch.equal(grads[0][0][:, -1], grads[1][0][:, -1])
    assert model(tokens).shape == () and model(tokens).dtype == torch.float32


def _hidden(model: LanguageModel, tokens: torch.Tensor) -> list[torch.Tensor]:
    results: list[torch.Tensor] = []
    handle = model.norm.register_forward_hook(lambda module, inputs, output: results.append(output.detach()))
    model(tokens)
    handle.remove()
    return results


def test_layer_stack_equals_the_tutorial() -> None:
    assert sum(p.numel() for p in linear_stack(30, 4).parameters()) == 4 * (30 * 30 + 30)


def test_result_records_its_machine_and_commit(tmp_path: Path) -> None:
    path = bench_results.write_result(tmp_path / "new" / "x.json", {"answer": 42})
    written = json.loads(path.read_text())
    assert written["answer"] == 42
    assert written["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert written["machine"]["cores"] >= 1 and "commit" in written
    assert [p.name for p in path.parent.iterdir()] == ["x.json"]


@pytest.mark.parametrize("bars", [2, 20])
def test_a_picture_is_a_png(bars: int, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "new" / "x.png"
    values = {f"stage {bar}": 1.0 + bar for bar in range(bars)}
    panels = [
        bar_chart.BarPanel("speed", "samples / s", values),
        bar_chart.BarPanel("memory", "bytes", {**values, "ddp": 2.0}),
    ]
    assert bar_chart.draw_bars(panels, path, "title")
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def _row(seconds: float, losses: list[float]) -> training_bench.ConfigMeasurement:
    return training_bench.ConfigMeasurement([seconds], 1.0, seconds, 1, [1, 1], "PSS", {}, losses, "shm", 1)


def test_offload_report_names_missed_targets_and_differing_losses() -> None:
    rows = {
        offload_bench.COMPUTE_ONLY: _row(1.0, [9.0]),
        "stage 1, none": _row(1.1, [2.0]),
        "stage 3, all on host": _row(1.4, [2.0]),
        "DeepSpeed, stage 3, all on host": _row(3.3, [2.1]),
    }
    verdicts, same = offload_bench._compare_losses_and_times(rows, 1e-5)
    assert not same and "NOT equal: DeepSpeed, stage 3, all on host differs by 1.0e-01" in verdicts[0]
    assert "stage 3, all on host: 1.40 x compute alone (target: at most 1.35: MISSED)" in verdicts
    assert "DeepSpeed, stage 3, all on host: 3.30 x compute alone" in verdicts
    rows["DeepSpeed, stage 3, all on host"] = _row(3.3, [float("nan")])
    assert not offload_bench._compare_losses_and_times(rows, 1e-5)[1]


def test_deepspeed_gets_an_equivalent_configuration() -> None:
    sizes = training_bench.BenchSizes(64, 1, 8, 2, 1, 1)
    ours = offload_bench._config(sizes, 3, "all on host", False, "/disk", pin=False)
    theirs = deepspeed_baseline.deepspeed_engine_config(ours)
    assert theirs["engine"] == "deepspeed"
    config = theirs["config"]
    assert config["zero_optimization"]["offload_param"]["device"] == "cpu"
    assert config["optimizer"] == {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01}}
    alike = ("train_micro_batch_size_per_gpu", "gradient_clipping")
    assert [config[key] for key in alike] == [ours[key] for key in alike]


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is not None, reason="DeepSpeed is installed")
def test_rows_of_deepspeed_are_skipped_with_a_reason_if_absent() -> None:
    result, notes = offload_bench._deepspeed_configs(training_bench.BenchSizes(64, 1, 8, 2, 1, 1), False, "/disk")
    assert result == {} and len(notes) == 6 and all("not installed" in note for note in notes)


def test_rows_of_deepspeed_are_skipped_while_a_lock_of_a_build_exists(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(deepspeed_baseline.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    lock = tmp_path / "py312_cpu" / "cpu_adam" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    reasons = deepspeed_baseline.unavailable_operators("CPUAdamBuilder")
    assert list(reasons) == ["CPUAdamBuilder"] and f"another build holds {lock}" in reasons["CPUAdamBuilder"]


def test_pinning_variants_double_the_rows_of_host_offload() -> None:
    sizes = training_bench.BenchSizes(64, 1, 8, 2, 1, 1)
    once, twice = (
        dict(offload_bench._windlass_configs(sizes, False, "/disk", pins)) for pins in ((True,), (True, False))
    )
    assert len(once) == 11 and len(twice) == 19
    place = twice["stage 2, optimizer on host, not pinned"]["zero_optimization"]["offload_optimizer"]
    assert place == {"device": "cpu", "pin_memory": False}


def test_results_name_no_folder_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["--rounds", "3", "--path", "/mnt/disk/x", "--out=/home/someone/r", "relative/y", "a=b"]
    monkeypatch.setattr("sys.argv", ["/usr/bin/bench.py", *arguments])
    assert bench_results.run_facts()["command"] == "bench.py --rounds 3 --path x --out=r relative/y a=b"


@pytest.mark.parametrize("command", ["zero-memory", "stages", "precision", "offload", "transport"])
def test_commands_have_help(command: str) -> None:
    result = CliRunner().invoke(bench_app, [command, "--help"])
    assert result.exit_code == 0 and "--out" in result.output


def test_a_width_that_is_no_multiple_of_a_head_is_refused() -> None:
    result = CliRunner().invoke(bench_app, ["stages", "--hidden", "100"])
    assert result.exit_code == 2 and "try 64" in result.output


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ["zero-memory", "--width", "64", "--depth", "3", "--engines", "ddp,windlass-1,windlass-3"],
        ["stages", "--hidden", "64", "--layers", "1", "--length", "16", "--rounds", "1", "--steps", "1"],
        ["precision", "--hidden", "64", "--layers", "1", "--length", "16", "--rounds", "2", "--steps", "2"],
        [
            "offload",
            "--hidden",
            "64",
            "--layers",
            "1",
            "--length",
            "16",
            "--rounds",
            "1",
            "--steps",
            "1",
            "--no-rivals",
        ],
    ],
)
def test_experiments_run_and_leave_their_files(arguments: list[str], tmp_path: Path) -> None:
    result = CliRunner().invoke(bench_app, [*arguments, "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    written = json.loads((tmp_path / f"{arguments[0]}.json").read_text())
    assert written["verdicts"] and written["bench"] == arguments[0]
    assert (tmp_path / f"{arguments[0]}.png").stat().st_size > 1000


def test_the_load_fits_the_vocabulary_and_the_window_of_a_model() -> None:
    fitted = load_bench.LoadSettings(model=Path("m")).fitted(256, 2048)
    assert fitted.long_prompt == 2000
    tokens = load_bench._prompt(1000, 0, fitted.vocabulary)
    assert min(tokens) >= 128 and max(tokens) < 256
    with pytest.raises(WindlassError, match="--model m takes 512 tokens"):
        fitted.fitted(256, 512)


def test_every_line_of_a_panel_is_drawn_in_its_own_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Any] = []
    monkeypatch.setattr(line_chart, "write_figure", lambda figure, path: figures.append(figure))
    panel = line_chart.LinePanel("t", "s", "clients", [1, 2], {f"line {number}": [1.0, 2.0] for number in range(14)})
    assert line_chart.draw_lines([panel], tmp_path / "lines.png", "title")
    lines = figures[0].axes[0].lines
    assert [line.get_label() for line in lines] == list(panel.values)
    assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == 14


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (3, r"ended with exit code 3 before it was ready; the end of .*log: no model \| bye; correct this"),
        (None, r"is not ready after 0 s; the end of .*log: no model \| bye; give a smaller model"),
    ],
)
def test_a_server_that_ended_is_not_reported_as_slow(
    code: int | None, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_under_test, "_START_SECONDS", 0.0)
    monkeypatch.setattr(server_under_test.time, "monotonic", lambda: 5.0)

    def start(command: list[str], stdout: Any, stderr: Any) -> Any:
        stdout.write(b"no model\nbye\n")
        return SimpleNamespace(poll=lambda: code, kill=lambda: None)

    monkeypatch.setattr(server_under_test.subprocess, "Popen", start)
    with pytest.raises(WindlassError, match=message):
        ServerUnderTest(tmp_path, [], tmp_path / "log")
