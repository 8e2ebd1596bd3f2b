"""Work of a set of ranks."""

from __future__ import annotations

from dataclasses import dataclass, field


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


@dataclass(frozen=True)
class Job:
    """One engine on some ranks; `engine` is a name of `windlass.cli.benches.bench_engines.make`."""

    engine: str
    ranks: int
    size: Size = field(default_factory=Size)
    threads: int = 1
    lr: float = 1e-4
    clip: float = 1.0
