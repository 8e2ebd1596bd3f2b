"""Measurement of engines on the same work: memory in fresh processes, comparison of losses, then interleaved times."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rig.floor import Roofs, floor
from rig.job import Job, Size
from rig.plan import BASE, groups, turn
from rig.targets import AGAINST
from rig.worker import start_ranks
from windlass.cli.benches.bench_engines import synchronizes_gradients
from windlass.cli.benches.bench_results import available_bytes
from windlass.cli.benches.rank_pool import RankPool, RankPoolError

EQUAL_LOSS = 1e-5
_WATCHED_STEPS = 2
_SPARE = 0.8  # fraction of the free memory that a group may take; the rest is for growth
_UNKNOWN_MEMORY = 8 << 30


@dataclass
class Result:
    """Measurements of one engine. Times are in seconds; the time of a step is that of its slowest rank."""

    engine: str
    parameters: int = 0
    failure: str | None = None
    memory_kind: str = ""
    memory: list[int] = field(default_factory=list)  # the peak of each rank, above the baseline
    footprint: int = 0  # bytes of all ranks, baseline included
    first_losses: list[float] = field(default_factory=list)  # losses in fresh processes, mean over ranks
    losses: list[float] = field(default_factory=list)  # losses in the timed rounds, with the untimed first steps
    loss_apart: float | None = None  # largest difference from the reference, over all steps
    rounds: list[list[float]] = field(default_factory=list)  # timed steps
    base_rounds: list[list[float]] = field(default_factory=list)  # timed steps of `BASE` in the same rounds
    rival_rounds: list[list[float]] = field(default_factory=list)  # timed steps of its rival in `AGAINST`, likewise
    compute: list[float] = field(default_factory=list)  # forward and backward of timed steps
    between: list[float] = field(default_factory=list)  # seconds from the end of a step to the start of the next
    traffic: dict[str, Any] | None = None
    floor: float | None = None  # lower bound of a step, in seconds
    floor_ratio: float | None = None  # floor over the step of `BASE` in the same group

    @property
    def median(self) -> float:
        """Median seconds of a step."""
        return statistics.median(self.steps)

    @property
    def steps(self) -> list[float]:
        """All timed steps."""
        return [seconds for item in self.rounds for seconds in item]

    @property
    def base_median(self) -> float:
        """Median seconds of a step of `BASE` in the same rounds."""
        return statistics.median(seconds for item in self.base_rounds for seconds in item)

    @property
    def ratios(self) -> list[float]:
        """For each round, the median step time divided by the median step time of `BASE` in that round."""
        return _ratios(self.rounds, self.base_rounds)

    @property
    def ratio(self) -> float:
        """Median of `ratios`."""
        return statistics.median(self.ratios)

    @property
    def rival_ratio(self) -> float | None:
        """Median over rounds of the median step time divided by the rival's in that round; None without a rival."""
        return statistics.median(_ratios(self.rounds, self.rival_rounds)) if self.rival_rounds else None

    @property
    def share_of_floor(self) -> float | None:
        """Lower bound divided by the step time, both relative to the step of `BASE`, which each group measures
        again."""
        return None if self.floor_ratio is None else self.floor_ratio / self.ratio

    @property
    def bytes_per_parameter(self) -> float:
        """Largest peak memory of a rank, in bytes for each parameter of the model."""
        return max(self.memory) / self.parameters


def _ratios(rounds: list[list[float]], others: list[list[float]]) -> list[float]:
    return [statistics.median(a) / statistics.median(b) for a, b in zip(rounds, others, strict=True)]


@dataclass
class Measured:
    """All results of one size and number of ranks."""

    size: Size
    ranks: int
    results: dict[str, Result]
    reference: str | None  # the engine whose losses the others must have
    groups: list[list[str]] = field(default_factory=list)
    roofs: list[Roofs] = field(default_factory=list)  # peak rates, one entry for each group

    @property
    def unequal(self) -> list[str]:
        """Engines whose losses differ from the reference's."""
        return [r.engine for r in self.results.values() if r.loss_apart is not None and r.loss_apart > EQUAL_LOSS]


@dataclass(frozen=True)
class Effort:
    """Amount of measurement: first steps whose losses are compared, rounds, timed steps per round."""

    check_steps: int
    rounds: int
    steps: int


Say = Callable[[str], None]


def measure(engines: Sequence[str], size: Size, ranks: int, effort: Effort, say: Say) -> Measured:
    """Measure `engines` (and `none`) on the same work. An engine that fails is reported and left out.

    Args:
        say: called with a line of progress.
    """
    names = [BASE, *(engine for engine in engines if engine != BASE)]
    results = {name: Result(name) for name in names}
    for name in names:
        say(f"memory and first losses: {name}, {ranks} fresh ranks")
        _in_fresh_ranks(results[name], size, ranks, effort.check_steps)
        if results[name].failure:
            say(f"  {results[name].failure}")
    well = [name for name in names if not results[name].failure]
    if BASE not in well:
        raise RankPoolError(f"`{BASE}` failed, and it is the baseline of all others: {results[BASE].failure}")
    together = [name for name in well if synchronizes_gradients(name)]
    reference = "ddp" if "ddp" in together else next(iter(together), None)
    measured = Measured(size, ranks, results, reference)
    _compare(measured)
    for name in measured.unequal:
        apart = results[name].loss_apart
        results[name].failure = f"its losses are {apart:.1e} from those of {reference}, so its speed means nothing"
        say(f"  {name}: {results[name].failure}")
    if effort.rounds:
        _time(measured, [name for name in well if not results[name].failure], effort, say)
        _compare(measured)
    return measured


