"""Tests that every spelling of a corpus finds its documents, and that every invalid one raises a clear error."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from windlass.base.errors import DataError
from windlass.data.corpus_sources import find_sources


def texts(*specs: object, field: str = "text") -> list[str]:
    return [
        text
        for source in find_sources([str(spec) for spec in specs], text_field=field)
        for text in source.documents(field)
    ]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    (tmp_path / "sub").mkdir()
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "a.txt").write_text("alpha")
    (tmp_path / "sub" / "b.py").write_text("beta = 'ü'")
    (tmp_path / ".hidden" / "c.txt").write_text("hidden")
    (tmp_path / "d.bin").write_bytes(b"\x00\x01\x02")
    (tmp_path / "e.jsonl").write_text(json.dumps({"text": "line 1"}) + "\n\n" + json.dumps({"text": "line 2"}) + "\n")
    (tmp_path / "f.json").write_text(json.dumps([{"text": "element"}, "bare"]))
    return tmp_path


def test_a_directory_is_read_in_order_without_hidden_and_binary_files(corpus: Path) -> None:
    assert texts(corpus) == ["alpha", "line 1", "line 2", "element", "bare", "beta = 'ü'"]


def test_globs_and_repeated_specs_give_each_file_once(corpus: Path) -> None:
    assert texts(corpus / "**" / "*.py", corpus / "*.txt", corpus / "a.txt") == ["beta = 'ü'", "alpha"]


def test_gzip_files_are_read(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"body": "packed"}'))
    assert texts(path, field="body") == ["packed"]


def test_parquet_columns_are_read_without_nulls(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    parquet.write_table(pyarrow.table({"text": ["one", None, "two"], "n": [1, 2, 3]}), tmp_path / "x.parquet")
    assert texts(tmp_path / "x.parquet") == ["one", "two"]
    with pytest.raises(DataError, match="'text', 'n'"):
        texts(tmp_path / "x.parquet", field="body")


def test_large_text_is_split_at_lines(tmp_path: Path) -> None:
    path = tmp_path / "large.txt"
    path.write_text("0123456789\n" * 200_000)
    pieces = texts(path)
    assert len(pieces) > 1 and "".join(pieces) == path.read_text()
    assert all(piece.endswith("\n") for piece in pieces)


def test_stdlib_is_sources_without_tests_and_packages() -> None:
    locations = [Path(source.location) for source in find_sources(["stdlib"])]
    assert {"argparse.py", "ast.py"} <= {path.name for path in locations}
    assert not any({"site-packages", "test", "encodings"} & set(path.parts) for path in locations)
    assert locations == [Path(source.location) for source in find_sources(["stdlib"])]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.bin", b"\x00", "not UTF-8 text"),
        ("x.txt", b"caf\xe9 " + b"a" * 9000, "not UTF-8"),
        ("x.jsonl", b'{"text": "fine"}\n{"text": \n', "line 2 is not JSON"),
        ("x.jsonl", b'{"body": "a", "title": "b"}\n', "'body', 'title'.*--text-field"),
        ("x.jsonl", b'{"text": 3}\n', "no text field"),
        ("x.jsonl", b'{"text": "a \\ud83d"}\n', "line 1 has half a surrogate pair"),
        ("x.parquet", b"PAR1 or not", "not a readable Parquet"),
    ],
)
def test_unreadable_content_is_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        texts(tmp_path / name)


def test_a_byte_order_past_the_first_window_is_reported_with_its_file(tmp_path: Path) -> None:
    path = tmp_path / "late.txt"
    path.write_bytes(b"a" * 10_000 + b"\xff")
    with pytest.raises(DataError, match="late.txt is not UTF-8"):
        texts(path)


@pytest.mark.parametrize("spec", ["/does/not/exist", "/does/not/*.txt"])
def test_missing_path_is_refused(spec: str) -> None:
    with pytest.raises(DataError, match="does not exist and matches no file"):
        find_sources([spec])


def test_no_data_and_an_empty_directory_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="--data"):
        find_sources([])
    with pytest.raises(DataError, match="no readable file"):
        find_sources([str(tmp_path)])


@pytest.mark.parametrize("damage", [lambda whole: whole[:-20], lambda whole: whole[:20] + b"\xff" * 9 + whole[29:]])
@pytest.mark.parametrize("name", ["cut.jsonl.gz", "cut.txt.gz"])
def test_a_damaged_gzip_file_is_named(name: str, tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    path = tmp_path / name
    lines = "".join(json.dumps({"text": f"line {number * 7919}"}) + "\n" for number in range(200))
    path.write_bytes(damage(gzip.compress(lines.encode())))
    with pytest.raises(DataError, match=name):
        texts(path)


def test_configuration_files_beside_records_are_read(tmp_path: Path) -> None:
    (tmp_path / "package.json").write_text('{\n  "name": "x"\n}\n')
    (tmp_path / "records.json").write_text('{"text": "a record"}\n{"text": "another"}\n')
    (tmp_path / "settings.json").write_text('{"name": "x", "size": 3}\n')
    (tmp_path / "single.json").write_text('{"text": "only one"}\n')
    settings = '{"name": "x", "size": 3}\n'
    assert texts(tmp_path) == ['{\n  "name": "x"\n}\n', "a record", "another", settings, "only one"]
    (tmp_path / "records.json").unlink()
    assert texts(tmp_path, field="name")[1:] == ["x", '{"text": "only one"}\n']
    with pytest.raises(DataError, match="package.json"):
        texts(tmp_path / "package.json")


def test_output_of_a_run_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("alpha")
    (tmp_path / "run" / "tokenizer").mkdir(parents=True)
    (tmp_path / "run" / "tokenizer" / "notes.txt").write_text("not data")
    result = find_sources([str(tmp_path)], exclude_dir=tmp_path / "run")
    assert [Path(source.location).name for source in result] == ["a.txt"]
    requested = find_sources([str(tmp_path / "run")], exclude_dir=tmp_path / "run")
    assert [Path(source.location).name for source in requested] == ["notes.txt"], "asked for by name, it is data"


def test_numeric_column_is_refused(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    table = pyarrow.table({"text": [1, 2], "words": pyarrow.array(["a", "b"]).dictionary_encode()})
    parquet.write_table(table, tmp_path / "x.parquet")
    with pytest.raises(DataError, match="int64, not strings"):
        texts(tmp_path / "x.parquet")
    assert texts(tmp_path / "x.parquet", field="words") == ["a", "b"]


def test_too_deeply_nested_record_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(b'{"a":' * 100_000 + b"\n")
    with pytest.raises(DataError, match="line 1 is not JSON .*nested more than 100 levels"):
        texts(tmp_path / "x.jsonl")
