"""Tests of the scheduler's properties on random states, and simulations until all requests are served."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from windlass.inference.scheduler import (
    POLICIES,
    SchedulerLimits,
    SequenceSnapshot,
    ServiceLevel,
    StepPlan,
    _plan_by_policy,
    _plan_decodes,
    _Planner,
    lateness,
    schedule,
)
from windlass.inference.step_cost import StepCost

BLOCK = 16
COST = StepCost(0.001, 0.01, 0.001, 1e-6)


def blocks(tokens: int) -> int:
    return -(-tokens // BLOCK)


def is_running_state(computed: int, remaining: int, drafts: int) -> SequenceSnapshot:
    decoding = remaining == 1
    known = computed + remaining + (drafts if decoding else 0)
    held = blocks(computed) if decoding else blocks(computed + remaining)
    return SequenceSnapshot(0, 0.0, known, computed, held, held, drafts if decoding else 0)


running_states = st.builds(
    is_running_state, st.integers(1, 200), st.one_of(st.just(1), st.integers(1, 300)), st.integers(0, 4)
)
waiting_states = st.builds(
    lambda known, priority, level: SequenceSnapshot(0, 0.0, known, 0, 0, priority=priority, level=level),
    st.integers(1, 400),
    st.integers(-1, 1),
    st.one_of(st.none(), st.builds(ServiceLevel, st.floats(0.1, 10), st.floats(0, 10))),
)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(running_states, max_size=12),
    st.lists(waiting_states, max_size=12),
    st.integers(0, 40),
    st.sampled_from(POLICIES),
    st.integers(16, 256),
    st.one_of(st.none(), st.floats(0.001, 0.2)),
    st.floats(0, 100),
)
def test_every_plan_can_be_carried_out(
    running: list[SequenceSnapshot],
    waiting: list[SequenceSnapshot],
    free: int,
    policy: str,
    budget: int,
    gap: float | None,
    now: float,
) -> None:
    running = [replace(s, sequence_id=i, arrival=float(i)) for i, s in enumerate(running)]
    waiting = [replace(s, sequence_id=100 + i, arrival=50.0 + i) for i, s in enumerate(waiting)]
    total = free + sum(s.num_blocks for s in running)
    limits = SchedulerLimits(policy, budget, 16, BLOCK, total, gap)  # type: ignore[arg-type]
    waiting = [s for s in waiting if blocks(s.num_known + 1) <= total]
    plan = schedule(running, waiting, free, limits, COST, now)
    known = {s.sequence_id: s for s in [*running, *waiting]}
    preempted, admitted = set(plan.preempted), set(plan.admitted)
    assert preempted <= {s.sequence_id for s in running}
    assert admitted <= {s.sequence_id for s in waiting}
    assert not preempted & set(plan.num_tokens)
    # tokens: at least one, at most those not computed; only unchunked prompts may exceed the budget
    for sequence_id, tokens in plan.num_tokens.items():
        assert 1 <= tokens <= known[sequence_id].remaining
        assert sequence_id in admitted or sequence_id < 100
    if policy == "splitfuse":
        assert sum(plan.num_tokens.values()) <= budget
    # blocks: no more than are free or become free
    needed = sum(blocks(known[s].num_known) for s in admitted)
    for sequence_id, tokens in plan.num_tokens.items():
        if sequence_id < 100:
            s = known[sequence_id]
            needed += max(blocks(s.num_computed + tokens) - s.num_blocks, 0)
    assert needed <= free + sum(known[s].num_freed for s in preempted)
    # a step computes tokens, or preempts to make room
    if running or waiting:
        assert plan.num_tokens or plan.preempted
    # with room for all, no decode is left out (except under prefill-first)
    decodes = [s for s in running if s.is_decode]
    if policy != "prefill-first" and not preempted and len(decodes) <= budget:
        assert all(s.sequence_id in plan.num_tokens for s in decodes)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 200), st.integers(-1, 1), st.booleans()), min_size=1, max_size=8),
    st.integers(0, 6),
    st.sampled_from(POLICIES),
    st.integers(4, 20),
    st.one_of(st.none(), st.floats(0.001, 0.2)),
    st.one_of(st.none(), st.builds(ServiceLevel, st.floats(0.1, 10), st.floats(0, 10))),
    st.booleans(),
)
def test_the_plan_of_decodes_alone_is_that_of_every_policy(
    states: list[tuple[int, int, bool]],
    free: int,
    policy: str,
    budget: int,
    gap: float | None,
    level: ServiceLevel | None,
    answered: bool,
) -> None:
    running = [
        replace(
            is_running_state(computed, 1, 0),
            sequence_id=i,
            arrival=float(-i % 3),
            priority=priority,
            copies_block=copies,
            level=level,
            has_answered=answered,
        )
        for i, (computed, priority, copies) in enumerate(states)
    ]
    total = free + sum(s.num_blocks for s in running)
    limits = SchedulerLimits(policy, budget, 16, BLOCK, total, gap)  # type: ignore[arg-type]
    planner = _Planner(running, [], free, limits, COST, 99.0, 0, None)
    expected = _plan_by_policy(planner, limits.policy)
    found = _plan_decodes(running, free, limits)
    if found is None:  # blocks or tokens are missing
        assert expected.preempted or len(running) > budget
    else:
        assert found == expected
        assert list(found.num_tokens) == list(expected.num_tokens)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(running_states, st.integers(-2, 3)), min_size=1, max_size=8),
    st.lists(waiting_states, min_size=1, max_size=4),
    st.integers(0, 20),
    st.integers(1, 8),
    st.sampled_from(POLICIES),
)
def test_only_a_request_that_then_runs_preempts_others(
    states: list[tuple[SequenceSnapshot, int]], waiting: list[SequenceSnapshot], spare: int, places: int, policy: str
) -> None:
    running = [replace(s, sequence_id=i, arrival=float(i), priority=priority) for i, (s, priority) in enumerate(states)]
    running = [replace(s, num_known=s.num_known - s.num_drafts, num_drafts=0) for s in running]
    # blocks beyond `num_freed` are shared with other sequences
    running = [replace(s, num_freed=s.num_blocks // (1 + s.sequence_id % 3)) for s in running]
    waiting = [replace(s, sequence_id=100 + i, arrival=50.0 + i) for i, s in enumerate(waiting)]
    free = len(running) + spare  # one free block for each decode, so that none needs a preemption
    total = free + sum(s.num_blocks for s in running)
    limits = SchedulerLimits(policy, 256, max(places, len(running)), BLOCK, total)  # type: ignore[arg-type]
    plan = schedule(running, waiting, free, limits, COST, 51.0)
    if plan.preempted:
        highest = min(s.priority for s in waiting if s.sequence_id in plan.admitted)
        assert all(s.priority > highest for s in running if s.sequence_id in plan.preempted)


def test_a_request_that_could_not_run_preempts_none() -> None:
    limits = SchedulerLimits("splitfuse", num_blocks=100, block_size=BLOCK)
    senior = SequenceSnapshot(1, 0.0, 1440, 1439, 90, 90, has_answered=True)
    low = SequenceSnapshot(2, 0.5, 80, 79, 5, 5, has_answered=True, priority=5)
    large = SequenceSnapshot(3, 1.0, 320, 0, 0)  # needs 20 blocks; 5 are free, and `low` could free 5
    plan = schedule([senior, low], [large], 5, limits, COST, 2.0)
    assert plan == StepPlan({1: 1, 2: 1}, [], [])


@pytest.mark.parametrize(("free", "preempts"), [(4, False), (8, True)])
def test_blocks_of_a_common_prefix_are_not_free_for_the_request_that_shares_them(free: int, preempts: bool) -> None:
    limits = SchedulerLimits("splitfuse", num_blocks=100, block_size=BLOCK)
    low = SequenceSnapshot(1, 0.0, 112, 111, 7, 7, has_answered=True, priority=1)
    # needs 15 blocks, of which it shares 6 while `low` holds them; preempting `low` frees 7, these 6 included
    sharing = SequenceSnapshot(2, 1.0, 240, 96, 6, shared={1: 6})
    plan = schedule([low], [sharing], free, limits, COST, 2.0)
    assert (plan.preempted, plan.admitted) == (([1], [2]) if preempts else ([], []))


class Simulation:
    """Simulation of a load: an engine's block accounting, and a clock driven by the cost model."""

    def __init__(self, limits: SchedulerLimits, cost: StepCost = COST) -> None:
        self.limits, self.cost, self.now = limits, cost, 0.0
        self.running: dict[int, SequenceSnapshot] = {}
        self.waiting: dict[int, SequenceSnapshot] = {}
        self.prompt: dict[int, int] = {}
        self.answer: dict[int, int] = {}
        self.first: dict[int, float] = {}
        self.done: dict[int, float] = {}
        self.gaps: list[float] = []
        self._last: dict[int, float] = {}
        self._clock = 0.0

    def add(self, number: int, prompt: int, answer: int, **more: object) -> None:
        facts = {"fair_start": self._clock, **more}
        self.waiting[number] = SequenceSnapshot(number, self.now, prompt, 0, 0, **facts)  # type: ignore[arg-type]
        self.prompt[number], self.answer[number] = prompt, answer

    def step(self) -> StepPlan:
        free = self.limits.num_blocks - sum(s.num_blocks for s in self.running.values())
        plan = schedule(
            list(self.running.values()), list(self.waiting.values()), free, self.limits, self.cost, self.now
        )
        for number in plan.preempted:
            old = self.running.pop(number)
            self.waiting[number] = replace(old, num_computed=0, num_blocks=0, num_freed=0)
        for number in plan.admitted:
            new = self.waiting.pop(number)
            held = blocks(new.num_known)
            self.running[number] = replace(new, num_blocks=held, num_freed=held)
        states = [(self.running[n], tokens) for n, tokens in plan.num_tokens.items()]
        cached = sum(s.num_computed for s, _ in states if s.is_decode)
        pairs = sum(tokens * (s.num_computed + tokens / 2) for s, tokens in states if not s.is_decode)
        self.now += self.cost.step_seconds(sum(plan.num_tokens.values()), cached, pairs)
        prompts = sum(not s.has_answered for s in self.running.values()) + len(self.waiting)
        for number, tokens in plan.num_tokens.items():
            s = self.running[number]
            computed = s.num_computed + tokens
            held = max(blocks(computed), s.num_blocks)
            work = 0.0 if s.has_answered else self.cost.prompt_work(tokens, s.num_computed)
            self._clock += work / max(prompts, 1)
            s = replace(s, num_computed=computed, num_blocks=held, num_freed=held, fair_start=s.fair_start + work)
            if computed == s.num_known:
                self.first.setdefault(number, self.now)
                if number in self._last:
                    self.gaps.append(self.now - self._last[number])
                self._last[number] = self.now
                s = replace(s, num_known=s.num_known + 1, has_answered=True)
            self.running[number] = s
            if s.num_known - self.prompt[number] >= self.answer[number]:
                self.done[number] = self.now
                del self.running[number]
        assert sum(s.num_blocks for s in self.running.values()) <= self.limits.num_blocks
        return plan

    def run(self, most: int = 20_000) -> None:
        for _ in range(most):
            if not self.running and not self.waiting:
                return
            self.step()
        raise AssertionError(f"{len(self.running)} running and {len(self.waiting)} waiting requests starve")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(3))
