"""Groups of engines that fit into memory together, and the order of the engines in a round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

BASE = "none"  # the compute alone; every group has it, because ratios are computed within a group


def groups(engines: Sequence[str], needs: Mapping[str, int], budget: int) -> list[list[str]]:
    """Split `engines` into groups whose ranks fit into memory at once; each begins with `BASE`.

    Args:
        needs: bytes of all ranks of an engine.
        budget: maximum bytes of a group. An engine that exceeds it together with `BASE` gets its own group.
    """
    results: list[list[str]] = []
    taken: list[int] = []
    for engine in engines:
        if engine == BASE:
            continue
        place = next((i for i, size in enumerate(taken) if size + needs[engine] <= budget), None)
        if place is None:
            results.append([BASE])
            taken.append(needs[BASE])
            place = len(results) - 1
        results[place].append(engine)
        taken[place] += needs[engine]
    return results or [[BASE]]


def turn(group: Sequence[str], number: int) -> list[str]:
    """Return the order within a round. Every other round is reversed, so that drift of the machine affects all
    engines."""
    return list(group) if number % 2 == 0 else list(reversed(group))
