"""Regression of a measured quantity of configurations on its prediction and on the values of their keys.

[Note: corrected predictions] A Gaussian process (Rasmussen and Williams 2006, section 2.2) models
log(measured / predicted) as a sum of independent parts: a constant, a slope in the logarithm of the prediction, an
effect of the value of each key, of each pair of keys, and of the configuration itself. Neighbouring values of an
ordered key have similar effects. With no measurement the result is the prediction; each measurement also corrects the
configurations that have something in common with it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windlass.tune.search_space import ORDERED_KEYS, Candidate, SearchSpace

Array = NDArray[np.float64]

_REACH = 2.0  # two values of an ordered key that are this many choices apart have the similarity 1/e
_SCALES = (0.5, 1.0, 2.0, 4.0)
_ABSENT = -1


@dataclass(frozen=True)
class Deviations:
    """Standard deviations of the parts of log(measured / predicted), before any measurement.

    Attributes:
        level: Standard deviation of the constant.
        slope: Standard deviation of the factor of log(predicted), around 1.
        key, pair, own: Standard deviation of the sum of the keys' effects, of the sum of the pairs' effects, and of the
            effect of the configuration itself.
        noise: Standard deviation of a measurement.
    """

    level: float
    slope: float
    key: float
    pair: float
    own: float
    noise: float


class CandidateFeatures:
    """Index of the value of each searched key among its choices, for all candidates."""

    def __init__(self, space: SearchSpace, candidates: Sequence[Candidate]) -> None:
        dimensions = [one for one in space.dimensions if len(one.choices) > 1]
        self._ordered = [one.key in ORDERED_KEYS for one in dimensions]
        # A key without effect in a configuration counts as a further value, `_ABSENT`.
        self._codes = np.array(
            [[_index(one.choices, candidate.get(one.key)) for one in dimensions] for candidate in candidates], dtype=int
        ).reshape(len(candidates), len(dimensions))

    def similarities(self, rows: Sequence[int], columns: Sequence[int]) -> list[Array]:
        """Return for each key the similarity of its values in candidates of `rows` and of `columns`, from 0 to 1."""
        found = []
        for number, ordered in enumerate(self._ordered):
            a, b = self._codes[list(rows), number][:, None], self._codes[list(columns), number][None, :]
            if ordered:
                both = (a != _ABSENT) == (b != _ABSENT)
                found.append(np.where(both, np.exp(-np.abs(a - b) / _REACH), 0.0))
            else:
                found.append((a == b).astype(float))
        return found


def _index(choices: Sequence[Any], value: Any) -> int:
    return next((number for number, one in enumerate(choices) if one == value), _ABSENT)


class CorrectedPredictions:
    """Predictions of all candidates, corrected by measurements; see [Note: corrected predictions].

    Args:
        prior: Logarithm of the predicted quantity of each candidate.
    """

    def __init__(self, features: CandidateFeatures, prior: Sequence[float], deviations: Deviations) -> None:
        self._features, self._deviations = features, deviations
        self._prior = np.asarray(prior, dtype=float)
        self._centred = self._prior - self._prior.mean()

    def fit(self, measured: Sequence[int], values: Sequence[float]) -> tuple[Array, Array]:
        """Return the predicted mean and standard deviation of log(quantity), `[candidates]` each.

        Args:
            measured: Indices of the measured candidates; a candidate may occur several times.
            values: Logarithm of each measured quantity.
        """
        rows = list(range(len(self._prior)))
        if not measured:
            return self._prior.copy(), np.sqrt(self._variance(1.0))
        residual = np.asarray(values, dtype=float) - self._prior[list(measured)]
        parts = self._parts(measured, measured)
        fits = [self._solve(scale, parts, residual) for scale in _SCALES]
        scale, factor, weights, _ = max(fits, key=lambda one: one[3])
        cross = self._covariance(scale, self._parts(rows, measured))
        mean = self._prior + cross @ weights
        explained = np.linalg.solve(factor, cross.T)
        return mean, np.sqrt(np.maximum(self._variance(scale) - (explained**2).sum(0), 1e-12))

    def _parts(self, rows: Sequence[int], columns: Sequence[int]) -> tuple[Array, Array]:
        """Return the covariance of the level, and that of slope and effects before the fitted scale multiplies it."""
        d = self._deviations
        a, b = self._centred[list(rows)][:, None], self._centred[list(columns)][None, :]
        likes = self._features.similarities(rows, columns)
        total = sum(likes) if likes else np.ones_like(a * b)
        squares = sum(like**2 for like in likes) if likes else total
        product = np.ones_like(a * b)
        for like in likes:
            product = product * like
        keys = max(1, len(likes))
        pairs = max(1, keys * (keys - 1) // 2)
        effects = d.key**2 * total / keys + d.pair**2 * (total**2 - squares) / 2 / pairs + d.own**2 * product
        return d.level**2 + np.zeros_like(effects), effects + d.slope**2 * a * b

    def _covariance(self, scale: float, parts: tuple[Array, Array]) -> Array:
        return np.asarray(parts[0] + scale**2 * parts[1])

    def _variance(self, scale: float) -> Array:
        d = self._deviations
        effects = d.key**2 + d.pair**2 + d.own**2 + d.slope**2 * self._centred**2
        return np.asarray(d.level**2 + scale**2 * effects)

    def _solve(self, scale: float, parts: tuple[Array, Array], residual: Array) -> tuple[float, Array, Array, float]:
        """Return `scale`, a Cholesky factor, the weights of the measurements, and the logarithm, up to a constant, of
        the evidence times the prior of `scale`.
        """
        covariance = self._covariance(scale, parts) + self._deviations.noise**2 * np.eye(len(residual))
        factor: Array = np.asarray(np.linalg.cholesky(covariance), dtype=float)
        weights: Array = np.asarray(np.linalg.solve(factor.T, np.linalg.solve(factor, residual)), dtype=float)
        evidence = -0.5 * float(residual @ weights) - float(np.log(np.diag(factor)).sum())
        return scale, factor, weights, evidence - math.log(scale) ** 2  # prior: log-normal around 1