def test_all_requests_are_served_with_a_small_cache(policy: str, seed: int) -> None:
    r = random.Random(seed)
    simulation = Simulation(SchedulerLimits(policy, 64, 8, BLOCK, 24))  # type: ignore[arg-type]
    for number in range(60):
        simulation.add(number, r.randrange(1, 250), r.randrange(1, 100), priority=r.randrange(3))
        if r.random() < 0.7:
            simulation.step()
    simulation.run()
    assert len(simulation.done) == 60


def test_a_large_request_is_not_passed_forever_by_small_ones() -> None:
    limits = SchedulerLimits("splitfuse", 64, 8, BLOCK, 24, max_wait_seconds=2.0)
    simulation = Simulation(limits)
    simulation.add(0, 40, 60)
    simulation.step()
    simulation.add(1000, 24 * BLOCK - 2, 1)  # needs all blocks of the cache
    number = 1
    while 1000 not in simulation.first and number < 5000:
        simulation.add(number, 40, 20)  # a small request is always waiting
        simulation.step()
        number += 1
    assert simulation.first[1000] < 2.0 + 3.0  # the bound on waiting, and time for running requests to end


def test_a_long_prompt_is_not_passed_forever_by_short_ones() -> None:
    """More prompts arrive than can be computed, so all of them are pressing."""
    limits = SchedulerLimits("splitfuse", 64, 4, BLOCK, 400, max_wait_seconds=0.1)
    simulation = Simulation(limits)
    for number in range(8):
        simulation.add(number, 60, 1)
    simulation.step()
    simulation.add(1000, 400, 1)
    number = 8
    while 1000 not in simulation.first and number < 200:
        simulation.add(number, 60, 1)
        simulation.step()
        number += 1
    # `number` starts at 8. One step each: 8 earlier prompts, 8 later ones with earlier deadlines (they take less time),
    # the chunks of the long prompt, and 2 steps that it shares.
    assert number < 8 + 8 + 8 + 400 // 64 + 2


