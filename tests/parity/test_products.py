"""Full product behind the covering array of tests/dist/test_training_equivalence.py.

`make parity` runs every combination of model, stage, optimizer, accumulation, precision, overlap and backward call
(5,000 cases), each with one number of ranks, one transport and one of `SETTINGS`, in turn. PARITY=everything runs each
case with all of them.
"""

from __future__ import annotations

import os
from itertools import cycle, product
from typing import Any

import pytest

from tests.dist.equivalence_cases import FACTORS, HF_FACTORS, allowed, name_of, recipe_of, setting_of
from tests.dist.equivalence_runs import hold

pytestmark = pytest.mark.slow

LAW = ("model", "stage", "optimizer", "accumulation", "precision", "overlap", "plain_backward")
# Values of the other factors, which the cases take in turn.
SETTINGS = [
    {"clipping": 1.0, "buckets": "default", "persistence": 0, "knobs": "frozen"},
    {"clipping": 0.1, "buckets": "tiny", "persistence": 300, "knobs": "default"},
    {"clipping": 0.0, "buckets": "tiny", "persistence": 0, "knobs": "merged"},
]


def _rows(factors: Any) -> list[dict[str, Any]]:
    places = [
        {"ranks": ranks, "transport": transport, **setting}
        for setting in SETTINGS
        for ranks, transport in product(factors["ranks"], factors["transport"])
    ]
    everything = os.environ.get("PARITY") == "everything"
    rotation = cycle(places)
    rows = []
    for values in product(*(factors[name] for name in LAW)):
        for place in places if everything else [next(rotation)]:
            row = {**dict(zip(LAW, values, strict=True)), **place}
            if allowed(row):
                rows.append(row)
    return rows


@pytest.mark.parametrize("row", _rows(FACTORS), ids=name_of)
def test_full_product(row: dict[str, Any]) -> None:
    hold(row["model"], recipe_of(row), setting_of(row))


@pytest.mark.parametrize("row", _rows(HF_FACTORS), ids=name_of)
def test_full_product_of_hugging_face_models(row: dict[str, Any]) -> None:
    hold(row["model"], recipe_of(row), setting_of(row))
