"""Tests of merging the ranks' sequences of collectives into one, and of the position of gathers in it."""

from __future__ import annotations

from itertools import permutations
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from windlass.zero.core.collective_scheduler import (
    FORWARD,
    CollectiveScheduler,
    SchedulerCallbacks,
    SyncPoint,
    hoist_gathers,
    merge_sequences,
)
from windlass.zero.core.completion_order import CompletionOrder
from windlass.zero.core.unit import ShardState


def gather(unit: int) -> int:
    return 3 * unit


def reduction(unit: int) -> int:
    return 3 * unit + 2


def contains(whole: tuple[int, ...], part: tuple[int, ...]) -> bool:
    """Return True if `part` is a subsequence of `whole`."""
    rest = iter(whole)
    return all(code in rest for code in part)


def test_merged_sequence_has_common_entries_once_and_interleaves_the_rest() -> None:
    assert merge_sequences(((1, 10, 11, 2), (1, 20, 21, 2))) == (1, 10, 20, 11, 21, 2)
    assert merge_sequences(((1, 2), (1, 2), (1, 2))) == (1, 2)
    assert merge_sequences(((), (3, 4))) == (3, 4)


@pytest.mark.parametrize("seed", range(20))
def test_merged_sequence_contains_every_sequence_in_order(seed: int) -> None:
    random = Random(seed)
    lists = tuple(tuple(random.choices(range(9), k=random.randrange(12))) for _ in range(random.randrange(1, 5)))
    full = merge_sequences(lists)
    assert all(contains(full, item) for item in lists)
    assert merge_sequences(lists) == full


def test_merge_keeps_equal_sequences_beside_an_empty_one() -> None:
    for lists in permutations([(1, 2, 3), (1, 2, 3), ()]):
        assert merge_sequences(lists) == (1, 2, 3)


def test_hoisting_moves_gathers_one_ahead_and_keeps_reduction_order() -> None:
    codes = [f(unit) for unit in (3, 2, 1) for f in (gather, reduction)]
    expected = [gather(3), gather(2), reduction(3), gather(1), reduction(2), reduction(1)]
    assert hoist_gathers(tuple(codes)) == tuple(expected)
    forward = tuple(gather(unit) for unit in (1, 2, 3))
    assert hoist_gathers(forward) == forward
    assert hoist_gathers((reduction(2), reduction(1))) == (reduction(2), reduction(1))
    assert hoist_gathers((reduction(2), gather(1))) == (gather(1), reduction(2))


@pytest.mark.parametrize("seed", range(20))
def test_hoisting_keeps_the_order_of_gathers(seed: int) -> None:
    random = Random(seed)
    codes = tuple(random.choice((gather, reduction))(random.randrange(6)) for _ in range(random.randrange(20)))
    for kind in (0, 2):
        assert [c for c in hoist_gathers(codes) if c % 3 == kind] == [c for c in codes if c % 3 == kind]


class Board:
    """Fake control board of two ranks that post equal records. Attribute `waited` lists the waits of this rank."""

    def __init__(self) -> None:
        self.waited: list[str] = []
        self.there = False

    def post(self, mine: list[int], what: str) -> SimpleNamespace:
        def wait() -> list[list[int]]:
            self.waited.append(what)
            return [mine, mine]

        return SimpleNamespace(poll=lambda: self.there, wait=wait)


class Unit(SimpleNamespace):
    def __init__(self, index: int, shard_state: ShardState) -> None:
        super().__init__(
            index=index, shard_state=shard_state, frees_memory=True, unsharded_for_peers=False, names=[f"w{index}"]
        )

    def join_unshard(self, *, backward: bool = False) -> None:
        self.shard_state = ShardState.UNSHARDING


def scheduler_of(units: list[Any]) -> CollectiveScheduler:
    """Return a scheduler of `units` whose gradients are never reduced and whose ranks never fail."""
    callbacks = SchedulerCallbacks(
        start_reduction=lambda number: None,
        is_gradient_ready=lambda number: False,
        reshard_unused=lambda unit: None,
        has_local_failure=lambda: 0.0,
        raise_failure=lambda: None,
    )
    return CollectiveScheduler(units, CompletionOrder(), callbacks, hoist_gathers=True)


@pytest.mark.parametrize("there", [False, True])
def test_begin_of_a_phase_is_awaited_only_by_gathers(there: bool) -> None:
    """Only a unit that must be all-gathered waits for the other ranks to start the phase."""
    units, board = [Unit(number, ShardState.SHARDED) for number in range(3)], Board()
    order: Any = scheduler_of(units)
    order.use_board(board)
    for step in range(2):
        order.begin_phase(FORWARD, reduces=False)
        assert not board.waited
        for unit in units:
            order.unshard(unit, backward=False)
            unit.shard_state = ShardState.UNSHARDED
        order.end_phase(FORWARD)
        order.new_step()
        for unit in units[step:]:
            unit.shard_state = ShardState.SHARDED
        board.waited.clear()
    order.begin_phase(FORWARD, reduces=False)
    order.unshard(units[0], backward=False)  # already unsharded
    board.there = there
    assert order.prefetch(units[1], backward=False) == there
    assert board.waited == ["the start of a forward"] * there
    order.unshard(units[1], backward=False)
    order.unshard(units[2], backward=False)
    assert board.waited == ["the start of a forward"], "what was needed before is known"


def test_reading_experts_syncs_once_per_phase_or_step() -> None:
    """A rank that reads experts waits at one sync point after each phase or step, however often it reads.

    Other ranks may have fewer experts and may not read them.
    """
    board = Board()
    order: Any = scheduler_of([])
    order.use_board(board)
    what = SyncPoint.GRADIENT_READ

    def met() -> int:
        board.waited.clear()
        order.sync(what, experts_only=True)
        order.sync(what, experts_only=True)
        return len(board.waited)

    assert met() == 1 and met() == 0
    order.begin_phase(FORWARD, reduces=False)  # no gather in this phase, yet a peer may wait for this rank in it
    assert met() == 1
    order.new_step()
    assert met() == 1
    order.new_step()
    order.sync(SyncPoint.CHECKPOINT)
    assert met() == 0, "a meeting of any kind is one of all"
    board.waited.clear()
    order.sync(what)
    assert board.waited == [what.value], "what all ranks have is read by all"