@pytest.mark.parametrize("waited", [1.0, 5.0])
def test_an_overdue_request_is_not_preempted_before_its_first_token(waited: float) -> None:
    limits = SchedulerLimits("splitfuse", 64, 2, BLOCK, 40, max_wait_seconds=2.0)
    running = [
        SequenceSnapshot(1, 0.0, 81, 80, 6, 6, has_answered=True),
        SequenceSnapshot(2, 10.0 - waited, 300, 64, 19, 19, priority=1),
    ]
    urgent = SequenceSnapshot(3, 9.5, 60, 0, 0)
    plan = schedule(running, [urgent], 15, limits, COST, 10.0)
    assert plan.preempted == ([] if waited > 2 else [2])
    assert plan.admitted == ([] if waited > 2 else [3])


def test_short_prompts_do_not_wait_for_a_long_one() -> None:
    def first_token(long: bool, policy: str) -> float:
        simulation = Simulation(SchedulerLimits(policy, 256, 16, BLOCK, 2000))  # type: ignore[arg-type]
        if long:
            simulation.add(0, 10_000, 4)
            simulation.step()
        arrival = simulation.now
        simulation.add(1, 100, 4)
        while 1 not in simulation.first:
            simulation.step()
        return simulation.first[1] - arrival

    idle = first_token(False, "splitfuse")
    assert first_token(True, "splitfuse") <= 3 * idle
    assert first_token(True, "orca") <= 3 * idle + 11  # orca does not split the prompt of 10,000 tokens into chunks


