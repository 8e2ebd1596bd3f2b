"""Tests that each crc32 implementation of windlass returns zlib's value, so that other tools can verify the files."""

from __future__ import annotations

import zlib

import torch
from hypothesis import given
from hypothesis import strategies as st

from windlass.checkpoint import checksum
from windlass.checkpoint.safetensors_file import tensor_bytes


@given(st.binary(max_size=5000), st.binary(max_size=300))
def test_checksum_equals_zlib_whole_and_in_parts(first: bytes, second: bytes) -> None:
    assert checksum.crc32(first) == zlib.crc32(first)
    assert checksum.crc32(second, checksum.crc32(first)) == zlib.crc32(first + second)


def test_checksum_reads_tensor_memory_without_a_copy() -> None:
    flat = torch.arange(1000, dtype=torch.int16)
    assert checksum.crc32(tensor_bytes(flat)) == zlib.crc32(flat.numpy().tobytes())
    assert checksum.crc32(tensor_bytes(flat[:0])) == 0
