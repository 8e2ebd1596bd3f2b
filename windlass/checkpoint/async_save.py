"""Async save of one engine, written by a thread during training. At most one save is in flight."""

from __future__ import annotations

import contextlib
import os
import threading
from dataclasses import replace

import torch

from windlass.base.device_memory import empty_host_tensor
from windlass.base.errors import CheckpointError
from windlass.base.log import logger
from windlass.checkpoint.checkpoint_ranks import CheckpointRanks
from windlass.checkpoint.checkpoint_save import CheckpointSave
from windlass.checkpoint.rank_file import RankFile
from windlass.comm.rank_group import RankGroup, create_rank_group
from windlass.storage.disk_error_messages import format_bytes
from windlass.storage.staging_memory import aligned_buffer, free_memory

_NICE = 10
_SPARE = 1.2  # required free memory, as a multiple of the copy's size

# [Note: collectives of an asynchronous save] Before the writes, the ranks agree on everything in their training
# threads, in `CheckpointSave`. The collectives of the writer threads (`CheckpointSave.finish`) use a separate gloo
# group, so that they can never match a collective of training.


class AsyncSave:
    """Writer of async saves, with at most one in flight (from `start` to `finish`).

    All methods are collective except `failure_flag` and `wait`.

    Args:
        ranks: the global ranks that save together.
    """

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self._ranks = ranks
        self._group: RankGroup | None = None
        self._host_buffer: torch.Tensor | None = None
        self._thread: threading.Thread | None = None
        self._error: CheckpointError | None = None

    def start(self, save: CheckpointSave, ranks: CheckpointRanks, *, pin: bool) -> None:
        """Copy the resident tensors of `save` to host memory, and start a thread that writes the checkpoint.

        Args:
            ranks: the ranks that save together, in the process group of the training thread.
            pin: page-lock the copy.
        """
        assert self._thread is None, "two saves at once"
        try:
            own = self._background_ranks(ranks)
            refused = self._copy_to_host(save.file, pin)
            thread = threading.Thread(
                target=self._write_in_background, args=(save, own, refused), name="windlass-checkpoint"
            )
            thread.start()
        except BaseException:
            save.abandon()
            raise
        self._thread = thread

    def failure_flag(self) -> float:
        """Return 1 if the save in flight has failed and the error was not raised yet, else 0."""
        thread = self._thread
        return float(thread is not None and not thread.is_alive() and self._error is not None)

    def wait(self) -> None:
        """Wait until the save in flight is over, if there is one. `finish` raises its error."""
        if self._thread is not None:
            self._thread.join()

    def finish(self) -> None:
        """Wait until the save in flight is over, if there is one.

        Raises:
            CheckpointError: the save failed. Raised once, on all ranks, with the same text.
        """
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Finish the save, and free memory and sockets. Raises as `finish` does."""
        try:
            self.finish()
        finally:
            self._host_buffer = None
            group, self._group = self._group, None
            if group is not None:
                group.destroy()

    def _background_ranks(self, ranks: CheckpointRanks) -> CheckpointRanks:
        """Return `ranks` with a process group that only writer threads use."""
        if ranks.world_size == 1:
            return replace(ranks, in_background=True)
        if self._group is None:
            self._group = create_rank_group([self._ranks], backend="gloo")
        return replace(ranks, group=self._group, in_background=True)

    def _copy_to_host(self, file: RankFile, pin: bool) -> Exception | None:
        """Copy resident tensors to host memory. If memory is too small for the copy, write the file now.

        Return the error, if there was one, for the thread to report.
        """
        try:
            requested = file.copy_nbytes
            if self._host_buffer is None or self._host_buffer.numel() < requested:
                self._host_buffer = None
                free, near = free_memory(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
                if free is not None and free < _SPARE * requested * near:  # every rank of this host is about to copy
                    logger.warning(
                        "this save blocks: the copy for an async save takes %s on each of the %d ranks of this host, "
                        "%s of memory are free",
                        format_bytes(requested),
                        near,
                        format_bytes(free),
                    )
                    file.write_now()
                    return None
                pinned = pin and torch.cuda.is_available()
                requested = max(requested, 1)
                self._host_buffer = (
                    empty_host_tensor(requested, torch.uint8, pin=True) if pinned else aligned_buffer(requested)[0]
                )
            file.copy_resident(self._host_buffer)
        except Exception as error:
            return error
        return None

    def _write_in_background(self, save: CheckpointSave, ranks: CheckpointRanks, local_error: Exception | None) -> None:
        # lower the priority, so that training goes first on a shared core
        with contextlib.suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        try:
            save.finish(ranks, local_error)
        except BaseException as error:
            checkpoint_error = error if isinstance(error, CheckpointError) else None
            self._error = CheckpointError(
                f"the checkpoint {save.path} was not written: {checkpoint_error or repr(error)}"
            )
            self._error.__cause__ = error
            logger.error("%s", self._error)  # logged here too, in case the run ends before `finish`
