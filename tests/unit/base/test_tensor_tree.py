"""Tests that tensors are found in every kind of container that a module may return."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, deque, namedtuple
from types import SimpleNamespace
from typing import Any

import torch

from windlass.base.tensor_tree import iterate_tensors, replace_tensors

Pair = namedtuple("Pair", "left right")


@dataclasses.dataclass
class Output:
    loss: torch.Tensor
    more: object = None


def test_search_visits_all_containers_and_yields_each_tensor_once() -> None:
    a, b, c, d, e = (torch.full((), float(i)) for i in range(5))
    value = [a, (b, {"x": Pair(c, [d])}), Output(e, OrderedDict(again=a)), SimpleNamespace(y=b), None, "text", 3]
    assert [t.item() for t in iterate_tensors(value)] == [0, 1, 2, 3, 4]


class Slotted:
    """Object whose only attribute is in a slot."""

    __slots__ = ("held", "unset")

    def __init__(self, held: object) -> None:
        self.held = held


def test_search_visits_slots_and_queues() -> None:
    a, b = torch.zeros(()), torch.ones(())
    assert [t.item() for t in iterate_tensors([Slotted(deque([a])), Slotted(b)])] == [0, 1]


def test_cycles_and_modules_end_the_search() -> None:
    box = SimpleNamespace(t=torch.ones(()))
    box.me = box
    box.module = torch.nn.Linear(2, 2)
    assert len(list(iterate_tensors(box))) == 1


def test_replace_keeps_containers_without_a_match() -> None:
    a, b = torch.zeros(1), torch.ones(1)
    kept = (b, "x")
    value = {"p": Pair(a, kept), "l": [a, 1]}
    new = replace_tensors(value, {id(a): b})
    assert new["p"].left is b and new["p"].right is kept and new["l"] == [b, 1]
    assert isinstance(new["p"], Pair)


class Named(list):  # type: ignore[type-arg]
    """Subclass of list."""


def test_replace_in_place_keeps_lists_and_dicts() -> None:
    a, b = torch.zeros(1), torch.ones(1)
    inner, kept = Named([a, 1]), [2]
    value = ({"l": inner, "kept": kept, "t": (a, kept)}, kept)
    new = replace_tensors(value, {id(a): b}, in_place=True)
    assert new is value and value[0]["l"] is inner and inner == [b, 1]
    assert value[0]["t"][0] is b and value[0]["t"][1] is kept is value[0]["kept"]


class Frozen(list):  # type: ignore[type-arg]
    """List that refuses changes, like the `immutable_list` of torch.fx."""

    def __setitem__(self, key: Any, value: Any) -> None:
        raise TypeError("immutable")


def test_replace_in_place_changes_lists_that_refuse_changes() -> None:
    a, b = torch.zeros(1), torch.ones(1)
    given = Frozen([a, 1])
    assert replace_tensors(given, {id(a): b}, in_place=True) is given and given[0] is b
    assert replace_tensors(given, {id(b): a}) == [a, 1] and given[0] is b
