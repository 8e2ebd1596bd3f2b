"""What measured values say about an order that was expected of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

SUM_TOLERANCE = 1e-6  # of the sum over parameters, relative to the largest


def describe_order(values: Mapping[str, float], tolerance: float) -> str:
    """The labels by rising value; `=` between neighbours that differ by no more than `tolerance` (relative)."""
    ranked = sorted(values, key=lambda label: values[label])
    text = ranked[0]
    for before, label in zip(ranked, ranked[1:], strict=False):
        same = values[label] <= values[before] * (1 + tolerance)
        text += f" {'=' if same else '<'} {label}"
    return text


def find_contradictions(values: Mapping[str, float], expected: Sequence[str], tolerance: float) -> list[str]:
    """The neighbours in `expected` (smallest value first) that stand the other way round by more than `tolerance`."""
    return [
        f"{after} {values[after]:.4g} is below {before} {values[before]:.4g}"
        for before, after in zip(expected, expected[1:], strict=False)
        if values[before] > values[after] * (1 + tolerance)
    ]


def compare_with_expected_order(
    quantity: str, values: Mapping[str, float], expected: Sequence[str], tolerance: float
) -> str:
    """One line: the order that was measured, the one that tutorials give, and whether they agree.

    Args:
        what: is ordered, and its direction: "speed (ms a step)".
        values: smaller is better.
        expected: best first.
        tolerance: relative difference that counts as none.
    """
    wrong = find_contradictions(values, expected, tolerance)
    said = " <= ".join(expected)
    outcome = "holds" if not wrong else "does not hold: " + "; ".join(wrong)
    return f"{quantity}: measured {describe_order(values, tolerance)}; tutorials say {said}: {outcome} (within {tolerance:.0%})"


def all_equal(values: Mapping[str, float], tolerance: float) -> bool:
    """Whether all values are within `tolerance`, relative to the largest magnitude."""
    scale = max(abs(value) for value in values.values())
    return max(values.values()) - min(values.values()) <= tolerance * scale
