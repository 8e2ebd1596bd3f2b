"""Saving a checkpoint: collective, whole or not at all, `latest` last."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from windlass.base.errors import CheckpointError
from windlass.base.log import logger
from windlass.checkpoint import plain
from windlass.checkpoint.agree import Ranks
from windlass.checkpoint.directory import check_tag, write_latest
from windlass.checkpoint.draft import Draft
from windlass.checkpoint.nodes import Nodes
from windlass.checkpoint.rank_file import RankFile
from windlass.checkpoint.state import Holding, SavedState, holdings, whole

if TYPE_CHECKING:  # the first import of torch.distributed.checkpoint costs as much as torch's own
    from windlass.checkpoint.storage import WrittenFile


def save(
    directory: str | os.PathLike[str],
    tag: str,
    state: SavedState,
    *,
    process_group: dist.ProcessGroup | None = None,
    save_latest: bool = True,
) -> Path:
    """Writes `state` as `directory`/`tag` and returns that path. Every rank of the group must call it.

    Data lands under a hidden name, is fsynced and renamed once whole; `latest` is written after that. A checkpoint of
    the same tag is replaced; whatever goes wrong, former checkpoints stay good. Memory: one box of a tensor at a time,
    and only for those that do not lie on the CPU; of what rests elsewhere, one drawer at a time.

    Args:
        process_group: the ranks that save together, gloo or nccl; the default group where None, and this process alone
            where torch.distributed is not initialized.
        save_latest: whether `latest` is to name this tag.

    Raises:
        CheckpointError: the same on all ranks: a disk without room, a bad tag, a tensor that the ranks' ranges do not
            cover exactly, plain data that is no plain data, ranks that disagree.
    """
    ranks = Ranks.of(process_group)
    return Begun(directory, tag, state, ranks, save_latest).finish(ranks)


class Later(Protocol):
    """Plain data that follows from what is written, and is known only then.

    Attributes:
        key: under which it is kept.
    """

    key: str

    def add(self, name: str, shape: tuple[int, ...], start: int, flat: torch.Tensor) -> object:
        """Elements `[start, start + n)` of a tensor that this rank writes, and no other: `flat` `[n]`."""

    def part(self) -> Any:
        """What this rank makes of all of its own."""

    def whole(self, parts: list[Any]) -> Any:
        """What is kept, as JSON has it, from the parts of all ranks."""


class Begun:
    """A save whose ranks have agreed on who writes what; nothing is written yet. Collective.

    Args:
        then: called on the first rank once it is there, and `latest` names it: the save was fine, whatever becomes of
            that, so what goes wrong with files is told and no error.
        later: plain data beside that of the state.
        beside: called on every rank with the draft's directory once the whole checkpoint is in it, to write files of
            its own there.
        by_node: nodes may have disks of their own, and then each gets the whole checkpoint; `then` is called on the
            first rank of each ([Note: node-local checkpoints]).

    Raises:
        CheckpointError: as `save`, the same on all ranks.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        tag: str,
        state: SavedState,
        ranks: Ranks,
        save_latest: bool,
        then: Callable[[], object] = lambda: None,
        later: Later | None = None,
        beside: Callable[[Path], object] | None = None,
        by_node: bool = False,
    ) -> None:
        self._then, self._later, self._beside = then, later, beside
        self._root, self._tag, self._save_latest = Path(directory), tag, save_latest
        self._draft: Draft | None = None
        self._nodes: Nodes | None = None
        held: dict[str, Holding] = {}
        told = ranks.each("preparing to save", lambda: _prepare(held, self._root, tag, state, ranks.rank))
        _check_same(told)
        try:
            path = ranks.first("preparing to save", self._begin)
            self._place = path = self._place_of_node(path, ranks) if by_node else path
            # Imported here: the first import of torch.distributed.checkpoint costs as much as torch's own.
            from windlass.checkpoint import transfer

            self._writer = transfer.plan(path, held, ranks, told[0][1], [own for _, _, own in told])
            if later is not None:
                self._writer.look(later.add)
        except BaseException:
            self._discard()
            raise

    @property
    def path(self) -> Path:
        """What it will be."""
        return self._root / self._tag

    @property
    def file(self) -> RankFile:
        """What this rank writes."""
        return self._writer.file

    def finish(self, ranks: Ranks, refused: Exception | None = None) -> Path:
        """Writes it, and returns its path. Collective over the same ranks; from any thread, if they have a group of
        their own.

        Args:
            refused: why this rank can't write its part, if so.

        Raises:
            CheckpointError: the same on all ranks; nothing is left of it.
        """
        try:
            results = ranks.to_first("saving", lambda: self._write(refused))
            if self._nodes is not None:
                return self._finish_everywhere(self._nodes, results, ranks)
            if self._beside is None:
                return ranks.first("finishing the save", lambda: self._commit(results))
            beside = self._beside
            ranks.first("finishing the save", lambda: self._index(results))
            ranks.each("writing the files of another format", lambda: beside(self._place) and None)
            return ranks.first("finishing the save", self._commit)
        except BaseException:
            self._discard()
            raise
        finally:
            self.file.let_go()

    def _place_of_node(self, path: Path, ranks: Ranks) -> Path:
        """The draft of this rank's node, of which there is one where nodes do not see that of rank 0."""
        nodes = Nodes.found(path, ranks)
        if not nodes.several:
            return path
        self._nodes = nodes
        makes = ranks.rank in nodes.leaders[1:]
        made = ranks.each("preparing to save", lambda: self._begin() if makes else None)
        return made[nodes.mine] or path

    def _finish_everywhere(self, nodes: Nodes, results: list[tuple[WrittenFile, Any]], ranks: Ranks) -> Path:
        """Write the index, and have every node commit the whole."""
        ranks.first("finishing the save", lambda: self._index(results))
        nodes.share_out(self._place, ranks)
        if (beside := self._beside) is not None:
            ranks.each("writing the files of another format", lambda: beside(self._place) and None)
            nodes.share_out(self._place, ranks)
        made = ranks.each("finishing the save", lambda: self._commit() if self._draft is not None else None)
        found = made[nodes.mine]
        assert found is not None
        return found

    def abandon(self) -> None:
        """It will not be written. Not collective."""
        self.file.let_go()
        self._discard()

    def _write(self, refused: Exception | None) -> tuple[WrittenFile, Any]:
        if refused is not None:
            raise refused
        return self._writer.write(), None if self._later is None else self._later.part()

    def _begin(self) -> Path:
        self._draft = Draft(self._root, self._tag)
        return self._draft.path

    def _index(self, written: list[tuple[WrittenFile, Any]]) -> None:
        if self._later is not None:
            self._writer.add_plain(self._later.key, self._later.whole([part for _, part in written]))
        self._writer.finish_with([file for file, _ in written])

    def _commit(self, written: list[tuple[WrittenFile, Any]] | None = None) -> Path:
        assert self._draft is not None
        if written is not None:
            self._index(written)
        path = self._draft.commit()
        if self._save_latest:
            write_latest(self._root, self._tag)
        try:
            self._then()
        except (CheckpointError, OSError) as error:
            logger.warning("%s is written; what was to follow failed: %s", path, error)
        return path

    def _discard(self) -> None:
        if self._draft is not None:
            self._draft.discard()


def _prepare(held: dict[str, Holding], root: Path, tag: str, state: SavedState, rank: int) -> tuple[str, Any, Any]:
    """Fills `held` with this rank's boxes; returns what the other ranks must know of it."""
    where = str(root / check_tag(tag))
    held.update(holdings(state.shards, state.tensors))
    shared, found = plain.encode(dict(state.plain), "plain/")
    own, found_own = plain.encode(dict(state.rank_plain), f"rank/{rank}/")
    # Rank 0's plain data is kept; the others' is only looked at, so that a value that cannot be kept is always told.
    for name, tensor in ({**found, **found_own} if rank == 0 else found_own).items():
        held[name] = whole(tensor)
    return where, shared if rank == 0 else None, own


def _check_same(told: list[tuple[str, Any, Any]]) -> None:
    if len({where for where, _, _ in told}) > 1:
        places = "; ".join(f"rank {rank}: {where}" for rank, (where, _, _) in enumerate(told))
        raise CheckpointError(f"ranks save to different places ({places}); give all the same directory and tag")
