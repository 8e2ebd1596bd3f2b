"""Layers of a model that compute on a part of the sequence, and modules that need full sequences."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from windlass.base.errors import ModelError
from windlass.parallel.tensor.block_tracing import find_blocks
from windlass.parallel.tensor.linear_layers import as_linear_layer, is_inside
from windlass.parallel.tensor.tensor_parallel_plan import ShardStyle, TensorParallelPlan


@dataclass
class LayerStack:
    """List of consecutive layers between which hidden states are sharded along the sequence.

    Attributes:
        layers: names of the layers.
        full_sequence_modules: modules in these layers that receive full sequences and compute the same on all ranks.
        chains: names of chains; each is one or more column-parallel layers, which all-gather the sequence, and a
            row-parallel layer, which reduce-scatters it.
        partial_parameters: parameters that are applied to a part of the sequence only.
    """

    layers: list[str]
    full_sequence_modules: list[str] = field(default_factory=list)
    chains: set[str] = field(default_factory=set)
    partial_parameters: list[str] = field(default_factory=list)


def find_layer_stacks(model: nn.Module, plan: TensorParallelPlan) -> list[LayerStack]:
    """Return the layer stacks of a model. The plan shards a module in each of their layers.

    A layer without shards ends a stack: it needs full sequences, or it is a stub for a layer of another pipeline stage.

    Direct parameters and norms of a layer are applied token by token. Attention and feed-forward modules with only
    sharded parameters all-gather the sequence and reduce-scatter it again, at the same cost as without sequence
    sharding. Any other module with a matrix (a router and its experts, replicated attention) receives full sequences.

    Raises:
        ModelError: the model has no module list with sharded layers, the first or the last layer of a list occurs
            in the list again, or a chain extends beyond its module.
    """
    stacks: list[LayerStack] = []
    list_before: str | None = None  # name of the list whose element was added last
    for name, layer in find_blocks(model):
        if any(is_inside(name, outer) for stack in stacks for outer in stack.layers):
            continue  # a layer of a list inside another layer
        if not _has_forward(layer):
            list_before = None
            continue  # a list inside the list is never called; its elements are layers
        if not name or not any(shard.rank_ranges for shard in plan.shards if is_inside(shard.name, name)):
            list_before = None
            continue
        if name.rpartition(".")[0] != list_before:
            stacks.append(LayerStack([]))
        list_before = name.rpartition(".")[0]
        stacks[-1].layers.append(name)
        _add_layer(name, layer, plan, stacks[-1])
    if not stacks:
        raise ModelError(
            "tp_sequence_norms shards activations between the layers of a ModuleList, and the model has no ModuleList "
            "with sharded layers; leave out tp_sequence_norms"
        )
    for stack in stacks:
        _check_ends(model, stack)
    return stacks


def _check_ends(model: nn.Module, stack: LayerStack) -> None:
    """Raise a ModelError if the first or last layer occurs in its list again, since its hooks would run there too."""
    layers = [model.get_submodule(name) for name in stack.layers]
    first, last = layers[0], layers[-1]
    holder = stack.layers[0].rpartition(".")[0]
    # `children()` would leave out a layer that is in the list again
    called = [module for module in model.get_submodule(holder)._modules.values() if module in layers]
    if len(layers) > 1 and (called.count(first), called.count(last), called[-1]) != (1, 1, last):
        raise ModelError(
            f"tp_sequence_norms shards the sequence at the first layer of {holder or 'the model'} and gathers it after "
            "the last one, and one of the two is in the list more than once; leave out tp_sequence_norms"
        )


def _add_layer(name: str, layer: nn.Module, plan: TensorParallelPlan, stack: LayerStack) -> None:
    children, holders = _called_children(name, layer)
    inside = [inner for inner, child in children.items() if not _is_token_wise(inner, child, plan)]
    if any(heads.module_name == name for heads in plan.head_partitions):
        inside = [name]  # the layer is an attention module: its heads, norms and residual need the full sequence
    for inner in inside:
        if any(
            not is_inside(shard.name, inner) for chain in _chains_in(inner, plan) for shard in plan.chain_shards(chain)
        ):
            raise ModelError(
                f"tp_sequence_norms can't shard the sequence around {inner}: a chain of layers begins in it and ends "
                f"outside; leave out tp_sequence_norms, or replicate its layers by parallel.tensor_table"
            )
    stack.full_sequence_modules += inside
    stack.chains |= {chain for chain in _chains_in(name, plan) if not any(is_inside(chain, inner) for inner in inside)}
    for parameter, value in layer.named_parameters(prefix=name):
        holder = parameter.rpartition(".")[0]
        shard = plan.shard_of(parameter) or plan.shard_of(holder)
        is_vector = value.dim() <= 1 or holder in holders  # a direct parameter may be [1, 1, features]
        if is_vector and shard is None and not any(is_inside(parameter, inner) for inner in inside):
            stack.partial_parameters.append(parameter)


def _called_children(name: str, layer: nn.Module) -> tuple[dict[str, nn.Module], set[str]]:
    """Return the modules that the forward of a layer calls, by name, and the names of the layer and of the containers
    around these modules. A container without a forward, such as a list of modules, is never called itself.
    """
    found: dict[str, nn.Module] = {}
    holders = {name}
    for leaf, child in layer.named_children():
        inner = f"{name}.{leaf}"
        if not _has_forward(child):
            called, containers = _called_children(inner, child)
            found.update(called)
            holders |= containers
        else:
            found[inner] = child
    return found, holders


def _has_forward(module: nn.Module) -> bool:
    """Return True if a module can be called; False for a container such as `nn.ModuleList`."""
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def _chains_in(name: str, plan: TensorParallelPlan) -> set[str]:
    return {shard.chain for shard in plan.shards if shard.chain and (shard.name == name or is_inside(shard.name, name))}


def _is_token_wise(name: str, child: nn.Module, plan: TensorParallelPlan) -> bool:
    """Return True if a module can receive a part of the sequence: it has only norms and sharded layers, which gather
    and scatter the sequence.
    """
    here = [shard for shard in plan.shards if shard.name == name or is_inside(shard.name, name)]
    if any(
        shard.style
        not in (ShardStyle.COLUMN, ShardStyle.COLUMN_SHARED, ShardStyle.ROW, ShardStyle.PARAMETER, ShardStyle.PARTIAL)
        for shard in here
    ):
        return False
    attention = [heads.module_name for heads in plan.head_partitions]
    for inner, module in child.named_modules(prefix=name):
        held = any(is_inside(inner, holder) or inner == holder for holder in attention)
        for parameter, value in module.named_parameters(prefix=inner, recurse=False):
            known = plan.shard_of(parameter) is not None or plan.shard_of(inner) is not None
            if not known and (value.dim() > 1 or held or as_linear_layer(inner, module) is not None):
                return False
    return True
