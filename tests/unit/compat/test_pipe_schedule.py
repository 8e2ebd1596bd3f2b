"""Tests of the schedules that scripts inspect: stages that run them in lockstep do not deadlock."""

from __future__ import annotations

import pytest

from windlass.compat import pipe_schedule as ps

SIZES = [(1, 1), (4, 1), (1, 3), (3, 2), (8, 3), (5, 4), (2, 5)]


def _steps(kind: type[ps.PipeSchedule], micro_batches: int, stages: int) -> list[tuple[list[ps.PipeInstruction], ...]]:
    """Return one tuple for each step, with the instructions of every stage in it."""
    schedules = [kind(micro_batches, stages, stage) for stage in range(stages)]
    return list(zip(*schedules, strict=True))


def _count(instructions: list[ps.PipeInstruction], kind: type) -> int:
    return sum(type(instruction) is kind for instruction in instructions)


@pytest.mark.parametrize(("micro_batches", "stages"), SIZES)
@pytest.mark.parametrize("kind", [ps.TrainSchedule, ps.InferenceSchedule])
def test_every_send_has_a_matching_receive(kind: type[ps.PipeSchedule], micro_batches: int, stages: int) -> None:
    """Each send of a stage has a receive of its neighbour in the same step."""
    for step in _steps(kind, micro_batches, stages):
        for stage in range(stages - 1):
            assert _count(step[stage], ps.SendActivation) == _count(step[stage + 1], ps.RecvActivation)
            assert _count(step[stage], ps.RecvGrad) == _count(step[stage + 1], ps.SendGrad)
        assert not _count(step[0], ps.RecvActivation) + _count(step[0], ps.SendGrad)
        assert not _count(step[-1], ps.SendActivation) + _count(step[-1], ps.RecvGrad)


@pytest.mark.parametrize(("micro_batches", "stages"), SIZES)
def test_training_runs_every_micro_batch_once_each_way(micro_batches: int, stages: int) -> None:
    """A buffer holds one micro-batch from its forward to its backward; only the last step updates the parameters."""
    for stage in range(stages):
        schedule = ps.TrainSchedule(micro_batches, stages, stage)
        held: list[int] = []
        forwards = 0
        steps = list(schedule)
        assert len(steps) == 2 * (micro_batches + stages - 1)
        for instruction in (instruction for step in steps for instruction in step):
            if isinstance(instruction, ps.BufferOpInstruction):
                assert 0 <= instruction.buffer_id < schedule.num_pipe_buffers()
            if isinstance(instruction, ps.ForwardPass):
                assert instruction.buffer_id not in held
                held.append(instruction.buffer_id)
                forwards += 1
            if isinstance(instruction, ps.BackwardPass):
                assert instruction.buffer_id == held.pop(0)  # the oldest micro-batch first
        assert (forwards, held) == (micro_batches, [])
        updates = [step for step in steps if _count(step, ps.OptimizerStep)]
        assert (
            updates == [steps[-1]] and _count(steps[-1], ps.ReduceGrads) == _count(steps[-1], ps.ReduceTiedGrads) == 1
        )


def test_data_parallel_schedule_accumulates() -> None:
    steps = list(ps.DataParallelSchedule(3, 1, 0))
    assert [len(step) for step in steps] == [3, 3, 5]


def test_instructions_show_their_arguments() -> None:
    assert repr(ps.ForwardPass(2)) == "ForwardPass(buffer_id=2)"
    schedule = ps.TrainSchedule(4, 3, 2)
    assert (schedule.is_first_stage, schedule.is_last_stage, schedule.num_stages, schedule.stage) == (False, True, 3, 2)
