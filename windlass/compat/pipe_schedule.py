"""Module `deepspeed.runtime.pipe.schedule`: DeepSpeed's schedules of a pipeline stage as lists of instructions.

Scripts read and subclass these to inspect or simulate a pipeline. windlass's engine runs its own schedules
(`windlass.parallel.pipeline.pipeline_schedules`) and does not execute these instructions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

from windlass.compat.runtime_functions import call_to_str


def tensor_bytes(tensor: Any) -> int:
    """Return the number of bytes of a tensor's elements."""
    return int(tensor.numel() * tensor.element_size())


class PipeInstruction:
    """Instruction for one stage. Its keyword arguments become attributes."""

    def __init__(self, **kwargs: Any) -> None:
        self.name = type(self).__name__
        self.kwargs = kwargs
        for name, value in kwargs.items():
            setattr(self, name, value)

    def __repr__(self) -> str:
        return call_to_str(self.name, **self.kwargs)


class OptimizerStep(PipeInstruction):
    """Instruction to step the optimizer and zero the gradients."""


class ReduceGrads(PipeInstruction):
    """Instruction to reduce gradients over the data-parallel ranks of the stage."""


class ReduceTiedGrads(PipeInstruction):
    """Instruction to reduce gradients of tied modules over the stages that share them."""


class CommitP2P(PipeInstruction):
    """Instruction to start all queued sends and receives."""


class BufferOpInstruction(PipeInstruction):
    """Instruction that works on the pipeline buffer `buffer_id`."""

    buffer_id: int

    def __init__(self, buffer_id: int, **kwargs: Any) -> None:
        super().__init__(buffer_id=buffer_id, **kwargs)


class LoadMicroBatch(BufferOpInstruction):
    """Instruction to read the next micro-batch into a buffer."""


class ForwardPass(BufferOpInstruction):
    """Instruction to run the stage's layers on a buffer's inputs."""


class BackwardPass(BufferOpInstruction):
    """Instruction to backpropagate through a buffer's outputs."""


class SendActivation(BufferOpInstruction):
    """Instruction to send a buffer's outputs to the next stage."""


class RecvActivation(BufferOpInstruction):
    """Instruction to receive a buffer's inputs from the previous stage."""


class SendGrad(BufferOpInstruction):
    """Instruction to send the gradients of a buffer's inputs to the previous stage."""


class RecvGrad(BufferOpInstruction):
    """Instruction to receive the gradients of a buffer's outputs from the next stage."""