GAP_LIMITS = SchedulerLimits("splitfuse", 512, 16, BLOCK, 4000, max_gap_seconds=0.05)
LINEAR = StepCost(0.0, 0.010, 0.001, 0.0)
QUADRATIC = StepCost(0.0, 0.010, 0.001, 1e-6, pair_seconds=1e-6)  # attention takes most of the time of a long prompt


@pytest.mark.parametrize(
    ("cost", "answers", "prompt", "least_steps"),
    [
        (LINEAR, [200] * 4, 5000, 100),
        (QUADRATIC, [2000], 10_000, 500),  # each of the last tokens attends to 10,000: few fit into a step
    ],
    ids=["linear", "attention"],
)
def test_steps_with_decodes_keep_the_gap(cost: StepCost, answers: list[int], prompt: int, least_steps: int) -> None:
    simulation = Simulation(GAP_LIMITS, cost)
    for number, tokens in enumerate(answers):
        simulation.add(number, 30, tokens)
    for _ in range(10):
        simulation.step()
    simulation.gaps.clear()
    simulation.add(10, prompt, 4)
    while 10 not in simulation.first:
        simulation.step()
    assert max(simulation.gaps) <= 0.0501
    assert len(simulation.gaps) > least_steps


@pytest.mark.parametrize("level", [None, ServiceLevel(9.0, 16.0)])
def test_no_more_answers_run_than_keep_the_gap(level: ServiceLevel | None) -> None:
    gap = 0.05 if level is None else None  # the level's 16 tokens/s allow 0.8 / 16 = 0.05 s too
    limits = SchedulerLimits("splitfuse", 512, 256, BLOCK, 4000, gap, max_wait_seconds=1e3)
    simulation = Simulation(limits, LINEAR)
    for number in range(100):
        simulation.add(number, 30, 400, level=level)
    simulation.run()
    assert len(simulation.done) == 100
    assert max(simulation.gaps) <= 0.0501
    slow = Simulation(SchedulerLimits("splitfuse", 512, 256, BLOCK, 4000, 0.005), LINEAR)
    for number in range(10):
        slow.add(number, 30, 40)
    slow.step()
    assert len(slow.running) == 10  # no limit: the gap is below even the time of one decode


