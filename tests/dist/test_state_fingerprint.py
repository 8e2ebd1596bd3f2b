"""Tests of an engine's fingerprint: equal for a state in any layout, and different for any other state."""

from __future__ import annotations

import logging
from collections import OrderedDict
from typing import Any
from unittest import mock

import numpy
import pytest
import torch

from tests.custom_optimizers import Foreign
from tests.dist.elastic_runs import LATE, Layout, Row, engine_for, steps
from tests.dist.harness import run_ranks

LAYOUTS = [
    Layout(2, 0, transport="shm"),
    Layout(2, 1, "host", "shm"),
    Layout(2, 2, "disk"),
    Layout(2, 3, "device", "shm"),
    Layout(2, 3, "host"),
    Layout(2, 3, "disk"),
]


def trained(model: str, optimizer: str, folder: str) -> list[str]:
    """Train two steps in every layout. Return the fingerprint in each."""
    results = []
    for layout in LAYOUTS:
        # One micro-batch per rank, because stages sum several micro-batches in different orders, with other rounding.
        row = Row(layout, layout, model, optimizer, micro_batches=2)
        engine = engine_for(row, layout, folder, 0)
        steps(engine, row, 0, 2)
        results.append(engine.fingerprint())
        engine.destroy()
    return results


@pytest.mark.parametrize(("model", "optimizer"), [("tied", "AdamW"), ("lora", "Muon"), ("unused_by_step", "stranger")])
def test_fingerprint_is_equal_for_all_layouts(model: str, optimizer: str, tmp_path: Any) -> None:
    first, second = run_ranks(trained, 2, model, optimizer, str(tmp_path), env=LATE, timeout=120)
    assert first == second
    assert len(set(first)) == 1, dict(zip(LAYOUTS, first, strict=True))


def one_bit(value: torch.Tensor) -> torch.Tensor:
    """Return the tensor with the lowest bit of its last element flipped."""
    changed = value.detach().clone().reshape(-1)
    changed[-1:].view(torch.int32)[-1] ^= 1
    return changed.view(value.shape)


def after_changes(layout: Layout, folder: str) -> dict[str, str]:
    """Flip a bit of each parameter and optimizer state in turn, and flip it back. Return the fingerprints."""
    import windlass
    from windlass.zero.access.full_values import full_states

    row = Row(layout, layout, "frozen", micro_batches=2)
    engine = engine_for(row, layout, folder, 0)
    steps(engine, row, 0, 1)
    results = {"nothing": engine.fingerprint()}
    for name, parameter in engine.module.named_parameters():
        value = windlass.zero.full_param(parameter)
        windlass.zero.set_full_param(parameter, one_bit(value))
        results[name] = engine.fingerprint()
        windlass.zero.set_full_param(parameter, value)
        for key in full_states(parameter) if parameter.requires_grad else ():
            state = windlass.zero.full_state(parameter, key)
            assert state is not None
            windlass.zero.set_full_state(parameter, key, one_bit(state.float()))
            results[f"{key} of {name}"] = engine.fingerprint()
            windlass.zero.set_full_state(parameter, key, state)
    results["nothing again"] = engine.fingerprint()
    engine.destroy()
    return results


@pytest.mark.parametrize(
    "layout",
    [Layout(2, 3, "disk"), pytest.param(Layout(2, 0), marks=pytest.mark.slow)],
    ids=["stage 3 on disk", "stage 0"],
)
def test_one_bit_changes_the_fingerprint(layout: Layout, tmp_path: Any) -> None:
    result, other = run_ranks(after_changes, 2, layout, str(tmp_path), env=LATE, timeout=120)
    assert result == other
    assert result.pop("nothing again") == result["nothing"]
    assert len(set(result.values())) == len(result) > 12
    before = result.pop("nothing").split("-")
    for what, taken in result.items():
        which = int(" of " in what)  # half of the fingerprint: 0 for parameters, 1 for optimizer states
        assert taken.split("-")[1 - which] == before[1 - which] and taken.split("-")[which] != before[which], what


