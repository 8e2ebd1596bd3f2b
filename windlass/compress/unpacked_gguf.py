"""Model directory for transformers, written from a GGUF file for compression stages that need float matrices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from windlass.compress.gguf_model import GgufDirectory, read_gguf_tokenizer
from windlass.compress.packed_directory import WIDE_FORMATS, write_packed_directory

_TOKENIZER = "tokenizer_config.json"


class _PlainGguf(GgufDirectory):
    """GGUF file whose matrices are all read as floats."""

    @property
    def quantization(self) -> dict[str, Any] | None:
        return None

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of all tensors."""
        return self._dtype


def write_unpacked(path: Path, target: Path) -> None:
    """Write the model and tokenizer of a GGUF file to a directory for transformers, one tensor in memory at a time.

    A call after an interruption continues. A complete directory is left as it is.

    Raises:
        ModelError: the file is damaged, or windlass does not support its architecture or its tokenizer.
    """
    if (target / _TOKENIZER).is_file():
        return
    tokenizer = read_gguf_tokenizer(path)
    if not target.is_dir():
        source = _PlainGguf(path)
        write_packed_directory(source, target, WIDE_FORMATS[source.dtype], head=True)
    tokenizer.save_pretrained(target)
