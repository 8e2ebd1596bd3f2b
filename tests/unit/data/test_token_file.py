"""Tests that a token file returns the written tokens, and that damaged and incomplete files are refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.base.errors import DataError
from windlass.data import token_file
from windlass.data.token_file import TokenWriter, open_tokens, token_dtype


def write(path: Path, train: list[int], held_out: list[int], vocab_size: int = 1000) -> Path:
    with TokenWriter(path, vocab_size) as writer:
        for part in (train, held_out):
            writer.append(np.array(part, dtype=np.int64))
        writer.finish(
            eos=0, train_tokens=len(train), eval_tokens=len(held_out), train_bytes=9, eval_bytes=5, documents=2, key="k"
        )
    return path


@given(
    train=st.lists(st.integers(0, 99_999), min_size=1),
    held_out=st.lists(st.integers(0, 99_999), min_size=1),
    vocab_size=st.sampled_from([100_000, 2**20]),
)
def test_tokens_round_trip(
    tmp_path_factory: pytest.TempPathFactory, train: list[int], held_out: list[int], vocab_size: int
) -> None:
    path = write(tmp_path_factory.mktemp("tokens") / "t.bin", train, held_out, vocab_size)
    opened = open_tokens(path, verify=True)
    assert opened.train.tolist() == train and opened.held_out.tolist() == held_out
    assert opened.header.eval_bytes == 5 and opened.header.key == "k"


@pytest.mark.parametrize(("vocab_size", "bits"), [(2**16, 16), (2**16 + 1, 32)])
def test_the_dtype_is_the_narrowest_that_holds_every_id(vocab_size: int, bits: int) -> None:
    assert token_dtype(vocab_size).itemsize * 8 == bits
    assert np.iinfo(token_dtype(vocab_size)).max >= vocab_size - 1


def test_flipped_payload_bits_are_detected(tmp_path: Path) -> None:
    path = write(tmp_path / "t.bin", [1, 2, 3], [4])
    full = path.read_bytes()
    for position in range(4096, len(full)):
        path.write_bytes(full[:position] + bytes([full[position] ^ 4]) + full[position + 1 :])
        with pytest.raises(DataError, match="damaged"):
            open_tokens(path, verify=True)


@pytest.mark.parametrize("length", [0, 7, 100, 4095, 4096, 4101])
def test_truncated_file_is_refused_without_reading(tmp_path: Path, length: int) -> None:
    path = write(tmp_path / "t.bin", [1, 2, 3], [4])
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(DataError, match="delete it"):
        open_tokens(path)


def test_another_format_version_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "t.bin", [1], [2])
    path.write_bytes(path.read_bytes().replace(b'"format_version": 2', b'"format_version": 9'))
    with pytest.raises(DataError, match="version 9"):
        open_tokens(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="none.bin"):
        open_tokens(tmp_path / "none.bin")


@pytest.mark.parametrize("token", [1000, -1])
def test_failed_writer_leaves_only_the_former_file(tmp_path: Path, token: int) -> None:
    path = write(tmp_path / "t.bin", [1, 2], [3])
    with pytest.raises(DataError, match=f"token id {token} is outside"), TokenWriter(path, 1000) as writer:
        writer.append(np.array([5, token]))
    assert open_tokens(path, verify=True).train.tolist() == [1, 2]
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux's always-full device")
def test_full_disk_leaves_no_partial_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_file, "temporary_path_beside", lambda path: tmp_path / "part")
    (tmp_path / "part").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path / "t.bin", list(range(9)), [1])
    assert not any(tmp_path.iterdir())
