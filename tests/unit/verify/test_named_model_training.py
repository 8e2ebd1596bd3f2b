"""Tests of the batches of `windlass verify --model`."""

from __future__ import annotations

from collections import UserDict, namedtuple
from typing import Any

import pytest
import torch

from windlass.verify.named_model_training import call_model, move_batch

Pair = namedtuple("Pair", ["x", "y"])
X, Y = torch.ones(2), torch.zeros(2)


@pytest.mark.parametrize("batch", [{"x": X, "y": Y}, UserDict(x=X, y=Y), (X, Y), [X, Y], Pair(X, Y)])
def test_a_batch_has_the_arguments_of_the_forward(batch: Any) -> None:
    """A tokenizer of transformers returns a `UserDict`."""
    here = torch.device("cpu")
    assert call_model(lambda x, y: (x, y), move_batch(batch, here)) == (X, Y)
    nested = call_model(lambda pair: pair, move_batch(Pair(X, [Y, 3]), here)._asdict()["y"][1:])
    assert nested == 3
