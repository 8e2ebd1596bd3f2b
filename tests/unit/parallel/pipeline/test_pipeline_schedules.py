"""Tests of pipeline schedules: each action once and in order, no deadlock, and the papers' bubble and memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from windlass.base.errors import ConfigError, ModelError
from windlass.parallel.pipeline.pipeline_action import Action, ActionKind, RankActions
from windlass.parallel.pipeline.pipeline_schedules import (
    SCHEDULES,
    ScheduleName,
    build_forward_schedule,
    build_schedule,
)
from windlass.parallel.pipeline.schedule_simulation import (
    ActionCosts,
    compute_bubble_fraction,
    list_dependencies,
    simulate_schedule,
)
from windlass.parallel.pipeline.transfer_order import add_transfers

EVEN = ActionCosts()


def cases(most_ranks: int = 5, most_micros: int = 9) -> Iterator[tuple[ScheduleName, int, int, int]]:
    """Yield every schedule with every number of ranks, of micro-batches and of stages on each rank."""
    for name in SCHEDULES:
        for ranks in range(1, most_ranks + 1):
            for micros in range(1, most_micros + 1):
                for each in (1, 2, 3, 4) if name in ("gpipe", "interleaved") else (1,):
                    yield name, ranks, micros, each


def test_every_micro_batch_passes_every_stage_once_and_in_order() -> None:
    for name, ranks, micros, each in cases():
        result = build_schedule(name, ranks, micros, each)
        back = (
            (ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT) if name == "zero-bubble" else (ActionKind.BACKWARD,)
        )
        for rank, order in enumerate(result):
            assert len(order) == len(set(order)) == each * micros * (1 + len(back))
            assert {action.stage % ranks for action in order} == {rank}
            for kind in (ActionKind.FORWARD, *back):
                for stage in range(rank, ranks * each, ranks):
                    seen = [a.micro_batch for a in order if a.kind is kind and a.stage == stage]
                    assert seen == list(range(micros)), (name, ranks, micros, each)


def test_actions_start_after_their_dependencies() -> None:
    for name, ranks, micros, each in cases():
        played = simulate_schedule(build_schedule(name, ranks, micros, each), ActionCosts(1.0, 1.5, 0.5, transfer=0.1))
        for action, (start, _) in played.spans.items():
            for before in list_dependencies(action, ranks * each, name == "zero-bubble"):
                late = 0.1 if before.stage != action.stage else 0.0
                assert played.spans[before][1] + late <= start + 1e-9


def test_schedule_has_no_deadlock_with_blocking_transfers() -> None:
    for name, ranks, micros, each in cases():
        _rendezvous(add_transfers(build_schedule(name, ranks, micros, each)), ranks)
    for ranks, micros, each in ((2, 3, 1), (3, 5, 2), (4, 8, 3)):
        _rendezvous(add_transfers(build_forward_schedule(ranks, micros, each)), ranks)


def test_transfers_are_paired_in_order_and_sends_follow_their_computation() -> None:
    for name, ranks, micros, each in cases():
        made = add_transfers(build_schedule(name, ranks, micros, each))
        moved = [entry for order in made for entry in order if not entry.kind.is_compute]
        sends = [entry for entry in moved if entry.kind.is_send]
        expected = 0 if ranks == 1 else 2 * micros * (ranks * each - 1)
        assert len(sends) == expected and len(set(moved)) == len(moved) == 2 * expected
        for order in made:
            for index, item in enumerate(order):
                if item.kind.is_send:
                    computed = next(before for before in reversed(order[:index]) if before.kind.is_compute)
                    assert (computed.stage, computed.micro_batch) == (item.stage, item.micro_batch)


def test_circular_schedules_are_refused() -> None:
    forward, backward = Action(ActionKind.FORWARD, 0, 0), Action(ActionKind.BACKWARD, 0, 0)
    last = [Action(ActionKind.FORWARD, 1, 0), Action(ActionKind.BACKWARD, 1, 0)]
    with pytest.raises(ModelError, match=r"rank 0 at B0\.0, rank 1 at F1\.0"):
        simulate_schedule([[backward, forward], last])


@pytest.mark.parametrize("name", SCHEDULES)
def test_bubble_equals_the_formula(name: ScheduleName) -> None:
    for costs in (EVEN, ActionCosts(2.0, 2.0, 2.0), ActionCosts(1.0, 1.25, 0.75) if name != "zero-bubble" else EVEN):
        for ranks in range(1, 9):
            for micros in (1, 2, 3, 5, 8, 16, 24):
                for each in (1, 2, 4) if name == "interleaved" else (1,):
                    if (each > 1 and micros % ranks) or (name == "zero-bubble" and micros < ranks):
                        continue
                    per_stage = ActionCosts(
                        costs.forward / each, costs.backward_input / each, costs.backward_weight / each
                    )
                    simulated = simulate_schedule(build_schedule(name, ranks, micros, each), per_stage).bubble_fraction
                    assert simulated == pytest.approx(
                        compute_bubble_fraction(name, ranks, micros, each, costs), abs=1e-12
                    )


def test_bubble_fractions_of_four_ranks_and_eight_micro_batches() -> None:
    assert compute_bubble_fraction("1f1b", 4, 8) == pytest.approx(3 / 11)
    assert compute_bubble_fraction("gpipe", 4, 8) == pytest.approx(3 / 11)
    assert compute_bubble_fraction("interleaved", 4, 8, 2) == pytest.approx(3 / 19)
    assert compute_bubble_fraction("zero-bubble", 4, 8) == pytest.approx(1 / 9)


def test_interleaving_is_never_slower_than_one_stage_per_rank() -> None:
    for ranks in range(2, 7):
        for micros in range(ranks, 20):
            for each in (2, 3):
                shorter = simulate_schedule(build_schedule("interleaved", ranks, micros, each)).end_time / each
                assert (
                    shorter
                    <= simulate_schedule(build_schedule("1f1b", ranks, micros)).end_time + (ranks - micros % ranks) * 3
                )


def test_held_micro_batches_equal_the_papers() -> None:
    for ranks in range(1, 7):
        for micros in range(1, 14):
            assert simulate_schedule(build_schedule("gpipe", ranks, micros)).peak_micro_batches == [micros] * ranks
            assert simulate_schedule(build_schedule("1f1b", ranks, micros)).peak_micro_batches == [
                min(micros, ranks - rank) for rank in range(ranks)
            ]
            for held in simulate_schedule(build_schedule("zero-bubble", ranks, micros)).peak_micro_batches:
                assert held == min(ranks, micros)
            for each in (2, 3):
                if micros % ranks == 0:
                    ahead = [2 * (ranks - 1 - rank) + (each - 1) * ranks + 1 for rank in range(ranks)]
                    held = simulate_schedule(build_schedule("interleaved", ranks, micros, each)).peak_micro_batches
                    assert held == [min(each * micros, most) for most in ahead]


def test_orders_of_1f1b_and_interleaved_equal_torch() -> None:
    from torch.distributed.pipelining.schedules import _get_1f1b_rank_ops as make

    for ranks, micros, each in ((2, 4, 2), (4, 8, 2), (3, 6, 3), (4, 12, 3)):
        result = build_schedule("interleaved", ranks, micros, each)
        for rank in range(ranks):
            ahead = min(2 * (ranks - 1 - rank) + (each - 1) * ranks, each * micros)

            def forward_stage(step: int, rank: int = rank, ranks: int = ranks, each: int = each) -> int:
                return int((step // ranks) % each * ranks + rank)

            def backward_stage(
                step: int, rank: int = rank, ranks: int = ranks, each: int = each, ahead: int = ahead
            ) -> int:
                return int((each - 1 - ((step - ahead) // ranks) % each) * ranks + rank)

            steady = each * micros - ahead
            theirs = make(each, ranks, ahead, steady, ahead, rank, forward_stage, backward_stage)
            computed = [item for item in theirs if item is not None]
            kinds = {"FORWARD": ActionKind.FORWARD, "FULL_BACKWARD": ActionKind.BACKWARD}
            assert result[rank] == [
                Action(kinds[item.computation_type.name], item.stage_index, item.microbatch_index) for item in computed
            ]


@pytest.mark.parametrize(
    ("name", "ranks", "micros", "each", "said"),
    [
        ("pipedream", 2, 2, 1, "'pipedream' does not exist; write one of gpipe, 1f1b, interleaved, zero-bubble"),
        ("1f1b", 2, 0, 1, "0 micro-batches"),
        ("gpipe", 0, 1, 1, "0 ranks"),
        ("interleaved", 2, 2, 0, "0 stages on each rank"),
        ("1f1b", 2, 2, 2, 'one stage on each rank, not 2; write "interleaved"'),
        ("zero-bubble", 2, 2, 3, "one stage on each rank, not 3"),
    ],
)
def test_invalid_schedules_are_refused(name: ScheduleName, ranks: int, micros: int, each: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        build_schedule(name, ranks, micros, each)


def _rendezvous(made: list[RankActions], ranks: int) -> None:
    """Assert that the actions of all ranks complete with blocking sends and receives."""
    partner = {
        ActionKind.SEND_ACTIVATION: (ActionKind.RECEIVE_ACTIVATION, 1),
        ActionKind.RECEIVE_ACTIVATION: (ActionKind.SEND_ACTIVATION, -1),
        ActionKind.SEND_GRADIENT: (ActionKind.RECEIVE_GRADIENT, -1),
        ActionKind.RECEIVE_GRADIENT: (ActionKind.SEND_GRADIENT, 1),
    }
    at, arrived = [0] * ranks, set()
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(made):
            while at[rank] < len(order) and order[at[rank]].kind.is_compute:
                action = order[at[rank]]
                if ranks > 1 and action.kind is ActionKind.FORWARD and action.stage:
                    assert Action(ActionKind.RECEIVE_ACTIVATION, action.stage, action.micro_batch) in arrived
                at[rank] += 1
                moved = True
            if at[rank] == len(order):
                continue
            half = order[at[rank]]
            kind, by = partner[half.kind]
            other = (half.stage + by) % ranks
            expected = Action(kind, half.stage + by, half.micro_batch)
            if at[other] < len(made[other]) and made[other][at[other]] == expected:
                arrived |= {half, expected}
                at[rank], at[other] = at[rank] + 1, at[other] + 1
                moved = True
    assert all(at[rank] == len(order) for rank, order in enumerate(made))
