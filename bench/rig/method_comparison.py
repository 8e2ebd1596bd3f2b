"""Comparison of the training methods of one axis: losses first, then times in interleaved rounds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.table import Table

from rig.compared_methods import FIELDS, RANKS, SIZES, Load, floor
from rig.floor import Roofs
from rig.job import Job, Size
from rig.method_rank import MethodRank
from rig.plan import BASE, turn
from rig.worker import start_ranks
from windlass.cli.benches.rank_pool import RankPool, RankPoolError

Say = Callable[[str], None]
REFERENCE = "dp"
EQUAL_LOSS = 1e-5
NOT_SLOWER = 1.0
_FIRST_STEPS = 3
_COLUMNS = ("ms", "min", "busy ms", "tokens/s", "MiB")


@dataclass
class Outcome:
    """Measurements of one method.

    Attributes:
        rounds: seconds of the timed steps of each round, on the slowest rank.
        busy: CPU seconds of a rank in each timed step, as the mean over ranks.
        losses: loss of the whole batch, for each step.
        failure: reason for a missing time.
        apart: largest relative difference of the losses from the reference's; None if they are not compared.
        floor: lower bound of a step in seconds.
        memory: bytes of the rank with the largest memory, between steps; None if it cannot be measured.
    """

    name: str
    rounds: list[list[float]] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    failure: str = ""
    apart: float | None = None
    floor: float | None = None
    memory: int | None = None

    @property
    def medians(self) -> list[float]:
        """Median step time of each round."""
        return [statistics.median(item) for item in self.rounds]

    @property
    def median(self) -> float:
        """Median time of all timed steps."""
        return statistics.median(seconds for item in self.rounds for seconds in item)


@dataclass
class Comparison:
    """Measurements of all methods of one axis.

    Attributes:
        compute: seconds of forward and backward of half the samples, by one rank alone.
        roofs: memory rates of a rank while both ranks work.
    """

    axis: str
    load: Load
    outcomes: dict[str, Outcome]
    compute: list[float] = field(default_factory=list)
    roofs: Roofs | None = None

    @property
    def unequal(self) -> list[str]:
        """Methods whose losses differ from the reference's."""
        return [item.name for item in self.outcomes.values() if item.apart is not None and not item.apart <= EQUAL_LOSS]

    def ratios(self, name: str, other: str) -> list[float]:
        """Return the ratios of the medians of `name` to those of `other`, by round; empty if one has no time."""
        ours, theirs = self.outcomes.get(name), self.outcomes.get(other)
        if ours is None or theirs is None:
            return []
        return [a / b for a, b in zip(ours.medians, theirs.medians, strict=False)]

    def ratio(self, name: str, other: str | None) -> float | None:
        """Return the median of `ratios`."""
        result = self.ratios(name, other) if other is not None else []
        return statistics.median(result) if result else None

    def rival(self, name: str) -> str | None:
        """Return the fastest rival of `name` that ran."""
        ran = [item for item in FIELDS[self.axis][name].rivals if item in self.outcomes and self.outcomes[item].rounds]
        return min(ran, key=lambda one: self.outcomes[one].median) if ran else None

    @property
    def slower(self) -> list[str]:
        """Methods that take longer than torch's own."""
        results = []
        for name in self.outcomes:
            ratio = self.ratio(name, self.rival(name))
            if ratio is not None and ratio > NOT_SLOWER:
                results.append(f"{name}: {ratio:.3f} x {self.rival(name)}")
        return results


def race(axis: str, load: Load, rounds: int, steps: int, say: Say) -> Comparison:
    """Run the methods of an axis in turn. A method that fails, or whose first losses differ from the reference's, is
    not timed."""
    result = Comparison(axis, load, {name: Outcome(name) for name in FIELDS[axis]})
    pools: dict[str, RankPool] = {}
    try:
        _start(pools, result, say)
        compare(result)
        for name in result.unequal:
            result.outcomes[name].failure = f"its losses differ by {result.outcomes[name].apart:.1e}"
            pools.pop(name).close()
        say(f"{axis}: {', '.join(pools)} in turns, {rounds} rounds of {steps} steps")
        if load.link:
            for pool in pools.values():
                pool.ask("pace", rate=load.link)
        roofs = pools[BASE].ask("roofs")
        result.roofs = Roofs(*(min(entry[key] for entry in roofs) for key in ("memory", "adam")))
        for number in range(rounds):
            for name in turn(list(pools), number):
                _timed(pools[name], result, steps)
        for name, pool in pools.items():
            taken = pool.ask("memory")
            result.outcomes[name].memory = None if None in taken else max(taken)
        compare(result)
    finally:
        for pool in pools.values():
            pool.close()
    for name, item in result.outcomes.items():
        way = FIELDS[axis][name]
        if way.sizes is None:
            item.floor = floor(way, SIZES[axis], load, statistics.median(result.compute), result.roofs)
    return result


def _start(pools: dict[str, RankPool], found: Comparison, say: Say) -> None:
    for name, item in found.outcomes.items():
        say(f"{found.axis}: first steps of {name}")
        job = Job(f"{found.axis}/{name}", RANKS, Size(batch=found.load.samples, length=found.load.length))
        pool = start_ranks(job, MethodRank)
        try:
            pool.ask("build")
            item.losses += mean_losses(pool.ask("steps", count=_FIRST_STEPS))
            pools[name] = pool
        except RankPoolError as error:
            if name in (BASE, REFERENCE):
                raise
            item.failure = str(error)
        finally:
            if name not in pools:
                pool.close()