def loaded_wrongly(folder: str) -> tuple[str, list[str]]:
    """Return the error of a load that changes an element, and the log lines on fingerprints of a correct load."""
    from windlass.base.errors import CheckpointError
    from windlass.engine import engine_loading

    layout = Layout(2, 3)
    row = Row(layout, layout, micro_batches=2)
    engine = engine_for(row, layout, folder, 0)
    text: list[str] = []
    keeping = logging.Handler()
    keeping.emit = lambda record: text.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("windlass").addHandler(keeping)
    steps(engine, row, 0, 1)
    engine.save_checkpoint(folder)
    engine.load_checkpoint(folder)
    logging.getLogger("windlass").removeHandler(keeping)
    fill = engine_loading._load_tensors

    def badly(*args: Any) -> Any:
        result = fill(*args)
        engine._sharded.masters.chunks[0].values()[0] += 1.0
        return result

    wrong = ""
    with mock.patch.object(engine_loading, "_load_tensors", badly):
        try:
            engine.load_checkpoint(folder)
        except CheckpointError as error:
            wrong = str(error)
    engine.destroy()
    return wrong, [line for line in text if "fingerprint" in line]


def test_load_compares_the_fingerprint(tmp_path: Any) -> None:
    for wrong, text in run_ranks(loaded_wrongly, 2, str(tmp_path)):
        assert "was loaded, but parameters differ from the saved ones: their fingerprint is " in wrong
        assert len(text) == 1 and text[0].startswith("fingerprint ")


class Shaped(Foreign):
    """Optimizer whose states are also values that a checkpoint returns as values of other types."""

    def rule(self, p: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any], lr: float) -> None:
        state.setdefault("shape", p.shape)
        state.setdefault("kept", OrderedDict(sizes=[numpy.float32(1.5)], factors=[torch.ones(2)]))
        state.setdefault("plan", Plan())
        state["seen"] = numpy.float32(state.get("seen", 0) + 1)
        p -= lr * gradient


class Plan:
    """Object of a class that the test declares as safe. Its text contains its address."""


def loaded_with_other_types(folder: str) -> list[Any]:
    import windlass

    found: list[Any] = []
    with torch.serialization.safe_globals([Plan]):
        for loads in (False, True):
            model = torch.nn.Linear(3, 2)
            config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}}
            engine = windlass.initialize(model=model, optimizer=Shaped(model.parameters()), config=config)[0]
            if loads:
                engine.load_checkpoint(folder)
            else:
                engine.backward(engine(torch.ones(1, 3)).sum())
                engine.step()
                engine.save_checkpoint(folder)
            found.append((windlass.zero.full_param(model.weight).tolist(), engine.fingerprint()))
            engine.destroy()
    return found


def test_states_that_a_load_returns_in_another_type_have_the_same_fingerprint(tmp_path: Any) -> None:
    for saved, loaded in run_ranks(loaded_with_other_types, 2, str(tmp_path)):
        assert loaded == saved


def logged(every: int) -> list[str]:
    import windlass

    text: list[str] = []
    keeping = logging.Handler()
    keeping.emit = lambda record: text.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("windlass").addHandler(keeping)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD"},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "fingerprint_interval": every,
    }
    engine = windlass.initialize(model=torch.nn.Linear(4, 4), config=config)[0]
    taken = []
    for _ in range(4):
        engine.backward(engine(torch.ones(1, 4)).sum())
        engine.step()
        taken.append(f"step {engine.global_steps} | fingerprint {engine.fingerprint()}")
    engine.destroy()
    logging.getLogger("windlass").removeHandler(keeping)
    lines = [line for line in text if "| fingerprint" in line]
    assert lines == (taken[every - 1 :: every] if every else [])
    return lines


@pytest.mark.parametrize(("every", "lines"), [(2, 2), (0, 0)])
def test_fingerprint_is_logged_at_its_interval(every: int, lines: int) -> None:
    assert [len(result) for result in run_ranks(logged, 2, every)] == [lines, lines]
