"""Tests that a backward through a graph older than the last step raises, as in plain torch."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests import oracle
from tests.dist.equivalence_runs import Setting, ds_config, specimen, start
from tests.dist.harness import run_ranks
from tests.models import Place
from tests.oracle import Recipe


def late_backward(name: str, setting: Setting) -> str:
    subject = specimen(name)
    engine = start(subject, ds_config(Recipe(), setting))
    loss = engine(**subject.batch(Place(0, 0, dist.get_rank())))
    engine.backward(loss, retain_graph=True)
    engine.step()
    try:
        loss.backward()
    except RuntimeError as error:
        return str(error)
    finally:
        engine.destroy()
    return ""


def test_plain_torch_raises() -> None:
    subject = specimen("mlp")
    model = oracle.build(subject)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(**subject.batch(Place(0, 0, 0)))
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("name", ["mlp", "tied"])
def test_a_backward_after_the_step_raises(name: str, stage: int, transport: str) -> None:
    setting = Setting(stage=stage, transport=transport)
    for text in run_ranks(late_backward, 2, name, setting, transport=transport):
        assert "inplace operation" in text


def later_forward(setting: Setting) -> tuple[float, float]:
    """Train for two steps on one batch, and return both losses. The graph of the second forward is not stale."""
    subject = specimen("mlp")
    engine = start(subject, ds_config(Recipe(), setting))
    batch = subject.batch(Place(0, 0, dist.get_rank()))
    losses = []
    for _ in range(2):
        loss = engine(**batch)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    engine.destroy()
    return losses[0], losses[1]


def test_a_forward_after_the_step_sees_the_new_weights(stage: int, transport: str) -> None:
    for first, second in run_ranks(later_forward, 2, Setting(stage=stage, transport=transport), transport=transport):
        assert second < first
