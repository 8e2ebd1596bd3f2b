"""Runner of a model that is sharded over ranks: the leader's side."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from windlass.inference.lora import LoraAdapters
from windlass.inference.rank_channel import RankChannel, RankCommand, portable_error
from windlass.inference.sharded_lora import ShardedLoraAdapters
from windlass.inference.step_batch import ModelRunner, SavedBlocks, StepBatch

T = TypeVar("T")


class ShardedRunner:
    """Runner that executes every operation on all ranks of a model; see [Note: inference ranks].

    Construction is collective: the leader gathers the `block_nbytes` of all ranks.

    Args:
        runner: runner of this rank's part.
        channel: channel to the other ranks, each of which runs a `RankWorker`.
    """

    is_asynchronous = False
    can_repeat = False

    def __init__(self, runner: ModelRunner, channel: RankChannel) -> None:
        self._runner, self._channel = runner, channel
        self.model, self.vocab_size = runner.model, runner.vocab_size
        self.block_size, self.num_blocks = runner.block_size, runner.num_blocks
        self.block_nbytes = sum(channel.gather(runner.block_nbytes))
        self.depth = channel.stages
        self._started: deque[StepBatch] = deque()
        self._saved_counts: list[int] = []  # number of each rank's tensors in the result of `save_blocks`
        self.computes_drafts = runner.computes_drafts
        adapters = runner.lora
        self.lora = ShardedLoraAdapters(adapters, channel) if isinstance(adapters, LoraAdapters) else None
        self.description = f"{runner.description}, on {channel.size} ranks"

    @property
    def local_runner(self) -> ModelRunner:
        """Runner of this rank's part."""
        return self._runner

    def run(self, batch: StepBatch) -> torch.Tensor:
        """Return the logits `[rows, vocab_size]` of `batch.logit_rows`, float32."""
        self.start(batch)
        return self.finish()

    def start(self, batch: StepBatch) -> None:
        """Send a batch to the other ranks; see `PipelinedRunner`."""
        with self._channel.guard():
            self._channel.start_batch(batch)
            self._started.append(batch)

    def finish(self) -> torch.Tensor:
        """Run this rank's part of the oldest batch, and return its logits; see `PipelinedRunner`."""
        with self._channel.guard():
            logits = self._runner.run(self._started.popleft())
            self._channel.finish_batch()
            return logits

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks, given as pairs of source and destination."""
        self._call("copy_blocks", list(pairs))

    def save_blocks(self, blocks: Sequence[int]) -> SavedBlocks:
        """Return copies of blocks in host memory: the tensors of rank 0, then those of rank 1, etc."""
        with self._channel.guard():
            self._channel.send(RankCommand.CALL, ("save_blocks", (list(blocks),)))
            parts = self._channel.gather(self._runner.save_blocks(blocks))
        self._saved_counts = [len(part) for part in parts]
        return [tensor for part in parts for tensor in part]

    def restore_blocks(self, blocks: Sequence[int], saved: SavedBlocks) -> None:
        """Write saved values into blocks, which may differ from the original ones."""
        counts = self._saved_counts
        with self._channel.guard():
            self._channel.send(RankCommand.CALL, ("restore_blocks", (list(blocks), saved, counts)))
            self._runner.restore_blocks(blocks, saved[: counts[0]])

    def release(self, sequence_id: int) -> None:
        """Free the state of a sequence on all ranks."""
        # a paged cache consists of blocks, which need no release
        if not self._runner.block_nbytes and not self._channel.failed:
            self._call("release", sequence_id)

    def fork(self, sequence_id: int, new_ids: Sequence[int]) -> None:
        """Let new sequences continue from the computed tokens of another one."""
        if not self._runner.block_nbytes:
            self._call("fork", sequence_id, list(new_ids))

    def use_idle_time(self) -> bool:
        """Work for milliseconds on each rank to speed up later steps; return False if the leader had nothing to do."""
        with self._channel.guard():
            self._channel.send(RankCommand.CALL, ("use_idle_time", ()))
            return self._runner.use_idle_time()

    def refresh_weights(self) -> None:
        """Pack the weights again on all ranks, after the live module (one that is still trained) has changed them."""
        self._call("refresh_weights")

    def close(self) -> None:
        """Free the KV caches, and end the workers."""
        if not self._channel.failed:
            while self._started:
                self.finish()
            with self._channel.guard():
                self._channel.send(RankCommand.CLOSE)
        self._runner.close()
        self._channel.end()

    def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call `function(model, *arguments)` on all ranks; return the leader's result. The function is pickled."""
        with self._channel.guard():
            self._channel.send(RankCommand.CALL, (function, arguments))
            return function(self.model, *arguments)

    def share(self, function: Callable[[], T]) -> T:
        """Call a function on the leader, and return its result. On the workers `take_part` returns the result,
        or raises the function's error.
        """
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