class PipeSchedule(ABC):
    """Schedule of one stage: iterating yields the list of instructions of each step.

    Args:
        micro_batches: micro-batches in a batch.
        stages: stages of the pipeline.
        stage_id: the stage that the schedule is for.
    """

    def __init__(self, micro_batches: int, stages: int, stage_id: int) -> None:
        self.micro_batches = micro_batches
        self.stages = stages
        self.stage_id = stage_id
        self.prev_stage = stage_id - 1
        self.next_stage = stage_id + 1
        self.it: Iterator[list[PipeInstruction]] | None = None

    @abstractmethod
    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Yield the instructions of each step. Stages may synchronize between steps without deadlock."""

    def num_pipe_buffers(self) -> int:
        """Return the number of buffers that this stage needs."""
        return self.micro_batches

    @property
    def stage(self) -> int:
        """Index of the stage."""
        return self.stage_id

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return self.stages

    @property
    def num_micro_batches(self) -> int:
        """Number of micro-batches in a batch."""
        return self.micro_batches

    @property
    def is_first_stage(self) -> bool:
        """True on the stage that reads the inputs."""
        return self.stage_id == 0

    @property
    def is_last_stage(self) -> bool:
        """True on the stage that computes the loss."""
        return self.stage_id == self.stages - 1

    def _valid_micro_batch(self, micro_batch_id: int) -> bool:
        return 0 <= micro_batch_id < self.micro_batches

    def _valid_stage(self, stage_id: int) -> bool:
        return 0 <= stage_id < self.stages

    def _buffer_idx(self, micro_batch_id: int) -> int:
        assert self._valid_micro_batch(micro_batch_id), (
            f"micro_batch_id is {micro_batch_id}; pass one below {self.micro_batches}"
        )
        return micro_batch_id % self.num_pipe_buffers()

    def __iter__(self) -> PipeSchedule:
        self.it = None
        return self

    def __next__(self) -> list[PipeInstruction]:
        if self.it is None:
            self.it = self.steps()
        return next(self.it)


class InferenceSchedule(PipeSchedule):
    """Schedule of forward passes only, with two buffers: one is received while the other is sent."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Yield `micro_batches + stages - 1` steps. Stage s runs micro-batch m at step m + s."""
        for step in range(self.micro_batches + self.stages - 1):
            micro = step - self.stage_id
            here, before = (step + self.stage_id) % 2, (step + self.stage_id + 1) % 2
            runs = self._valid_micro_batch(micro)
            sends = self._valid_stage(self.next_stage) and self._valid_micro_batch(micro - 1)
            exchange: list[PipeInstruction] = []
            if sends:
                exchange.append(SendActivation(before))
            if runs and self._valid_stage(self.prev_stage):
                exchange.append(RecvActivation(here))
            if self.stage_id % 2:  # neighbours use opposite orders, so that a send meets a receive
                exchange.reverse()
            load = [LoadMicroBatch(here)] if runs and (self.is_first_stage or self.is_last_stage) else []
            yield [*load, *exchange, *([ForwardPass(here)] if runs else [])]

    def num_pipe_buffers(self) -> int:
        """Return 2."""
        return 2


class TrainSchedule(PipeSchedule):
    """1F1B schedule.

    Stage s runs the forward of micro-batch m at step 2m + s, and its backward at step 2m + 2 * stages - 1 - s.
    """

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Yield `2 * (micro_batches + stages - 1)` steps. The last one reduces gradients and steps the optimizer."""
        total, before = 2 * (self.micro_batches + self.stages - 1), -1
        for step in range(total):
            micro, forward = self._step_to_micro_batch(step)
            runs, ran = self._valid_micro_batch(micro), self._valid_micro_batch(before)
            found: list[PipeInstruction] = []
            if forward and self._valid_stage(self.prev_stage):
                found += [SendGrad(self._buffer_idx(before))] if ran else []
                found += [RecvActivation(self._buffer_idx(micro))] if runs else []
            if not forward and self._valid_stage(self.next_stage):
                found += [RecvGrad(self._buffer_idx(micro))] if runs else []
                found += [SendActivation(self._buffer_idx(before))] if ran else []
            if runs and forward and (self.is_first_stage or self.is_last_stage):
                found.append(LoadMicroBatch(self._buffer_idx(micro)))
            if runs:
                found.append((ForwardPass if forward else BackwardPass)(self._buffer_idx(micro)))
            if step == total - 1:
                found += [ReduceTiedGrads(), ReduceGrads(), OptimizerStep()]
            before = micro
            yield found

    def num_pipe_buffers(self) -> int:
        """Return the maximum number of forwards that await their backward, at least 2."""
        return max(2, min(self.stages - self.stage_id, self.micro_batches))

    def _step_to_micro_batch(self, step: int) -> tuple[int, bool]:
        """Return the micro-batch of a step, which may be out of range, and whether the step is a forward."""
        if (step - self.stage_id) % 2 == 0:
            return (step - self.stage_id) // 2, True
        return (step + self.stage_id + 1) // 2 - self.stages, False


class DataParallelSchedule(PipeSchedule):
    """Schedule of a single stage with gradient accumulation."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Yield one step for each micro-batch."""
        for step in range(self.micro_batches):
            found: list[PipeInstruction] = [LoadMicroBatch(0), ForwardPass(0), BackwardPass(0)]
            if step == self.micro_batches - 1:
                found += [ReduceGrads(), OptimizerStep()]
            yield found

    def num_pipe_buffers(self) -> int:
        """Return 1."""
        return 1
