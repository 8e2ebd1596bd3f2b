"""Loading of a checkpoint into tensors in place, with any sharding and any number of ranks."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from windlass.base.errors import CheckpointError
from windlass.base.log import logger
from windlass.base.text import plural
from windlass.checkpoint.checkpoint_directory import find_checkpoint
from windlass.checkpoint.checkpoint_index import CheckpointIndex
from windlass.checkpoint.checkpoint_ranks import CheckpointRanks
from windlass.checkpoint.checkpoint_state import RESERVED_PREFIXES, HeldTensor, LoadedState, SavedState, hold_tensors
from windlass.checkpoint.foreign_formats import ParameterOrder
from windlass.checkpoint.safetensors_file import dtype_from_code
from windlass.checkpoint.stored_checkpoint import StoredCheckpoint


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
    advice: str = "Load with strict=False to load what matches, or ignore names by prefix",
    parameter_order: ParameterOrder | None = None,
    check: Callable[[dict[str, Any], dict[str, Any] | None], object] = lambda shared, own: None,
    opened: StoredCheckpoint | None = None,
    first: Collection[str] = (),
    check_first: Callable[[], object] = lambda: None,
    on_overwrite: Callable[[], object] = lambda: None,
) -> LoadedState:
    """Fill the tensors of `into` in place from `directory`/`tag`. Collective over the group.

    `into.shards` and `into.tensors` may have any sharding over any number of ranks. The ranks together need
    not cover a tensor, and their ranges may overlap. The plain data of `into` is ignored; the saved plain data is
    returned.

    Args:
        tag: tag of the checkpoint; None: the tag in `latest`.
        process_group: the ranks that load together; see `save`.
        strict: raise on missing and unexpected names; else only report them.
        ignore: prefixes of names in the checkpoint that need not be requested, such as `("state/",)`.
        optional: prefixes of names whose absence, in `into` or in the checkpoint, is only reported.
        cast: convert values of another dtype; else another dtype is an error.
        advice: end of the error message about names that differ.
        parameter_order: names of the optimizer's parameters by group. Needed to load the optimizer states of
            DeepSpeed's stage 0, whose files have no names.
        check: called with the plain data shared by all ranks and with this rank's own (None if none was saved), before
            a tensor is filled. Its error is raised on all ranks.
        opened: the same checkpoint, already open with the same `parameter_order`, so that its index and headers are not
            read again; None: open it here.
        first: names of tensors that are filled before all others.
        check_first: called after the tensors in `first` are filled, before the others. Its error is raised on all
            ranks.
        on_overwrite: called on all ranks before the remaining tensors are filled. An error after this call leaves the
            values of these tensors undefined.

    Raises:
        CheckpointError: the same on all ranks: no such checkpoint, damaged files, another shape or dtype, names that
            differ. All of these except damage are detected before data is read; after damage the tensors' values are
            undefined.
    """
    ranks = CheckpointRanks.of_group(process_group)
    name, path = ranks.run_on_first("looking for the checkpoint", lambda: find_checkpoint(directory, tag))
    expected: list[_LoadRequest] = []
    matches = ranks.run_on_all(
        "preparing to load", lambda: _prepare_load(expected, path, into, ranks, cast, parameter_order, check, opened)
    )
    local = expected[0]
    requested = {name for names, _ in matches for name in names}
    missing = tuple(sorted({name for _, names in matches for name in names}))
    unexpected = tuple(
        name
        for name in local.index.tensors
        if name not in requested and not name.startswith(RESERVED_PREFIXES + tuple(ignore))
    )
    wrong = [
        tuple(name for name in names if not name.startswith(optional)) if strict else ()
        for names in (missing, unexpected)
    ]
    if any(wrong):
        summary = "; ".join(
            count_and_names(word, names) for word, names in zip(("missing", "unexpected"), wrong, strict=True)
        )
        raise CheckpointError(f"{path} does not match: {summary}. {advice}")
    # Import here: the first import of torch.distributed.checkpoint takes as long as that of torch.
    from windlass.checkpoint import collective_transfer

    collective_transfer.load_held_tensors(local.stored, local.held, ranks, first, check_first, on_overwrite)
    matched = len(requested) - len(missing)
    summary = (
        f"{plural(matched, 'tensor')} matched, {count_and_names('missing', missing)}, "
        f"{count_and_names('unexpected', unexpected)}"
    )
    logger.log(logging.WARNING if missing or unexpected else logging.INFO, f"loaded {path}: {summary}")
    return LoadedState(
        tag=name,
        path=path,
        plain=local.stored.plain,
        rank_plain=local.rank_plain,
        saved_world_size=local.index.world_size,
        matched=matched,
        missing=missing,
        unexpected=unexpected,
    )


@dataclass(frozen=True)
class _LoadRequest:
    stored: StoredCheckpoint
    held: dict[str, HeldTensor]
    rank_plain: dict[str, Any] | None

    @property
    def index(self) -> CheckpointIndex:
        """Index of the checkpoint."""
        return self.stored.index


def _prepare_load(
    requests: list[_LoadRequest],
    path: Path,
    into: SavedState,
    ranks: CheckpointRanks,
    cast: bool,
    parameter_order: ParameterOrder | None,
    check: Callable[[dict[str, Any], dict[str, Any] | None], object],
    opened: StoredCheckpoint | None,
) -> tuple[list[str], list[str]]:
    """Append this rank's request to `requests`. Return the requested names, and those that the checkpoint lacks."""
    if opened is not None:
        if opened.is_replaced:
            raise CheckpointError(opened.replaced_message)
        if opened.path != path and not (path.exists() and path.samefile(opened.path)):
            raise CheckpointError(
                f"rank {ranks.rank} loads {opened.path} and rank 0 {path}; pass the same directory and tag on all ranks"
            )
        stored = opened
    else:
        stored = StoredCheckpoint.from_path(path, parameter_order, slice(ranks.rank, None, ranks.world_size))
    index = stored.index
    held = hold_tensors(into.shards, into.tensors, allow_overlap=True)
    missing = [name for name in held if name not in index.tensors]
    present = {name: holding for name, holding in held.items() if name in index.tensors}
    problems = [text for name, holding in present.items() if (text := _mismatch(name, holding, index, cast))]
    if problems:
        rest = f"; and {len(problems) - 10} more" if len(problems) > 10 else ""
        raise CheckpointError(f"{path} does not fit: {'; '.join(problems[:10])}{rest}")
    own = stored.read_rank_plain(ranks.rank)
    check(stored.plain, own)
    requests.append(_LoadRequest(stored, present, own))
    return list(held), missing


def _mismatch(name: str, holding: HeldTensor, index: CheckpointIndex, cast: bool) -> str:
    record = index.tensors[name]
    if record.shape != holding.shape:
        return f"{name!r} has shape {record.shape} in the checkpoint, {holding.shape} here"
    dtype = dtype_from_code(record.dtype)
    if dtype != holding.dtype and not cast:
        return f"{name!r} is {dtype} in the checkpoint, {holding.dtype} here (cast=True converts)"
    return ""


def count_and_names(word: str, names: tuple[str, ...]) -> str:
    """Return the number of names and the first few of them, as text."""
    shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
    return f"{len(names)} {word} ({shown})" if names else f"0 {word}"
