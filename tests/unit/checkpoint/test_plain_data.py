"""Tests that plain data survives a round trip, and that other data is refused."""

from __future__ import annotations

import argparse
import collections
import enum
import json
import math
import random
import sys
import types
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from windlass.base.errors import CheckpointError
from windlass.checkpoint.plain_data import UnknownEnumMember, decode, encode, tensor_names
from windlass.checkpoint.stored_objects import UnknownObject, unknown_classes

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8)
keys = st.text(max_size=4) | st.just("$") | st.integers() | st.tuples(st.integers(), st.text(max_size=2))
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple) | st.dictionaries(keys, inner, max_size=3)
    ),
    max_leaves=12,
)


@given(values)
def test_plain_data_round_trips_through_strict_json(value: object) -> None:
    encoded, result = encode(value, "plain/")
    back = decode(json.loads(json.dumps(encoded, allow_nan=False)), {})
    assert not result
    assert back == value
    assert repr(back) == repr(value)  # distinguishes 1 from 1.0 and True, and lists from tuples


def test_nan_round_trips() -> None:
    encoded, _ = encode({"loss": math.nan, "best": -math.inf}, "plain/")
    back = decode(json.loads(json.dumps(encoded, allow_nan=False)), {})
    assert math.isnan(back["loss"]) and back["best"] == -math.inf


def test_tensors_are_extracted_by_name() -> None:
    first, second = torch.arange(3), torch.ones(())
    encoded, result = encode({"ema": [first], "deep": {"t": (second,)}}, "rank/2/")
    assert all(name.startswith("rank/2/") for name in result)
    assert tensor_names(encoded) == list(result)
    back = decode(json.loads(json.dumps(encoded)), result)
    assert back["ema"][0] is first and back["deep"]["t"][0] is second


def test_states_of_rng_and_scheduler_round_trip() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[2, 5])
    state: dict[str, Any] = {
        "python": random.Random(3).getstate(),
        "torch": torch.get_rng_state(),
        "lr": schedule.state_dict(),
    }
    encoded, result = encode(state, "plain/")
    back: dict[str, Any] = decode(json.loads(json.dumps(encoded, allow_nan=False)), result)
    generator = random.Random()
    generator.setstate(back["python"])
    assert generator.random() == random.Random(3).random()
    assert collections.Counter(back["lr"]["milestones"]) == schedule.milestones
    assert torch.equal(back["torch"], state["torch"])


def test_client_state_of_scripts_round_trips() -> None:
    """Values in the client state of DeepSpeed scripts survive: argparse options, numpy generator states, sets."""
    state: dict[str, Any] = {
        "args": argparse.Namespace(lr=1e-3, out=Path("a") / "b", dtype=torch.bfloat16, **{"$": 1}),
        "numpy": numpy.random.get_state(),
        "arrays": [numpy.zeros((0, 3), "f2"), numpy.array(["a", "bc"]), numpy.array(True), numpy.arange(6)[::2]],
        "numbers": [numpy.float32(0.5), numpy.int64(3), numpy.bool_(True)],
        "seen": {1, "a"},
        "frozen": frozenset({(1, 2)}),
        "bytes": b"\x00\xff",
        "space": types.SimpleNamespace(deep=argparse.Namespace(a=1)),
    }
    encoded, result = encode(state, "plain/")
    back: dict[str, Any] = decode(json.loads(json.dumps(encoded, allow_nan=False)), result)
    assert back["args"] == argparse.Namespace(lr=1e-3, out=str(Path("a") / "b"), dtype=torch.bfloat16, **{"$": 1})
    assert back["space"].deep.a == 1 and back["seen"] == {1, "a"} and back["frozen"] == state["frozen"]
    assert back["bytes"] == b"\x00\xff" and repr(back["numbers"]) == "[0.5, 3, True]"
    for item, other in zip([*state["arrays"], state["numpy"][1]], [*back["arrays"], back["numpy"][1]], strict=True):
        assert item.dtype == other.dtype and item.shape == other.shape and (item == other).all()
    numpy.random.RandomState().set_state(back["numpy"])


