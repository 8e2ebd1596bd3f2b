"""Tests of layer partitions: the heaviest part is as light as in the best of all partitions, tried one by one."""

from __future__ import annotations

from itertools import combinations, pairwise
from random import Random

import pytest
import torch
from torch import nn

from windlass.base.errors import ConfigError
from windlass.parallel.pipeline.layer_partition import compute_layer_weights, measure_layer_times, partition_layers


def _by_trying(weights: list[float], parts: int) -> tuple[float, float]:
    results = []
    for inner in combinations(range(1, len(weights)), parts - 1):
        sums = [sum(weights[a:b]) for a, b in pairwise([0, *inner, len(weights)])]
        if all(sums) or sum(weight > 0 for weight in weights) < parts:
            results.append((max(sums), sum(s * s for s in sums)))
    return min(results)


def test_partition_is_optimal() -> None:
    random = Random(0)
    for _ in range(300):
        weights = [float(random.choice([0, 0, 1, 2, 3, 7, 20])) for _ in range(random.randint(1, 9))]
        parts = random.randint(1, len(weights))
        bounds = partition_layers(weights, parts)
        assert bounds[0] == 0 and bounds[-1] == len(weights) and len(bounds) == parts + 1
        assert all(a < b for a, b in pairwise(bounds))
        sums = [sum(weights[a:b]) for a, b in pairwise(bounds)]
        assert (max(sums), sum(s * s for s in sums)) == _by_trying(weights, parts), (weights, parts)


def test_equal_layers_are_divided_evenly() -> None:
    assert partition_layers([1.0] * 8, 4) == [0, 2, 4, 6, 8]
    assert partition_layers([0.1] * 9, 3) == [0, 3, 6, 9]
    assert partition_layers([0.1, 0.2, 0.3, 0.3, 0.2, 0.1], 2) == [0, 3, 6]


def test_partition_of_many_layers() -> None:
    weights = [50.0, *[10.0] * 126, 50.0]
    sums = [sum(weights[a:b]) for a, b in pairwise(partition_layers(weights, 16))]
    assert max(sums) == 90.0 and min(sums) >= 80.0


def test_layer_weights_follow_the_method() -> None:
    names = ["Embedding", "TransformerBlock", "TransformerBlock", "Linear"]
    sizes = lambda: [4, 2, 2, 9]  # noqa: E731
    assert compute_layer_weights("uniform", names, sizes) == [1, 1, 1, 1]
    assert (
        compute_layer_weights("parameters", names, sizes) == compute_layer_weights("best", names, sizes) == [4, 2, 2, 9]
    )
    assert compute_layer_weights("type:transformer", names, sizes) == [0, 1, 1, 0]
    assert compute_layer_weights("type:^(embedding|Linear)$", names, sizes) == [1, 0, 0, 1]
    assert compute_layer_weights([0.5, 1, 1, 2], names, sizes) == [0.5, 1, 1, 2]


@pytest.mark.parametrize(
    ("method", "said"),
    [
        ("type:mamba", r"'type:mamba' matches none of the layers' classes: \['Linear'\]"),
        ("type:(", r"'type:\(' has an invalid regular expression: missing \)"),
        ("evenly", "partition_method 'evenly' does not exist"),
        ([1.0, 2.0], "2 weights, and there are 3 layers"),
    ],
)
def test_unknown_methods_are_refused(method: str | list[float], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        compute_layer_weights(method, ["Linear"] * 3, list)


def test_too_few_layers_are_refused() -> None:
    with pytest.raises(ConfigError, match="3 layers can't be split into 4 parts"):
        partition_layers([1.0, 1.0, 1.0], 4)


def test_measured_times_distinguish_heavy_and_light_layers() -> None:
    layers = [nn.Linear(8, 8), nn.Sequential(*[nn.Linear(256, 256) for _ in range(8)]), nn.ReLU()]
    layers[1][0], layers[1][-1] = nn.Linear(8, 256), nn.Linear(256, 8)
    result = measure_layer_times(layers, torch.randn(64, 8))
    assert len(result) == 3 and result[1] > 2 * max(result[0], result[2])
    assert all(p.grad is None for layer in layers for p in layer.parameters())
