"""KV blocks of preempted sequences: moved to host memory or disk, or dropped and computed again."""

from __future__ import annotations

import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

from windlass.base.errors import StorageError
from windlass.base.log import logger
from windlass.base.text import one_line
from windlass.inference.engine_options import EngineOptions
from windlass.inference.step_batch import ModelRunner, SavedBlocks
from windlass.inference.step_cost import StepCost
from windlass.storage.process_directory import ProcessDirectory
from windlass.storage.tensor_file import read_tensors, write_tensors

# A skipped save measures no rate. So each skipped save raises the assumed rate by this factor: saves are tried again
# after a single slow one, e.g. one that waited for other writes, and a disk that is ten times too slow is tried about
# once in 120 preemptions.
_RECOVERY = 1.02

if TYPE_CHECKING:
    from windlass.inference.generation_request import GenerationSequence


class PreemptedBlocks:
    """Store of the KV blocks of preempted sequences.

    Blocks are saved if measured rates predict that moving them away and back takes less time than computing their
    tokens again. They are moved to host memory, or to a file if host memory is full or slow.

    Raises:
        StorageError: the swap directory cannot be used.
    """

    def __init__(self, runner: ModelRunner, options: EngineOptions) -> None:
        self._runner = runner
        self._host_left = options.swap_bytes if runner.block_nbytes else 0
        self._directory: ProcessDirectory | None = None
        if options.swap_directory is not None and runner.block_nbytes:
            try:
                # this also removes the files of killed processes, which have keys and values of users' texts
                self._directory = ProcessDirectory(Path(options.swap_directory), "kv")
            except StorageError as error:
                raise StorageError(f"swap_directory {options.swap_directory} cannot be used: {error}") from error
            weakref.finalize(self, self._directory.release)
        self._files: dict[int, Path] = {}
        self._held: dict[int, int] = {}
        # True from a failed write to the next successful write, so that failures in a row log one warning
        self._disk_failed = False
        self._rates = {"host": 4e9, "disk": 5e8}  # bytes a second, assumed before the first measurement

    def save(self, sequence: GenerationSequence, cost: StepCost) -> None:
        """Save the blocks of a sequence that is being preempted, and set its `saved`. Leave `saved` None if there is no
        room, or if computing the tokens again is predicted to take less time.

        Args:
            cost: model of the time to compute the tokens again.
        """
        blocks = sequence.blocks[: -(-sequence.num_computed // self._runner.block_size)]
        nbytes = len(blocks) * self._runner.block_nbytes
        again = cost.prefill_seconds(sequence.num_computed)
        if not blocks or not nbytes:
            return
        if nbytes <= self._host_left and self._moves("host", nbytes, again):
            began = time.perf_counter()
            sequence.saved = self._runner.save_blocks(blocks)
            self._measure("host", nbytes, began)
            self._host_left -= nbytes
            self._held[sequence.sequence_id] = nbytes
        elif self._directory is not None and self._moves("disk", nbytes, again):
            began = time.perf_counter()
            path = self._directory.path / str(sequence.sequence_id)
            saved = self._runner.save_blocks(blocks)
            try:
                write_tensors(path, {str(number): tensor for number, tensor in enumerate(saved)})
            except OSError as error:
                path.unlink(missing_ok=True)
                if not self._disk_failed:
                    logger.warning(
                        "the KV blocks of a preempted request cannot be written to %s, so its tokens are computed "
                        "again: %s; free some space, or give another swap_directory. The next warning follows a write "
                        "that succeeds",
                        path,
                        one_line(str(error)),
                    )
                self._disk_failed = True
                return
            self._disk_failed = False
            self._measure("disk", nbytes, began)
            self._files[sequence.sequence_id] = path
            sequence.saved = []

    def read(self, sequence: GenerationSequence) -> SavedBlocks | None:
        """Return the saved blocks of a sequence; None if they cannot be read, so that its tokens are computed again."""
        path = self._files.get(sequence.sequence_id)
        if path is None:
            return sequence.saved
        try:
            return list(read_tensors(path)[0].values())  # in the order in which they were written
        except (OSError, StorageError) as error:
            logger.warning(
                "the KV blocks of a preempted request cannot be read, so its %d tokens are computed again: %s",
                sequence.num_computed,
                one_line(str(error)),
            )
            return None

    def restore(self, sequence: GenerationSequence, saved: SavedBlocks) -> None:
        """Write saved blocks into the first blocks of the sequence, and drop the saved copy."""
        self._runner.restore_blocks(sequence.blocks[: saved[0].shape[0]], saved)
        self.drop(sequence)

    def drop(self, sequence: GenerationSequence) -> None:
        """Drop the saved blocks of a sequence."""
        self._host_left += self._held.pop(sequence.sequence_id, 0)
        path = self._files.pop(sequence.sequence_id, None)
        if path is not None:
            path.unlink(missing_ok=True)
        sequence.saved = None

    def close(self) -> None:
        """Remove all files."""
        if self._directory is not None:
            self._directory.release()

    def _moves(self, tier: str, nbytes: int, again: float) -> bool:
        """Return True if moving `nbytes` bytes to a tier and back is predicted to take at most `again` seconds. Else
        raise the assumed rate of the tier; see `_RECOVERY`.
        """
        if 2 * nbytes / self._rates[tier] <= again:
            return True
        self._rates[tier] *= _RECOVERY
        return False

    def _measure(self, tier: str, nbytes: int, began: float) -> None:
        self._rates[tier] = nbytes / max(time.perf_counter() - began, 1e-9)