class Kind(enum.Enum):
    ENCODER = 1


def test_enumerations_are_stored_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron keeps members of enumerations in the arguments that it saves."""
    encoded, _ = encode(argparse.Namespace(kind=Kind.ENCODER), "plain/")
    text = json.dumps(encoded)
    assert decode(json.loads(text), {}).kind is Kind.ENCODER
    monkeypatch.delattr(f"{__name__}.Kind")  # as in a process that has not imported the script
    absent = decode(json.loads(text), {}).kind
    assert absent == UnknownEnumMember(__name__, "Kind", "ENCODER") and encode(absent, "")[0] == encoded["$"][1]["kind"]
    for forged in (["os", "path", "join"], ["os", "environ", "HOME"], ["builtins", "print", "x"]):
        assert isinstance(decode({"$": ["enum", forged]}, {}), UnknownEnumMember)


class Meter:
    """Object of a script, as torch rebuilds it from its `__dict__`."""

    def __init__(self, total: torch.Tensor) -> None:
        self.total, self.seen = total, (1, 2)


class Counter:
    """Object with a state of its own."""

    __slots__ = ("count",)

    def __init__(self, count: int) -> None:
        self.count = count

    def __getstate__(self) -> int:
        return self.count

    def __setstate__(self, state: int) -> None:
        self.count = int(state) + 0


class SlottedMeter:
    """Object with `__slots__` and without `__setstate__`, which torch cannot rebuild."""

    __slots__ = ("total",)

    def __init__(self) -> None:
        self.total = 1


class BuiltFromArguments:
    """Object of a class with its own `__new__`, which a file must not call."""

    def __new__(cls, size: int = 1) -> BuiltFromArguments:
        raise AssertionError("a file cannot construct it")


def test_objects_of_declared_classes_are_rebuilt_from_their_state() -> None:
    """Objects of classes that are declared safe to torch are saved as their state, and rebuilt only if declared."""
    state = {"hub": {"loss": Meter(torch.arange(3)), "steps": [Counter(5)]}}
    with pytest.raises(CheckpointError, match=r"hub\.loss is a .*Meter, .*add_safe_globals\(\[Meter\]\)"):
        encode(state, "plain/")
    with torch.serialization.safe_globals([Meter, Counter]):
        encoded, tensors = encode(state, "plain/")
        text = json.dumps(encoded)
        back = decode(json.loads(text), tensors)
        assert type(back["hub"]["loss"]) is Meter and back["hub"]["steps"][0].count == 5
        assert torch.equal(back["hub"]["loss"].total, torch.arange(3)) and back["hub"]["loss"].seen == (1, 2)
        forged = {"$": ["object", [__name__, "Meter", [1]]]}
        with pytest.raises(CheckpointError, match="the state of an object is a list"):
            decode(forged, {})
    unread = decode(json.loads(text), tensors)  # the classes are no longer declared safe
    assert unknown_classes(unread) == {f"{__name__}.Meter", f"{__name__}.Counter"}
    assert encode(unread, "plain/")[0] == encoded


def test_classes_with_constructors_of_their_own_are_refused() -> None:
    with torch.serialization.safe_globals([SlottedMeter, BuiltFromArguments]):
        with pytest.raises(CheckpointError, match="meter is a .*SlottedMeter, .*__slots__"):
            encode({"meter": SlottedMeter()}, "plain/")
        with pytest.raises(CheckpointError, match="__new__"):
            decode({"$": ["object", [__name__, "BuiltFromArguments", None]]}, {})
    for name in (["os", "system", "true"], ["subprocess", "Popen", {"args": "true"}], ["builtins", "dict", {}]):
        assert isinstance(decode({"$": ["object", name]}, {}), UnknownObject)


class HistoryBuffer:
    """Class with the constructor and the members of mmengine's `HistoryBuffer`."""

    def __init__(self, log_history: Any, count_history: Any, max_length: int = 1000000) -> None:
        self.max_length, self._log_history, self._count_history = max_length, log_history, count_history
        self.statistics_methods = {"min": min}  # not plain data

    @property
    def data(self) -> tuple[Any, Any]:
        return self._log_history, self._count_history


