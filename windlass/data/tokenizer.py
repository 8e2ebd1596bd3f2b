"""Byte-level BPE tokenizer: training, loading from a directory, and a hash for comparison."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from windlass.base.atomic_file import make_directory, write_atomically
from windlass.base.bounded_json import parse_json
from windlass.base.errors import DataError

EOS, PAD = "<|endoftext|>", "<|pad|>"


@dataclass(frozen=True)
class TextTokenizer:
    """Tokenizer from text to ids. `eos` is the id of the token that ends every document and precedes the first held-out
    one."""

    backend: Any  # tokenizers.Tokenizer
    eos: int
    digest: str  # hash of everything that determines the ids of a text

    @property
    def vocab_size(self) -> int:
        return int(self.backend.get_vocab_size())

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of each text, `[tokens]` int64, without end tokens. Runs on all cores."""
        return [
            np.array(item.ids, dtype=np.int64) for item in self.backend.encode_batch(texts, add_special_tokens=False)
        ]


def train_tokenizer(texts: Iterable[str], vocab_size: int, directory: Path) -> TextTokenizer:
    """Train a byte-level BPE of at most `vocab_size` tokens and save it as a Hugging Face fast tokenizer.

    Every byte is in the initial vocabulary, so no text is out of vocabulary.
    Source: Sennrich et al. 2016 (BPE), Radford et al. 2019 (on bytes).

    Raises:
        DataError: the vocabulary size is below 258, or the package tokenizers is missing.
    """
    if vocab_size < 258:
        raise DataError(f"vocabulary size {vocab_size} is too small: 256 bytes and two special tokens need 258")
    tokenizers = _import_tokenizers()
    byte_level = tokenizers.pre_tokenizers.ByteLevel
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = byte_level(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[EOS, PAD], initial_alphabet=byte_level.alphabet(), show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    _save(backend, directory)
    return load_tokenizer(directory)


def load_tokenizer(directory: Path) -> TextTokenizer:
    """Load the fast tokenizer of a Hugging Face directory.

    Raises:
        DataError: `tokenizer.json` is missing or damaged, the tokenizer has no end-of-text token, or the package
            tokenizers is missing.
    """
    file = directory / "tokenizer.json"
    if not file.is_file():
        raise DataError(
            f"no tokenizer at {directory}: it holds no tokenizer.json; give a directory saved by save_pretrained"
        )
    tokenizers = _import_tokenizers()
    try:
        data = file.read_bytes()
        backend = tokenizers.Tokenizer.from_str(data.decode())
        settings = _read_settings(directory)
    except OSError as error:
        raise DataError(f"cannot read the tokenizer in {directory}: {error.strerror or error}") from error
    except Exception as error:  # the Rust library raises a bare Exception for a malformed file
        raise DataError(f"the tokenizer in {directory} is damaged ({error}); save it again") from error
    backend.encode_special_tokens = True  # the literal text "<|endoftext|>" in a corpus must not end a document
    backend.no_truncation()
    backend.no_padding()
    eos = _eos_id(backend, settings, directory)
    return TextTokenizer(backend, eos, hashlib.blake2b(data + str(eos).encode(), digest_size=16).hexdigest())


def _read_settings(directory: Path) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (directory / name).is_file():
            merged |= {key: value for key, value in parse_json((directory / name).read_bytes()).items() if value}
    return merged


def _eos_id(backend: Any, settings: dict[str, Any], directory: Path) -> int:
    token = settings.get("eos_token")
    name = token.get("content") if isinstance(token, dict) else token
    index = backend.token_to_id(name) if isinstance(name, str) else None
    if index is None:
        raise DataError(
            f"the tokenizer in {directory} has no end-of-text token; set eos_token in its tokenizer_config.json"
        )
    return int(index)


def _save(backend: Any, directory: Path) -> None:
    make_directory(directory)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOS,
        "bos_token": EOS,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
    }
    texts = {"tokenizer.json": backend.to_str(), "tokenizer_config.json": json.dumps(settings, indent=2)}
    for name, text in texts.items():
        write_atomically(directory / name, text)


def _import_tokenizers() -> Any:
    try:
        import tokenizers
        import tokenizers.decoders
        import tokenizers.models
        import tokenizers.pre_tokenizers
        import tokenizers.trainers
    except ImportError as error:
        raise DataError("tokenizing needs tokenizers: pip install 'windlass[hf]'") from error
    return tokenizers
