"""Assignment of boxes (rectangular parts of tensors) to ranks: each box is written once, and all of every tensor is
written.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from windlass.base.errors import CheckpointError
from windlass.checkpoint.checkpoint_state import HeldTensor
from windlass.checkpoint.fragment_boxes import flat_start, is_contiguous
from windlass.checkpoint.safetensors_file import dtype_code, dtype_from_code

BoxBounds = tuple[tuple[int, ...], tuple[int, ...]]
"""Bounds of a box: its offsets in the full tensor, and its sizes."""


class HeldTensorInfo(NamedTuple):
    """Description of the boxes of one tensor that a rank holds.

    Attributes:
        shape, dtype_code: shape of the full tensor; its dtype in safetensors' spelling.
        boxes: boxes of this rank; None for a single box that is the full tensor.
    """

    shape: tuple[int, ...]
    dtype_code: str
    boxes: tuple[BoxBounds, ...] | None

    @property
    def all_boxes(self) -> tuple[BoxBounds, ...]:
        """`boxes`, with None replaced by one box for the full tensor."""
        return (((0,) * len(self.shape), self.shape),) if self.boxes is None else self.boxes


HeldTensorInfos = dict[str, HeldTensorInfo]
"""Descriptions of all tensors that one rank holds, by name."""


def describe_held(held: Mapping[str, HeldTensor]) -> HeldTensorInfos:
    """Describe the tensors of this rank for the other ranks.

    Raises:
        CheckpointError: a dtype that a checkpoint cannot hold.
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
    """Assign each box to one rank.

    Args:
        ranks: descriptions of the tensors that each rank holds.

    Returns:
        For each rank, one byte per box that it holds, in order: 1 if it writes the box. Also the total bytes of all
            boxes, each counted once. A box that several ranks hold is assigned to the one with the fewest bytes so far.

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
                        "replicas must be sharded alike"
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
    # `chosen` follows the order of names over all ranks; each rank has its boxes in the order of its names
    order = list(names)
    return [
        _reorder_flags(bytes(flags), described, order) for flags, described in zip(chosen, ranks, strict=True)
    ], sum(load)


def boxes_to_write(infos: HeldTensorInfos, chosen: bytes) -> list[tuple[str, HeldTensorInfo, BoxBounds]]:
    """Return the boxes that a rank writes, in order."""
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
            raise CheckpointError(
                f"element {start} of {name!r} lies in two different boxes; replicas must be sharded alike"
            )
        if start > position:
            break
        position = start + count
    if position != math.prod(shape):
        raise CheckpointError(
            f"no rank holds element {position} of {name!r} (shape {shape}); over all ranks the ranges must cover it"
        )


def _agreed_shapes(ranks: Sequence[HeldTensorInfos]) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return shape and dtype of each tensor. Raise CheckpointError if ranks disagree."""
    names: dict[str, tuple[tuple[int, ...], str]] = {}
    for rank, described in enumerate(ranks):
        for name, held in described.items():
            known = names.setdefault(name, held[:2])
            if known != held[:2]:
                first = next(number for number, other in enumerate(ranks) if name in other)
                raise CheckpointError(
                    f"ranks disagree on {name!r}: rank {first} has shape {known[0]}, {dtype_from_code(known[1])}, rank "
                    f"{rank} has shape {held.shape}, {dtype_from_code(held.dtype_code)}; one name must mean one tensor "
                    "on all ranks"
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
    """Check coverage as `check_coverage` does, for boxes that are not flat ranges."""
    open_: list[BoxBounds] = []  # boxes that extend into the rows where the next box begins
    for offsets, sizes in sorted(boxes):
        open_ = [other for other in open_ if other[0][0] + other[1][0] > offsets[0]]
        for other in open_:
            if all(
                max(a, b) < min(a + n, b + m) for a, n, b, m in zip(offsets, sizes, other[0], other[1], strict=True)
            ):
                raise CheckpointError(
                    f"boxes of {name!r} (shape {shape}) at {other[0]} and {offsets} overlap; replicas must be sharded "
                    "alike"
                )
        open_.append((offsets, sizes))
    held = sum(math.prod(sizes) for _, sizes in boxes)
    if held != math.prod(shape):
        raise CheckpointError(
            f"ranks hold {held} of the {math.prod(shape)} elements of {name!r} (shape {shape}); over all ranks the "
            "boxes must cover it"
        )
