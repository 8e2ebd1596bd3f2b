"""Runner of a model that is sharded over ranks: the leader's side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from windlass.inference.rank_channel import RankChannel, RankCommand, portable_error
from windlass.inference.step_batch import ModelRunner, SavedBlocks, StepBatch

T = TypeVar("T")


class TensorParallelRunner:
    """Runs every operation on all ranks of a model; see [Note: inference ranks].

    Args:
        runner: of this rank's part.
        channel: to the other ranks, each of which runs a `TensorParallelWorker`.
    """

    def __init__(self, runner: ModelRunner, channel: RankChannel) -> None:
        self._runner, self._channel = runner, channel
        self.model, self.vocab_size = runner.model, runner.vocab_size
        self.block_size, self.num_blocks = runner.block_size, runner.num_blocks
        self.block_nbytes = runner.block_nbytes * channel.size
        self.computes_drafts = runner.computes_drafts
        self.lora = runner.lora
        self.description = f"{runner.description}, on {channel.size} ranks"

    @property
    def local_runner(self) -> ModelRunner:
        """Runner of this rank's part."""
        return self._runner

    def run(self, batch: StepBatch) -> torch.Tensor:
        """Return the logits `[rows, vocab_size]` of `batch.logit_rows`, float32."""
        with self._channel.guard():
            self._channel.send_batch(batch)
            return self._runner.run(batch)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks, given as pairs of source and destination."""
        self._call("copy_blocks", list(pairs))

    def save_blocks(self, blocks: Sequence[int]) -> SavedBlocks:
        """Return copies of blocks in host memory: the tensors of rank 0, then those of rank 1, etc."""
        with self._channel.guard():
            self._channel.send(RankCommand.CALL, ("save_blocks", (list(blocks),)))
            parts = self._channel.gather(self._runner.save_blocks(blocks))
        return [tensor for part in parts for tensor in part]

    def restore_blocks(self, blocks: Sequence[int], saved: SavedBlocks) -> None:
        """Write saved values into blocks, which may differ from the original ones."""
        count = len(saved) // self._channel.size
        with self._channel.guard():
            self._channel.send(RankCommand.CALL, ("restore_blocks", (list(blocks), saved)))
            self._runner.restore_blocks(blocks, saved[:count])

    def release(self, sequence_id: int) -> None:
        """Free the runners' state of a sequence."""
        # a paged cache consists of blocks, which need no release
        if not self._runner.block_nbytes and not self._channel.failed:
            self._call("release", sequence_id)

    def fork(self, sequence_id: int, new_ids: Sequence[int]) -> None:
        """Let new sequences continue from the computed tokens of another one."""
        if not self._runner.block_nbytes:
            self._call("fork", sequence_id, list(new_ids))

    def close(self) -> None:
        """Free the KV caches, and end the workers."""
        if not self._channel.failed:
            with self._channel.guard():
                self._channel.send(RankCommand.CLOSE)
        self._runner.close()

    def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call `function(model, *arguments)`, a function of a module, on all ranks; return the leader's result."""
        with self._channel.guard():
            self._channel.send(RankCommand.CALL, (function, arguments))
            return function(self.model, *arguments)

    def share(self, function: Callable[[], T]) -> T:
        """Call a function on the leader whose result, or error, all ranks get: the workers are in `take_part`."""
        try:
            value = function()
        except Exception as error:
            if not self._channel.failed:
                with self._channel.guard():
                    self._channel.send(RankCommand.RESULT, (None, portable_error(error)))
            raise
        except BaseException as error:
            if not self._channel.failed:
                self._channel.fail(error)
            raise
        with self._channel.guard():
            self._channel.send(RankCommand.RESULT, (value, None))
        return value

    def _call(self, method: str, *arguments: Any) -> None:
        with self._channel.guard():
            self._channel.send(RankCommand.CALL, (method, arguments))
            getattr(self._runner, method)(*arguments)
