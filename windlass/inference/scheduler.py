"""Scheduling of a step: which sequences run, and with how many tokens each.

[Note: scheduling without phases] There are no phases. Each sequence has known tokens (prompt, generated tokens, drafts)
and computed tokens (with keys and values in the KV cache). A step lets computed tokens catch up with known ones:
sequences with one token left to compute (decodes) come first, and the rest of the step's tokens is shared among
prompts. That is Dynamic SplitFuse (Holmes et al. 2024, DeepSpeed-FastGen); the policies of vLLM's first engine
(prefill-first) and of Orca (Yu et al. 2022) are settings of the same function.

[Note: fair shares] A step has tokens for only a few prompts. It takes the prompts that would end first if all prompts
always had equal shares (Parekh and Gallager 1993, weighted fair queueing; Friedman and Henderson 2003, fair
sojourn protocol). No prompt ends much later than with equal shares, and most end much earlier: a short prompt passes a
long one, and a long prompt waits for short ones only in proportion to its own length. The order needs a virtual clock,
which counts the work that a prompt with an equal share would have received. The caller advances the clock by the work
of a step for prompts (`StepCost.prompt_work`), divided by the number of prompts, waiting ones included. Each prompt has
a `fair_start`: the clock at its arrival plus the work done for it since then.

[Note: bound on waiting] A request's deadline is its arrival plus `max_wait_seconds` plus the time that its prompt
takes. Planned deadlines are earlier by a tenth of `max_wait_seconds`, because predicted times may be wrong. A request
is pressing if it must run now so that, by the predicted times, it and all requests with later deadlines meet their
planned deadlines. Pressing prompts come before all other prompts, by deadline, and get seven eighths of a step's prompt
tokens. This order meets all deadlines if any order can (Liu and Layland 1973). A server that enforces the bound under
any load (`enforce_max_wait`) refuses a request that would make `lateness` positive.

`schedule` is a pure function of snapshots, so that its properties can be tested without a model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from windlass.inference.step_cost import StepCost

Policy = Literal["splitfuse", "prefill-first", "orca"]
POLICIES: tuple[Policy, ...] = ("splitfuse", "prefill-first", "orca")

_MIN_CHUNK = 64  # fewest tokens of a prompt's share in a step; smaller shares need too many steps
_LEAST_PROGRESS = 16  # prompt tokens that even a step with slow decodes has; fewer if the step's limits are small
_LEAST_PART = 1 / 8  # smallest share of a step's time that prompts get
_WAIT_SHARE = 0.9  # part of `max_wait_seconds` that planned deadlines allow; the rest covers wrong predictions
_PRESSING_PART = 7 / 8  # part of a step's prompt tokens that pressing prompts get if there are other prompts
_LEVEL_SHARE = 0.8  # limit of a step's predicted time, relative to the declared time between two tokens


@dataclass(frozen=True, slots=True)
class ServiceLevel:
    """Service level that a request declares.

    Attributes:
        first_token_seconds: longest time from arrival to the first token.
        tokens_per_second: rate of the tokens after the first one; 0: none is declared.
    """

    first_token_seconds: float
    tokens_per_second: float = 0.0


@dataclass(slots=True)  # not frozen: a frozen dataclass takes three times as long to make
class SequenceSnapshot:
    """Facts about a sequence that the scheduler needs.

    Attributes:
        sequence_id: number, unique among running and waiting sequences.
        arrival: time of arrival in seconds.
        num_known: number of tokens of prompt and answer, drafts included.
        num_drafts: number of drafts in `num_known`, which may be dropped.
        num_computed: number of tokens with keys and values in the cache; for a waiting sequence, tokens that were saved
            or are in the prefix cache.
        num_blocks: number of blocks that the sequence holds; for a waiting sequence, blocks of its cached prefix that
            running sequences hold.
        num_freed: number of blocks that become free if the sequence is preempted after all running sequences behind it
            in the order of `seniority`: its blocks that no sequence before it holds.
        copies_block: True if the sequence's last block is shared and must be copied before the next token.
        priority: lower values run first.
        level: service level; None: none is declared.
        num_candidates: number of running sequences that the sequence becomes after its prompt (`n` or `best_of`); 1
            after that.
        has_answered: True if the first token of the answer was generated.
        fair_start: virtual clock at the arrival, plus the work done since then; see [Note: fair shares].
        shared: for a waiting sequence, how many of its `num_blocks` become free if a running sequence is preempted, by
            the id of the running one. The waiting sequence must then take them from the free blocks.
    """

    sequence_id: int
    arrival: float
    num_known: int
    num_computed: int
    num_blocks: int
    num_freed: int = 0
    num_drafts: int = 0
    copies_block: bool = False
    priority: int = 0
    level: ServiceLevel | None = None
    num_candidates: int = 1
    has_answered: bool = False
    fair_start: float = 0.0
    shared: Mapping[int, int] = field(default_factory=dict)

    @property
    def remaining(self) -> int:
        """Number of tokens that are known and not computed."""
        return self.num_known - self.num_computed

    @property
    def is_decode(self) -> bool:
        """True if only one token is not computed yet, apart from drafts."""
        return self.num_known - self.num_computed == 1 + self.num_drafts


@dataclass(frozen=True)
class SchedulerLimits:
    """Settings of the scheduler.

    Attributes:
        policy: `splitfuse` runs decodes and parts of prompts together; `prefill-first` runs whole prompts alone before
            any decode; `orca` runs decodes and whole prompts together.
        max_tokens_per_step: largest number of tokens of a forward. With `prefill-first` and `orca`, a whole prompt may
            have more.
        max_sequences: largest number of sequences that run at the same time.
        block_size, num_blocks: tokens of a block of the KV cache, and number of blocks.
        max_gap_seconds: limit of the predicted time of a `splitfuse` step, exceeded if decodes leave prompts less than
            an eighth of it. Only as many prompts are computed at a time as can later decode together within this limit.
            None: only the number of tokens is limited, unless a running answer has a service level.
        max_wait_seconds: limit of the wait for the first token, in addition to the time of the prompt: a request that
            would wait longer runs before all others; see [Note: bound on waiting].
    """

    policy: Policy = "splitfuse"
    max_tokens_per_step: int = 512
    max_sequences: int = 64
    block_size: int = 16
    num_blocks: int = 1024
    max_gap_seconds: float | None = None
    max_wait_seconds: float = 30.0


@dataclass
class StepPlan:
    """Result of `schedule`.

    Attributes:
        num_tokens: number of tokens of each sequence that runs in the step, by id.
        admitted: ids of waiting sequences that start; each gets blocks for all its known tokens.
        preempted: ids of running sequences that lose their blocks.
    """

    num_tokens: dict[int, int] = field(default_factory=dict)
    admitted: list[int] = field(default_factory=list)
    preempted: list[int] = field(default_factory=list)


def schedule(
    running: Sequence[SequenceSnapshot],
    waiting: Sequence[SequenceSnapshot],
    free_blocks: int,
    limits: SchedulerLimits,
    cost: StepCost,
    now: float,
    *,
    elsewhere: int = 0,
    share: int | None = None,
) -> StepPlan:
    """Plan one step.

    Args:
        running: sequences that hold blocks for all their known tokens but the last and the drafts.
        waiting: sequences that were not admitted yet, or were preempted.
        free_blocks: blocks that no sequence holds.
        cost: model of the time of a step.
        now: time in seconds, by the same clock as `SequenceSnapshot.arrival`.
        elsewhere: sum of `num_candidates` of the running sequences that are not in `running`, e.g. because another step
            computes them.
        share: number of running sequences at which admission stops; None: no limit.

    Returns:
        A plan that needs no more blocks than are free after its preemptions. It is empty only if nothing can run.
    """
    if not waiting and (plan := _plan_decodes(running, free_blocks, limits)) is not None:
        return plan
    return _plan_by_policy(_Planner(running, waiting, free_blocks, limits, cost, now, elsewhere, share), limits.policy)


def _plan_by_policy(planner: _Planner, policy: Policy) -> StepPlan:
    if policy == "prefill-first":
        planner.admit(planner.whole_prompt_fits)
        planner.run_whole_prompts()
        if not planner.plan.num_tokens:
            planner.run_decodes()
    elif policy == "orca":
        planner.run_decodes()
        planner.admit(planner.whole_prompt_fits)
        planner.run_whole_prompts()
    else:
        planner.run_decodes()
        planner.admit(lambda _: True)
        planner.share_among_prompts()
    return planner.plan


def _plan_decodes(running: Sequence[SequenceSnapshot], free_blocks: int, limits: SchedulerLimits) -> StepPlan | None:
    """Return the plan if every sequence decodes, without drafts, and tokens and blocks suffice; None in other cases.

    Most steps are of this kind, and deadlines or costs do not change their plan.
    """
    if not 0 < len(running) <= limits.max_tokens_per_step:
        return None
    needed = 0
    for sequence in running:
        if sequence.remaining != 1 or sequence.num_drafts:
            return None
        needed += _count_blocks(sequence, 1, limits.block_size)
    if needed > free_blocks:
        return None
    order = sorted(running, key=seniority) if len(running) > 1 else running
    return StepPlan({sequence.sequence_id: 1 for sequence in order})


def _count_blocks(sequence: SequenceSnapshot, tokens: int, block_size: int) -> int:
    """Return the number of blocks that a sequence needs for its next `tokens` tokens."""
    total = -(-(sequence.num_computed + tokens) // block_size)
    return max(total - sequence.num_blocks, 0) + sequence.copies_block


def lateness(
    running: Sequence[SequenceSnapshot],
    waiting: Sequence[SequenceSnapshot],
    limits: SchedulerLimits,
    cost: StepCost,
    now: float,
) -> float:
    """Return the largest number of seconds by which a first token misses its planned deadline.

    Requests are assumed to run by deadline; see [Note: bound on waiting]. Negative values are time to spare; `-inf`: no
    request waits for its first token. The arguments are those of `schedule`.
    """
    return _Planner(running, waiting, 0, limits, cost, now, 0, None).find_lateness()


class _Planner:
    def __init__(
        self,
        running: Sequence[SequenceSnapshot],
        waiting: Sequence[SequenceSnapshot],
        free_blocks: int,
        limits: SchedulerLimits,
        cost: StepCost,
        now: float,
        elsewhere: int,
        share: int | None,
    ) -> None:
        self.plan = StepPlan()
        self._elsewhere, self._share = elsewhere, share
        self._limits, self._cost, self._now, self._free = limits, cost, now, free_blocks
        self._running = sorted(running, key=seniority)
        self._token_seconds = self._predict_token_seconds()
        self._by_deadline = self._sort_by_deadline([*running, *waiting])
        self._pressing = self._find_pressing()
        self._waiting = sorted(waiting, key=self._urgency)
        self._admitted: set[int] = set()
        self._used_tokens = 0
        self._cached_tokens = 0  # number of keys that the decodes of the step read
        self._pairs = 0.0  # number of pairs of a prompt token of the step and a key that the token attends to

    def run_decodes(self) -> None:
        """Give each decoding sequence its token, and its drafts if tokens and blocks suffice, in the order of
        `seniority`. If blocks run out, preempt the last running sequences of this order."""
        decodes = [sequence for sequence in self._running if sequence.is_decode]
        decodes = decodes[: self._limits.max_tokens_per_step]
        spare = self._limits.max_tokens_per_step - len(decodes)  # tokens left for drafts
        preempted: set[int] = set()
        for sequence in decodes:
            if sequence.sequence_id in preempted:
                break  # all sequences after it were preempted too
            drafts = min(sequence.num_drafts, spare)
            if self._blocks_for(sequence, 1 + drafts) > self._free:
                drafts = 0
            while self._blocks_for(sequence, 1) > self._free and sequence.sequence_id not in preempted:
                preempted.add(self._running[-1].sequence_id)
                self._preempt(self._running[-1])
            if sequence.sequence_id in preempted:
                break
            self._free -= self._blocks_for(sequence, 1 + drafts)
            spare -= drafts
            self._cached_tokens += sequence.num_computed
            self._run(sequence, 1 + drafts)

    def admit(self, fits: Callable[[SequenceSnapshot], bool]) -> None:
        """Admit waiting sequences in the order of their urgency, as long as there are free blocks and places in the
        batch. Preempt running sequences of lower priority for them.
        """
        if self.plan.preempted:
            return  # waiting sequences would take the blocks that were freed for decodes
        places = self._limits.max_sequences - self._elsewhere
        places -= sum(sequence.num_candidates for sequence in self._running)
        for sequence in self._waiting:
            if self._share is not None and len(self._running) >= self._share:
                break  # other steps admit the remaining sequences
            needed = -(-sequence.num_known // self._limits.block_size) - sequence.num_blocks
            needed += sum(sequence.shared.get(preempted, 0) for preempted in self.plan.preempted)
            if fits(sequence):
                for junior in self._find_juniors(sequence, needed, places):
                    self._preempt(junior)
                    needed += sequence.shared.get(junior.sequence_id, 0)
                    places += junior.num_candidates
            if places < sequence.num_candidates and (self._running or self._elsewhere):
                break
            if self._lacks_blocks(needed) or not fits(sequence):
                if self._is_pressing(sequence):
                    break  # no smaller request may be admitted before a pressing one
                continue
            self._free -= needed
            places -= sequence.num_candidates
            self._admitted.add(sequence.sequence_id)
            self.plan.admitted.append(sequence.sequence_id)
            self._running.append(sequence)

    def _find_juniors(self, sequence: SequenceSnapshot, needed: int, places: int) -> list[SequenceSnapshot]:
        """Return the running sequences to preempt, from the last one on, so that a waiting sequence of higher priority
        can run: as few as possible, and none if all of them would free too little and no other step can free more. A
        pressing sequence is not preempted, because it precedes all others.
        """
        left, juniors, freed = list(self._running), list[SequenceSnapshot](), 0
        while self._lacks_blocks(needed, len(juniors), freed) or (
            places < sequence.num_candidates and (left or self._elsewhere)
        ):
            junior = left.pop() if left else None
            if (
                junior is None
                or junior.priority <= sequence.priority
                or junior.sequence_id in self._admitted
                or self._is_pressing(junior)
            ):
                # running sequences of other steps could free the missing blocks: the caller plans again with all
                # sequences
                return juniors if self._share is not None and self._elsewhere else []
            juniors.append(junior)
            freed += junior.num_freed
            needed += sequence.shared.get(junior.sequence_id, 0)
            places += junior.num_candidates
        return juniors

    def _lacks_blocks(self, needed: int, preempted: int = 0, freed: int = 0) -> bool:
        # one block stays free for each running sequence, so that admission causes no preemption in the next step
        others = len(self._running) - preempted + self._elsewhere
        return needed + min(others, max(self._limits.num_blocks - needed, 0)) > self._free + freed

    def whole_prompt_fits(self, sequence: SequenceSnapshot) -> bool:
        """Return True if all tokens of the prompt fit in the step, or if it is the step's first prompt, which may
        exceed the limit.
        """
        prompts = self._prompts()
        tokens = self._used_tokens + sum(other.remaining for other in prompts) + sequence.remaining
        return not prompts or tokens <= self._limits.max_tokens_per_step

    def run_whole_prompts(self) -> None:
        """Run all remaining tokens of each prompt."""
        for sequence in self._prompts():
            self._run(sequence, sequence.remaining)

    def share_among_prompts(self) -> None:
        """Share the remaining tokens of the step among prompts by max-min fairness.

        A prompt that is shorter than its share leaves the difference to the others. If shares would become smaller than
        `_MIN_CHUNK`, only the first prompts get tokens: by priority; at equal priority, by deadline if any prompt has a
        service level, else in the order of [Note: fair shares]. Time is shared in the same order. Pressing prompts go
        first, by deadline, and leave an eighth to other prompts, so that short prompts need not wait for all of them.
        """
        prompts = self._prompts()
        gap = self._gap()
        left = self._prompt_budget(gap)
        pressing = sorted((prompt for prompt in prompts if self._is_pressing(prompt)), key=self._urgency)
        others = [prompt for prompt in prompts if not self._is_pressing(prompt)]
        has_levels = any(prompt.level is not None for prompt in others)
        others.sort(key=self._urgency if has_levels else self._fair_order)
        others = others[: self._find_room(gap, pressing, others)]
        part = _PRESSING_PART if pressing and others else 1.0
        begin = self._cost.step_seconds(self._used_tokens, self._cached_tokens) if self._used_tokens else 0.0
        # on a slow machine, or if they are many, decodes alone may take the full gap and would starve prompts
        seconds = None if gap is None else max(gap - begin, gap * _LEAST_PART)
        reserved = left - math.ceil(left * part)
        left = self._share_in_order(pressing, left - reserved, None if seconds is None else begin + seconds * part)
        self._share_in_order(others, left + reserved, None if seconds is None else begin + seconds)

    def _find_room(
        self, gap: float | None, pressing: Sequence[SequenceSnapshot], others: Sequence[SequenceSnapshot]
    ) -> int:
        """Return how many of `others` may be computed now: once they are answers, a step that decodes all answers must
        leave a part of `gap` for prompts. A gap that a single decode exceeds cannot be met, and limits nothing.

        Attention is not counted: decodes of long texts may fill the gap, and short prompts should not wait until these
        decodes end.
        """
        if gap is None or self._cost.step_seconds(1, 0) > gap * (1 - _LEAST_PART):
            return len(others)
        decodes = len(self._running) - len(pressing) - len(others)
        answers = self._elsewhere + decodes + sum(prompt.num_candidates for prompt in pressing)
        for place, prompt in enumerate(others):
            answers += prompt.num_candidates
            if self._cost.step_seconds(answers, 0) > gap * (1 - _LEAST_PART):
                return place if answers > prompt.num_candidates else 1
        return len(others)

    def _share_in_order(self, prompts: Sequence[SequenceSnapshot], left: int, end: float | None) -> int:
        """Share `left` tokens of a step of at most `end` seconds among sorted prompts; return the number of tokens
        left."""
        if left <= 0 or not prompts:
            return left
        sharing = prompts[: max(left // _MIN_CHUNK, 1)]
        shares = _max_min_shares([sequence.remaining for sequence in sharing], left)
        left -= sum(shares)
        for place, prompt in enumerate(prompts):
            granted = shares[place] if place < len(shares) else min(prompt.remaining, left)
            left -= granted if place >= len(shares) else 0
            granted = self._within(end, prompt, granted)
            if not granted:
                continue
            self._pairs += granted * (prompt.num_computed + granted / 2)
            self._run(prompt, granted)
        return left

    def _fair_order(self, prompt: SequenceSnapshot) -> tuple[int, int, int, float, float]:
        """Return a sort key: by priority, then by the virtual time at which the prompt ends."""
        work = self._cost.prompt_work(prompt.remaining, prompt.num_computed)
        return 1, prompt.priority, 0, prompt.fair_start + work, prompt.arrival

    def _within(self, end: float | None, prompt: SequenceSnapshot, most: int) -> int:
        """Return how many tokens of a prompt, at most `most`, fit into a step of `end` seconds; the first prompt of a
        step gets at least one."""
        if end is None:
            return most
        low, high = min(int(not self._pairs), most), most
        while low < high:  # binary search, since the predicted time grows with the tokens
            middle = (low + high + 1) // 2
            pairs = self._pairs + middle * (prompt.num_computed + middle / 2)
            if self._cost.step_seconds(self._used_tokens + middle, self._cached_tokens, pairs) <= end:
                low = middle
            else:
                high = middle - 1
        return low

    def _prompts(self) -> list[SequenceSnapshot]:
        """Return running sequences that compute a prompt or recompute an answer, and sequences admitted in this
        step."""
        return [s for s in self._running if not s.is_decode or s.sequence_id in self._admitted]

    def _gap(self) -> float | None:
        """Return the seconds that the step may take: `max_gap_seconds`, or less for a running answer's service level.
        None: no limit."""
        gap = self._limits.max_gap_seconds
        decodes = [sequence for sequence in self._running if sequence.is_decode]
        rates = [one.level.tokens_per_second for one in decodes if one.level is not None]
        if not any(rates):
            return gap
        alone = self._cost.step_seconds(len(decodes), sum(sequence.num_computed for sequence in decodes))
        for rate in rates:
            # skip rates that a step without prompts cannot reach: they are missed anyway, and their gap would only
            # delay prompts
            if rate > 0 and (promised := _LEVEL_SHARE / rate) >= alone:
                gap = promised if gap is None else min(gap, promised)
        return gap

    def _least_progress(self, gap: float | None) -> int:
        limits = self._limits
        most = min(_LEAST_PROGRESS, limits.max_tokens_per_step // 8)
        if gap is not None:
            most = min(most, int(self._cost.tokens_within(gap, 0) * _LEAST_PART))
        return max(most, 1)

    def _prompt_budget(self, gap: float | None) -> int:
        left = self._limits.max_tokens_per_step - self._used_tokens
        if gap is None or left <= 0:
            return left
        within = self._cost.tokens_within(gap, self._cached_tokens) - self._used_tokens
        return min(left, max(within, self._least_progress(gap)))

    def _run(self, sequence: SequenceSnapshot, tokens: int) -> None:
        self.plan.num_tokens[sequence.sequence_id] = tokens
        self._used_tokens += tokens

    def _preempt(self, sequence: SequenceSnapshot) -> None:
        self._running = [other for other in self._running if other is not sequence]
        self._free += sequence.num_freed
        self.plan.preempted.append(sequence.sequence_id)
        self._used_tokens -= self.plan.num_tokens.pop(sequence.sequence_id, 0)

    def _blocks_for(self, sequence: SequenceSnapshot, tokens: int) -> int:
        return _count_blocks(sequence, tokens, self._limits.block_size)

    def _predict_token_seconds(self) -> float:
        """Return the predicted seconds per prompt token of a full step with the present decodes. A step is full if it
        takes all of `_gap`, or, without a gap, if it has `max_tokens_per_step` tokens."""
        gap = self._gap()
        decodes = [sequence for sequence in self._running if sequence.is_decode]
        cached = sum(sequence.num_computed for sequence in decodes)
        if gap is None:
            tokens = max(self._limits.max_tokens_per_step - len(decodes), 1)
            return self._cost.step_seconds(len(decodes) + tokens, cached) / tokens
        within = self._cost.tokens_within(gap, cached) - len(decodes)
        return gap / max(within, self._least_progress(gap))

    def _prompt_seconds(self, tokens: int) -> float:
        return max(self._cost.prefill_seconds(tokens), tokens * self._token_seconds)

    def _sort_by_deadline(self, sequences: Iterable[SequenceSnapshot]) -> list[tuple[float, float, int]]:
        """Return (deadline, predicted seconds for the remaining tokens, id) of each sequence without a first token,
        sorted. These are the planned deadlines of [Note: bound on waiting]."""
        margin = (1 - _WAIT_SHARE) * self._limits.max_wait_seconds
        return sorted(
            (
                self._deadline(sequence) - margin,
                self._seconds_beside_decodes(sequence.remaining, sequence.num_computed),
                sequence.sequence_id,
            )
            for sequence in sequences
            if not sequence.has_answered
        )

    def find_lateness(self) -> float:
        """Return the largest number of seconds by which a sequence misses its planned deadline; see `lateness`."""
        end, latest = self._now, float("-inf")
        for deadline, rest, _ in self._by_deadline:
            end += rest
            latest = max(latest, end - deadline)
        return latest

    def _find_pressing(self) -> set[int]:
        """Return the ids of sequences that must run now."""
        # `start`: latest time at which a sequence must start so that it and all with later deadlines meet these
        pressing, start = set(), float("inf")
        for deadline, rest, number in reversed(self._by_deadline):
            start = min(start, deadline) - rest
            if start < self._now:
                pressing.add(number)
        return pressing

    def _seconds_beside_decodes(self, tokens: int, computed: int) -> float:
        """Return the predicted seconds for `tokens` tokens of a pressing prompt after its first `computed` tokens."""
        return self._cost.prompt_work(tokens, computed) * self._token_seconds / _PRESSING_PART

    def _deadline(self, sequence: SequenceSnapshot) -> float:
        own = self._seconds_beside_decodes(sequence.num_known, 0)
        return sequence.arrival + self._limits.max_wait_seconds + own

    def _is_pressing(self, sequence: SequenceSnapshot) -> bool:
        return sequence.sequence_id in self._pressing

    def _urgency(self, sequence: SequenceSnapshot) -> tuple[int, int, int, float, float]:
        """Return a sort key: pressing requests first, by deadline; the others by priority. At equal priority, requests
        are sorted by deadline, and those that can no longer meet their service level come last, by arrival."""
        if self._is_pressing(sequence):
            return 0, 0, 0, self._deadline(sequence), sequence.arrival
        level = sequence.level
        wait = self._limits.max_wait_seconds if level is None else level.first_token_seconds
        deadline = sequence.arrival + wait
        late = (
            level is not None
            and not sequence.has_answered
            and (self._now + self._prompt_seconds(sequence.remaining) > deadline)
        )
        return 1, sequence.priority, int(late), sequence.arrival if late else deadline, sequence.arrival


def _max_min_shares(wanted: Sequence[int], total: int) -> list[int]:
    """Return shares of `total`: the smallest are as large as possible, none is larger than its entry in `wanted`."""
    shares = [0] * len(wanted)
    for number, place in enumerate(sorted(range(len(wanted)), key=lambda place: wanted[place])):
        shares[place] = min(wanted[place], total // (len(wanted) - number))
        total -= shares[place]
    return shares


def seniority(sequence: SequenceSnapshot) -> tuple[int, float, int]:
    """Return the sort key of running sequences. The last ones are preempted first."""
    return sequence.priority, sequence.arrival, sequence.sequence_id
