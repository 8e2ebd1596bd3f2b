"""SVG picture of a compression: size, loss and speed of the model before and after, and format and size by layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Protocol

from windlass.cli.checkpoints import format_size
from windlass.compress.budget_choice import BudgetChoice
from windlass.compress.model_directory import ModelDirectory
from windlass.kernels.weight_format import get_weight_format

_COLORS = {"int8": "#4477aa", "int4": "#66ccee", "int3": "#ccbb44", "int2": "#ee6677", "wide": "#bbbbbb"}
_OTHER = "#aa3377"  # color of other formats
_WIDTH, _PANEL, _LAYERS = 900.0, 150.0, 150.0
_BEFORE, _AFTER, _EXPECTED = "#bbbbbb", "#228833", "#000000"


class LayerBytes(Protocol):
    """Names, format and sizes of the layers that one bar shows."""

    @property
    def names(self) -> tuple[str, ...]: ...
    @property
    def format(self) -> str | None: ...
    @property
    def wide_bytes(self) -> int: ...
    @property
    def nbytes(self) -> int: ...


@dataclass(frozen=True)
class LayerSize:
    """Format and size of one layer.

    Attributes:
        names: tuple with one name, that of the layer in the files.
        format: name of the format; None: unquantized.
        wide_bytes, nbytes: bytes of the layer's weight before and after rounding.
    """

    names: tuple[str, ...]
    format: str | None
    wide_bytes: int
    nbytes: int


def layer_sizes(
    directory: ModelDirectory, formats: Mapping[str, str], written: ModelDirectory | None = None
) -> list[LayerSize]:
    """Return the size of each matrix of an unquantized model once the layers in `formats` are packed, in the order of
    layer numbers.

    Args:
        written: result, which may have other matrices in another dtype; None: they keep theirs.
    """
    found = []
    for name, place in directory.places.items():
        layer = name.removesuffix(".weight")
        if len(place.shape) == 2 and layer != name:
            rows, columns = place.shape
            form, wide = formats.get(layer), rows * columns * place.dtype.itemsize
            parts = () if form is None else get_weight_format(form).file_form(rows, columns).values()
            kept = wide if written is None or name not in written.places else written.places[name].nbytes
            found.append(LayerSize((layer,), form, wide, sum(part.nbytes for part in parts) if parts else kept))
    return sorted(found, key=lambda one: [int(part) if part.isdigit() else -1 for part in one.names[0].split(".")])


def draw_compression(
    before: Mapping[str, Any], after: Mapping[str, Any], layers: Sequence[LayerBytes], choice: BudgetChoice | None
) -> str:
    """Return an SVG with bars for the model's values before and after, lines at the values that `choice` predicted,
    and a bar for each layer.

    Args:
        before, after: fields of `ModelFigures`.
    """
    expected: dict[str, float | None] = {}
    if choice is not None:
        bits = None if before["bits"] is None else before["bits"] + choice.loss
        expected = {"nbytes": choice.nbytes, "bits": bits, "speed": choice.seconds and 1 / choice.seconds}
    panels = [
        (title, before[key], after[key], expected.get(key), write)
        for title, key, write in (
            ("bytes of all tensors", "nbytes", format_size),
            ("peak memory", "memory", format_size),
            ("held-out bits per byte", "bits", lambda value: f"{value:.4f}"),
            ("tokens/s, one request", "speed", lambda value: f"{value:.1f}"),
        )
        if before[key] is not None and after[key] is not None
    ]
    body = []
    for place, panel in enumerate(panels):
        body += _draw_panel(20 + place * (_WIDTH - 40) / 4, *panel)
    body += _draw_layers(layers, _PANEL + 30)
    height = _PANEL + _LAYERS + 60
    lines = "\n".join(body)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {_WIDTH:.0f} {height:.0f}" font-family="sans-serif">\n{lines}\n</svg>\n'
    )


def _draw_panel(x: float, title: str, before: float, after: float, expected: float | None, write: Any) -> list[str]:
    """Draw two bars with their values, and a line at the expected value."""
    low, tall = _PANEL - 18, _PANEL - 60
    most = max(before, after, expected or 0.0) or 1.0
    drawn = [_text(x, 15, title)]
    for place, (name, value, color) in enumerate((("before", before, _BEFORE), ("after", after, _AFTER))):
        left, top = x + 80 * place, low - tall * value / most
        drawn.append(_bar(left, top, 60, low - top, color, f"{title}, {name}: {write(value)}"))
        drawn += [_text(left, low + 13, name), _text(left, top - 3, write(value))]
    if expected is not None:
        top = low - tall * expected / most
        drawn.append(_bar(x + 74, top - 1, 72, 2, _EXPECTED, f"{title}, expected: {write(expected)}"))
    return drawn


def _draw_layers(layers: Sequence[LayerBytes], top: float) -> list[str]:
    """Draw a bar for each layer: its width is the size before rounding, its height the size after / before."""
    total, x, low = sum(one.wide_bytes for one in layers) or 1, 20.0, top + _LAYERS
    most = max((one.nbytes / (one.wide_bytes or 1) for one in layers), default=1.0) or 1.0
    drawn = []
    for one in layers:
        span, tall = (_WIDTH - 40) * one.wide_bytes / total, (_LAYERS - 20) * one.nbytes / (one.wide_bytes or 1) / most
        sizes = f"{format_size(one.wide_bytes)} -> {format_size(one.nbytes)}"
        title = f"{', '.join(one.names)}: {one.format or 'wide'}, {sizes}"
        drawn.append(_bar(x, low - tall, max(span - 0.5, 0.5), tall, _COLORS.get(_kind(one), _OTHER), title))
        x += span
    for place, kind in enumerate(dict.fromkeys(map(_kind, layers))):
        left = 20 + 90 * place
        drawn.append(f'<rect x="{left}" y="{top - 10}" width="10" height="10" fill="{_COLORS.get(kind, _OTHER)}"/>')
        drawn.append(_text(left + 14, top - 1, kind))
    caption = "height: bytes of each layer, divided by those before rounding; width: bytes before; by their numbers"
    return [*drawn, _text(20, low + 18, caption)]


def _kind(one: LayerBytes) -> str:
    return (one.format or "wide").partition("_")[0]


def _bar(x: float, y: float, width: float, height: float, color: str, title: str) -> str:
    size = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f'<rect {size} fill="{color}"><title>{escape(title)}</title></rect>'


def _text(x: float, y: float, text: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="11">{escape(text)}</text>'
