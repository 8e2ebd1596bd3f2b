"""Functions `estimate_zero3_model_states_mem_needs_all_live` etc.: bytes of parameters, gradients and optimizer states.

The formulas assume 16-bit training with Adam: an element needs 2 bytes for the parameter, 2 for the gradient, and 12 to
16 for the master weight, its gradient and two moments. Activations and buffers are not included. For an existing model
the functions also print what `windlass plan` computes from the layout of the model's units.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from windlass.config import load_config
from windlass.plan.memory_plan import DEVICE, HOST
from windlass.plan.plan_run import RunShape, plan_memory
from windlass.plan.planned_layout import Target

_GIB = 1 << 30


def estimate_zero2_model_states_mem_needs(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int]:
    """Return the bytes of a node's host memory and of one device at stage 2."""
    ranks = num_gpus_per_node * num_nodes
    if cpu_offload:
        return int(total_params * max(4 * ranks, 16) * additional_buffer_factor), int(2 * total_params)
    host = total_params * 4 * num_gpus_per_node * additional_buffer_factor
    return int(host), 2 * total_params + int(18 * total_params / ranks)


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
    """Return the bytes of a node's host memory, of one device, and of the largest layer unsharded, at stage 3."""
    ranks = num_gpus_per_node * num_nodes
    largest = 4 * largest_layer_params
    built = 4 * num_gpus_per_node  # each rank of the node builds the model in fp32, unless zero.Init shards it
    if cpu_offload:
        kept = 18 if cpu_offload_params else 16
        device = largest if cpu_offload_params else largest + int(2 * total_params / ranks)
        host = total_params * (kept / num_nodes if zero_init else max(built, kept / num_nodes))
    else:
        device = largest + int(18 * total_params / ranks)
        host = built * (largest_layer_params if zero_init else total_params)
    return int(host * additional_buffer_factor), int(device), largest


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print the memory that stage 2 needs, with and without optimizer offload."""
    rows = []
    for offload in (True, False):
        needs = estimate_zero2_model_states_mem_needs(
            total_params, num_gpus_per_node, num_nodes, offload, additional_buffer_factor
        )
        rows.append((*needs, f"offload_optimizer={'cpu' if offload else 'none'}"))
    _print_table(f"{_millions(total_params)} parameters", num_gpus_per_node, num_nodes, rows)


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print the memory that stage 3 needs, for each combination of offload and `zero.Init`."""
    rows = []
    for optimizer, parameters in ((True, True), (True, False), (False, False)):
        for built in (True, False):
            host, device, _ = estimate_zero3_model_states_mem_needs(
                total_params,
                largest_layer_params,
                num_gpus_per_node,
                num_nodes,
                optimizer,
                parameters,
                built,
                additional_buffer_factor,
            )
            places = [
                f"offload_{name}={'cpu' if offloaded else 'none'}"
                for name, offloaded in _offload_flags(parameters, optimizer)
            ]
            rows.append((host, device, ", ".join([*places, f"zero_init={int(built)}"])))
    what = f"{_millions(total_params)} parameters, {_millions(largest_layer_params)} of them in the largest layer"
    _print_table(what, num_gpus_per_node, num_nodes, rows)


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print the same table as `..._all_cold` for an existing model, and windlass's own figures."""
    estimate_zero2_model_states_mem_needs_all_cold(
        model_to_params(model)[0], num_gpus_per_node, num_nodes, additional_buffer_factor
    )
    _print_planned(model, 2, num_gpus_per_node, num_nodes, ((True, False), (False, False)))


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print the same table as `..._all_cold` for an existing model, and windlass's own figures."""
    estimate_zero3_model_states_mem_needs_all_cold(
        *model_to_params(model), num_gpus_per_node, num_nodes, additional_buffer_factor
    )
    _print_planned(model, 3, num_gpus_per_node, num_nodes, ((True, True), (True, False), (False, False)))


def model_to_params(model: nn.Module) -> tuple[int, int]:
    """Return the number of elements in all parameters (shared ones once), and in the largest single module."""
    total = sum({id(parameter): parameter.numel() for parameter in model.parameters()}.values())
    largest = max((sum(p.numel() for p in module.parameters(recurse=False)) for module in model.modules()), default=0)
    return total, largest


def _print_planned(
    model: nn.Module, stage: int, gpus: int, nodes: int, offloads: tuple[tuple[bool, bool], ...]
) -> None:
    """Print the memory that `windlass plan` predicts during the optimizer step, without activations.

    Args:
        offloads: flags of optimizer and parameter offload, for each row.
    """
    rows = []
    for optimizer, parameters in offloads:
        zero: dict[str, Any] = {"stage": stage}
        flags = _offload_flags(parameters, optimizer) if stage == 3 else (("optimizer", optimizer),)
        zero |= {f"offload_{name}": {"device": "cpu"} for name, offloaded in flags if offloaded}
        config = load_config(
            {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": zero}
        )
        run = RunShape(gpus * nodes, target=Target("cuda", "nccl"), activations=0)
        step = plan_memory(model, config, run).moments["step"]
        places = [f"offload_{name}={'cpu' if offloaded else 'none'}" for name, offloaded in flags]
        rows.append((gpus * step.total(HOST), step.total(DEVICE), ", ".join(places)))
    print("The same by windlass's own layout, with bf16 and Adam, buffers included:")
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
