"""Packing of a corpus into a token file, which is reused if it is up to date."""

from __future__ import annotations

import errno
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from windlass.base.atomic_file import make_directory
from windlass.base.errors import DataError
from windlass.base.log import logger
from windlass.data.corpus_sources import CorpusSource, find_sources
from windlass.data.held_out import choose_held_out
from windlass.data.token_file import TokenFileHeader, TokenWriter, open_tokens, read_header
from windlass.data.tokenizer import TextTokenizer, load_tokenizer, train_tokenizer

_ENCODE_BYTES = 2**22  # bytes of text that are tokenized at a time, on all cores
_SAMPLE_BYTES = 2**24  # bytes of text on which a tokenizer is trained
_MIN_DOCUMENTS = 64


@dataclass(frozen=True)
class PackedCorpus:
    """Location of a packed corpus and its tokenizer."""

    tokens: Path
    tokenizer_dir: Path
    tokenizer: TextTokenizer
    header: TokenFileHeader
    is_reused: bool
    documents: int  # number of documents, before those of a small corpus were split


class Corpus:
    """Documents of some sources in a fixed order, each with its hash and size. Every iteration reads them again."""

    def __init__(self, sources: Sequence[CorpusSource], text_field: str) -> None:
        self._sources, self._text_field = sources, text_field
        self._split_bytes: int | None = None
        self._scan()
        self.documents = len(self.sizes)
        if 0 < len(self.sizes) < _MIN_DOCUMENTS:
            self._split_bytes = max(int(self.sizes.sum()) // _MIN_DOCUMENTS, 1)
            self._scan()

    def __iter__(self) -> Iterator[str]:
        """Yield the documents, which are read from the sources again.

        Raises:
            DataError: the number of documents has changed.
        """
        count = 0
        for text in self._read():
            count += 1
            if count > len(self.sizes):
                break
            yield text
        if count != len(self.sizes):
            raise DataError(
                f"the corpus changed while it was read: it had {len(self.sizes)} documents; wait until nothing writes "
                "to it, or pack a copy"
            )

    def _read(self) -> Iterator[str]:
        for source in self._sources:
            for text in source.documents(self._text_field):
                yield from [text] if self._split_bytes is None else _split_text(text, self._split_bytes)

    def _scan(self) -> None:
        digests, sizes, full = [], [], hashlib.blake2b(digest_size=16)
        for text in self._read():
            data = text.encode()
            digest = hashlib.blake2b(data, digest_size=8).digest()
            full.update(digest)
            digests.append(int.from_bytes(digest, "little"))
            sizes.append(len(data))
        self.digests = np.array(digests, dtype=np.uint64)  # [documents]
        self.sizes = np.array(sizes, dtype=np.int64)  # [documents], bytes
        self.digest = full.hexdigest()


def pack_corpus(
    specs: Sequence[str],
    directory: Path,
    *,
    tokenizer_dir: Path | None = None,
    vocab_size: int = 4096,
    text_field: str = "text",
    eval_bytes: int = 2**17,
) -> PackedCorpus:
    """Return the corpus packed into `directory/tokens.bin`. An undamaged file of the same text and settings is reused.

    Args:
        specs: sources for `corpus_sources.find_sources`.
        tokenizer_dir: tokenizer to use. Without it a BPE is trained on the training documents and stored in
            `directory/tokenizer`.
        vocab_size: vocabulary size of the trained BPE.
        eval_bytes: approximate bytes of held-out text; a tenth of the corpus if that is less.

    Raises:
        DataError: there is no readable text, the tokenizer is invalid, or `directory` cannot be written.
    """
    corpus = Corpus(find_sources(specs, directory, text_field), text_field)
    if len(corpus.sizes) < 2:
        raise DataError(
            f"the corpus {', '.join(specs)} is empty or a single line; give at least some lines of text to train on "
            "and to hold out"
        )
    try:
        make_directory(directory)
        return _build_or_reuse(corpus, directory, tokenizer_dir, vocab_size, eval_bytes)
    except OSError as error:
        hint = "free some space" if error.errno == errno.ENOSPC else "check the path and its rights"
        raise DataError(f"cannot write the packed corpus to {directory}: {error.strerror or error}; {hint}") from error


def _build_or_reuse(
    corpus: Corpus, directory: Path, tokenizer_dir: Path | None, vocab_size: int, eval_bytes: int
) -> PackedCorpus:
    tokens = directory / "tokens.bin"
    folder = tokenizer_dir or directory / "tokenizer"
    recipe: dict[str, str | int | None] = {
        "documents": corpus.digest,
        "eval_bytes": eval_bytes,
        "vocab_size": None if tokenizer_dir else vocab_size,
    }
    if tokenizer_dir is not None or (folder / "tokenizer.json").is_file() and tokens.is_file():
        tokenizer = load_tokenizer(folder)
        if _is_up_to_date(tokens, _build_key(recipe, tokenizer)):
            return PackedCorpus(tokens, folder, tokenizer, read_header(tokens), True, corpus.documents)
    held_out = choose_held_out(corpus.digests, corpus.sizes, eval_bytes)
    if tokenizer_dir is None:
        tokenizer = train_tokenizer(_tokenizer_sample(corpus, held_out), vocab_size, folder)
    _write_token_file(corpus, held_out, tokenizer, tokens, _build_key(recipe, tokenizer))
    return PackedCorpus(tokens, folder, tokenizer, read_header(tokens), False, corpus.documents)


def _is_up_to_date(tokens: Path, key: str) -> bool:
    if not tokens.is_file():
        return False
    try:
        return open_tokens(tokens, verify=True).header.key == key
    except DataError as error:
        logger.warning("%s; building it again", str(error).split(";")[0])
        return False


def _build_key(recipe: dict[str, str | int | None], tokenizer: TextTokenizer) -> str:
    text = json.dumps(recipe | {"tokenizer": tokenizer.digest}, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _tokenizer_sample(corpus: Corpus, held_out: np.ndarray) -> Iterator[str]:
    """Yield training documents, chosen by their hashes, of about `_SAMPLE_BYTES` in total, but at least one."""
    order = np.argsort(corpus.digests, kind="stable")
    order = order[~held_out[order]]
    before = np.cumsum(corpus.sizes[order]) - corpus.sizes[order]
    drawn = np.zeros(len(held_out), dtype=bool)
    drawn[order[before < _SAMPLE_BYTES]] = True
    yield from (text for text, requested in zip(corpus, drawn, strict=True) if requested)


def _write_token_file(corpus: Corpus, held_out: np.ndarray, tokenizer: TextTokenizer, path: Path, key: str) -> None:
    evaluation: list[np.ndarray] = [np.array([tokenizer.eos])]
    train_tokens = 0
    with TokenWriter(path, tokenizer.vocab_size) as writer:
        for ids, held in zip(_encode_documents(corpus, tokenizer), held_out, strict=True):
            if held:
                evaluation.append(ids)
            else:
                writer.append(ids)
                train_tokens += len(ids)
        last = np.concatenate(evaluation)
        writer.append(last)
        writer.finish(
            eos=tokenizer.eos,
            train_tokens=train_tokens,
            eval_tokens=len(last),
            train_bytes=int(corpus.sizes[~held_out].sum()),
            eval_bytes=int(corpus.sizes[held_out].sum()),
            documents=len(held_out),
            key=key,
        )


def _encode_documents(corpus: Corpus, tokenizer: TextTokenizer) -> Iterator[np.ndarray]:
    """Yield the token ids of each document, with the end token last."""
    batch: list[str] = []
    waiting = 0
    for text, size in zip(corpus, corpus.sizes, strict=True):
        batch.append(text)
        waiting += int(size)
        if waiting >= _ENCODE_BYTES:
            yield from _encode_with_eos(batch, tokenizer)
            batch, waiting = [], 0
    yield from _encode_with_eos(batch, tokenizer)


def _encode_with_eos(batch: list[str], tokenizer: TextTokenizer) -> Iterator[np.ndarray]:
    for ids in tokenizer.encode(batch):
        yield np.append(ids, tokenizer.eos)


def _split_text(text: str, size: int) -> Iterator[str]:
    """Yield pieces of about `size` characters that end at line ends. Only lines longer than `size` are split."""
    piece = ""
    for line in text.splitlines(keepends=True):
        for start in range(0, len(line), size):
            piece += line[start : start + size]
            if len(piece) >= size:
                yield piece
                piece = ""
    if piece:
        yield piece
