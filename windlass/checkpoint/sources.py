"""The stored boxes that a load reads, part by part, each byte once, straight into where it belongs."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem

from windlass.checkpoint.checksum import crc32 as crc32_of
from windlass.checkpoint.fragment import flat_start, is_contiguous
from windlass.checkpoint.index import Chunk
from windlass.checkpoint.open_files import OpenFiles
from windlass.checkpoint.tensor_file import TensorFile

_AT_ONCE = 1 << 22  # bytes of what is converted, moved to a device or only summed up


@dataclass(frozen=True)
class Source:
    """One stored box and its dtype."""

    chunk: Chunk
    dtype: torch.dtype

    @property
    def key(self) -> tuple[str, str]:
        """File and entry."""
        return self.chunk.file, self.chunk.entry

    @property
    def nbytes(self) -> int:
        return math.prod(self.chunk.sizes) * self.dtype.itemsize


@dataclass
class _Progress:
    """How far an entry was read, in bytes, and the crc32 of that."""

    position: int = 0
    crc32: int = 0


class Sources:
    """Reads boxes of the checkpoint directory `path` into what a planner says. Use it in a `with` statement.

    A box whose parts go to several drawers is read part by part, as these are opened; its crc32 is known, and checked,
    once nothing more of it is expected.
    """

    def __init__(self, path: Path, planner: LoadPlanner) -> None:
        self._planner = planner
        self._files = OpenFiles(path)
        self._expected: Counter[tuple[str, str]] = Counter()
        self._progress: dict[tuple[str, str], _Progress] = {}

    def __enter__(self) -> Sources:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.__exit__(kind, error, trace)

    def expect(self, source: Source) -> None:
        """One more part of this box will be read."""
        self._expected[source.key] += 1

    def position(self, source: Source) -> tuple[str, int]:
        """Sorts boxes as they lie in their files."""
        return source.chunk.file, self._file(source).span(source.chunk.entry)[0]

    def read(self, source: Source, items: list[ReadItem]) -> None:
        """Fill what `items` want of a box.

        Raises:
            CheckpointError: its bytes are not those that were written. The targets' values are then undefined.
        """
        self._expected[source.key] -= len(items)
        last = not self._expected[source.key]
        chunk, targets = source.chunk, [self._planner.resolve_tensor(item).detach() for item in items]
        if len(items) == 1 and last and tuple(items[0].lengths) == chunk.sizes and _is_straight(source, targets[0]):
            self._file(source).read_into(chunk.entry, targets[0], chunk.crc32)
        elif all(_is_flat(chunk, item, target) for item, target in zip(items, targets, strict=True)):
            self._file(source).check_size(chunk.entry, source.nbytes)
            if chunk.crc32 is None:
                self._file(source).require_sound(chunk.entry, None)
            begins = [flat_start(chunk.sizes, tuple(item.storage_offsets)) for item in items]
            for number in sorted(range(len(items)), key=begins.__getitem__):
                self._read_flat(source, begins[number], targets[number].view(-1))
        else:
            self._read_boxes(source, items, targets)
        for item, target in zip(items, targets, strict=True):
            self._planner.commit_tensor(item, target)
        if last and (progress := self._progress.pop(source.key, None)) is not None:
            self._sum_up(source, progress, source.nbytes)
            self._file(source).check_sum(chunk.entry, progress.crc32, chunk.crc32)

    def _read_flat(self, source: Source, begin: int, target: torch.Tensor) -> None:
        """Fill the flat `target` with the box's elements from `begin` on."""
        size = source.dtype.itemsize
        sums = source.chunk.crc32 is not None
        progress = self._progress.setdefault(source.key, _Progress()) if sums else None
        if progress is not None:
            self._sum_up(source, progress, begin * size)
        step = target.numel() if _is_straight(source, target) else _AT_ONCE // size
        for first in range(0, target.numel(), max(step, 1)):
            part = target[first : first + step]
            straight = (
                part if _is_straight(source, target) else torch.empty(part.numel(), dtype=source.dtype, device="cpu")
            )
            raw = self._file(source).read_part(source.chunk.entry, (begin + first) * size, straight)
            # a part that is read again (replicas on one rank) was summed up the first time
            if progress is not None and progress.position == (begin + first) * size:
                progress.crc32 = crc32_of(raw, progress.crc32)
                progress.position += len(raw)
            if straight is not part:
                part.copy_(straight)

    def _sum_up(self, source: Source, progress: _Progress, until: int) -> None:
        """Take the bytes up to `until` into the crc32 though nobody wants them: it covers all of the box."""
        while progress.position < until:
            scratch = torch.empty(min(_AT_ONCE, until - progress.position), dtype=torch.uint8, device="cpu")
            raw = self._file(source).read_part(source.chunk.entry, progress.position, scratch)
            progress.crc32 = crc32_of(raw, progress.crc32)
            progress.position += len(raw)

    def _read_boxes(self, source: Source, items: list[ReadItem], targets: list[torch.Tensor]) -> None:
        """Fill targets that are no flat ranges of the box, as other planners may ask; all of it is in memory."""
        chunk = source.chunk
        whole = torch.empty(chunk.sizes, dtype=source.dtype, device="cpu")
        self._file(source).read_into(chunk.entry, whole, chunk.crc32)
        for item, target in zip(items, targets, strict=True):
            part = whole
            for dim, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                part = part.narrow(dim, offset, length)
            target.copy_(part)

    def _file(self, source: Source) -> TensorFile:
        return self._files.named(source.chunk.file)


def _is_straight(source: Source, target: torch.Tensor) -> bool:
    """Whether the file's bytes are the target's."""
    return target.device.type == "cpu" and target.dtype == source.dtype and target.is_contiguous()


def _is_flat(chunk: Chunk, item: ReadItem, target: torch.Tensor) -> bool:
    """Whether a part is one flat range both of the box and of its target."""
    return target.is_contiguous() and is_contiguous(chunk.sizes, tuple(item.lengths))
