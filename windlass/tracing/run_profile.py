"""Profile of all ranks: where the time goes, which rank the others wait for, and the memory at its peak."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from windlass.base.text import plural
from windlass.tracing.range_log import LOCAL_WAITS
from windlass.tracing.rank_profile import RankProfile, StepTimes

STRAGGLER_SHARE, STRAGGLER_MS = 0.1, 1.0
"""A rank straggles if its own time exceeds the median of the other ranks by this share and by this many ms."""


@dataclass(frozen=True)
class Straggler:
    """Rank that the others wait for.

    Attributes:
        own, others: time per step that the rank does not spend waiting for other ranks, and the median of this time on
            the other ranks, in ms.
        cause: the part of `own` (compute, idle time or a local wait) that exceeds the other ranks' median most.
        excess: ms by which this part exceeds the median.
    """

    rank: int
    own: float
    others: float
    cause: str
    excess: float

    def __str__(self) -> str:
        return (
            f"straggler: rank {self.rank} needs {self.own:.1f} ms a step for its own work, the other ranks "
            f"{self.others:.1f} ms (median); most of the difference is {self.cause}: {self.excess:.1f} ms more"
        )


@dataclass(frozen=True)
class RunProfile:
    """Profiles of all ranks, in the order of their ranks."""

    ranks: list[RankProfile]

    @property
    def steps(self) -> int:
        """Number of profiled steps."""
        return len(self.ranks[0].steps)

    def mean_times(self) -> list[StepTimes]:
        """Return the mean step of each rank."""
        return [mean_step(one.steps) for one in self.ranks]

    def straggler(self) -> Straggler | None:
        """Return the rank that the others wait for, over all steps; None if no rank straggles."""
        return find_straggler({one.rank: mean for one, mean in zip(self.ranks, self.mean_times(), strict=True)})

    def straggling_steps(self) -> dict[int, int]:
        """Return, for each rank that straggled in any step, the number of those steps."""
        found: dict[int, int] = {}
        for step in range(self.steps):
            slow = find_straggler({one.rank: one.steps[step] for one in self.ranks})
            if slow is not None:
                found[slow.rank] = found.get(slow.rank, 0) + 1
        return found

    def summary(self) -> str:
        """Return the summary as text."""
        means = self.mean_times()
        lines = [
            f"profile of {plural(self.steps, 'step')} on {plural(len(self.ranks), 'rank')} "
            f"(transport {self.ranks[0].transport}), ms a step:",
            f"{'rank':>6}{'step':>10}{'compute':>10}{'idle':>10}{'waiting':>10}  for",
        ]
        for one, mean in zip(self.ranks, means, strict=True):
            waits = ", ".join(f"{wire} {ms:.1f}" for wire, ms in _largest(mean.waits))
            lines.append(
                f"{one.rank:>6}{mean.total:>10.1f}{mean.compute:>10.1f}{mean.idle:>10.1f}{mean.waiting:>10.1f}  {waits}"
            )
        phases = ", ".join(f"{name} {ms:.1f}" for name, ms in means[0].phases.items())
        if phases:
            lines.append(f"phases of rank {self.ranks[0].rank}, waits included: {phases}")
        lines += [self._straggler_line(), *self._memory_lines()]
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        """Return the summary as plain data."""
        slow = self.straggler()
        return {
            "steps": self.steps,
            "transport": self.ranks[0].transport,
            "ranks": [
                {
                    "rank": one.rank,
                    "host": one.host,
                    "device": one.device,
                    "mean_ms": _times_as_json(mean),
                    "steps_ms": [_times_as_json(step) for step in one.steps],
                    "peak_memory": peak.amounts if (peak := peak_sample(one)) is not None else {},
                }
                for one, mean in zip(self.ranks, self.mean_times(), strict=True)
            ],
            "straggler": None
            if slow is None
            else {"rank": slow.rank, "own_ms": slow.own, "others_ms": slow.others, "cause": slow.cause},
            "straggling_steps": {str(rank): count for rank, count in self.straggling_steps().items()},
        }

    def _straggler_line(self) -> str:
        slow = self.straggler()
        if slow is not None:
            return str(slow)
        single = self.straggling_steps()
        if not single:
            return "no rank straggles"
        counted = ", ".join(f"rank {rank} in {plural(count, 'step')}" for rank, count in sorted(single.items()))
        return f"no rank straggles over all steps, but in single ones: {counted} of {self.steps}"

    def _memory_lines(self) -> list[str]:
        peaks = {one.rank: peak for one in self.ranks if (peak := peak_sample(one)) is not None}
        if not peaks:
            return []
        rank = max(peaks, key=lambda number: peaks[number].total)
        kinds = sorted(peaks[rank].amounts.items(), key=lambda item: -item[1])
        parts = ", ".join(f"{kind} {nbytes / 2**20:.1f}" for kind, nbytes in kinds if nbytes)
        lines = [f"memory at the peak, rank {rank}, {peaks[rank].total / 2**20:.1f} MiB: {parts}"]
        if not self.ranks[0].has_activations:
            lines.append("activations are unknown, because operators were not recorded")
        return lines


def mean_step(steps: Sequence[StepTimes]) -> StepTimes:
    """Return the mean of steps."""
    count = len(steps)
    return StepTimes(
        sum(one.total for one in steps) / count,
        sum(one.compute for one in steps) / count,
        sum(one.idle for one in steps) / count,
        _mean_by_name([one.waits for one in steps]),
        _mean_by_name([one.phases for one in steps]),
    )


def find_straggler(times: Mapping[int, StepTimes]) -> Straggler | None:
    """Return the rank whose own time exceeds that of the others; None if no rank straggles.

    Steps of ranks that wait for each other take equally long, so the slow rank is the one that waits least.
    """
    if len(times) < 2:
        return None
    rank = max(times, key=lambda one: times[one].own)
    others = [one for number, one in times.items() if number != rank]
    typical, own = median(one.own for one in others), times[rank].own
    if own < (1 + STRAGGLER_SHARE) * typical or own < typical + STRAGGLER_MS:
        return None
    parts = {name: amount - median(_own_parts(one).get(name, 0.0) for one in others)
             for name, amount in _own_parts(times[rank]).items()}  # fmt: skip
    cause = max(parts, key=lambda name: parts[name])
    return Straggler(rank, own, typical, cause, parts[cause])


def peak_sample(one: RankProfile) -> Any:
    """Return the sample of the largest memory of a rank; None without samples."""
    return max(one.memory, key=lambda sample: sample.total, default=None)


def _own_parts(times: StepTimes) -> dict[str, float]:
    local = {wire: ms for wire, ms in times.waits.items() if wire in LOCAL_WAITS}
    return {"compute": times.compute, "idle time": times.idle, **local}


def _mean_by_name(maps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for one in maps for name in one)
    return {name: sum(one.get(name, 0.0) for one in maps) / len(maps) for name in names}


def _largest(waits: Mapping[str, float], most: int = 4) -> list[tuple[str, float]]:
    return sorted(((wire, ms) for wire, ms in waits.items() if ms >= 0.05), key=lambda item: -item[1])[:most]


def _times_as_json(times: StepTimes) -> dict[str, Any]:
    return {
        "total": times.total,
        "compute": times.compute,
        "idle": times.idle,
        "waits": times.waits,
        "phases": times.phases,
    }