def _in_fresh_ranks(result: Result, size: Size, ranks: int, check_steps: int) -> None:
    try:
        with start_ranks(Job(result.engine, ranks, size)) as pool:
            result.parameters = pool.ask("build", watch=True)[0]["parameters"]
            first = pool.ask("steps", count=_WATCHED_STEPS)
            memory = pool.ask("memory")
            rest = pool.ask("steps", count=max(0, check_steps - _WATCHED_STEPS))
    except RankPoolError as error:
        result.failure = str(error)
        return
    result.memory_kind = memory[0]["kind"]
    result.memory = [item["peak"] for item in memory]
    result.footprint = sum(item["peak"] + item["base"] for item in memory)
    result.first_losses = _means(first, "losses") + _means(rest, "losses")


def _time(measured: Measured, names: list[str], effort: Effort, say: Say) -> None:
    results, size, ranks = measured.results, measured.size, measured.ranks
    needs = {name: results[name].footprint for name in names}
    rivals = {engine: rival for engine, (rival, _) in AGAINST.items()}
    measured.groups = groups(names, needs, int(_SPARE * (available_bytes() or _UNKNOWN_MEMORY)), rivals)
    for group in measured.groups:
        say(f"time: {', '.join(group)} in turns, {effort.rounds} rounds of {effort.steps} steps")
        pools: dict[str, RankPool] = {}
        try:
            for name in group:
                pools[name] = start_ranks(Job(name, ranks, size))
                pools[name].ask("build", watch=False)
                pools[name].ask("steps", count=1)
            before, rounds_before = len(results[BASE].compute), len(results[BASE].rounds)
            roofs = _roofs(pools[BASE])
            _rounds(pools, results, effort)
            # only the rounds of this group, because the speed of the machine may change
            compute = statistics.median(results[BASE].compute[before:])
            base = statistics.median(s for item in results[BASE].rounds[rounds_before:] for s in item)
            for name, pool in pools.items():
                results[name].traffic = pool.ask("traffic")[0]
                least = floor(name, results[name].parameters, ranks, compute, roofs)
                results[name].floor, results[name].floor_ratio = least, least and least / base
            measured.roofs.append(roofs)
        finally:
            for pool in pools.values():
                pool.close()


def _roofs(pool: RankPool) -> Roofs:
    result = pool.ask("roofs")
    return Roofs(*(min(item[key] for item in result) for key in ("memory", "adam")))


def _rounds(pools: dict[str, RankPool], results: dict[str, Result], effort: Effort) -> None:
    losses: dict[str, list[float]] = {name: [] for name in pools}
    for number in range(effort.rounds):
        of_round = {}
        for name in turn(list(pools), number):
            result = pools[name].ask("steps", count=effort.steps + 1)  # one more step: the first is a warm-up
            of_round[name] = _slowest(result, "seconds")[1:]
            results[name].compute += _slowest(result, "compute")[1:]
            results[name].between += _slowest(result, "between")[1:]
            losses[name] += _means(result, "losses")
        for name, seconds in of_round.items():
            results[name].rounds.append(seconds)
            results[name].base_rounds.append(of_round[BASE])
            rival, _ = AGAINST.get(name, ("", 0.0))
            if rival in of_round:
                results[name].rival_rounds.append(of_round[rival])
    for name, item in losses.items():
        if not results[name].losses:  # an engine in two groups has the same losses twice
            results[name].losses = item


def _compare(measured: Measured) -> None:
    if measured.reference is None:
        return
    reference = measured.results[measured.reference]
    for name, result in measured.results.items():
        if synchronizes_gradients(name) and result.first_losses:
            pairs = [(result.first_losses, reference.first_losses)]
            if result.losses and reference.losses:  # empty for an engine whose first losses differ: it is not timed
                pairs.append((result.losses, reference.losses))
            result.loss_apart = max(_largest_difference(ours, theirs) for ours, theirs in pairs)


def _largest_difference(losses: Sequence[float], reference: Sequence[float]) -> float:
    """Return the largest absolute difference of two losses; infinite if a loss is NaN or a step is missing."""
    if len(losses) != len(reference):
        return math.inf
    apart = [abs(a - b) for a, b in zip(losses, reference, strict=True)]
    return math.inf if any(map(math.isnan, apart)) else max(apart, default=0.0)


def _slowest(told: list[dict[str, list[float]]], key: str) -> list[float]:
    return [max(step) for step in zip(*(rank[key] for rank in told), strict=True)]


def _means(told: list[dict[str, list[float]]], key: str) -> list[float]:
    return [statistics.mean(step) for step in zip(*(rank[key] for rank in told), strict=True)]
