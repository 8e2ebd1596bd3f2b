"""Work of a set of ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Size:
    """Size of a Llama in fp32 and of its batches.

    Args:
        hidden: width, a multiple of 64 (the size of a head).
        layers: number of blocks.
        length: tokens of a sequence, at most 512.
        batch: sequences on a rank.
        vocabulary: number of tokens.
    """

    hidden: int = 768
    layers: int = 12
    length: int = 128
    batch: int = 1
    vocabulary: int = 8192

    def plain(self) -> dict[str, Any]:
        """Return the arguments of transformers' `LlamaConfig`."""
        return {
            "hidden_size": self.hidden,
            "intermediate_size": self.hidden * 8 // 3 // 64 * 64,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.hidden // 64,
            "num_key_value_heads": self.hidden // 64,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": 512,
            "tie_word_embeddings": False,
        }


@dataclass(frozen=True)
class Job:
    """Work of some ranks. For a `Worker`, `engine` is a name of `windlass.cli.benches.bench_engines.make_engine`."""

    engine: str
    ranks: int
    size: Size = field(default_factory=Size)
    threads: int = 1
    lr: float = 1e-4
    clip: float = 1.0
