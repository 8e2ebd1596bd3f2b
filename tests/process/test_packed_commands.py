"""Tests of packed directories in other processes: their measurement, and `windlass generate`."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from pathlib import Path

import pytest

from tests.serving.tiny_model import write_tiny_model
from windlass.cli.model_run import measure_run
from windlass.compress.packed_directory import write_packed_directory
from windlass.inference.llm import LLM
from windlass.inference.sampling_params import SamplingParams


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed")
    write_packed_directory(write_tiny_model(folder / "wide"), folder / "int4", "int4_g32")
    return folder / "int4"


@pytest.mark.slow  # `tests/compress/test_compress_command.py` measures models.
def test_the_run_of_a_model_is_measured_in_a_process_of_its_own(packed: Path) -> None:
    held = bytearray(256 << 20)
    held[:: 1 << 12] = bytes([1]) * len(held[:: 1 << 12])  # pages of this process must not be counted
    before = set(multiprocessing.active_children())  # e.g. idle ranks of earlier tests
    found = measure_run(packed)
    assert found.seconds > 0 and found.memory is not None and found.idle_memory is not None
    assert (packed / "model.safetensors").stat().st_size < found.memory - found.idle_memory < 100 << 20
    assert not set(multiprocessing.active_children()) - before


def test_generate_continues_a_text_with_a_packed_directory(packed: Path) -> None:
    command = [sys.executable, "-m", "windlass", "generate", str(packed), "--prompt", "some words"]
    command += ["--max-new-tokens", "8", "--temperature", "0"]
    found = subprocess.run(command, capture_output=True, timeout=300, check=False)
    assert found.returncode == 0, found.stderr.decode()
    with LLM(packed) as llm:
        text = llm.generate(["some words"], SamplingParams(temperature=0, max_tokens=8))[0].outputs[0].text
    assert found.stdout.decode() == f"some words{text}\n" and text