def test_decodes_of_a_long_text_that_fill_the_gap_let_short_prompts_pass() -> None:
    cost = StepCost(0.0, 0.010, 0.001, 5e-6)
    long = SequenceSnapshot(0, 0.0, 10_000, 9999, blocks(10_000), blocks(10_000), has_answered=True)
    running = [long, replace(long, sequence_id=1)]
    plan = schedule(running, [SequenceSnapshot(2, 1.0, 20, 0, 0)], 2000, GAP_LIMITS, cost, 1.0)
    assert plan.num_tokens[0] == plan.num_tokens[1] == 1 and plan.num_tokens[2] > 0


def test_the_end_of_a_long_prompt_does_not_pass_a_short_one() -> None:
    cost = StepCost(0.0, 0.010, 0.001, 0.0, pair_seconds=1e-6)
    running = [SequenceSnapshot(0, 0.0, 10_000, 9900, blocks(10_000), blocks(10_000))]
    plan = schedule(running, [SequenceSnapshot(1, 1.0, 120, 0, 0)], 2000, GAP_LIMITS, cost, 1.0)
    assert plan.num_tokens[1] >= 40


def test_a_gap_bounds_steps_of_prompts_alone() -> None:
    simulation = Simulation(GAP_LIMITS, LINEAR)
    simulation.add(0, 5000, 1)
    assert simulation.step().num_tokens == {0: 50}


def test_running_answers_keep_their_service_level_while_prompts_are_computed() -> None:
    cost = StepCost(0.0, 0.010, 0.001, 0.0)
    level = ServiceLevel(1.0, 20.0)
    simulation = Simulation(SchedulerLimits("splitfuse", 512, 16, BLOCK, 4000), cost)
    simulation.add(0, 30, 200, level=level)
    simulation.step()
    simulation.add(1, 3000, 4)
    while 1 not in simulation.first:
        simulation.step()
    assert max(simulation.gaps) <= 0.05 and len(simulation.gaps) > 50


def test_a_rate_that_decodes_alone_do_not_reach_delays_no_prompt() -> None:
    cost = StepCost(0.0, 0.010, 0.001, 0.0)
    steps = []
    for level in (None, ServiceLevel(1.0, 1e9)):
        simulation = Simulation(SchedulerLimits("splitfuse", 512, 16, BLOCK, 4000), cost)
        simulation.add(0, 30, 200, level=level)
        simulation.step()
        simulation.add(1, 3000, 4)
        steps.append(0)
        while 1 not in simulation.first:
            simulation.step()
            steps[-1] += 1
    assert steps[0] == steps[1]


def test_prompts_with_a_service_level_go_by_deadline() -> None:
    limits = SchedulerLimits("splitfuse", 64, 8, BLOCK, 400)
    near = SequenceSnapshot(1, 0.0, 300, 0, 0, level=ServiceLevel(1.0))
    far = SequenceSnapshot(2, 0.0, 100, 0, 0, level=ServiceLevel(9.0))
    assert schedule([], [far, near], 400, limits, COST, 0.1).num_tokens == {1: 64}


def test_tokens_that_a_short_prompt_leaves_go_to_the_next_one() -> None:
    limits = SchedulerLimits("splitfuse", 100, 8, BLOCK, 400)
    waiting = [SequenceSnapshot(1, 0.0, 300, 0, 0), SequenceSnapshot(2, 0.0, 60, 0, 0)]
    assert schedule([], waiting, 400, limits, COST, 0.1).num_tokens == {2: 60, 1: 40}


def test_service_levels_order_admission() -> None:
    limits = SchedulerLimits("splitfuse", 64, 1, BLOCK, 100)
    waiting = [
        SequenceSnapshot(1, 0.0, 60, 0, 0),
        SequenceSnapshot(2, 0.0, 60, 0, 0, level=ServiceLevel(5.0)),
        SequenceSnapshot(3, 0.0, 60, 0, 0, level=ServiceLevel(1.0)),
        SequenceSnapshot(4, 0.0, 60, 0, 0, level=ServiceLevel(0.01)),  # the deadline has passed
    ]
    for expected in (3, 2, 1, 4):
        plan = schedule([], waiting, 100, limits, COST, 0.5)
        assert plan.admitted == [expected]
        waiting = [s for s in waiting if s.sequence_id != expected]


