"""Charts as inline SVG. All text is escaped."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

Points = Sequence[tuple[float, float]]

COLOURS = ("#1f6fb4", "#d1601f", "#3a8f3a", "#8a4fb0", "#b0303a", "#5a6570")
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 560, 230, 62, 12, 30, 34
_FLAT = 1e-12  # relative difference of values below which a curve is drawn as a level line
_MOST_POINTS = 400  # maximum number of intervals of a curve; each is drawn by its smallest and largest value


def line_chart(title: str, unit: str, curves: Mapping[str, Points]) -> str:
    """Return a chart of one or more curves over the steps, coloured as in `COLOURS`; "" if there are no points.

    Args:
        curves: points of finite numbers by the name of the curve, sorted by step.
    """
    points = [point for curve in curves.values() for point in curve]
    if not points:
        return ""
    first, last = min(x for x, _ in points), max(x for x, _ in points)
    ticks = nice_ticks(min(y for _, y in points), max(y for _, y in points))
    low, high, span = ticks[0], ticks[-1], (last - first) or 1.0
    plot_width, plot_height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def place(x: float, y: float) -> str:
        across = _LEFT + (x - first) / span * plot_width
        return f"{across:.1f},{_TOP + (high - y) / (high - low) * plot_height:.1f}"

    parts = [f'<text x="{_LEFT}" y="16" class="title">{escape(with_unit(title, unit))}</text>']
    for tick in ticks:
        _, down = place(first, tick).split(",")
        parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{down}" y2="{down}" class="grid"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{float(down) + 4:.1f}" class="y">{format_number(tick)}</text>')
    for x, anchor in ((first, "start"), (last, "end")):
        across, _ = place(x, low).split(",")
        parts.append(f'<text x="{across}" y="{_HEIGHT - 14}" class="x {anchor}">step {x:,.0f}</text>')
    for number, (name, curve) in enumerate(curves.items()):
        colour = COLOURS[number % len(COLOURS)]
        kept = " ".join(place(x, y) for x, y in thinned(curve))
        if len(curve) == 1:
            across, down = kept.split(",")
            parts.append(f'<circle cx="{across}" cy="{down}" r="3" fill="{colour}"/>')
        elif curve:
            parts.append(f'<polyline points="{kept}" stroke="{colour}" class="curve"/>')
        if curve and len(curves) > 1:
            left = _LEFT + 110 * number
            parts.append(f'<rect x="{left}" y="{_HEIGHT - 9}" width="8" height="8" fill="{colour}"/>')
            parts.append(f'<text x="{left + 12}" y="{_HEIGHT - 1}" class="x">{escape(name)}</text>')
    label = escape(f"{title} by step", quote=True)
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def with_unit(name: str, unit: str) -> str:
    """Return a name with its unit, or the name alone if it ends with a unit of more than one character."""
    return name if name.endswith(unit) and len(unit) > 1 else f"{name}, {unit}"


def bar_chart(title: str, unit: str, bars: Mapping[str, Mapping[str, float]]) -> str:
    """Return stacked horizontal bars; "" if no part has a length.

    Args:
        bars: length of each part of each bar, by name; a part has the same colour in all bars.
    """
    longest = max((sum(parts.values()) for parts in bars.values()), default=0.0)
    if longest <= 0:
        return ""
    names = list(dict.fromkeys(name for parts in bars.values() for name in parts))
    height = _TOP + 28 * len(bars) + 24
    drawn = [f'<text x="0" y="16" class="title">{escape(with_unit(title, unit))}</text>']
    for row, (bar, parts) in enumerate(bars.items()):
        across, down = float(_LEFT), _TOP + 28 * row
        drawn.append(f'<text x="{_LEFT - 6}" y="{down + 14}" class="y">{escape(bar)}</text>')
        for name, length in parts.items():
            width = length / longest * (_WIDTH - _LEFT - _RIGHT)
            colour = COLOURS[names.index(name) % len(COLOURS)]
            tip = f"<title>{escape(name)}: {format_number(length)} {escape(unit)}</title>"
            size = f'x="{across:.1f}" y="{down}" width="{width:.1f}" height="20"'
            drawn.append(f'<rect {size} fill="{colour}">{tip}</rect>')
            across += width
    for number, name in enumerate(names):
        across = _LEFT + 95 * number
        drawn.append(
            f'<rect x="{across}" y="{height - 16}" width="8" height="8" fill="{COLOURS[number % len(COLOURS)]}"/>'
            f'<text x="{across + 12}" y="{height - 8}" class="x">{escape(name)}</text>'
        )
    label = escape(title, quote=True)
    return f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{label}">{"".join(drawn)}</svg>'


def nice_ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Return about `count` round numbers that enclose `low` and `high`, ascending, at least two."""
    if high - low <= _FLAT * max(abs(low), abs(high)):
        around = abs(low) * 0.1 or 1.0
        low, high = low - around, high + around
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough)) if rough > 0 else 1.0
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, max(last, first + 1) + 1)]


def thinned(points: Points) -> list[tuple[float, float]]:
    """Return at most 800 points: the smallest and the largest value of each interval, in order."""
    if len(points) <= 2 * _MOST_POINTS:
        return list(points)
    size = -(-len(points) // _MOST_POINTS)
    kept: list[tuple[float, float]] = []
    for start in range(0, len(points), size):
        part = points[start : start + size]
        kept += sorted({min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])})
    return kept


def format_number(value: float) -> str:
    """Format a number with three or four significant digits: `12,300`, `0.0012`, `3e-05`."""
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.4g}"
