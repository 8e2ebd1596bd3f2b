"""Comparison of measured values with an expected order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

SUM_TOLERANCE = 1e-6  # tolerance of parameter sums, relative to the largest


def describe_order(values: Mapping[str, float], tolerance: float) -> str:
    """Format the labels by rising value, with `=` between neighbours that differ by at most `tolerance` (relative)."""
    ranked = sorted(values, key=lambda label: values[label])
    text = ranked[0]
    for before, label in zip(ranked, ranked[1:], strict=False):
        same = values[label] <= values[before] * (1 + tolerance)
        text += f" {'=' if same else '<'} {label}"
    return text


def find_contradictions(values: Mapping[str, float], expected: Sequence[str], tolerance: float) -> list[str]:
    """Describe the neighbours in `expected` (smallest value first) whose order is reversed by more than `tolerance`
    (relative)."""
    return [
        f"{after} {values[after]:.4g} is below {before} {values[before]:.4g}"
        for before, after in zip(expected, expected[1:], strict=False)
        if values[before] > values[after] * (1 + tolerance)
    ]


def compare_with_expected_order(
    quantity: str, values: Mapping[str, float], expected: Sequence[str], tolerance: float
) -> str:
    """Describe in one line the measured order, the order in tutorials, and whether they agree.

    Args:
        quantity: quantity and its unit: "speed (ms a step)".
        values: measured values by label; smaller is better.
        expected: labels, best first.
        tolerance: relative difference up to which two values count as equal.
    """
    wrong = find_contradictions(values, expected, tolerance)
    expected_text = " <= ".join(expected)
    outcome = "holds" if not wrong else "does not hold: " + "; ".join(wrong)
    return (
        f"{quantity}: measured {describe_order(values, tolerance)}; in tutorials {expected_text}: {outcome} "
        f"(within {tolerance:.0%})"
    )


def all_equal(values: Mapping[str, float], tolerance: float) -> bool:
    """Return True if all values are within `tolerance` of each other, relative to the largest magnitude."""
    scale = max(abs(value) for value in values.values())
    return max(values.values()) - min(values.values()) <= tolerance * scale
