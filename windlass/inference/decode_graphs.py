"""Decode steps as graphs: kernel launches recorded once for each of a few batch sizes, and replayed with other inputs.

[Note: padded decode steps] A graph has fixed shapes. A batch is padded to the next recorded size with rows that are
ignored: each has one token at position 0, with keys and values in a block that no sequence has.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import Any, Protocol

import torch

from windlass.base.log import logger
from windlass.inference.step_batch import StepBatch


class CapturedStep(Protocol):
    """Launches of one step, which read and write the same memory at each replay."""

    output: torch.Tensor

    def replay(self) -> None:
        """Run the launches again."""
        ...


Capture = Callable[[Callable[[], torch.Tensor]], CapturedStep]
"""Callable that runs a function once or more, records its launches, and returns them with the function's result."""


def bucket_sizes(largest: int) -> list[int]:
    """Return the batch sizes that are recorded: 1, 2, 4, multiples of 8 up to 64, then of 32; the last is `largest`."""
    sizes = [*(1, 2, 4), *range(8, 65, 8), *range(96, largest + 1, 32)]
    return [*(size for size in sizes if size < largest), largest]


class DecodeGraphs:
    """Recorded decode steps of a runner.

    Args:
        run: function that computes the logits of a batch on the device and reads no value of the batch on the host.
        capture: recorder of `run`.
        max_sequences: largest number of sequences of a batch.
        max_blocks: largest number of KV blocks of a sequence.
        scratch_block: KV block of the padding rows; see [Note: padded decode steps].
        block_size: tokens of a KV block.
        device: device of the inputs.
    """

    def __init__(
        self,
        run: Callable[[StepBatch], torch.Tensor],
        capture: Capture,
        *,
        max_sequences: int,
        max_blocks: int,
        scratch_block: int,
        block_size: int,
        device: torch.device,
    ) -> None:
        self._run, self._capture = run, capture
        self._sizes = bucket_sizes(max_sequences)
        self._scratch, self._block_size = scratch_block, block_size
        # all sizes share these inputs: a graph of n rows reads the first n
        long = torch.zeros(3, max_sequences, dtype=torch.long, device=device)
        self._ids, self._positions, self._slots = long[0], long[1], long[2]
        self._lengths = torch.ones(max_sequences, dtype=torch.int32, device=device)
        self._table = torch.full((max_sequences, max_blocks), scratch_block, dtype=torch.int32, device=device)
        self._starts = torch.arange(max_sequences + 1, dtype=torch.int32, device=device)
        self._rows = torch.arange(max_sequences, device=device)
        self._steps: dict[int, CapturedStep] = {}
        self._failed = False

    @property
    def captured_sizes(self) -> list[int]:
        """Batch sizes with a graph."""
        return sorted(self._steps)

    def takes(self, batch: StepBatch) -> bool:
        """Return True if the batch is a decode step that fits into the largest graph, and no capture has failed."""
        fits = len(batch.sequence_ids) <= self._sizes[-1] and batch.block_table.shape[1] <= self._table.shape[1]
        return not self._failed and batch.is_decode and fits

    def run(self, batch: StepBatch) -> torch.Tensor:
        """Return the logits `[sequences, vocab_size]` of a batch that `takes` accepts, valid until the next call.

        The graph of a batch size is recorded at its first use.
        """
        count = len(batch.sequence_ids)
        size = self._sizes[bisect_left(self._sizes, count)]
        self._fill(batch, count, size)
        step = self._steps.get(size)
        if step is None:
            inputs = self._inputs(size)
            try:
                step = self._capture(lambda: self._run(inputs))
            except Exception as error:  # any model runs here; one that reads values on the host cannot be captured
                self._failed = True
                logger.info("decode steps run without CUDA graphs, whose capture failed: %s", str(error).split("\n")[0])
                return self._run(batch)
            self._steps[size] = step
        step.replay()
        return step.output[:count]

    def close(self) -> None:
        """Free the graphs and their memory."""
        self._steps.clear()
        self._failed = True

    def _fill(self, batch: StepBatch, count: int, size: int) -> None:
        self._ids[:count].copy_(batch.token_ids, non_blocking=True)
        self._positions[:count].copy_(batch.positions, non_blocking=True)
        self._slots[:count].copy_(batch.slots, non_blocking=True)
        self._lengths[:count].copy_(batch.context_lengths, non_blocking=True)
        self._table[:count, : batch.block_table.shape[1]].copy_(batch.block_table, non_blocking=True)
        if size > count:
            self._ids[count:size].zero_()
            self._positions[count:size].zero_()
            self._slots[count:size].fill_(self._scratch * self._block_size)
            self._lengths[count:size].fill_(1)
            self._table[count:size].fill_(self._scratch)

    def _inputs(self, size: int) -> StepBatch:
        return StepBatch(
            self._ids[:size],
            self._positions[:size],
            self._starts[: size + 1],
            self._lengths[:size],
            self._table[:size],
            self._slots[:size],
            self._rows[:size],
            list(range(size)),
            [None] * size,
        )


class CudaGraphCapture:
    """Capture of CUDA graphs that share one pool of memory: their steps never run at the same time."""

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, function: Callable[[], torch.Tensor]) -> CapturedStep:
        """Record a function, after two ordinary runs that compile kernels and allocate libraries' workspaces."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                function()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            output = function()
        self._pool = self._pool or graph.pool()
        return _CudaStep(graph, output)


class _CudaStep:
    def __init__(self, graph: torch.cuda.CUDAGraph, output: torch.Tensor) -> None:
        self._graph, self.output = graph, output

    def replay(self) -> None:
        self._graph.replay()
