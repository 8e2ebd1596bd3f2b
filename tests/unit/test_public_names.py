"""Snapshot of the public names. A name may be added, or deprecated before its removal (CONTRIBUTING.md)."""

from __future__ import annotations

import argparse
import doctest
import importlib
import inspect
import subprocess
import sys

import pytest

import windlass

PUBLIC = {
    "windlass": [
        "AsyncLLMEngine",
        "BeamSearchParams",
        "CompletionOutput",
        "Engine",
        "LLM",
        "LayerSpec",
        "LoRARequest",
        "MoE",
        "PipelineModule",
        "RequestOutput",
        "SamplingParams",
        "StackedMLP",
        "StructuredOutputsParams",
        "TextPrompt",
        "TiedLayerSpec",
        "TokensPrompt",
        "WindlassError",
        "__version__",
        "add_config_arguments",
        "checkpointing",
        "from_pretrained",
        "init_distributed",
        "init_inference",
        "initialize",
        "optim",
        "parameter_server",
        "profile",
        "read_checkpoint",
        "register_experts",
        "topology",
        "zero",
    ],
    "windlass.topology": [
        "MeshShape",
    ],
    "windlass.zero": [
        "ExponentialMovingAverage",
        "GatheredParameters",
        "Init",
        "full_grad",
        "full_param",
        "full_state",
        "local_grad",
        "local_param",
        "local_state",
        "set_full_grad",
        "set_full_param",
        "set_full_state",
        "set_local_grad",
        "set_local_param",
        "set_local_state",
    ],
}
# Callers pass these arguments by keyword or position, so their names and order are public too.
INITIALIZE = [
    "args",
    "model",
    "optimizer",
    "model_parameters",
    "training_data",
    "lr_scheduler",
    "distributed_port",
    "mpu",
    "dist_init_required",
    "collate_fn",
    "config",
    "mesh_param",
    "config_params",
]


@pytest.mark.parametrize("module", PUBLIC)
def test_public_names_are_the_recorded_ones(module: str) -> None:
    result = importlib.import_module(module)
    assert sorted(result.__all__) == PUBLIC[module]
    for name in PUBLIC[module]:
        assert getattr(result, name) is not None


def test_initialize_takes_the_recorded_arguments() -> None:
    assert list(inspect.signature(windlass.initialize).parameters) == INITIALIZE


def test_initialize_stays_a_function_when_its_module_is_imported() -> None:
    importlib.import_module("windlass.initialize")
    assert inspect.isfunction(windlass.initialize)


def test_unknown_name_error_lists_the_known_names() -> None:
    with pytest.raises(AttributeError, match="no attribute 'initialise'.*initialize"):
        _ = windlass.initialise  # type: ignore[attr-defined]


def test_public_names_are_offered_by_dir() -> None:
    assert set(windlass.__all__) <= set(dir(windlass))


def test_topology_docstring_examples_hold() -> None:
    import windlass.topology

    result = doctest.testmod(windlass.topology)
    assert result.attempted == 4 and result.failed == 0


@pytest.mark.parametrize("module", ["windlass", "windlass.cli.main", "windlass.cli.run", "windlass.cli.check"])
def test_import_does_not_import_torch(module: str) -> None:
    code = f"import sys, {module}; print(*({{'torch', 'transformers', 'numpy'}} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == []


def test_scripts_read_a_configuration_from_their_command_line() -> None:
    parser = windlass.add_config_arguments(argparse.ArgumentParser())
    arguments = parser.parse_args(["--deepspeed", "--deepspeed_config", "ds.json"])
    assert (arguments.deepspeed, arguments.deepspeed_config) == (True, "ds.json")
    assert parser.parse_args([]).deepspeed_config is None
