"""Tests of configuration sources: dict, path, base64, strict and relaxed JSON, and errors for unreadable sources."""

from __future__ import annotations

import base64
import copy
import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.base.errors import ConfigError
from windlass.config import load_config
from windlass.config.config_source import find_key_lines, read_source, source_for_ranks

CONFIGS = Path(__file__).resolve().parents[4] / "shared" / "compat" / "configs"


def write(folder: Path, text: str) -> Path:
    path = folder / "ds.json"
    path.write_text(text, "utf-8")
    return path


def test_a_dict_is_kept_and_never_written_to() -> None:
    source = {
        "bfloat16": {"enabled": "true"},
        "zero_optimization": {"stage": "2", "prefetch_bucket_size": "auto"},
        "train_batch_size": "auto",
        "optimizer": {"type": "Adam", "params": {"lr": 1}},
    }
    before = copy.deepcopy(source)
    config = load_config(source)
    assert config.raw is source
    assert source == before
    assert config.bf16.enabled and config.zero_optimization.stage == 2


RELAXED = """
{   // a comment
    "train_batch_size": 8,   # another
    /* and
       another */
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {
            "device": "none"
        }
        "offload_param": {"device": "none"},
    },
    "fp16": {"enabled": true},
}
"""


def test_comments_trailing_and_missing_commas(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, RELAXED))
    assert (config.train_batch_size, config.zero_optimization.stage, config.fp16.enabled) == (8, 3, True)
    assert config.zero_optimization.offload_param is not None
    assert config.raw["fp16"] == {"enabled": True}


def test_key_lines_with_nesting_strings_and_comments() -> None:
    lines = find_key_lines(RELAXED.replace("another */", 'a "stage": 1, */'))
    assert lines["train_batch_size"] == [3]
    assert lines["zero_optimization.stage"] == [7]
    assert lines["zero_optimization.offload_param.device"] == [11]
    assert lines["fp16.enabled"] == [13]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=12,
)


@given(st.dictionaries(st.text(), json_values, max_size=4))
def test_any_json_object_is_read_as_json_reads_it_from_base64(data: dict[str, object]) -> None:
    encoded = base64.urlsafe_b64encode(json.dumps(data).encode()).decode()
    assert read_source(encoded).data == data


@given(st.text())
def test_finding_lines_never_fails(text: str) -> None:
    find_key_lines(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"fp16": {}, "fp16": {}}', ["written twice", "fp16"]),
        ('{"a": 1,\n "zero_optimization": {"stage": 1,\n "stage": 2}}', ["stage", "lines 2, 3"]),
        ('{\n "fp16": {},\n "fp16": {}, // relaxed\n}', ["written twice", "lines 2, 3"]),
        ('{\n"train_batch_size": ,\n}', ["not JSON", "line 2"]),
        ('{"train_batch_size": [1, 2}', ["not JSON", "line 1"]),
        ("[1, 2]", ["list", "not an object"]),
        ("hello", ["not JSON"]),
    ],
)
def test_parse_error_names_its_position(tmp_path: Path, text: str, words: list[str]) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert all(word in str(caught.value) for word in [*words, str(path)])


@pytest.mark.parametrize("missing", ["no/such/file.json", "not base64 at all", "x" * 5000])
def test_a_missing_file_is_named(missing: str) -> None:
    with pytest.raises(ConfigError, match="there is no configuration file"):
        load_config(missing)


def test_unreadable_file_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        load_config(tmp_path)
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ConfigError, match="UTF-8"):
        load_config(tmp_path / "bytes.json")


def test_another_type_is_refused() -> None:
    with pytest.raises(ConfigError, match="not int"):
        load_config(3)


@pytest.mark.skipif(
    not CONFIGS.is_dir(), reason="the collection of circulating configurations is not beside the project"
)
def test_published_configurations_load() -> None:
    paths = sorted(CONFIGS.glob("*.json"))
    assert paths
    for path in paths:
        config = load_config(path)
        text = path.read_text()
        batches = 'train_batch_size": 32' in text or 'train_micro_batch_size_per_gpu": 1' in text
        if batches:
            config.resolve_batch(1)
        else:
            with pytest.raises(ConfigError, match="neither train_batch_size nor"):
                config.resolve_batch(1)
        unfilled = [refusal for refusal in config.refusals() if '"auto": no program filled it in' in str(refusal)]
        assert config.refusals() == unfilled, path
        assert bool(unfilled) == ('"auto"' in text), path


def test_a_pipe_becomes_a_source_that_every_rank_can_read(tmp_path: Path) -> None:
    path = write(tmp_path, "{}")
    assert source_for_ranks(str(path)) == str(path)
    reading, writing = os.pipe()
    os.write(writing, b'// of a pipe\n{"train_batch_size": 4, "fp16": {"enabled": "auto"}}')
    os.close(writing)
    try:
        source = source_for_ranks(f"/dev/fd/{reading}")
    finally:
        os.close(reading)
    for _ in range(2):
        assert read_source(source).data == {"train_batch_size": 4, "fp16": {"enabled": "auto"}}
    assert source_for_ranks(source) == source
    with pytest.raises(ConfigError, match="is empty"):
        source_for_ranks(os.devnull)
