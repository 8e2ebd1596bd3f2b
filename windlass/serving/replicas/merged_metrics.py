"""Merging of the Prometheus metrics of several processes into one response."""

from __future__ import annotations

from collections.abc import Iterable


def merge_expositions(expositions: Iterable[str]) -> str:
    """Join metrics in Prometheus' text format. Samples of different processes must differ in a label.

    The format requires the samples of a metric to follow its description, so samples are grouped by metric.
    """
    descriptions: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for exposition in expositions:
        name = ""
        for line in exposition.splitlines():
            if line.startswith("# "):
                _, kind, name, *_ = line.split(" ", 3)
                known = descriptions.setdefault(name, [])
                if not any(other.split(" ", 2)[1] == kind for other in known):
                    known.append(line)
            elif line:
                samples.setdefault(name, []).append(line)
    lines = [line for name, description in descriptions.items() for line in (*description, *samples.get(name, ()))]
    return "\n".join([*lines, ""])
