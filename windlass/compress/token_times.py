"""Time of a generated token, predicted from the times of its matrix products and corrected by measurements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from windlass.compress.format_speed import measure_product
from windlass.compress.layer_sensitivity import InputGroup

ANCHOR_FORMAT = "int4_g128"


@dataclass(frozen=True)
class TokenTimes:
    """Measured seconds per generated token, of the full model.

    Attributes:
        wide: seconds of the unquantized model.
        anchor: seconds of the model with all layers and the head in `ANCHOR_FORMAT`.
    """

    wide: float
    anchor: float


class ProductTimes:
    """Measured times of the matrix products of groups of layers, and the time of a token that follows from them.

    The time of a token is the time of its products, times a scale, plus a constant rest. The scale makes the
    two times of `TokenTimes` fit; `correct` changes the rest so that a third measured time fits.

    Args:
        times: measured times of a token; None: time is not limited, and nothing is measured.
        measure: function of rows, columns and format that returns the seconds of a product with such a matrix.
    """

    def __init__(
        self,
        model: Any,
        groups: Sequence[InputGroup],
        times: TokenTimes | None,
        measure: Callable[[int, int, str], float] = measure_product,
    ) -> None:
        self._times, self._measure = times, measure
        self._shapes = {}
        for group in groups:
            layers = [model.get_submodule(name) for name in group.names]
            rows = round(group.share * sum(layer.out_features for layer in layers))
            self._shapes[group] = (rows, layers[0].in_features)
        self._known: dict[tuple[int, int, str], float] = {}
        self._wide = self._saved = self._rest = 0.0
        if times is not None:
            self._wide = sum(self.seconds(group, None) for group in groups)
            self._saved = self._wide - sum(self.seconds(group, ANCHOR_FORMAT) for group in groups)
            head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
            if head is not None and not any(model.get_submodule(n) is head for g in groups for n in g.names):
                rows, columns = head.weight.shape  # the head is packed in the model that `times.anchor` measured
                self._saved += measure(rows, columns, "fp32") - measure(rows, columns, ANCHOR_FORMAT)

    @property
    def wide(self) -> float | None:
        """Measured seconds of a token of the unquantized model; None: nothing is measured."""
        return None if self._times is None else self._times.wide

    def seconds(self, group: InputGroup, name: str | None) -> float:
        """Return the seconds of a group's product for one token; 0 if the budget does not limit time."""
        if self._times is None:
            return 0.0
        key = (*self._shapes[group], name or "fp32")
        if key not in self._known:
            self._known[key] = self._measure(*key)
        return self._known[key]

    @property
    def _scale(self) -> float:
        """Factor from seconds of products timed alone to seconds in the full model, bounded so that all products
        together take at most the measured time of a token."""
        assert self._times is not None
        if self._saved <= 0 or self._times.wide <= self._times.anchor:
            return 1.0
        measured = (self._times.wide - self._times.anchor) / self._saved
        return min(measured, self._times.wide / self._wide)

    def token_seconds(self, products: float) -> float | None:
        """Return the predicted seconds of a token whose products take `products` seconds; None: nothing is measured."""
        if self._times is None:
            return None
        return self._times.wide + self._rest + (products - self._wide) * self._scale

    def correct(self, products: float, seconds: float) -> None:
        """Change the constant rest so that a token takes the measured `seconds` if its products take `products`."""
        self._rest += seconds - (self.token_seconds(products) or 0.0)

    def limit(self, token: float) -> float:
        """Return the largest time of the products with which a token takes at most `token` seconds."""
        assert self._times is not None
        return self._wide + (token - self._rest - self._times.wide) / self._scale
