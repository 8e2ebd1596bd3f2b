"""Choice of a weight format for each group of layers under limits of bytes, loss and time: a knapsack.

[Note: format knapsack] The losses of layers are assumed to add up, as bytes and times do. Multipliers of the
limited resources give a lower bound of the objective (Lagrange). An option's reduced cost is its objective plus
multiplied resources, minus the least sum in its group. A choice within the limits exceeds the bound by its reduced
costs plus the multiplied unused resources. So all choices within a given distance of the bound are built group by
group: a partial choice is dropped if its reduced costs exceed the distance, if no completion is within the limits, or
if another one is at least as good in the objective and all resources. The distance grows until a choice is found, and
the best one is the optimum. After each group at most `_MOST_SUMS` partial choices remain, those with the least reduced
costs. If others were dropped, the result may exceed the optimum, by at most its distance from the bound
(`FormatChoice.gap`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_MOST_SUMS = 50_000
_FINEST = 1 << 44  # unit of resources that are not integers: their limit or largest sum, divided by this
_SEARCHES = 60  # golden-section steps for each multiplier
_GOLDEN = (5**0.5 - 1) / 2
_GROWTH = 4.0

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True)
class FormatOption:
    """One format of a group of layers.

    Attributes:
        name: name of the format; None: unquantized.
        nbytes: bytes of the group's weights.
        loss: increase of the model's loss by the format.
        seconds: seconds of the group's products for one token.
    """

    name: str | None
    nbytes: int
    loss: float
    seconds: float = 0.0


@dataclass(frozen=True)
class FormatLimits:
    """Limits of the sums over all groups; None: no limit."""

    nbytes: int | None = None
    loss: float | None = None
    seconds: float | None = None


class UnmetLimitError(ValueError):
    """Error for a limit that no choice meets.

    Attributes:
        resource: nbytes, loss or seconds.
        nearest: least sum of the resource, over all choices, or for seconds and loss over those within the other
            limits.
        places: index of each group's option in a choice with this sum.
    """

    def __init__(self, resource: str, nearest: float, places: Sequence[int] = ()) -> None:
        super().__init__(f"the least {resource} is {nearest}")
        self.resource, self.nearest, self.places = resource, nearest, list(places)


@dataclass(frozen=True)
class FormatChoice:
    """Solution of the knapsack.

    Attributes:
        places: index of the chosen option of each group.
        gap: upper bound of the excess of the choice's objective over the optimum; 0: the choice is the optimum.
    """

    places: list[int]
    gap: float = 0.0


def choose_formats(groups: Sequence[Sequence[FormatOption]], limits: FormatLimits) -> FormatChoice:
    """Return the best choice of an option for each group; see [Note: format knapsack].

    With a limit of bytes or time, the best choice is that of the least loss within the limits; otherwise that of the
    fewest bytes within the limit of the loss.

    Raises:
        UnmetLimitError: no choice is within the limits.
    """
    if limits.nbytes is None and limits.seconds is None:
        return _least(groups, "nbytes", {"loss": limits.loss})
    found = _least(groups, "loss", {"nbytes": limits.nbytes, "seconds": limits.seconds})
    loss = total(groups, found.places, "loss")
    if limits.loss is not None and loss > limits.loss:
        raise UnmetLimitError("loss", loss, found.places)
    return found


def total(groups: Sequence[Sequence[FormatOption]], chosen: Sequence[int], resource: str) -> float:
    """Return the sum of a resource over the chosen options of all groups."""
    return float(sum(getattr(options[place], resource) for options, place in zip(groups, chosen, strict=True)))


def _least(groups: Sequence[Sequence[FormatOption]], objective: str, limits: dict[str, float | None]) -> FormatChoice:
    """Return the choice with the least objective within limits of resources.

    Raises:
        UnmetLimitError: no choice is within the limits.
    """
    bounds = {name: limit for name, limit in limits.items() if limit is not None}
    for name, limit in bounds.items():
        places = [min(range(len(one)), key=lambda place: getattr(one[place], name)) for one in groups]  # noqa: B023
        if total(groups, places, name) > limit:
            if name != (first := next(iter(bounds))):  # the nearest choice must be within the first limit too
                places = _least(groups, name, {first: bounds[first]}).places
            raise UnmetLimitError(name, total(groups, places, name), places)
    costs = [np.array([getattr(option, objective) for option in options], dtype=np.float64) for options in groups]
    counted = [_count(groups, name, limit) for name, limit in bounds.items()]
    resources = [np.stack([one[0][group] for one in counted]) for group in range(len(groups))]
    search = _Search(costs, resources, np.array([one[1] for one in counted], dtype=np.int64))
    found = search.solve()
    if found is not None:
        return found
    first, second = bounds  # two limits: the check above ensures that each can be met without the other
    places = _least(groups, second, {first: bounds[first]}).places
    if (nearest := total(groups, places, second)) > bounds[second]:
        raise UnmetLimitError(second, nearest, places)
    # This choice is within both limits. The search dropped its beginning, because there were too many partial choices.
    return FormatChoice(places, total(groups, places, objective) - search.bound)


def _count(groups: Sequence[Sequence[FormatOption]], name: str, limit: float) -> tuple[list[Integers], int]:
    """Return a resource of all options, `[options]` for each group, and its limit, as integers, so that sums do not
    depend on the order of their terms. Bytes are unchanged; seconds and losses are rounded to fine units, and the limit
    is raised by the largest error of a sum."""
    values = [[getattr(option, name) for option in options] for options in groups]
    if all(isinstance(value, int) for options in values for value in options):
        return [np.array(options, dtype=np.int64) for options in values], int(limit)
    most = max(limit, sum(max(options) for options in values)) or 1.0
    unit = most / _FINEST
    counts = [np.array([round(value / unit) for value in options], dtype=np.int64) for options in values]
    return counts, round(limit / unit) + len(groups) // 2 + 1


class _Search:
    """Search for the best choice within limits.

    Args:
        costs: objective of each group's options.
        resources: `[limits, options]` of each group.
        limits: largest sum of each resource.

    Attributes:
        bound: a lower bound of the objective.
    """

    def __init__(self, costs: Sequence[Floats], resources: Sequence[Integers], limits: Integers) -> None:
        self._costs, self._resources, self._limits = costs, resources, limits
        width = max(map(len, costs))
        self._padded = np.full((len(costs), width), np.inf)
        self._weights = np.zeros((len(limits), len(costs), width))
        for group, (cost, resource) in enumerate(zip(costs, resources, strict=True)):
            self._padded[group, : len(cost)] = cost
            self._weights[:, group, : len(cost)] = resource
        self.bound, self._multipliers = self._best_bound()

    def solve(self) -> FormatChoice | None:
        """Return the best choice; None if no choice within the limits was found."""
        bound, multipliers = self.bound, self._multipliers
        reduced = [cost + multipliers @ resource for cost, resource in zip(self._costs, self._resources, strict=True)]
        reduced = [one - one.min() for one in reduced]
        largest = sum(float(one.max()) for one in reduced) + float(multipliers @ self._limits)
        scale = max(abs(bound), *(float(cost.max()) for cost in self._costs), 1e-300)
        distance = max(largest / len(self._costs) / 64, 1e-12 * scale)
        while True:
            found, is_whole = self._within(reduced, multipliers, distance + 1e-12 * scale)
            if found is not None and (found[0] <= bound + distance or not is_whole or distance > largest):
                return FormatChoice(found[1], 0.0 if is_whole else max(found[0] - bound, 0.0))
            if distance > largest:
                return None
            distance *= _GROWTH

    def _best_bound(self) -> tuple[float, Floats]:
        """Return the largest lower bound of the objective that was found, and its multipliers."""
        spread = float(sum(cost.max() - cost.min() for cost in self._costs)) or 1.0
        scales = [spread / max(int(limit), 1) for limit in self._limits]
        chosen = np.zeros(len(self._limits))

        def bound_of(multipliers: Floats) -> float:
            sums = self._padded + np.tensordot(multipliers, self._weights, 1)
            return float(sums.min(1).sum() - multipliers @ self._limits)

        def maximize(resource: int) -> float:
            """Choose the multipliers of `resource` and of all later resources, and return the bound."""
            if resource == len(chosen):
                return bound_of(chosen)

            def at(exponent: float) -> float:
                chosen[resource] = scales[resource] * 10**exponent if exponent > -np.inf else 0.0
                return maximize(resource + 1)

            best = max(_golden_section(at, -5.0, 6.0), -np.inf, key=at)
            return at(best)

        return maximize(0), chosen

    def _within(
        self, reduced: Sequence[Floats], multipliers: Floats, distance: float
    ) -> tuple[tuple[float, list[int]] | None, bool]:
        """Return two values: `(objective, choice)` of the best choice within the limits and within a distance of the
        bound, or None if there is none; and False if partial choices were dropped because there were too many."""
        kept = [np.flatnonzero(one <= distance) for one in reduced]
        least = np.array([one[:, places].min(1) for one, places in zip(self._resources, kept, strict=True)])
        rest = least[::-1].cumsum(0)[::-1] - least  # for each group, the least sums over all later groups
        sums, costs, spent = np.zeros((len(multipliers), 1), dtype=np.int64), np.zeros(1), np.zeros(1)
        links: list[tuple[Integers, Integers]] = []
        is_whole = True
        for group, places in enumerate(kept):
            count = costs.size
            sums = (self._resources[group][:, places, None] + sums[:, None]).reshape(len(multipliers), -1)
            costs = (self._costs[group][places, None] + costs).ravel()
            spent = (reduced[group][places, None] + spent).ravel()
            fits = (sums <= (self._limits - rest[group])[:, None]).all(0) & (spent <= distance)
            chosen = np.flatnonzero(fits)
            if not chosen.size:
                return None, is_whole
            chosen = chosen[_undominated(sums[:, chosen], costs[chosen])]
            if chosen.size > _MOST_SUMS:
                is_whole = False
                chosen = chosen[np.argpartition(spent[chosen], _MOST_SUMS)[:_MOST_SUMS]]
            links.append((places[chosen // count], chosen % count))
            sums, costs, spent = sums[:, chosen], costs[chosen], spent[chosen]
        place = int(costs.argmin())
        objective, found = float(costs[place]), []
        for options, before in reversed(links):
            found.append(int(options[place]))
            place = int(before[place])
        return (objective, found[::-1]), is_whole


def _undominated(sums: Integers, costs: Floats) -> Integers:
    """Return the indices of the partial choices for which no other one is at least as good in the cost and all
    resources. Of several equal choices, one is returned.

    Args:
        sums: one or two resources, `[resources, choices]`.
    """
    order: Integers = np.lexsort((costs, *sums[::-1]))
    if len(sums) == 1:
        best = np.minimum.accumulate(costs[order])
        is_less: NDArray[np.bool_] = np.concatenate([[True], costs[order][1:] < best[:-1]])
        return order[is_less]
    seconds, values = sums[1][order].tolist(), costs[order].tolist()
    kept = []
    steps: list[int] = []  # second resource of the Pareto front so far, ascending; `lows` has its costs, descending
    lows: list[float] = []
    for place, (second, value) in enumerate(zip(seconds, values, strict=True)):
        at = bisect_right(steps, second)
        if at and lows[at - 1] <= value:
            continue
        kept.append(place)
        if at and steps[at - 1] == second:
            at -= 1
        end = at
        while end < len(lows) and lows[end] >= value:
            end += 1
        steps[at:end], lows[at:end] = [second], [value]
    return order[kept]


def _golden_section(value: Callable[[float], float], low: float, high: float) -> float:
    """Return the argument for which a function with a single maximum is largest."""
    left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    at_left, at_right = value(left), value(right)
    for _ in range(_SEARCHES):
        if at_left < at_right:
            low, left, at_left = left, right, at_right
            right = low + _GOLDEN * (high - low)
            at_right = value(right)
        else:
            high, right, at_right = right, left, at_left
            left = high - _GOLDEN * (high - low)
            at_left = value(left)
    return (low + high) / 2
