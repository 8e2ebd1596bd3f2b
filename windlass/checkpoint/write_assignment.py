"""Assignment of boxes to the ranks that write them: each box once, and all of every tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from windlass.base.errors import CheckpointError
from windlass.checkpoint.checkpoint_state import HeldTensor
from windlass.checkpoint.fragment_boxes import flat_start, is_contiguous
from windlass.checkpoint.safetensors_file import dtype_code, dtype_from_code

BoxBounds = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets in the whole tensor, and sizes."""


class HeldTensorInfo(NamedTuple):
    """What one rank holds of one tensor.

    Attributes:
        shape, code: of the whole tensor; its dtype as safetensors spells it.
        boxes: of this rank; None for one box that is all of it.
    """

    shape: tuple[int, ...]
    dtype_code: str
    boxes: tuple[BoxBounds, ...] | None

    @property
    def all_boxes(self) -> tuple[BoxBounds, ...]:
        """`boxes`, with one box for the whole tensor."""
        return (((0,) * len(self.shape), self.shape),) if self.boxes is None else self.boxes


HeldTensorInfos = dict[str, HeldTensorInfo]
"""What one rank holds, by name: all that others must know of it."""


def describe_held(held: Mapping[str, HeldTensor]) -> HeldTensorInfos:
    """What this rank tells the others of what it holds.

    Raises:
        CheckpointError: a dtype that no checkpoint can hold.
    """
    found, codes = {}, {}
    for name, holding in held.items():
        if holding.dtype not in codes:
            try:
                codes[holding.dtype] = dtype_code(holding.dtype)
            except CheckpointError as error:
                raise CheckpointError(f"{name!r}: {error}") from error
        pieces = holding.boxes
        boxes = None
        if len(pieces) != 1 or pieces[0].sizes != holding.shape:
            boxes = tuple((piece.offsets, piece.sizes) for piece in pieces)
        found[name] = HeldTensorInfo(holding.shape, codes[holding.dtype], boxes)
    return found


def assign_writers(ranks: Sequence[HeldTensorInfos]) -> tuple[list[bytes], int]:
    """Which boxes each rank writes, and the bytes of all of them.

    Args:
        ranks: what each rank holds.

    Returns:
        For each rank one byte a box, in order: 1 where it writes it. A box that several hold is written by the one
        that has the fewest bytes to write so far.

    Raises:
        CheckpointError: ranks disagree on a tensor's shape or dtype, or their boxes leave gaps or overlap.
    """
    names = _agreed_shapes(ranks)
    chosen = [bytearray() for _ in ranks]
    load = [0] * len(ranks)
    for name, (shape, code) in names.items():
        holders: dict[tuple[int, ...], list[tuple[int, int, tuple[int, ...]]]] = {}
        for rank, described in enumerate(ranks):
            held = described.get(name)
            for offsets, sizes in held.all_boxes if held is not None else ():
                same = holders.setdefault(offsets, [])
                if same and same[0][2] != sizes:
                    raise CheckpointError(
                        f"ranks {same[0][0]} and {rank} hold ranges of {name!r} that overlap but differ; "
                        "replicas must be cut alike"
                    )
                same.append((rank, len(chosen[rank]), sizes))
                chosen[rank].append(0)
        if not holders:
            raise CheckpointError(f"every rank's range of {name!r} is empty; over all ranks the ranges must cover it")
        width = dtype_from_code(code).itemsize
        for same in holders.values():
            writer, at, sizes = min(same, key=lambda one: load[one[0]]) if len(same) > 1 else same[0]
            chosen[writer][at] = 1
            load[writer] += math.prod(sizes) * width
        boxes = [(offsets, same[0][2]) for offsets, same in holders.items()]
        if len(boxes) != 1 or boxes[0][1] != shape:
            check_coverage(name, shape, boxes)
    # one byte a box in the order of names over all ranks; each rank has its boxes in the order of its own names
    order = list(names)
    return [
        _reorder_flags(bytes(flags), described, order) for flags, described in zip(chosen, ranks, strict=True)
    ], sum(load)


def boxes_to_write(infos: HeldTensorInfos, chosen: bytes) -> list[tuple[str, HeldTensorInfo, BoxBounds]]:
    """The boxes that a rank writes, in order."""
    flags = iter(chosen)
    return [(name, held, box) for name, held in infos.items() for box in held.all_boxes if next(flags)]


def check_coverage(name: str, shape: tuple[int, ...], boxes: Sequence[BoxBounds]) -> None:
    """Raise CheckpointError unless the boxes cover the tensor, each element once."""
    if not all(is_contiguous(shape, sizes) for _, sizes in boxes):
        _check_box_coverage(name, shape, boxes)
        return
    spans = sorted((flat_start(shape, offsets), math.prod(sizes)) for offsets, sizes in boxes)
    position = 0
    for start, count in spans:
        if start < position:
            raise CheckpointError(f"element {start} of {name!r} lies in two different cuts; replicas must be cut alike")
        if start > position:
            break
        position = start + count
    if position != math.prod(shape):
        raise CheckpointError(
            f"no rank holds element {position} of {name!r} (shape {shape}); over all ranks the ranges must cover it"
        )


def _agreed_shapes(ranks: Sequence[HeldTensorInfos]) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of each tensor, of which all ranks that name it must have the same."""
    names: dict[str, tuple[tuple[int, ...], str]] = {}
    for rank, described in enumerate(ranks):
        for name, held in described.items():
            known = names.setdefault(name, held[:2])
            if known != held[:2]:
                first = next(number for number, other in enumerate(ranks) if name in other)
                raise CheckpointError(
                    f"ranks disagree on {name!r}: rank {first} has shape {known[0]}, {dtype_from_code(known[1])}, rank {rank} "
                    f"has shape {held.shape}, {dtype_from_code(held.dtype_code)}; one name must mean one tensor on all ranks"
                )
    return names


def _reorder_flags(flags: bytes, infos: HeldTensorInfos, order: list[str]) -> bytes:
    own = [name for name in order if name in infos]
    if own == list(infos):
        return flags
    at, places = 0, {}
    for name in own:
        places[name] = at
        at += len(infos[name].all_boxes)
    return b"".join(flags[places[name] : places[name] + len(held.all_boxes)] for name, held in infos.items())


def _check_box_coverage(name: str, shape: tuple[int, ...], boxes: Sequence[BoxBounds]) -> None:
    """As `check_cover`, of boxes that are no flat ranges: no two overlap, and together they have all elements."""
    open_: list[BoxBounds] = []  # those that reach the rows where the next one begins
    for offsets, sizes in sorted(boxes):
        open_ = [other for other in open_ if other[0][0] + other[1][0] > offsets[0]]
        for other in open_:
            if all(
                max(a, b) < min(a + n, b + m) for a, n, b, m in zip(offsets, sizes, other[0], other[1], strict=True)
            ):
                raise CheckpointError(
                    f"boxes of {name!r} (shape {shape}) at {other[0]} and {offsets} overlap; replicas must be cut alike"
                )
        open_.append((offsets, sizes))
    held = sum(math.prod(sizes) for _, sizes in boxes)
    if held != math.prod(shape):
        raise CheckpointError(
            f"ranks hold {held} of the {math.prod(shape)} elements of {name!r} (shape {shape}); over all ranks the "
            "boxes must cover it"
        )
