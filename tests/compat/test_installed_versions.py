"""Test of one client run on two ranks with the installed versions, for CI on the oldest and the newest ones.

The other tests of this folder check more and take longer.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.compat.conftest import launch, require_package

require_package("accelerate")
pytestmark = pytest.mark.slow  # test_transformers_trainer.py checks more on the pinned versions


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """Return the losses of three steps by run and dtype, e.g. `plain-fp32`, or `zero3-bf16` over two ranks."""
    folder = tmp_path_factory.mktemp("versions")
    launch("short_training.py", folder, "plain", ranks=0, stands_in=False, seconds=900)
    launch("short_training.py", folder, "sharded", ranks=2, seconds=900)
    return {path.stem: json.loads(path.read_text()) for path in Path(folder).glob("*.json")}


def test_loaded_model_trains_to_the_plain_losses(losses: dict[str, list[float]]) -> None:
    """The Trainer's losses at stages 2 and 3 over two ranks equal those of one plain process with both batches.

    This holds in bf16 and fp32, with a norm whose weight the file lacks.
    """
    assert {"plain-fp32", "plain-bf16", "zero3-fp32", "zero3-bf16", "zero2-fp32", "zero2-bf16"} <= losses.keys()
    for name, result in losses.items():
        plain = losses[f"plain-{name.partition('-')[2]}"]
        assert len(result) == len(plain) == 3 and result[0] != result[-1]
        assert result == pytest.approx(plain, rel=2e-4 if name.endswith("fp32") else 1e-2), (name, losses)
