"""Functions `estimate_zero3_model_states_mem_needs_all_live` etc.: bytes of parameters, gradients and optimizer states.

The bytes are those that `windlass plan` counts for 16-bit training with Adam: an element needs 2 bytes for the
parameter, 4 for the reduced gradient, 4 for the master weight and 8 for two moments. Activations are not included, and
communication buffers only in the last table for an existing model. `docs/planning.md` has the differences from
DeepSpeed's formulas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from windlass.config import load_config
from windlass.plan.memory_plan import DEVICE, HOST, MemoryPlan
from windlass.plan.plan_run import RunShape, plan_memory
from windlass.plan.planned_layout import Target

_GIB = 1 << 30
_STATES = ("parameters", "gradients", "master weights", "optimizer states", "module buffers")
_MOST_LAYERS = 512  # layers of a model of which only two sizes are known; their number changes no sum
_LAYER_BYTES = 4  # bytes of an unsharded parameter and of its gradient, both in 16 bits

_Offloads = tuple[bool, bool]  # optimizer offload, parameter offload
_Needs = Callable[[_Offloads, bool], tuple[int, int]]  # takes offloads and zero.Init; host and device bytes


def estimate_zero2_model_states_mem_needs(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int]:
    """Return the bytes of a node's host memory and of one device at stage 2."""
    model = _layers(total_params, total_params)
    return _needs(model, 2, num_gpus_per_node, num_nodes, additional_buffer_factor)((cpu_offload, False), False)


def estimate_zero3_model_states_mem_needs(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    cpu_offload_params: bool = True,
    zero_init: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int, int]:
    """Return the bytes of a node's host memory, of one device, and of the largest layer unsharded, at stage 3. As in
    DeepSpeed, parameters are offloaded only together with the optimizer."""
    model = _layers(total_params, largest_layer_params)
    needs = _needs(model, 3, num_gpus_per_node, num_nodes, additional_buffer_factor, largest_layer_params)
    return *needs((cpu_offload, cpu_offload and cpu_offload_params), zero_init), _LAYER_BYTES * largest_layer_params


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print the memory that stage 2 needs, with and without optimizer offload."""
    needs = _needs(_layers(total_params, total_params), 2, num_gpus_per_node, num_nodes, additional_buffer_factor)
    _print_stage_2(total_params, num_gpus_per_node, num_nodes, needs)


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print the memory that stage 3 needs, for each combination of offload and `zero.Init`."""
    model = _layers(total_params, largest_layer_params)
    needs = _needs(model, 3, num_gpus_per_node, num_nodes, additional_buffer_factor, largest_layer_params)
    _print_stage_3(total_params, largest_layer_params, num_gpus_per_node, num_nodes, needs)


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print the same table as `..._all_cold` for an existing model, and one that includes communication buffers."""
    needs = _needs(model, 2, num_gpus_per_node, num_nodes, additional_buffer_factor)
    _print_stage_2(model_to_params(model)[0], num_gpus_per_node, num_nodes, needs)
    _print_with_buffers(model, 2, num_gpus_per_node, num_nodes, ((True, False), (False, False)))


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print the same table as `..._all_cold` for an existing model, and one that includes communication buffers."""
    total, largest = model_to_params(model)
    needs = _needs(model, 3, num_gpus_per_node, num_nodes, additional_buffer_factor, largest)
    _print_stage_3(total, largest, num_gpus_per_node, num_nodes, needs)
    _print_with_buffers(model, 3, num_gpus_per_node, num_nodes, ((True, True), (True, False), (False, False)))


def model_to_params(model: nn.Module) -> tuple[int, int]:
    """Return the number of elements in all parameters (shared ones once), and in the largest single module."""
    total = sum({id(parameter): parameter.numel() for parameter in model.parameters()}.values())
    largest = max((sum(p.numel() for p in module.parameters(recurse=False)) for module in model.modules()), default=0)
    return total, largest


