"""Which layers of a model compute on a part of the sequence, and where whole sequences are needed."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from windlass.base.errors import ModelError
from windlass.parallel.tensor.block_tracing import find_blocks
from windlass.parallel.tensor.linear_layers import as_linear_layer, is_inside
from windlass.parallel.tensor.tensor_parallel_plan import ShardStyle, TensorParallelPlan


@dataclass
class LayerStack:
    """A list of layers, one after the other, between which hidden states are cut.

    Attributes:
        layers: their names.
        whole: modules in them that are given whole sequences and compute the same on all ranks.
        chains: whose columns gather parts of the sequence and whose row scatters them.
        parts: parameters that see only a part of the sequence.
    """

    layers: list[str]
    full_sequence_modules: list[str] = field(default_factory=list)
    chains: set[str] = field(default_factory=set)
    partial_parameters: list[str] = field(default_factory=list)


def find_layer_stacks(model: nn.Module, plan: TensorParallelPlan) -> list[LayerStack]:
    """The stacks of a model of which the plan cuts something.

    What a layer holds directly, and its norms, compute token by token. Attention and feed-forward layers whose
    parameters are all cut gather the sequence and scatter it again, at no more cost than without. Any other module with
    a matrix (a router and its experts, attention that stays whole) is given whole sequences.

    Raises:
        ModelError: the model has no list of layers, or one whose chains leave it.
    """
    stacks: dict[str, LayerStack] = {}
    for name, layer in find_blocks(model):
        if name and any(cut.rank_ranges for cut in plan.shards if is_inside(cut.name, name)):
            stack = stacks.setdefault(name.rpartition(".")[0], LayerStack([]))
            stack.layers.append(name)
            _add_layer(name, layer, plan, stack)
    if not stacks:
        raise ModelError(
            "sequence_norms cuts activations between the layers of a ModuleList, and the model has none with layers "
            "that are cut; leave sequence_norms out"
        )
    return list(stacks.values())


def _add_layer(name: str, layer: nn.Module, plan: TensorParallelPlan, stack: LayerStack) -> None:
    inside: list[str] = []
    for leaf, child in layer.named_children():
        inner = f"{name}.{leaf}"
        if not _is_token_wise(inner, child, plan):
            inside.append(inner)
    for inner in inside:
        if any(not is_inside(cut.name, inner) for chain in _chains_in(inner, plan) for cut in plan.chain_shards(chain)):
            raise ModelError(
                f"sequence_norms can't cut the sequence around {inner}: a chain of layers begins in it and ends "
                f"elsewhere; leave sequence_norms out, or its layers whole by parallel.tensor_table"
            )
    stack.full_sequence_modules += inside
    stack.chains |= {chain for chain in _chains_in(name, plan) if not any(is_inside(chain, inner) for inner in inside)}
    for parameter, value in layer.named_parameters(prefix=name):
        cut = plan.shard_of(parameter) or plan.shard_of(parameter.rpartition(".")[0])
        if value.dim() == 1 and cut is None and not any(is_inside(parameter, inner) for inner in inside):
            stack.partial_parameters.append(parameter)


def _chains_in(name: str, plan: TensorParallelPlan) -> set[str]:
    return {cut.chain for cut in plan.shards if cut.chain and (cut.name == name or is_inside(cut.name, name))}


def _is_token_wise(name: str, child: nn.Module, plan: TensorParallelPlan) -> bool:
    """Its layers are all cut, so that it may gather and scatter; or it has only norms."""
    here = [cut for cut in plan.shards if cut.name == name or is_inside(cut.name, name)]
    if any(
        cut.style
        not in (ShardStyle.COLUMN, ShardStyle.COLUMN_SHARED, ShardStyle.ROW, ShardStyle.PARAMETER, ShardStyle.PARTIAL)
        for cut in here
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
