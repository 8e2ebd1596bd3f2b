"""Loading a checkpoint into tensors in place: any other cut, any other number of ranks."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from windlass.base.errors import CheckpointError
from windlass.base.log import logger
from windlass.checkpoint import plain
from windlass.checkpoint.agree import Ranks
from windlass.checkpoint.deepspeed_files import Order, index_of
from windlass.checkpoint.directory import find
from windlass.checkpoint.index import Index
from windlass.checkpoint.state import RESERVED, Holding, LoadedState, SavedState, holdings, whole
from windlass.checkpoint.tensor_file import dtype_of


def load(
    directory: str | os.PathLike[str],
    tag: str | None,
    into: SavedState,
    *,
    process_group: dist.ProcessGroup | None = None,
    strict: bool = True,
    ignore: tuple[str, ...] = (),
    optional: tuple[str, ...] = (),
    cast: bool = False,
    advice: str = "Load with strict=False to take what matches, or ignore names by prefix",
    order: Order | None = None,
) -> LoadedState:
    """Fills the tensors of `into` in place from `directory`/`tag`. Every rank of the group must call it.

    `into.shards` and `into.tensors` may be cut in any way and on any number of ranks; ranks need not cover a tensor,
    and ranges may overlap.
    Its plain data is not looked at: what the checkpoint holds is returned.

    Args:
        tag: None for the one that `latest` names.
        process_group: as in `save`.
        strict: whether missing and unexpected names are errors; else they are only reported.
        ignore: prefixes of names in the checkpoint that are not expected to be asked for, such as `("state/",)`.
        optional: prefixes of names whose absence, here or there, is only reported.
        cast: whether values of another dtype are converted; else another dtype is an error.
        advice: ends the error about names that differ.
        order: names of the optimizer's parameters by group, which DeepSpeed's files of stage 0 lack.

    Raises:
        CheckpointError: the same on all ranks: no such checkpoint, damaged files, another shape or dtype, names that
            differ. Before data is read all of this but damage is known; after damage the tensors' values are undefined.
    """
    ranks = Ranks.of(process_group)
    name, path = ranks.first("looking for the checkpoint", lambda: find(directory, tag))
    wanted: list[_Wanted] = []
    matches = ranks.each("preparing to load", lambda: _prepare(wanted, path, into, ranks.rank, cast, order))
    mine = wanted[0]
    asked = {name for names, _ in matches for name in names}
    missing = tuple(sorted({name for _, names in matches for name in names}))
    unexpected = tuple(
        name for name in mine.index.tensors if name not in asked and not name.startswith(RESERVED + tuple(ignore))
    )
    wrong = [
        tuple(name for name in names if not name.startswith(optional)) if strict else ()
        for names in (missing, unexpected)
    ]
    if any(wrong):
        told = "; ".join(listed(word, names) for word, names in zip(("missing", "unexpected"), wrong, strict=True))
        raise CheckpointError(f"{path} does not match: {told}. {advice}")
    # Imported here: the first import of torch.distributed.checkpoint costs as much as torch's own.
    from windlass.checkpoint import transfer

    transfer.read(path, mine.index, mine.held, ranks)
    matched = len(asked) - len(missing)
    told = f"{matched} tensors matched, {listed('missing', missing)}, {listed('unexpected', unexpected)}"
    logger.log(logging.WARNING if missing or unexpected else logging.INFO, f"loaded {path}: {told}")
    own = mine.index.ranks[ranks.rank] if ranks.rank < mine.index.world_size else None
    return LoadedState(
        tag=name,
        path=path,
        plain=plain.decode(mine.index.plain, mine.set_aside),
        rank_plain=None if own is None else plain.decode(own, mine.set_aside),
        saved_world_size=mine.index.world_size,
        matched=matched,
        missing=missing,
        unexpected=unexpected,
    )


@dataclass(frozen=True)
class _Wanted:
    index: Index
    held: dict[str, Holding]
    set_aside: dict[str, torch.Tensor]


def _prepare(
    wanted: list[_Wanted], path: Path, into: SavedState, rank: int, cast: bool, order: Order | None
) -> tuple[list[str], list[str]]:
    """Puts what this rank is to read into `wanted`; returns the names it asks for, and those that are missing."""
    index = index_of(path, order)
    held = holdings(into.shards, into.tensors, overlap=True)
    missing = [name for name in held if name not in index.tensors]
    present = {name: holding for name, holding in held.items() if name in index.tensors}
    problems = [text for name, holding in present.items() if (text := _problem(name, holding, index, cast))]
    if problems:
        rest = f"; and {len(problems) - 10} more" if len(problems) > 10 else ""
        raise CheckpointError(f"{path} does not fit: {'; '.join(problems[:10])}{rest}")
    set_aside = _set_aside(index, rank)
    present |= {name: whole(tensor) for name, tensor in set_aside.items()}
    wanted.append(_Wanted(index, present, set_aside))
    return list(held), missing


def _problem(name: str, holding: Holding, index: Index, cast: bool) -> str:
    record = index.tensors[name]
    if record.shape != holding.shape:
        return f"{name!r} has shape {record.shape} in the checkpoint, {holding.shape} here"
    dtype = dtype_of(record.dtype)
    if dtype != holding.dtype and not cast:
        return f"{name!r} is {dtype} in the checkpoint, {holding.dtype} here (cast=True converts)"
    return ""


def _set_aside(index: Index, rank: int) -> dict[str, torch.Tensor]:
    """Memory for the tensors that the plain data refers to: the shared, and this rank's own."""
    values: list[Any] = [index.plain, *index.ranks[rank : rank + 1]]
    found = {}
    for name in (name for value in values for name in plain.tensor_names(value)):
        if name not in index.tensors:
            raise CheckpointError(f"plain data of the checkpoint refers to the tensor {name!r}, which it does not hold")
        record = index.tensors[name]
        found[name] = torch.empty(record.shape, dtype=dtype_of(record.dtype), device="cpu")
    return found


def listed(word: str, names: tuple[str, ...]) -> str:
    """How many, and which first."""
    shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
    return f"{len(names)} {word} ({shown})" if names else f"0 {word}"
