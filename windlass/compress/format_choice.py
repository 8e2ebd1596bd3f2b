"""Choice of a weight format for each layer under limits of bytes, loss and time: a knapsack, solved exactly.

[Note: format knapsack] The losses of layers are taken to add up, as their bytes and times do. For one limit the set of
all sums that no other sum beats in both resources is built group by group, so the result is exact unless a set has more
than `_MOST_SUMS` and is thinned. With a limit of bytes and one of time, a bisection finds the smallest multiplier of
the time whose best choice under the limit of bytes fits both limits; exchanges between two groups then improve the
result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_MOST_SUMS = 200_000
_BISECTIONS = 40
_EXCHANGES = 500


@dataclass(frozen=True)
class FormatOption:
    """One format of a group of layers.

    Attributes:
        name: name of the format; None: unquantized.
        nbytes: bytes of the group's weights.
        loss: loss that the format adds to the model's.
        seconds: seconds of the group's products for one token.
    """

    name: str | None
    nbytes: int
    loss: float
    seconds: float = 0.0


@dataclass(frozen=True)
class FormatLimits:
    """Limits of the sums; None: no limit."""

    nbytes: int | None = None
    loss: float | None = None
    seconds: float | None = None


class UnmetLimitError(ValueError):
    """No choice is within a limit.

    Attributes:
        resource: nbytes, loss or seconds.
        nearest: least possible sum of the resource.
    """

    def __init__(self, resource: str, nearest: float) -> None:
        super().__init__(f"the least {resource} is {nearest}")
        self.resource, self.nearest = resource, nearest


def choose_formats(groups: Sequence[Sequence[FormatOption]], limits: FormatLimits) -> list[int]:
    """Return the index of the chosen option of each group; see [Note: format knapsack].

    With a limit of bytes or time, the choice of the least loss within them; else the choice of the fewest bytes within
    the limit of the loss.

    Raises:
        UnmetLimitError: no choice is within the limits.
    """
    if limits.nbytes is None and limits.seconds is None:
        chosen = _Frontier(groups, {"nbytes": 1.0}, {"loss": 1.0}).first_below(limits.loss)
        if chosen is None:
            raise UnmetLimitError("loss", _least(groups, "loss"))
        return chosen
    for resource in ("nbytes", "seconds"):
        limit = getattr(limits, resource)
        if limit is not None and _least(groups, resource) > limit:
            raise UnmetLimitError(resource, _least(groups, resource))
    chosen = _within(groups, limits)
    if limits.loss is not None and total(groups, chosen, "loss") > limits.loss:
        raise UnmetLimitError("loss", total(groups, chosen, "loss"))
    return chosen


def total(groups: Sequence[Sequence[FormatOption]], chosen: Sequence[int], resource: str) -> float:
    """Return the sum of a resource over a choice."""
    return float(sum(getattr(options[place], resource) for options, place in zip(groups, chosen, strict=True)))


def _least(groups: Sequence[Sequence[FormatOption]], resource: str) -> float:
    return float(sum(min(getattr(option, resource) for option in options) for options in groups))


def _within(groups: Sequence[Sequence[FormatOption]], limits: FormatLimits) -> list[int]:
    if limits.nbytes is None or limits.seconds is None:
        resource = "nbytes" if limits.seconds is None else "seconds"
        chosen = _Frontier(groups, {resource: 1.0}, {"loss": 1.0}).last_within(getattr(limits, resource))
        assert chosen is not None
        return chosen

    def under(multiplier: float) -> list[int]:
        cost = {"loss": 1.0, "seconds": multiplier} if multiplier < float("inf") else {"seconds": 1.0}
        found = _Frontier(groups, {"nbytes": 1.0}, cost).last_within(limits.nbytes)
        assert found is not None
        return found

    chosen = under(0.0)
    if total(groups, chosen, "seconds") <= limits.seconds:
        return chosen
    chosen = under(float("inf"))
    if total(groups, chosen, "seconds") > limits.seconds:
        raise UnmetLimitError("seconds", total(groups, chosen, "seconds"))
    spread = sum(max(one.loss for one in options) for options in groups) + 1e-12
    low, high = 0.0, 1e6 * spread / limits.seconds
    for _ in range(_BISECTIONS):
        middle = (low * high) ** 0.5 if low else high / 1024
        trial = under(middle)
        if total(groups, trial, "seconds") <= limits.seconds:
            high = middle
            if total(groups, trial, "loss") <= total(groups, chosen, "loss"):
                chosen = trial
        else:
            low = middle
        if low and high / low < 1.001:
            break
    return _exchange(groups, chosen, limits)


def _exchange(groups: Sequence[Sequence[FormatOption]], chosen: list[int], limits: FormatLimits) -> list[int]:
    """Change one or two groups at a time while the loss falls within the limits of bytes and time."""
    assert limits.nbytes is not None and limits.seconds is not None
    places = [(group, place) for group, options in enumerate(groups) for place in range(len(options))]
    owner = np.array([group for group, _ in places])
    for _ in range(_EXCHANGES):
        changes = {
            resource: np.array(
                [getattr(groups[g][p], resource) - getattr(groups[g][chosen[g]], resource) for g, p in places]
            )
            for resource in ("nbytes", "seconds", "loss")
        }
        sums = {resource: one[:, None] + one[None] for resource, one in changes.items()}
        allowed = owner[:, None] != owner[None]  # a place that is chosen already changes nothing
        allowed &= sums["nbytes"] <= limits.nbytes - total(groups, chosen, "nbytes")
        allowed &= sums["seconds"] <= limits.seconds - total(groups, chosen, "seconds")
        losses = np.where(allowed, sums["loss"], 0.0)
        best = int(losses.argmin())
        if losses.flat[best] >= -1e-15:
            break
        for one in divmod(best, len(places)):
            group, place = places[one]
            chosen[group] = place
    return chosen


class _Frontier:
    """Pareto frontier of the sums of a resource and a cost, with the choices on it.

    Args:
        resource, cost: multiplier of each attribute of an option.
    """

    def __init__(
        self, groups: Sequence[Sequence[FormatOption]], resource: Mapping[str, float], cost: Mapping[str, float]
    ) -> None:
        def values(options: Sequence[FormatOption], weights: Mapping[str, float]) -> NDArray[np.float64]:
            return np.array([sum(weight * getattr(one, name) for name, weight in weights.items()) for one in options])

        self._sums: NDArray[np.float64] = np.zeros(1)  # bytes below 2**53 are exact
        self.costs: NDArray[np.float64] = np.zeros(1)
        self._links: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
        for options in groups:
            self._add(values(options, resource), values(options, cost))

    def _add(self, resources: NDArray[np.float64], costs: NDArray[np.float64]) -> None:
        count = len(self._sums)
        sums = (self._sums[None] + resources[:, None]).ravel()
        totals = (self.costs[None] + costs[:, None]).ravel()
        order = np.lexsort((totals, sums))
        best = np.minimum.accumulate(totals[order])
        kept = order[np.concatenate([[True], totals[order][1:] < best[:-1]])]
        if len(kept) > _MOST_SUMS:
            kept = kept[np.unique(np.linspace(0, len(kept) - 1, _MOST_SUMS).astype(np.int64))]
        self._links.append((kept // count, kept % count))
        self._sums, self.costs = sums[kept], totals[kept]

    def last_within(self, limit: float | None) -> list[int] | None:
        """Return the choice of the least cost whose resource is within a limit."""
        assert limit is not None
        place = int(np.searchsorted(self._sums, limit * (1 + 1e-12), side="right")) - 1
        return self._choice(max(place, 0))

    def first_below(self, limit: float | None) -> list[int] | None:
        """Return the choice of the least resource whose cost is within a limit."""
        assert limit is not None
        within = np.flatnonzero(self.costs <= limit)
        return self._choice(int(within[0])) if len(within) else None

    def _choice(self, place: int) -> list[int]:
        found = []
        for options, before in reversed(self._links):
            found.append(int(options[place]))
            place = int(before[place])
        return found[::-1]