def _layers(total: int, largest: int) -> nn.Module:
    """Return a model on the meta device with a layer of `largest` parameters, and no larger one unless there would be
    too many."""

    def sizes() -> Iterator[int]:
        yield min(largest, total)
        rest, size = total - largest, max(1, largest, -(-total // _MOST_LAYERS))
        for start in range(0, rest, size):
            yield min(size, rest - start)

    layers = [nn.ParameterList([torch.empty(1, size, device="meta")]) for size in sizes() if size > 0]
    return nn.ModuleList(layers)


def _needs(model: nn.Module, stage: int, gpus: int, nodes: int, factor: float, largest_layer_params: int = 0) -> _Needs:
    """Return the function that computes the memory of a configuration.

    A node's host memory is the larger one of the model as its ranks build it, and of the states that they keep there,
    times `factor`.
    """

    def needs(offloads: _Offloads, zero_init: bool) -> tuple[int, int]:
        plan = _plan(model, stage, gpus * nodes, offloads, sharded_init=zero_init)
        states = {place: _sum_of_states(plan, place) for place in (HOST, DEVICE)}
        host = gpus * max(plan.moments["init"].total(HOST), states[HOST])
        return int(host * factor), states[DEVICE] + _LAYER_BYTES * largest_layer_params

    return needs


def _sum_of_states(plan: MemoryPlan, place: str) -> int:
    return sum(nbytes for kind, nbytes in plan.moments["step"].of(place).items() if kind in _STATES)


def _plan(model: nn.Module, stage: int, ranks: int, offloads: _Offloads, *, sharded_init: bool = False) -> MemoryPlan:
    """Return the plan of a run without activations."""
    optimizer, parameters = offloads
    zero: dict[str, Any] = {"stage": stage, "stage3_param_persistence_threshold": 0}
    flags = _offload_flags(parameters, optimizer) if stage == 3 else (("optimizer", optimizer),)
    zero |= {f"offload_{name}": {"device": "cpu"} for name, offloaded in flags if offloaded}
    config = load_config({"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": zero})
    run = RunShape(ranks, target=Target("cuda", "nccl"), activations=0, sharded_init=sharded_init)
    return plan_memory(model, config, run)


def _print_stage_2(total: int, gpus: int, nodes: int, needs: _Needs) -> None:
    rows = [
        (*needs((offload, False), False), f"offload_optimizer={'cpu' if offload else 'none'}")
        for offload in (True, False)
    ]
    _print_table(f"{_millions(total)} parameters", gpus, nodes, rows)


def _print_stage_3(total: int, largest: int, gpus: int, nodes: int, needs: _Needs) -> None:
    rows = []
    for optimizer, parameters in ((True, True), (True, False), (False, False)):
        for built in (True, False):
            places = [
                f"offload_{name}={'cpu' if offloaded else 'none'}"
                for name, offloaded in _offload_flags(parameters, optimizer)
            ]
            options = ", ".join([*places, f"zero_init={int(built)}"])
            rows.append((*needs((optimizer, parameters), built), options))
    what = f"{_millions(total)} parameters, {_millions(largest)} of them in the largest layer"
    _print_table(what, gpus, nodes, rows)


def _print_with_buffers(model: nn.Module, stage: int, gpus: int, nodes: int, offloads: tuple[_Offloads, ...]) -> None:
    """Print the memory that `windlass plan` predicts during the optimizer step, without activations."""
    rows = []
    for optimizer, parameters in offloads:
        step = _plan(model, stage, gpus * nodes, (optimizer, parameters)).moments["step"]
        flags = _offload_flags(parameters, optimizer) if stage == 3 else (("optimizer", optimizer),)
        places = [f"offload_{name}={'cpu' if offloaded else 'none'}" for name, offloaded in flags]
        rows.append((gpus * step.total(HOST), step.total(DEVICE), ", ".join(places)))
    print("The same during the step, with communication buffers, without a reserve:")
    _print_rows(rows)


def _offload_flags(parameters: bool, optimizer: bool) -> tuple[tuple[str, bool], ...]:
    return ("param", parameters), ("optimizer", optimizer)


def _millions(count: int) -> str:
    return f"{count / 1e6:.0f}M"


def _print_table(what: str, gpus: int, nodes: int, rows: list[tuple[int, int, str]]) -> None:
    print(f"Memory for parameters, optimizer states and gradients, {nodes} node(s) of {gpus} GPU(s), {what}:")
    _print_rows(rows)


def _print_rows(rows: list[tuple[int, int, str]]) -> None:
    print("  per CPU  |  per GPU  |  options")
    for host, device, options in rows:
        print(f"  {host / _GIB:7.2f}GB | {device / _GIB:7.2f}GB | {options}")