def test_history_of_mmengine_is_rebuilt(monkeypatch: pytest.MonkeyPatch) -> None:
    """mmengine's hook saves a `HistoryBuffer` for each scalar. mmengine's `load_state_dict` skips other classes."""
    module = types.ModuleType("mmengine.logging.history_buffer")
    monkeypatch.setattr(HistoryBuffer, "__module__", module.__name__)
    module.HistoryBuffer = HistoryBuffer  # type: ignore[attr-defined]
    encoded, tensors = encode(HistoryBuffer(numpy.array([0.5, 0.25]), numpy.array([1, 2]), 7), "plain/")
    assert isinstance(decode(encoded, tensors), UnknownObject)  # mmengine is not imported
    monkeypatch.setitem(sys.modules, module.__name__, module)
    back = decode(json.loads(json.dumps(encoded)), tensors)
    assert type(back) is HistoryBuffer and back.max_length == 7
    assert back.data[0].tolist() == [0.5, 0.25] and back.data[1].tolist() == [1, 2]
    name, array = [module.__name__, "HistoryBuffer"], numpy.zeros(2)
    for forged in (
        {"values": array, "counts": array, "max_length": 1},
        {"values": array, "counts": [1, 2], "max_length": 9},
        {"values": array, "counts": array},
        None,
    ):
        state, tensors = encode(forged, "plain/")
        with pytest.raises(CheckpointError, match="HistoryBuffer"):
            decode({"$": ["object", [*name, state]]}, tensors)


def test_object_array_is_refused() -> None:
    raw = {"$": ["tensor", "t"]}
    for code in ("O", "no type"):
        with pytest.raises(CheckpointError, match="holds"):
            decode({"$": ["array", [code, [1], raw]]}, {"t": torch.zeros(8, dtype=torch.uint8)})


@pytest.mark.parametrize("kind", [lambda n: (n, 0), lambda n: frozenset([n]), lambda n: (1 << 62) + n])
def test_more_keys_than_a_load_accepts_are_refused_at_the_save(kind: Any) -> None:
    seen = {kind(n) for n in range(4096)}
    encoded, _ = encode({"seen": seen, "count": dict.fromkeys(range(5000), "few")}, "plain/")
    assert decode(encoded, {})["seen"] == seen
    with pytest.raises(CheckpointError, match=r"client\.count.*more than 4096 keys"):
        encode({"client": {"seen": seen, "count": {kind(-1): 1}}}, "plain/")


def test_keys_inside_of_keys_count_as_in_a_load() -> None:
    value = {frozenset([(n, 1)]): 0 for n in range(1200)}
    encoded, _ = encode(value, "plain/")
    assert decode(encoded, {}) == value


@pytest.mark.parametrize("value", [object(), numpy.array([None]), lambda: None])
def test_other_values_are_refused_with_their_path(value: object) -> None:
    with pytest.raises(CheckpointError, match=r"client\.list\[1\] is a .*never\s+pickled"):
        encode({"client": {"list": [0, value]}}, "plain/")


@pytest.mark.parametrize(
    "text",
    [
        '{"$": ["pickle", "gASV"]}',
        '{"$": ["tensor", "absent"]}',
        '{"$": 3}',
        '{"$": ["float", "1"]}',
        '{"$": [1], "a": 2}',
    ],
)
def test_non_canonical_text_is_refused(text: str) -> None:
    with pytest.raises(CheckpointError, match="cannot (be )?read"):
        decode(json.loads(text), {})
