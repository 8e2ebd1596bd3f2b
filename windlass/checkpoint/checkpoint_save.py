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
from windlass.checkpoint import plain_data
from windlass.checkpoint.checkpoint_directory import check_tag, write_latest
from windlass.checkpoint.checkpoint_ranks import CheckpointRanks
from windlass.checkpoint.checkpoint_state import HeldTensor, SavedState, hold_full_tensor, hold_tensors
from windlass.checkpoint.node_disks import NodeDisks
from windlass.checkpoint.rank_file import RankFile
from windlass.checkpoint.staging_checkpoint import StagingCheckpoint

if TYPE_CHECKING:  # the first import of torch.distributed.checkpoint costs as much as torch's own
    from windlass.checkpoint.safetensors_storage import WrittenFile


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
    ranks = CheckpointRanks.of_group(process_group)
    return CheckpointSave(directory, tag, state, ranks, save_latest).finish(ranks)


class DerivedMetadata(Protocol):
    """Plain data that follows from what is written, and is known only then.

    Attributes:
        key: under which it is kept.
    """

    key: str

    def add(self, name: str, shape: tuple[int, ...], start: int, flat: torch.Tensor) -> object:
        """Elements `[start, start + n)` of a tensor that this rank writes, and no other: `flat` `[n]`."""

    def local_part(self) -> Any:
        """What this rank makes of all of its own."""

    def combine(self, parts: list[Any]) -> Any:
        """What is kept, as JSON has it, from the parts of all ranks."""


class CheckpointSave:
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
        ranks: CheckpointRanks,
        save_latest: bool,
        on_finished: Callable[[], object] = lambda: None,
        derived_metadata: DerivedMetadata | None = None,
        write_extra_files: Callable[[Path], object] | None = None,
        use_node_local_storage: bool = False,
    ) -> None:
        self._on_finished, self._derived_metadata, self._write_extra_files = (
            on_finished,
            derived_metadata,
            write_extra_files,
        )
        self._directory, self._tag, self._save_latest = Path(directory), tag, save_latest
        self._staging: StagingCheckpoint | None = None
        self._nodes: NodeDisks | None = None
        held: dict[str, HeldTensor] = {}
        told = ranks.run_on_all(
            "preparing to save", lambda: _prepare_save(held, self._directory, tag, state, ranks.rank)
        )
        _check_same_target(told)
        try:
            path = ranks.run_on_first("preparing to save", self._create_staging)
            self._staging_path = path = self._create_node_staging(path, ranks) if use_node_local_storage else path
            # Imported here: the first import of torch.distributed.checkpoint costs as much as torch's own.
            from windlass.checkpoint import collective_transfer

            self._writer = collective_transfer.plan_save(path, held, ranks, told[0][1], [own for _, _, own in told])
            if derived_metadata is not None:
                self._writer.observe(derived_metadata.add)
        except BaseException:
            self._discard()
            raise

    @property
    def path(self) -> Path:
        """What it will be."""
        return self._directory / self._tag

    @property
    def file(self) -> RankFile:
        """What this rank writes."""
        return self._writer.file

    def finish(self, ranks: CheckpointRanks, local_error: Exception | None = None) -> Path:
        """Writes it, and returns its path. Collective over the same ranks; from any thread, if they have a group of
        their own.

        Args:
            refused: why this rank can't write its part, if so.

        Raises:
            CheckpointError: the same on all ranks; nothing is left of it.
        """
        try:
            results = ranks.gather_to_first("saving", lambda: self._write_rank_file(local_error))
            if self._nodes is not None:
                return self._finish_on_all_nodes(self._nodes, results, ranks)
            if self._write_extra_files is None:
                return ranks.run_on_first("finishing the save", lambda: self._commit(results))
            beside = self._write_extra_files
            ranks.run_on_first("finishing the save", lambda: self._write_index(results))
            ranks.run_on_all("writing the files of another format", lambda: beside(self._staging_path) and None)
            return ranks.run_on_first("finishing the save", self._commit)
        except BaseException:
            self._discard()
            raise
        finally:
            self.file.release_storages()

    def _create_node_staging(self, path: Path, ranks: CheckpointRanks) -> Path:
        """The draft of this rank's node, of which there is one where nodes do not see that of rank 0."""
        nodes = NodeDisks.detect(path, ranks)
        if not nodes.has_several:
            return path
        self._nodes = nodes
        makes = ranks.rank in nodes.leaders[1:]
        made = ranks.run_on_all("preparing to save", lambda: self._create_staging() if makes else None)
        return made[nodes.local_leader] or path

    def _finish_on_all_nodes(
        self, nodes: NodeDisks, results: list[tuple[WrittenFile, Any]], ranks: CheckpointRanks
    ) -> Path:
        """Write the index, and have every node commit the whole."""
        ranks.run_on_first("finishing the save", lambda: self._write_index(results))
        nodes.replicate_files(self._staging_path, ranks)
        if (beside := self._write_extra_files) is not None:
            ranks.run_on_all("writing the files of another format", lambda: beside(self._staging_path) and None)
            nodes.replicate_files(self._staging_path, ranks)
        made = ranks.run_on_all("finishing the save", lambda: self._commit() if self._staging is not None else None)
        found = made[nodes.local_leader]
        assert found is not None
        return found

    def abandon(self) -> None:
        """It will not be written. Not collective."""
        self.file.release_storages()
        self._discard()

    def _write_rank_file(self, local_error: Exception | None) -> tuple[WrittenFile, Any]:
        if local_error is not None:
            raise local_error
        return self._writer.write(), None if self._derived_metadata is None else self._derived_metadata.local_part()

    def _create_staging(self) -> Path:
        self._staging = StagingCheckpoint(self._directory, self._tag)
        return self._staging.path

    def _write_index(self, written: list[tuple[WrittenFile, Any]]) -> None:
        if self._derived_metadata is not None:
            self._writer.add_plain(
                self._derived_metadata.key, self._derived_metadata.combine([part for _, part in written])
            )
        self._writer.write_index([file for file, _ in written])

    def _commit(self, written: list[tuple[WrittenFile, Any]] | None = None) -> Path:
        assert self._staging is not None
        if written is not None:
            self._write_index(written)
        path = self._staging.commit()
        if self._save_latest:
            write_latest(self._directory, self._tag)
        try:
            self._on_finished()
        except (CheckpointError, OSError) as error:
            logger.warning("%s is written; what was to follow failed: %s", path, error)
        return path

    def _discard(self) -> None:
        if self._staging is not None:
            self._staging.discard()


def _prepare_save(
    held: dict[str, HeldTensor], root: Path, tag: str, state: SavedState, rank: int
) -> tuple[str, Any, Any]:
    """Fills `held` with this rank's boxes; returns what the other ranks must know of it."""
    where = str(root / check_tag(tag))
    held.update(hold_tensors(state.shards, state.tensors))
    shared, found = plain_data.encode(dict(state.plain), "plain/")
    own, found_own = plain_data.encode(dict(state.rank_plain), f"rank/{rank}/")
    # Rank 0's plain data is kept; the others' is only looked at, so that a value that cannot be kept is always told.
    for name, tensor in ({**found, **found_own} if rank == 0 else found_own).items():
        held[name] = hold_full_tensor(tensor)
    return where, shared if rank == 0 else None, own


def _check_same_target(told: list[tuple[str, Any, Any]]) -> None:
    if len({where for where, _, _ in told}) > 1:
        places = "; ".join(f"rank {rank}: {where}" for rank, (where, _, _) in enumerate(told))
        raise CheckpointError(f"ranks save to different places ({places}); give all the same directory and tag")
