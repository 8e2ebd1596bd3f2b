"""Fuzz tests of `windlass check` and `load` on damaged and hostile configurations."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from tests.fuzz.mutations import LONG, time_limit
from tests.fuzz.texts import examples, mutants, outcome, peak_memory
from windlass.base.errors import ConfigError, WindlassError
from windlass.base.text import escape_unprintable, nearest_name
from windlass.cli.check import check
from windlass.config import config_loading, load_config, parameter_tables
from windlass.config.config_source import read_source
from windlass.config.key_table import TRAINING_CONFIG, config_keys

app = typer.Typer()
app.command()(check)
AUTO = {"type": "AdamW", "params": {"lr": "auto"}}
SEEDS = [
    json.dumps(
        {
            "train_batch_size": 8,
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "reduce_bucket_size": 5e8},
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95]}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5, "warmup_max_lr": 3e-4}},
        },
        indent=1,
    ).encode(),
    json.dumps({"train_batch_size": "auto", "fp16": {"enabled": "auto"}, "optimizer": AUTO}).encode(),
    b"{\n  // relaxed\n  stage: 3, # more\n  'train_batch_size': 4,\n  zero_optimization: {stage: 2,}\n}\n",
    json.dumps({"parallel": {"tp": 1, "tensor_table": {".*": "column"}}, "_comment": "\x1b[1m"}).encode(),
    b'{"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0, "cycle_max_lr": [0.1]}}, "train_batch_size": 8}',
]


def run(path: Path) -> str:
    result = CliRunner().invoke(app, [str(path)], catch_exceptions=False)
    assert result.exit_code in (0, 1)
    assert result.output == escape_unprintable(result.output), result.output
    return result.output


def test_mutations_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    for data in mutants(SEEDS, 150):
        path.write_bytes(data)
        printed = outcome(run, path)
        loaded = outcome(load_config, path)
        try:
            strict = json.loads(data)
        except (ValueError, RecursionError):
            assert isinstance(loaded, WindlassError) or "not strict JSON" in printed, data
            continue
        if not isinstance(loaded, WindlassError):
            # the relaxed parser reads strict JSON as the strict parser does
            assert loaded.raw == strict or _unequal_to_itself(strict), data
            assert not isinstance(outcome(load_config, base64.urlsafe_b64encode(data).decode()), WindlassError), data


def _unequal_to_itself(data: Any) -> bool:
    return "NaN" in json.dumps(data)


plain = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.just("auto")),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=6), inner, max_size=3)),
    max_leaves=6,
)
names = st.one_of(
    st.sampled_from(sorted({row.path.split(".")[0] for row in config_keys() if row.root == TRAINING_CONFIG})), st.text()
)
inner_names = st.sampled_from(sorted({step for row in config_keys() for step in row.path.split(".")}))


@settings(
    max_examples=examples(150, 100),
    deadline=None,
    derandomize=not LONG,
    suppress_health_check=list(HealthCheck),
)
@given(st.dictionaries(names, st.one_of(plain, st.dictionaries(inner_names, plain, max_size=3)), max_size=4))
def test_any_dictionary(config: dict[str, Any]) -> None:
    before = repr(config)
    outcome(lambda given: load_config(given).refusals(), config)
    assert repr(config) == before  # the caller's own dict is unchanged


@pytest.mark.parametrize(
    "text",
    [
        '{"a":' * 100_000,
        "[" * 100_000,
        '{"train_batch_size": ' + "9" * 5000 + "}",
        "{train_batch_size: " + "9" * 5000 + ",}",
        "{a: 1e999,}",
        "{a: '''x'''}",
        "{a: n" + "," * 60_000 + "}",
        '{a: "' + '\\"' * 30_000 + "\n}",
        "/*" * 30_000,
        "{a: b" + '"\\"' * 20_000 + "\n}",
        "{\n" + "\n".join(f'"a{number}": {{' for number in range(3000)),
        json.dumps({"x" * 1_000_000: 1}),
        json.dumps({"optimizer": {"type": "A" * 1_000_000}}),
        json.dumps({"zero_optimization": {"x" * 1000 + str(n): n for n in range(500)}}),
        json.dumps({"\x1b]0;owned\x07\u202e\ud800": "\x1b[2J"}),
        json.dumps([1]),
        "",
    ],
    ids=lambda text: f"{text[:12]!r}...{len(text)}",
)
def test_expensive_texts(tmp_path: Path, text: str) -> None:
    path = tmp_path / "ds.json"
    path.write_text(text)
    assert isinstance(outcome(load_config, path), ConfigError)
    outcome(run, path)
    assert peak_memory(read_source, path) < 16 * len(text) + 2**22


@pytest.mark.parametrize("section", [None, "zero_optimization", "optimizer"])
def test_5000_unknown_keys_are_one_short_message(section: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nearest names are searched for the first few keys only, since each search takes milliseconds."""
    searched = 0

    def counted(name: str, known: Iterable[str]) -> str | None:
        nonlocal searched
        searched += 1
        return nearest_name(name, known)

    for module in (config_loading, parameter_tables):
        monkeypatch.setattr(module, "nearest_name", counted)
    unknown: dict[str, Any] = {f"zero_optimisation_{number}": number for number in range(5000)}
    if section == "optimizer":
        unknown = {"type": "AdamW", "params": unknown}
    with pytest.raises(ConfigError, match="has no such parameter|nearest is") as caught, time_limit():
        load_config({section: unknown} if section else unknown)
    assert "5000 problems" in str(caught.value).replace(",", "") and "and 4,900 more" in str(caught.value)
    assert 0 < searched <= config_loading.MAX_HINTS + parameter_tables.MAX_PARAMETER_HINTS


def test_a_dictionary_that_contains_itself_is_refused() -> None:
    config: dict[str, Any] = {}
    config["zero_optimization"] = config
    with pytest.raises(ConfigError, match="contains itself"):
        load_config(config)
    with pytest.raises(ConfigError, match=r"the key 3, a int"):
        load_config({"zero_optimization": {3: 1}})
