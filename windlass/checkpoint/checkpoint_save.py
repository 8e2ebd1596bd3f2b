"""Saving of a checkpoint: collective and atomic; the file `latest` is written last."""

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

if TYPE_CHECKING:  # the first import of torch.distributed.checkpoint takes as long as that of torch
    from windlass.checkpoint.safetensors_storage import WrittenFile


def save(
    directory: str | os.PathLike[str],
    tag: str,
    state: SavedState,
    *,
    process_group: dist.ProcessGroup | None = None,
    save_latest: bool = True,
) -> Path:
    """Write `state` as `directory`/`tag` and return that path. Collective over the group.

    Data is written under a hidden name, fsynced, and renamed once complete; `latest` is written after that. A
    checkpoint of the same tag is replaced. If the save fails, earlier checkpoints are intact. Memory: host
    copies of tensors that are not on the CPU, at most 256 MiB plus one box (part of a tensor) at a time; for lazy
    tensors, one storage handle at a time.

    Args:
        process_group: the ranks that save together, gloo or nccl. None: the default group, or this process alone if
            torch.distributed is not initialized.
        save_latest: write this tag to `latest`.

    Raises:
        CheckpointError: the same on all ranks: a full disk, an invalid tag, a tensor that the ranks' ranges do not
            cover exactly, unsupported plain data, ranks with different arguments.
    """
    ranks = CheckpointRanks.of_group(process_group)
    return CheckpointSave(directory, tag, state, ranks, save_latest).finish(ranks)


class DerivedMetadata(Protocol):
    """Plain data computed from the written bytes, and so known only after the write.

    Attributes:
        key: key under which it is stored.
    """

    key: str

    def add(self, name: str, shape: tuple[int, ...], start: int, flat: torch.Tensor) -> object:
        """Process `flat` `[n]`, elements `[start, start + n)` of the tensor `name`, which no other rank writes."""

    def local_part(self) -> Any:
        """Return this rank's result."""

    def combine(self, parts: list[Any]) -> Any:
        """Combine the results of all ranks, on rank 0, into the stored value, which must be JSON data."""


class CheckpointSave:
    """Save whose ranks have agreed which rank writes each box (part of a tensor). No data is written yet.

    Construction is collective.

    Args:
        on_finished: called on the first rank once the checkpoint exists and, with `save_latest`, `latest` names it. Its
            CheckpointErrors and OSErrors are only logged, because the save itself has succeeded.
        derived_metadata: plain data to store besides that of the state.
        write_extra_files: called on every rank with the staging directory once the checkpoint in it is complete, to
            write further files there.
        use_node_local_storage: nodes may have disks of their own, and each such node gets the full checkpoint;
            `on_finished` is then called on the first rank of each disk ([Note: node-local checkpoints]).

    Raises:
        CheckpointError: in the cases of `save`; the same on all ranks.
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
        shared: list[Any] = []  # plain data, not gathered: only rank 0 writes it, and it may be large
        targets = ranks.run_on_all(
            "preparing to save", lambda: _prepare_save(held, shared, self._directory, tag, state, ranks.rank)
        )
        _check_same_target(targets)
        try:
            path = ranks.run_on_first("preparing to save", self._create_staging)
            self._staging_path = path = self._create_node_staging(path, ranks) if use_node_local_storage else path
            # Import here: the first import of torch.distributed.checkpoint takes as long as that of torch.
            from windlass.checkpoint import collective_transfer

            self._writer = collective_transfer.plan_save(path, held, ranks, shared[0], [own for _, own in targets])
            if derived_metadata is not None:
                self._writer.observe(derived_metadata.add)
        except BaseException:
            self._discard()
            raise

    @property
    def path(self) -> Path:
        """Path of the finished checkpoint."""
        return self._directory / self._tag

    @property
    def file(self) -> RankFile:
        """Data file of this rank."""
        return self._writer.file

    def finish(self, ranks: CheckpointRanks, local_error: Exception | None = None) -> Path:
        """Write the checkpoint and return its path. Collective over the ranks of the construction.

        May be called in any thread, if `ranks` has a process group of its own for that thread.

        Args:
            local_error: error that prevents this rank from writing its part; None: there is none.

        Raises:
            CheckpointError: the same on all ranks; the staging directory is removed.
        """
        try:
            results = ranks.gather_to_first("saving", lambda: self._write_rank_file(local_error))
            if self._nodes is not None:
                return self._finish_on_all_nodes(self._nodes, results, ranks)
            if self._write_extra_files is None:
                return ranks.run_on_first("finishing the save", lambda: self._commit(results))
            write_extra = self._write_extra_files
            ranks.run_on_first("finishing the save", lambda: self._write_index(results))
            ranks.run_on_all("writing the files of another format", lambda: write_extra(self._staging_path) and None)
            return ranks.run_on_first("finishing the save", self._commit)
        except BaseException:
            self._discard()
            raise
        finally:
            self.file.release_storages()

    def _create_node_staging(self, path: Path, ranks: CheckpointRanks) -> Path:
        """Return the staging directory of this rank's node. A node that cannot access rank 0's gets its own."""
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
        """Write the index, copy all files to every node, and commit on each node."""
        ranks.run_on_first("finishing the save", lambda: self._write_index(results))
        nodes.replicate_files(self._staging_path, ranks)
        if (write_extra := self._write_extra_files) is not None:
            ranks.run_on_all("writing the files of another format", lambda: write_extra(self._staging_path) and None)
            nodes.replicate_files(self._staging_path, ranks)
        made = ranks.run_on_all("finishing the save", lambda: self._commit() if self._staging is not None else None)
        found = made[nodes.local_leader]
        assert found is not None
        return found

    def abandon(self) -> None:
        """Discard the save. Not collective."""
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
            logger.warning("%s is written; the clean-up after it failed: %s", path, error)
        return path

    def _discard(self) -> None:
        if self._staging is not None:
            self._staging.discard()


def _prepare_save(
    held: dict[str, HeldTensor], shared_plain: list[Any], root: Path, tag: str, state: SavedState, rank: int
) -> tuple[str, Any]:
    """Fill `held` with this rank's parts of tensors. On rank 0, append its encoded plain
    data to `shared_plain`; on other ranks, append None.

    Return the target path and this rank's own encoded plain data.
    """
    where = str(root / check_tag(tag))
    held.update(hold_tensors(state.shards, state.tensors))
    shared, found = plain_data.encode(dict(state.plain), "plain/")
    own, found_own = plain_data.encode(dict(state.rank_plain), f"rank/{rank}/")
    # Only rank 0's shared plain data is stored. The other ranks encode theirs too, so that unsupported values always
    # raise.
    for name, tensor in ({**found, **found_own} if rank == 0 else found_own).items():
        held[name] = hold_full_tensor(tensor)
    shared_plain.append(shared if rank == 0 else None)
    return where, own


def _check_same_target(targets: list[tuple[str, Any]]) -> None:
    if len({where for where, _ in targets}) > 1:
        places = "; ".join(f"rank {rank}: {where}" for rank, (where, _) in enumerate(targets))
        raise CheckpointError(f"ranks save to different paths ({places}); pass the same directory and tag on all ranks")