def test_urgent_requests_preempt_others() -> None:
    limits = SchedulerLimits("splitfuse", 64, 4, BLOCK, 10)
    running = [SequenceSnapshot(1, 0.0, 81, 80, 5, 5), SequenceSnapshot(2, 1.0, 65, 64, 5, 5)]
    urgent = SequenceSnapshot(3, 2.0, 60, 0, 0, priority=-1)
    plan = schedule(running, [urgent], 0, limits, COST, 3.0)
    assert plan.preempted
    after = [s for s in running if s.sequence_id not in plan.preempted]
    if not plan.admitted:
        plan = schedule(after, [urgent, running[1]], 5, limits, COST, 3.0)
    assert plan.admitted[0] == 3


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 600), st.floats(0, 2)), min_size=1, max_size=12), st.sampled_from([None, 0.05])
)
def test_no_prompt_ends_later_than_with_equal_shares(requests: list[tuple[int, float]], gap: float | None) -> None:
    """Compare with ideal processor sharing, in which each unfinished prompt always gets an equal part of the rate."""
    simulation = Simulation(SchedulerLimits("splitfuse", 64, 16, BLOCK, 2000, gap), LINEAR)
    requests = sorted(requests, key=lambda request: request[1])
    step = LINEAR.step_seconds(64, 0) if gap is None else 0.05
    rate = 1000.0  # tokens per second in a full step
    left = {number: float(prompt) for number, (prompt, _) in enumerate(requests)}
    ends: dict[int, float] = {}
    now = 0.0
    while left:
        active = [number for number in left if requests[number][1] <= now]
        arrivals = [requests[number][1] for number in left if requests[number][1] > now]
        if not active:
            now = min(arrivals)
            continue
        span = min([left[number] * len(active) / rate for number in active] + [at - now for at in arrivals])
        now += span
        for number in active:
            left[number] -= span * rate / len(active)
            if left[number] < 1e-6:
                ends[number] = now
                del left[number]
    pending = list(enumerate(requests))
    while pending or simulation.waiting or simulation.running:
        while pending and (pending[0][1][1] <= simulation.now or not (simulation.waiting or simulation.running)):
            number, (prompt, arrival) = pending.pop(0)
            simulation.now = max(simulation.now, arrival)
            simulation.add(number, prompt, 1)
        simulation.step()
    # A prompt waits for the step in progress, and a step of few tokens still takes the time to read the weights.
    for number, end in ends.items():
        assert simulation.first[number] <= end + (2 + len(requests)) * step


def test_requests_that_are_accepted_by_lateness_keep_the_bound() -> None:
    """More prompts arrive than can be computed. Each is accepted only if it and all earlier ones keep the bound."""
    r = random.Random(7)
    limits = SchedulerLimits("splitfuse", 128, 64, BLOCK, 40_000, max_wait_seconds=3.0)
    simulation = Simulation(limits)
    accepted: dict[int, float] = {}
    for number in range(400):
        prompt = r.choice([20, 100, 1000])
        new = SequenceSnapshot(number, simulation.now, prompt, 0, 0)
        waiting = [*simulation.waiting.values(), new]
        if lateness(list(simulation.running.values()), waiting, limits, COST, simulation.now) <= 0:
            simulation.add(number, prompt, r.randrange(1, 30))
            accepted[number] = simulation.now
        simulation.step()
    simulation.run()
    waits = [simulation.first[one] - arrival for one, arrival in accepted.items()]
    assert len(accepted) < 300
    assert max(waits) <= 3.0 + 1.5 * COST.prefill_seconds(1000)
    assert max(waits) > 2.0  # accepted requests wait nearly as long as the bound, so none is refused without need


def test_short_prompts_pass_long_ones_that_press() -> None:
    """The long prompts that wait cannot all keep the bound; short ones still get an eighth of each step's tokens."""
    limits = SchedulerLimits("splitfuse", 128, 64, BLOCK, 4000, max_gap_seconds=0.05, max_wait_seconds=5.0)
    simulation = Simulation(limits, LINEAR)
    for number in range(10):
        simulation.add(number, 2000, 1)
    while simulation.now < 8.0:
        simulation.step()
    arrival = simulation.now
    simulation.add(100, 30, 1)
    while 100 not in simulation.first:
        simulation.step()
    assert simulation.first[100] < arrival + 1.0
    assert len(simulation.first) < 9