def _timed(pool: RankPool, found: Comparison, steps: int) -> None:
    """Run one step with cold caches, then the timed steps."""
    name = pool.label.split("/")[1]
    if name == BASE:
        found.compute += [max(step) for step in zip(*pool.ask("compute", count=3), strict=True)][1:]
    results, item = pool.ask("steps", count=steps + 1), found.outcomes[name]
    item.rounds.append(slowest(results)[1:])
    item.busy += [statistics.mean(step) for step in zip(*(rank["busy"] for rank in results), strict=True)][1:]
    item.losses += mean_losses(results)


def compare(found: Comparison) -> None:
    """Record the largest difference of each method's losses from the reference's."""
    reference = found.outcomes[REFERENCE].losses
    for name, item in found.outcomes.items():
        way = FIELDS[found.axis][name]
        if way.synchronises and way.sizes is None and not item.failure:
            item.apart = max_loss_difference(item.losses, reference)


def max_loss_difference(losses: Sequence[float], reference: Sequence[float]) -> float:
    """Return the largest difference, relative to the reference; infinite if a loss is NaN or a step is missing."""
    if len(losses) != len(reference):
        return math.inf
    apart = [abs(a - b) / abs(b) for a, b in zip(losses, reference, strict=True)]
    return max((math.inf if math.isnan(item) else item for item in apart), default=0.0)


def slowest(told: Iterable[dict[str, Any]]) -> list[float]:
    """Return the seconds of each step's slowest rank."""
    return [max(step) for step in zip(*(rank["seconds"] for rank in told), strict=True)]


def mean_losses(told: Iterable[dict[str, Any]]) -> list[float]:
    """Return the mean loss of each step over the ranks that have one."""
    steps = zip(*(rank["losses"] for rank in told), strict=True)
    return [statistics.mean(loss for loss in step if loss is not None) for step in steps]


def table(found: Comparison) -> Table:
    """Return a table of times, compared with the compute alone, data parallelism, torch and the physical limit."""
    load = found.load
    title = f"{found.axis}: a step of {load.samples} x {load.length} tokens on {RANKS} ranks x 1 thread, fp32, AdamW"
    title += f", {load.link / 2**20:g} MiB/s between them" if load.link else ""
    made = Table(title=title, title_justify="left")
    made.add_column("", no_wrap=True)
    for column in (*_COLUMNS, "x none", "x dp", "x torch's", "spread", "torch's", "limit ms", "of limit"):
        made.add_column(column, justify="right", no_wrap=True)
    for name, item in found.outcomes.items():
        if not item.rounds:
            made.add_row(name, "absent")
            continue
        rival, ratios = found.rival(name), found.ratios(name, found.rival(name) or "")
        made.add_row(
            name,
            f"{item.median * 1e3:.0f}",
            f"{min(seconds for each in item.rounds for seconds in each) * 1e3:.0f}",
            f"{statistics.median(item.busy) * 1e3:.0f}",
            f"{load.samples * load.length / item.median:.0f}",
            f"{item.memory / 2**20:.0f}" if item.memory else "",
            *(_said(found.ratio(name, other)) for other in (BASE, REFERENCE, rival)),
            f"{min(ratios):.2f}-{max(ratios):.2f}" if ratios else "",
            rival or "",
            f"{item.floor * 1e3:.0f}" if item.floor else "",
            f"{item.floor / item.median:.0%}" if item.floor else "",
        )
    return made


def links(races: Sequence[Comparison]) -> Table:
    """Return a table of data parallelism and a pipeline on slower and slower links: measured times and lower bounds."""
    made = Table(title="data parallelism over a pipeline, time of a step", title_justify="left")
    for column in ("MiB/s", "windlass", "torch's", "by the limits"):
        made.add_column(column, justify="right", no_wrap=True)
    for item in races:
        ours, theirs = (item.ratio(*pair) for pair in (("dp", "pp"), ("torch ddp", "torch pp")))
        least = [item.outcomes[name].floor for name in ("dp", "pp")]
        bound = least[0] / least[1] if least[0] and least[1] else None
        made.add_row(f"{item.load.link / 2**20:g}", _said(ours), _said(theirs), _said(bound))
    return made


def _said(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.3f}"


def notes(found: Comparison) -> list[str]:
    """Return notes for readers of the table."""
    apart = {item.name: item.apart for item in found.outcomes.values() if item.apart is not None}
    worst = max(apart, key=lambda name: apart[name], default=REFERENCE)
    lines = (
        [f"losses: the largest difference from {REFERENCE} is {apart[worst]:.1e}, of {worst}"] if len(apart) > 1 else []
    )
    lines += [f"absent: {item.name}: {item.failure}" for item in found.outcomes.values() if item.failure]
    return lines + [f"slower than torch's own: {line}" for line in found.slower]


def plain(found: Comparison) -> dict[str, Any]:
    """Return plain data for the JSON."""
    results = {
        name: {
            **asdict(item),
            "median_ms": item.median * 1e3 if item.rounds else None,
            "tokens_per_second": found.load.samples * found.load.length / item.median if item.rounds else None,
            "x_none": found.ratio(name, BASE),
            "x_dp": found.ratio(name, REFERENCE),
            "rival": found.rival(name),
            "x_rival": found.ratio(name, found.rival(name)),
        }
        for name, item in found.outcomes.items()
    }
    return {
        "load": asdict(found.load),
        "model": asdict(SIZES[found.axis]),
        "ranks": RANKS,
        "compute_seconds": found.compute,
        "roofs": asdict(found.roofs) if found.roofs is not None else None,
        "unequal": found.unequal,
        "slower_than_torch": found.slower,
        "results": results,
    }
