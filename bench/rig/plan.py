"""Engines measured in one group, which fit into memory together, and the order of their turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

BASE = "none"  # the compute alone; every group has it, for ratios are of one group


def groups(engines: Sequence[str], needs: Mapping[str, int], budget: int) -> list[list[str]]:
    """Cut `engines` into groups whose ranks can all be alive at once; each begins with `BASE`.

    Args:
        needs: bytes that all ranks of an engine take.
        budget: bytes that a group may take. An engine that exceeds it beside `BASE` gets a group of its own.
    """
    found: list[list[str]] = []
    taken: list[int] = []
    for engine in engines:
        if engine == BASE:
            continue
        place = next((i for i, size in enumerate(taken) if size + needs[engine] <= budget), None)
        if place is None:
            found.append([BASE])
            taken.append(needs[BASE])
            place = len(found) - 1
        found[place].append(engine)
        taken[place] += needs[engine]
    return found or [[BASE]]


def turn(group: Sequence[str], number: int) -> list[str]:
    """The order within a round: every other one backwards, so that a drift of the machine hits all alike."""
    return list(group) if number % 2 == 0 else list(reversed(group))
