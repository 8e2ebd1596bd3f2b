"""Predicted time of a step of each candidate configuration, by simulation.

[Note: estimated order] The search measures the configuration that it returns, so predictions only decide which
candidates are measured first. One training step is simulated with the model's sizes ([Note: folded links]), on a host
with the rates of a known device. A model without a configuration of transformers is simulated as a decoder with equally
many parameters and blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from windlass.base.errors import WindlassError
from windlass.config import load_config
from windlass.config.batch_sizes import TRAIN
from windlass.observe.device_peak import names_gpu
from windlass.parallel.model_shape import ModelShape
from windlass.simulate.cluster import Cluster
from windlass.simulate.cluster_file import known_cluster
from windlass.simulate.hardware_parts import CLUSTERS
from windlass.simulate.predict_step import predict_step
from windlass.tune.memory_forecast import ForecastResult
from windlass.tune.search_space import Candidate

_DEFAULT_GPU = "dgx-h100"


class StepRanking:
    """Predictions for the candidates of one search.

    Args:
        config_of: Function that returns the configuration of a candidate.
        world_size: Number of ranks, on one host.
        facts: Properties of the model and the machine.

    Attributes:
        problem: First reason for which a step could not be simulated; empty: there is none.
    """

    def __init__(
        self, config_of: Callable[[Candidate], dict[str, Any]], world_size: int, facts: ForecastResult
    ) -> None:
        self._config_of, self._world_size, self._facts = config_of, world_size, facts
        self._shape, self._cluster = shape_of_facts(facts), cluster_of_facts(facts, world_size)
        self._seconds: dict[Candidate, float | None] = {}
        self.problem = ""

    def seconds(self, candidate: Candidate) -> float | None:
        """Return the predicted seconds of a step; None: the simulation does not cover the configuration."""
        if candidate not in self._seconds:
            self._seconds[candidate] = self._predict(candidate)
        return self._seconds[candidate]

    def seconds_per_sample(self, candidate: Candidate) -> float:
        """Return the predicted seconds of a step, divided by the global batch if the candidate has one; infinite
        without a prediction.
        """
        seconds = self.seconds(candidate)
        return math.inf if seconds is None else seconds / float(candidate.get(TRAIN, 1))

    def _predict(self, candidate: Candidate) -> float | None:
        try:
            found = predict_step(
                self._shape,
                load_config(_without_automatic_values(self._config_of(candidate))),
                self._cluster,
                world_size=self._world_size,
                length=self._facts.tokens,
            )
        except WindlassError as error:
            self.problem = self.problem or str(error).splitlines()[0]
            return None
        return found.seconds


def _without_automatic_values(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration without the "auto" values of optimizer and scheduler: they do not change the time of a
    step."""
    found = dict(config)
    for name in ("optimizer", "scheduler"):
        section = found.get(name)
        if isinstance(section, Mapping) and isinstance(section.get("params"), Mapping):
            params = {key: value for key, value in section["params"].items() if value != "auto"}
            found[name] = {**section, "params": params}
    return found


def shape_of_facts(facts: ForecastResult) -> ModelShape:
    """Return the sizes of the model, or those of a decoder with equally many parameters and blocks."""
    if facts.shape:
        return ModelShape(**facts.shape)
    layers = max(1, facts.blocks)
    # A layer of width h has about 12 h^2 parameters: four matrices of attention, two of the feed-forward network.
    hidden = max(1, round(math.sqrt(facts.parameters / (12 * layers))))
    return ModelShape(hidden, layers, heads=1, vocabulary=1, gated=False, tied=True)


def cluster_of_facts(facts: ForecastResult, world_size: int) -> Cluster:
    """Return one host with one device for each rank: a CPU core, the known GPU of this name, or else an H100."""
    name = "cpu"
    if facts.device != "cpu":
        known = (key for key, one in CLUSTERS.items() if names_gpu(facts.device_name, one.device))
        name = next(known, _DEFAULT_GPU)
    found = known_cluster(name)
    return replace(found, host=replace(found.host, devices=world_size))
