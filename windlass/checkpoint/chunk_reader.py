"""Reading of stored boxes (rectangular parts of tensors) in a load: part by part into their target memory, with a
check of their crc32.
"""

from __future__ import annotations

import ctypes
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple

import torch

from windlass.checkpoint.checkpoint_state import LazyStorage
from windlass.checkpoint.checksum import crc32 as crc32_of
from windlass.checkpoint.fragment_boxes import flat_start, is_contiguous
from windlass.checkpoint.open_file_cache import OpenFileCache
from windlass.checkpoint.safetensors_file import TensorFile, tensor_bytes
from windlass.checkpoint.shard_load_planner import Wanted

_RUN_BYTES = 1 << 22  # maximum bytes converted, moved to a device, checksummed or read at a time
_SMALL = 1 << 18  # bytes; smaller boxes are read together with their neighbours: a copy costs less than another read


class _Box(NamedTuple):
    """Stored box, its byte range `[begin, end)` in the file, and those of its parts that are read in one pass."""

    file: TensorFile
    begin: int
    end: int
    parts: list[Wanted]


@dataclass
class _ChecksumProgress:
    """Number of bytes of a stored box that have been read so far, and the crc32 of these bytes."""

    position: int = 0
    crc32: int = 0


class ChunkReader:
    """Reader of boxes of a checkpoint into their target memory. Use it in a `with` statement.

    Target memory may be offloaded: then it is filled while its handle (`LazyStorage`) is open. A box with parts in
    several handles is read part by part, as the handles are opened. Its crc32 is checked after its last part. Small
    boxes that are wanted in full and follow each other in their file are read together.

    Args:
        files: the open files of the checkpoint.
    """

    def __init__(self, files: OpenFileCache) -> None:
        self._files = files
        self._expected_parts: Counter[int] = Counter()  # number of parts still to be read, by the id of their box
        self._progress: dict[int, _ChecksumProgress] = {}

    def __enter__(self) -> ChunkReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.__exit__(kind, error, trace)

    def fill(self, wanted: Sequence[Wanted]) -> None:
        """Read all the wanted parts.

        Raises:
            CheckpointError: the bytes are damaged. The targets' values are then undefined.
        """
        self._expected_parts = Counter(id(one.chunk) for one in wanted)
        for handle, parts in _by_handle(wanted):
            boxes = sorted(self._boxes(parts), key=lambda box: (box.parts[0].chunk.file, box.begin))
            with handle.open() if handle is not None else nullcontext():
                self._read_boxes(boxes)

    def _boxes(self, parts: list[Wanted]) -> Iterable[_Box]:
        by_box: dict[int, list[Wanted]] = {}
        for one in parts:
            by_box.setdefault(id(one.chunk), []).append(one)
        for same in by_box.values():
            file = self._files.get(same[0].chunk.file)
            yield _Box(file, *file.byte_range(same[0].chunk.entry), same)

    def _read_boxes(self, boxes: list[_Box]) -> None:
        run: list[_Box] = []
        for box in boxes:
            together = self._is_simple(box)
            if run and not (
                together
                and (run[-1].file, run[-1].end) == (box.file, box.begin)
                and box.end - run[0].begin <= _RUN_BYTES
            ):
                self._read_run(run)
                run = []
            if together:
                run.append(box)
            else:
                self._read(box)
        if run:
            self._read_run(run)

    def _is_simple(self, box: _Box) -> bool:
        """Return True if a box is small, has a crc32, and is wanted once and in full."""
        one = box.parts[0]
        return (
            box.end - box.begin <= _SMALL
            and len(box.parts) == 1
            and self._expected_parts[id(one.chunk)] == 1
            and one.whole
            and one.chunk.crc32 is not None
        )

    def _read_run(self, run: list[_Box]) -> None:
        """Read boxes that follow each other in their file with one read, and fill their targets. Check each crc32."""
        file, first = run[0].file, run[0].begin
        raw = file.read_run(first, run[-1].end, run[0].parts[0].chunk.entry)
        data, start = memoryview(raw), ctypes.addressof(raw)
        changed = []
        for _, begin, end, (one,) in run:
            chunk = one.chunk
            file.compare_crc32(chunk.entry, crc32_of(data[begin - first : end - first]), chunk.crc32)
            target = one.into().detach()
            straight = (
                target if _needs_no_conversion(one, target) else torch.empty(one.sizes, dtype=one.dtype, device="cpu")
            )
            memory = tensor_bytes(straight)
            file.check_size(chunk.entry, len(memory))
            ctypes.memmove(memory, start + begin - first, len(memory))
            if straight is not target:
                target.copy_(straight)
            elif not target.is_inference():
                changed.append(target)
            if one.done is not None:
                one.done(target)
            self._expected_parts[id(chunk)] = 0
        if changed:
            # memmove is invisible to autograd, which must detect that its saved tensors are stale.
            torch.autograd.graph.increment_version(changed)

    def _read(self, box: _Box) -> None:
        """Fill the targets of parts of one box."""
        file, parts = box.file, box.parts
        chunk, dtype = parts[0].chunk, parts[0].dtype
        nbytes = math.prod(chunk.sizes) * dtype.itemsize
        self._expected_parts[id(chunk)] -= len(parts)
        last = not self._expected_parts[id(chunk)]
        targets = [one.into().detach() for one in parts]
        if len(parts) == 1 and last and parts[0].whole and _needs_no_conversion(parts[0], targets[0]):
            file.read_into(chunk.entry, targets[0], chunk.crc32)
        elif all(_is_flat(one, target) for one, target in zip(parts, targets, strict=True)):
            file.check_size(chunk.entry, nbytes)
            if chunk.crc32 is None:
                file.verify_checksum(chunk.entry, None)
            begins = [flat_start(chunk.sizes, one.offsets) for one in parts]
            for number in sorted(range(len(parts)), key=begins.__getitem__):
                self._read_flat(file, parts[number], begins[number], targets[number].view(-1))
        else:
            self._read_whole(file, parts, targets)
        for one, target in zip(parts, targets, strict=True):
            if one.done is not None:
                one.done(target)
        if last and (progress := self._progress.pop(id(chunk), None)) is not None:
            _sum_up(file, chunk.entry, progress, nbytes)
            file.compare_crc32(chunk.entry, progress.crc32, chunk.crc32)

    def _read_flat(self, file: TensorFile, one: Wanted, begin: int, target: torch.Tensor) -> None:
        """Fill the flat `target` with the box's elements from `begin` on."""
        size, entry = one.dtype.itemsize, one.chunk.entry
        progress = (
            self._progress.setdefault(id(one.chunk), _ChecksumProgress()) if one.chunk.crc32 is not None else None
        )
        if progress is not None:
            _sum_up(file, entry, progress, begin * size)
        step = target.numel() if _needs_no_conversion(one, target) else _RUN_BYTES // size
        for first in range(0, target.numel(), max(step, 1)):
            part = target[first : first + step]
            straight = (
                part if _needs_no_conversion(one, target) else torch.empty(part.numel(), dtype=one.dtype, device="cpu")
            )
            raw = file.read_part(entry, (begin + first) * size, straight)
            # if this rank reads a part twice, for two replicas, the checksum includes it once
            if progress is not None and progress.position == (begin + first) * size:
                progress.crc32 = crc32_of(raw, progress.crc32)
                progress.position += len(raw)
            if straight is not part:
                part.copy_(straight)

    def _read_whole(self, file: TensorFile, parts: list[Wanted], targets: list[torch.Tensor]) -> None:
        """Read the full box into memory, and copy parts of it to targets that are not flat ranges of the box.

        Such targets occur if the sharding changes along an inner dimension, and with torch's planners.
        """
        chunk = parts[0].chunk
        full = torch.empty(chunk.sizes, dtype=parts[0].dtype, device="cpu")
        file.read_into(chunk.entry, full, chunk.crc32)
        for one, target in zip(parts, targets, strict=True):
            part = full
            for dim, (offset, size) in enumerate(zip(one.offsets, one.sizes, strict=True)):
                part = part.narrow(dim, offset, size)
            target.copy_(part)


