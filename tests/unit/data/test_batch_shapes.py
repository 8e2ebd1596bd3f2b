"""Tests of recorded shapes of a forward's inputs."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.utils.rnn import pack_padded_sequence

from windlass.base.tensor_tree import iterate_tensors
from windlass.engine.batch_shapes import BatchShapes


class Pair(NamedTuple):
    rows: torch.Tensor
    weight: float


@dataclass
class Record:
    rows: torch.Tensor
    name: str


IDS = torch.zeros(4, 7, dtype=torch.long)
ROWS = torch.ones(4, 3, dtype=torch.bfloat16)
TABLE = torch.ones(7, 3)


@pytest.mark.parametrize(
    "inputs",
    [
        ((IDS,), {}),
        ((), {"ids": IDS, "options": {"mask": None, "flags": [True, "x", torch.float32]}}),
        (((IDS, ROWS), TABLE), {"scale": 0.5}),
        ((Pair(ROWS, 2.0), Record(ROWS, "a")), {"both": [ROWS, IDS]}),
        ((UserDict(ids=IDS), OrderedDict(rows=ROWS)), {}),
    ],
)
def test_a_batch_is_made_again_with_other_samples(inputs: Any) -> None:
    shapes = BatchShapes(*inputs)
    assert not shapes.unknown and shapes.first is not None
    for micro in (4, 2, 1):
        made = shapes.make(micro, 4)
        pairs = list(zip(iterate_tensors(inputs), iterate_tensors(made), strict=True))  # shared tensors stay shared
        for given, zeros in pairs:
            rows = micro if given.shape[0] == 4 else given.shape[0]
            assert zeros.shape == (rows, *given.shape[1:]) and zeros.dtype == given.dtype
    assert type(made[0]) is tuple and [type(one) for one in made[0]] == [type(one) for one in inputs[0]]
    assert made[1].keys() == inputs[1].keys()


@pytest.mark.parametrize(
    ("given", "of", "micro", "expected"),
    [
        ((7, 4, 3), 4, 2, (7, 2, 3)),  # samples along the second dimension
        ((8, 5), 4, 2, (4, 5)),  # two rows for each sample
        ((3,), 4, 1, (1,)),
        ((), 4, 2, ()),
    ],
)
def test_samples_are_found_along_the_first_or_second_dimension(given: Any, of: int, micro: int, expected: Any) -> None:
    (args, _) = BatchShapes((torch.zeros(given),), {}).make(micro, of)
    assert tuple(args[0].shape) == expected


def test_gradients_of_inputs_are_kept() -> None:
    (args, _) = BatchShapes((torch.zeros(2, 3, requires_grad=True),), {}).make(2, 2)
    assert args[0].requires_grad


def test_no_input_makes_a_forward_fail() -> None:
    endless: list[Any] = []
    endless.append(endless)
    packed = pack_padded_sequence(torch.ones(3, 2, 4), torch.tensor([3, 2]))
    sparse = torch.ones(2, 2).to_sparse()
    for value, kind in ((endless, "list"), (object(), "object"), (sparse, "Tensor"), (iter([1]), "list_iterator")):
        assert BatchShapes((value,), {}).unknown == [kind]
    assert not BatchShapes((packed,), {}).unknown
    assert BatchShapes((1, "x"), {}).first is None
