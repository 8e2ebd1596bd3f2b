"""Fuzz tests of the files of a tokenizer.

Law: the tokenizer is loaded and used, or a `WindlassError` with printable text names the directory.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fuzz.mutations import SEED
from tests.fuzz.texts import examples, mutants, outcome, replace_somewhere
from tests.inference.text_models import byte_level_tokenizer, sentencepiece_tokenizer
from windlass.base.errors import WindlassError
from windlass.inference.model_loading import load_tokenizer_of

MAKERS = {"byte-level": byte_level_tokenizer, "sentencepiece": sentencepiece_tokenizer}


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
@pytest.mark.parametrize("kind", MAKERS)
def test_mutations_of_a_tokenizer(kind: str, name: str, tmp_path: Path) -> None:
    tokenizer = MAKERS[kind]()
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    path = tmp_path / name

    def use(directory: Path) -> Any:
        made = load_tokenizer_of(directory)
        return made.decode(made("the quick é").input_ids)

    seed = path.read_bytes()
    for data in (*mutants([seed], 60), *replaced(seed, name)):
        path.write_bytes(data)
        result = outcome(use, tmp_path)
        if isinstance(result, WindlassError):
            assert str(tmp_path) in str(result), result


def replaced(seed: bytes, name: str) -> Iterator[bytes]:
    """Yield files of valid JSON with odd values."""
    draw = random.Random(SEED)
    for _ in range(examples(100, 10) if name.endswith(".json") else 0):
        data = json.loads(seed)
        replace_somewhere(data, draw)
        yield json.dumps(data).encode()