def _sum_up(file: TensorFile, entry: str, progress: _ChecksumProgress, until: int) -> None:
    """Read the bytes up to `until` only to add them to the checksum, which covers the full box."""
    while progress.position < until:
        scratch = torch.empty(min(_RUN_BYTES, until - progress.position), dtype=torch.uint8, device="cpu")
        raw = file.read_part(entry, progress.position, scratch)
        progress.crc32 = crc32_of(raw, progress.crc32)
        progress.position += len(raw)


def _by_handle(parts: Iterable[Wanted]) -> list[tuple[LazyStorage | None, list[Wanted]]]:
    """Group parts by the storage handle that must be open for them.

    Parts that need no handle come first, then the handles in order of appearance.
    """
    found: dict[int, tuple[LazyStorage | None, list[Wanted]]] = {id(None): (None, [])}
    for one in parts:
        found.setdefault(id(one.handle), (one.handle, []))[1].append(one)
    return list(found.values())


def _needs_no_conversion(one: Wanted, target: torch.Tensor) -> bool:
    """Return True if the file's bytes can be read directly into the memory of the target."""
    is_lazy = target.is_conj() or target.is_neg()  # its memory has other values than the tensor
    return target.device.type == "cpu" and target.dtype == one.dtype and target.is_contiguous() and not is_lazy


def _is_flat(one: Wanted, target: torch.Tensor) -> bool:
    """Return True if a part is one flat range both of the box and of its target."""
    return target.is_contiguous() and is_contiguous(one.chunk.sizes, one.sizes)
