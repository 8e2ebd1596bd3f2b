"""Tests of `deepspeed.checkpointing`: DeepSpeed's arguments and names reach windlass's options."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from windlass import checkpointing
from windlass.compat import activation_names
from windlass.compat.activation_names import CudaRNGStatesTracker
from windlass.parallel import activation_checkpoint_api
from windlass.parallel.activation_checkpoint_api import current_options


@pytest.fixture(autouse=True)
def _forgotten(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(activation_checkpoint_api, "_options", None)
    monkeypatch.setattr(activation_checkpoint_api, "_configured", False)
    monkeypatch.setattr(activation_checkpoint_api, "_settings", None)
    monkeypatch.setattr(activation_names, "_unit", None)
    yield


def test_configure_has_deepspeed_arguments() -> None:
    known = "mpu_ deepspeed_config partition_activations contiguous_checkpointing num_checkpoints checkpoint_in_cpu"
    names = list(inspect.signature(activation_names.configure).parameters)
    assert names == [*known.split(), "synchronize", "profile", "more"]


def test_every_argument_sets_its_option() -> None:
    group: Any = object()
    activation_names.configure(
        SimpleNamespace(get_model_parallel_group=lambda: group),
        {"activation_checkpointing": {"number_checkpoints": 3, "profile": True}},
        contiguous_checkpointing=True,
        num_checkpoints=5,
        checkpoint_in_cpu=True,
        synchronize=True,
        profile=False,
        min_offload_bytes=7,
    )
    options = current_options()
    assert (options.contiguous_memory_optimization, options.number_checkpoints) == (True, 5)
    assert (options.cpu_checkpointing, options.synchronize_checkpoint_boundary, options.profile) == (True, True, False)
    assert options.group is group and options.min_offload_bytes == 7


def test_partitioning_is_turned_on_and_off() -> None:
    activation_names.configure(profile=True)
    activation_names.partition_activations_in_checkpoint(True)
    assert current_options().partition_activations and current_options().profile
    activation_names.partition_activations_in_checkpoint(False)
    assert not current_options().partition_activations


def test_names_of_the_generators_that_megatron_reads() -> None:
    tracker, name = activation_names._CUDA_RNG_STATE_TRACKER, activation_names._MODEL_PARALLEL_RNG_TRACKER_NAME
    assert tracker is activation_names.get_cuda_rng_tracker() and isinstance(tracker, CudaRNGStatesTracker)
    activation_names.model_parallel_cuda_manual_seed(3)
    first = tracker.get_states()[name]
    torch.manual_seed(8)
    outside = torch.get_rng_state()
    activation_names.model_parallel_reconfigure_tp_seed(3)
    assert torch.equal(tracker.get_states()[name], first) and torch.equal(torch.get_rng_state(), outside)
    activation_names.model_parallel_reconfigure_tp_seed(4)
    assert not torch.equal(tracker.get_states()[name], first)
    activation_names._set_cuda_rng_state(first)
    assert torch.initial_seed() == 3 + 2718
    tracker.reset()


def test_detached_variables_keep_requires_grad() -> None:
    leaf = torch.ones(2, requires_grad=True)
    one, two, other = activation_names.detach_variable((leaf * 2, torch.ones(1), "text"))
    assert one.is_leaf and one.requires_grad and not two.requires_grad and other == "text"
    with pytest.raises(RuntimeError, match="tuple, not Tensor"):
        activation_names.detach_variable(leaf)  # type: ignore[arg-type]


def test_other_names_are_those_of_windlass() -> None:
    assert activation_names.get_cuda_rng_tracker() is checkpointing.rng_tracker
    assert activation_names.model_parallel_cuda_manual_seed is checkpointing.manual_seed


def test_configure_without_mpu_keeps_the_former_mpu() -> None:
    group: Any = object()
    unit = SimpleNamespace(get_model_parallel_group=object, get_slice_parallel_group=lambda: group)
    activation_names.configure(unit)
    assert current_options().group is group, "not the group of all ranks that hold the model"
    activation_names.configure(None, profile=True)
    assert current_options().group is group and current_options().profile and activation_names.mpu is unit


def test_setting_an_option_does_not_configure() -> None:
    activation_names.partition_activations_in_checkpoint(True)
    activation_names.LIVE["PROFILE_TIME"](True)
    assert not activation_names.is_configured() and current_options().partition_activations
    activation_names.LIVE["deepspeed_checkpointing_enabled"](True)
    assert activation_names.is_configured() and current_options().profile


@pytest.mark.parametrize("call", [activation_names.checkpoint, activation_names.non_reentrant_checkpoint])
def test_results_are_returned_as_by_deepspeed(call: Any) -> None:
    x = torch.ones(2, requires_grad=True)
    for one in (lambda a: a * 2, lambda a: (a * 2,), lambda a: [a * 2]):
        assert torch.equal(call(one, x), x * 2)
    for two in (lambda a: (a, a * 2), lambda a: [a, a * 2]):
        found = call(two, x)
        assert type(found) is tuple and len(found) == 2
    assert call(lambda a: {"a": a}, x).keys() == {"a"}
