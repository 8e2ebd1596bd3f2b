"""Runs unmodified clients that are installed somewhere else, plainly, and with windlass as DeepSpeed.

A client NAME is found by two variables: WINDLASS_CLIENT_NAME, a checkout of its repository, and
WINDLASS_CLIENT_NAME_PYTHON, the interpreter of a virtual environment with the client's requirements.
`python tools/make_layered_venv.py .venv DIR REQUIREMENT...` makes such an environment on top of this project's.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from windlass.compat.stand_in_path import stand_in_environment

ROOT = Path(__file__).parents[2]
TEXT = "the cat sat on a mat and looked at two red birds that sang in one old tree near our house"


@dataclass(frozen=True)
class Client:
    """Checkout of a client and the Python interpreter that runs it."""

    folder: Path
    python: str

    def run(
        self,
        *arguments: object,
        ranks: int = 0,
        path: tuple[Path, ...] = (),
        stands_in: bool | None = None,
        classic: bool = False,
        folder: Path | None = None,
        seconds: float = 1500,
        **env: str,
    ) -> str:
        """Run a script over `ranks` ranks, or plainly (0), and return its output.

        Args:
            path: folders that are searched first for modules.
            stands_in: `import deepspeed` imports windlass; by default True with ranks.
            classic: start ranks by the `deepspeed` command, which passes `--local_rank` to scripts.
            folder: working directory; by default the checkout.

        Raises:
            AssertionError: the script failed; the text has the end of its output.
        """
        command = [self.python]
        if ranks and classic:
            command += ["-m", "windlass.compat.deepspeed_command", "--num_gpus", str(ranks)]
        elif ranks:
            command += ["-m", "windlass", "run", "--nproc", str(ranks)]
        values = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", **env}
        values["PYTHONPATH"] = os.pathsep.join(map(str, (*path, ROOT)))
        if stands_in or (stands_in is None and ranks):
            values |= stand_in_environment(values)
        command += map(str, arguments)
        where = folder or self.folder
        done = subprocess.run(command, env=values, cwd=where, capture_output=True, text=True, timeout=seconds)
        printed = done.stdout + done.stderr
        assert done.returncode == 0, f"{' '.join(command)} ended with {done.returncode}:\n{printed[-6000:]}"
        return printed

    def versions(self, *packages: str) -> dict[str, str]:
        """Return the versions of the installed packages."""
        asked = f"import importlib.metadata as m, json; print(json.dumps({{p: m.version(p) for p in {packages!r}}}))"
        found: dict[str, str] = json.loads(subprocess.check_output([self.python, "-c", asked], text=True))
        return found


def client(name: str, repository: str, needs: str, environ: Mapping[str, str] = os.environ) -> Client:
    """Return the client of that name, or skip the test with instructions for installing it."""
    variable = f"WINDLASS_CLIENT_{name}"
    folder, python = environ.get(variable), environ.get(f"{variable}_PYTHON")
    if not folder or not python:
        pytest.skip(
            f"clone {repository}; python tools/make_layered_venv.py .venv DIR {needs}; "
            f"then set {variable} to the clone and {variable}_PYTHON to DIR/bin/python"
        )
    return Client(Path(folder), python)


def words(number: int, length: int) -> str:
    """Return `length` random words, drawn with `number` as the seed."""
    return " ".join(random.Random(number).choices(TEXT.split(), k=length))


def tiny_llama(folder: Path) -> None:
    """Save a tokenizer and a Llama. Its random weights are so large that a few steps change the losses."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from windlass.data.tokenizer import train_tokenizer

    tokenizer = train_tokenizer([TEXT] * 5, 300, folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    tokens = {"vocab_size": tokenizer.vocab_size, "eos_token_id": tokenizer.eos, "pad_token_id": 1}
    config = LlamaConfig(initializer_range=0.2, **tokens, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder)
