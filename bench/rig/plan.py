"""Groups of engines that fit into memory together, and the order of the engines in a round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

BASE = "none"  # the compute alone; every group has it, because ratios are computed within a group


def groups(
    engines: Sequence[str], needs: Mapping[str, int], budget: int, rivals: Mapping[str, str] | None = None
) -> list[list[str]]:
    """Split `engines` into groups whose ranks fit into memory at once; each begins with `BASE`.

    Args:
        needs: bytes of all ranks of an engine.
        budget: maximum bytes of a group. An engine that exceeds it together with `BASE` gets its own group.
        rivals: engine -> the engine with which its time is compared. It joins each group that has the first,
            if it is one of `engines`, because a ratio needs times of the same rounds.
    """
    rivals = {engine: rival for engine, rival in (rivals or {}).items() if engine in engines and rival in engines}
    results: list[list[str]] = []
    for engine in sorted(engines, key=lambda engine: engine in rivals.values()):  # a rival may have joined already
        if engine == BASE or any(engine in group for group in results):
            continue
        needed = [engine, rivals[engine]] if engine in rivals else [engine]
        for group in results:
            joined = [*group, *(name for name in needed if name not in group)]
            if sum(needs[name] for name in joined) <= budget:
                group[:] = joined
                break
        else:
            results.append([BASE, *needed])
    return results or [[BASE]]


def turn(group: Sequence[str], number: int) -> list[str]:
    """Return the order within a round. Every other round is reversed, so that drift of the machine affects all
    engines."""
    return list(group) if number % 2 == 0 else list(reversed(group))
