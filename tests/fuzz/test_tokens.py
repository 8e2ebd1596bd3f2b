"""Fuzz tests of token files, tokenizers, corpora and the JSON of a run."""

from __future__ import annotations

import contextlib
import gzip
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.fuzz.texts import mutants, outcome, peak_memory
from windlass.base.errors import DataError, WindlassError
from windlass.cli.training.model_builder import declared_vocab_size
from windlass.cli.training.training_plan import TrainingPlan, read_plan
from windlass.data import document_formats
from windlass.data.token_file import TokenWriter, open_tokens
from windlass.data.tokenizer import load_tokenizer, train_tokenizer
from windlass.from_pretrained import _files_in_index
from windlass.parallel.model_shape import parse_model_shape


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokens") / "tokens.bin"
    with TokenWriter(path, 300) as writer:
        writer.append(np.arange(200))
        writer.append(np.arange(50))
        writer.finish(
            eos=0, train_tokens=200, eval_tokens=50, train_bytes=900, eval_bytes=77, documents=3, key="of the corpus"
        )
    return path


def test_mutations_of_a_token_file(tokens: Path, tmp_path: Path) -> None:
    full = tokens.read_bytes()
    true = open_tokens(tokens, verify=True)
    path = tmp_path / "tokens.bin"
    used = len(full[:4096].rstrip())
    seeds = [full, full[:used] + full[4096:]]  # the second has no padding, so every mutation changes content
    for data in mutants(seeds, 150):
        if len(data) < 4096 + 500 and b"seal" in data:
            data = data[:used].ljust(4096) + data[used:]
        path.write_bytes(data)
        result = outcome(open_tokens, path, True)
        if not isinstance(result, WindlassError):
            assert result.header == true.header, data[:used]  # a damaged file raises, or has the true values
            assert np.array_equal(result.train, true.train) and np.array_equal(result.held_out, true.held_out)


def test_changed_header_is_detected(tokens: Path, tmp_path: Path) -> None:
    full = tokens.read_bytes()
    path = tmp_path / "tokens.bin"
    for old, new in ((b'"eval_bytes": 77', b'"eval_bytes": 78'), (b'"eos": 0', b'"eos": 1'), (b": 300", b": 301")):
        assert old in full
        path.write_bytes(full.replace(old, new))
        with pytest.raises(DataError, match="header is damaged"):
            open_tokens(path)


def test_token_file_allocates_no_memory(tokens: Path, tmp_path: Path) -> None:
    for data in (tokens.read_bytes(), b"WLTOKENS" + b"[" * 4088 + b"\0" * 10**6):
        (tmp_path / "tokens.bin").write_bytes(data)
        assert peak_memory(open_tokens, tmp_path / "tokens.bin") < 4 * len(data) + 2**19


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(["some text to learn from " * 20], 270, folder)
    return folder


def test_mutations_of_a_tokenizer(tokenizer: Path, tmp_path: Path) -> None:
    names = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
    good = {name: (tokenizer / name).read_bytes() for name in names[:2]} | {
        names[2]: b'{"eos_token": {"content": "x"}}'
    }

    def use(changed: Path) -> None:
        loaded = load_tokenizer(changed.parent)
        assert loaded.eos >= 0
        for ids in loaded.encode(["some text", "\x00 \u202e"]):
            assert ids.dtype == np.int64

    for name in names:
        for each, data in good.items():
            (tmp_path / each).write_bytes(data)
        for data in mutants([good[name]], 100):
            (tmp_path / name).write_bytes(data)
            outcome(use, tmp_path / name)


def _documents(read: Callable[[str, str], Any]) -> Callable[[Path], Any]:
    return lambda path: list(read(str(path), "text"))


CORPORA: dict[str, tuple[Callable[[Path], Any], list[bytes]]] = {
    "x.jsonl": (
        _documents(document_formats.read_lines),
        [b'{"text": "some"}\n"more"\n{"text": "\\u00e9", "other": [1, {}]}\n'],
    ),
    "x.json": (
        _documents(document_formats.read_json),
        [b'[{"text": "some"}, "more", {"text": "other"}]', b'{"text": "some"}\n'],
    ),
    "x.txt": (lambda path: list(document_formats.read_text(str(path))), [b"some text\nmore \xc3\xa9\n"]),
    "y.jsonl.gz": (_documents(document_formats.read_lines), [gzip.compress(b'{"text": "some"}\n' * 9, mtime=0)]),
}


@pytest.mark.parametrize("name", CORPORA)
def test_mutations_of_a_corpus(name: str, tmp_path: Path) -> None:
    read, seeds = CORPORA[name]

    def use(path: Path) -> None:
        document_formats.is_text(path)
        document_formats.has_records(path, "text")
        with contextlib.suppress(*document_formats.READ_ERRORS):  # the corpus reports them with the file's name
            for text in read(path):
                text.encode()

    path = tmp_path / name
    for data in mutants(seeds, 150):
        path.write_bytes(data)
        outcome(use, path)


PLAN = TrainingPlan("out", {}, "tiny", ["x"], "tok", 1, 2, 3, 4, 5, 6, None, 7)
MODEL = {"model_type": "llama", "vocab_size": 9, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
RUNS: dict[str, tuple[Callable[[Path], Any], dict[str, Any]]] = {
    "run.json": (read_plan, asdict(PLAN)),
    "config.json": (lambda path: (declared_vocab_size(str(path)), parse_model_shape(str(path))), MODEL),
    "model.safetensors.index.json": (_files_in_index, {"weight_map": {"a": "model-1.safetensors"}, "metadata": {}}),
}


@pytest.mark.parametrize("name", RUNS)
def test_mutations_of_json(name: str, tmp_path: Path) -> None:
    read, seed = RUNS[name]
    path = tmp_path / name
    for data in mutants([json.dumps(seed).encode()], 200):
        path.write_bytes(data)
        result = outcome(read, path)
        if isinstance(result, TrainingPlan):
            assert {key: type(value) for key, value in asdict(result).items() if key != "prompt"} == {
                key: type(value) for key, value in seed.items() if key != "prompt"
            }, data
