"""Tests of packing: it keeps every byte, excludes held-out text from training, and reruns only after a change."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from windlass.base.errors import DataError
from windlass.data.corpus_sources import find_sources
from windlass.data.pack_corpus import Corpus, PackedCorpus, pack_corpus
from windlass.data.token_file import open_tokens
from windlass.data.tokenizer import EOS, load_tokenizer, train_tokenizer

pytest.importorskip("tokenizers")


def document(index: int) -> str:
    return f"def function_{index}(x):\n    return x * {index} + len('{'ab' * (index % 7)}')\n" * 3


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for index in range(80):
        (folder / f"{index:03}.py").write_text(document(index))
    return folder


def packed(corpus: Path, tmp_path: Path, **options: object) -> PackedCorpus:
    return pack_corpus([str(corpus)], tmp_path / "out", vocab_size=300, eval_bytes=1000, **options)  # type: ignore[arg-type]


def decode(result: PackedCorpus) -> tuple[list[str], list[str]]:
    """Decode the training and held-out documents from the tokens."""
    tokens = open_tokens(result.tokens)
    parts = []
    for ids in (tokens.train, tokens.held_out):
        ends = np.flatnonzero(ids == result.tokenizer.eos)
        starts = np.concatenate([[0], ends[:-1] + 1])
        pieces = [ids[start:end].tolist() for start, end in zip(starts, ends, strict=True)]
        parts.append([result.tokenizer.backend.decode(piece) for piece in pieces if piece])
    return parts[0], parts[1]


def test_every_document_is_packed_once_and_bytes_are_counted(corpus: Path, tmp_path: Path) -> None:
    result = packed(corpus, tmp_path)
    train, held_out = decode(result)
    assert sorted(train + held_out) == sorted(document(index) for index in range(80))
    assert held_out
    assert result.header.eval_bytes == sum(len(text.encode()) for text in held_out)
    assert result.header.train_bytes == sum(len(text.encode()) for text in train)


def test_corpus_is_rebuilt_only_if_the_text_changes(corpus: Path, tmp_path: Path) -> None:
    first = packed(corpus, tmp_path)
    again = packed(corpus, tmp_path)
    assert not first.is_reused and again.is_reused and again.header == first.header
    (corpus / "003.py").write_text("changed = True\n")
    assert not packed(corpus, tmp_path).is_reused


def test_damaged_file_is_rebuilt(corpus: Path, tmp_path: Path) -> None:
    first = packed(corpus, tmp_path)
    data = bytearray(first.tokens.read_bytes())
    data[-1] ^= 1
    first.tokens.write_bytes(data)
    second = packed(corpus, tmp_path)
    assert not second.is_reused and second.header.digest == first.header.digest


def test_given_tokenizer_is_used_and_its_change_rebuilds(corpus: Path, tmp_path: Path) -> None:
    train_tokenizer([document(1)], 270, tmp_path / "own")
    result = packed(corpus, tmp_path, tokenizer_dir=tmp_path / "own")
    assert result.header.vocab_size <= 270 and not (tmp_path / "out" / "tokenizer").exists()
    train_tokenizer([document(2), "other words"], 290, tmp_path / "own")
    assert not packed(corpus, tmp_path, tokenizer_dir=tmp_path / "own").is_reused


def test_single_file_is_split_for_held_out_text(tmp_path: Path) -> None:
    text = "".join(document(index) for index in range(50))
    (tmp_path / "one.py").write_text(text)
    result = pack_corpus([str(tmp_path / "one.py")], tmp_path / "out", vocab_size=300)
    train, held_out = decode(result)
    assert held_out and sum(map(len, train + held_out)) == len(text)
    assert result.header.eval_bytes <= len(text) * 0.2


@pytest.mark.parametrize("content", ["", "  \n\n ", "x"])
def test_an_empty_corpus_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "x.txt").write_text(content)
    with pytest.raises(DataError, match="empty"):
        pack_corpus([str(tmp_path / "x.txt")], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_end_token_in_the_text_does_not_end_a_document(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(["a b c"], 258, tmp_path / "tok")
    (ids,) = tokenizer.encode([f"a{EOS}b"])
    assert tokenizer.eos not in ids.tolist()


def test_byte_level_tokenizer_round_trips_every_text(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(["plain ascii"], 258, tmp_path / "tok")
    for text in ("naïve 日本 🐍", "\t\r\n  x", "\x00\x7f"):
        (ids,) = tokenizer.encode([text])
        assert tokenizer.backend.decode(ids.tolist()) == text


def test_bad_tokenizers_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no tokenizer at"):
        load_tokenizer(tmp_path)
    with pytest.raises(DataError, match="258"):
        train_tokenizer(["a"], 100, tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(DataError, match="damaged"):
        load_tokenizer(tmp_path)
    train_tokenizer(["a"], 258, tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": None}))
    with pytest.raises(DataError, match="eos_token"):
        load_tokenizer(tmp_path)


def test_a_missing_package_is_not_reported_as_a_damaged_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(DataError, match="^tokenizing needs tokenizers: pip install"):
        load_tokenizer(tmp_path)


def test_a_corpus_that_changes_under_the_reader_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "log.jsonl"
    file.write_text("".join(json.dumps({"text": document(index)}) + "\n" for index in range(70)))
    corpus = Corpus(find_sources([str(file)]), "text")
    for lines in (71, 69):
        file.write_text("".join(json.dumps({"text": document(index)}) + "\n" for index in range(lines)))
        with pytest.raises(DataError, match="changed while it was read: it had 70"):
            list(corpus)
