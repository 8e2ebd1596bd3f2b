"""Test of Ctrl-C while `windlass chat` loads the model on another thread, which is in native code."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

LOADING = """
import torch
from windlass.cli.main import main
from windlass.serving import engine_loading

def load(model, **options):
    matrix = torch.ones(1000, 1000)
    print("multiplying", flush=True)
    while True:
        matrix @ matrix

engine_loading.load_llm_engine = load
main(["chat", "a-model"])
"""


@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGINT")
def test_ctrl_c_ends_a_chat_that_loads_its_model() -> None:
    command = [sys.executable, "-c", LOADING]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "multiplying\n"
        process.send_signal(signal.SIGINT)
        printed, _ = process.communicate(timeout=60)
    assert (process.returncode, printed.strip()) == (130, "")
