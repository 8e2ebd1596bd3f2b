"""Which layers of a model compute on a part of the sequence, and where whole sequences are needed."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from windlass.base.errors import ModelError
from windlass.parallel.tensor.linear_layers import below, linear
from windlass.parallel.tensor.plan import Plan, Style
from windlass.parallel.tensor.tracing import find_blocks


@dataclass
class Stack:
    """A list of layers, one after the other, between which hidden states are cut.

    Attributes:
        layers: their names.
        whole: modules in them that are given whole sequences and compute the same on all ranks.
        chains: whose columns gather parts of the sequence and whose row scatters them.
        parts: parameters that see only a part of the sequence.
    """

    layers: list[str]
    whole: list[str] = field(default_factory=list)
    chains: set[str] = field(default_factory=set)
    parts: list[str] = field(default_factory=list)


def find_stacks(model: nn.Module, plan: Plan) -> list[Stack]:
    """The stacks of a model of which the plan cuts something.

    What a layer holds directly, and its norms, compute token by token. Attention and feed-forward layers whose
    parameters are all cut gather the sequence and scatter it again, at no more cost than without. Any other module with
    a matrix (a router and its experts, attention that stays whole) is given whole sequences.

    Raises:
        ModelError: the model has no list of layers, or one whose chains leave it.
    """
    stacks: dict[str, Stack] = {}
    for name, layer in find_blocks(model):
        if name and any(cut.shares for cut in plan.cuts if below(cut.name, name)):
            stack = stacks.setdefault(name.rpartition(".")[0], Stack([]))
            stack.layers.append(name)
            _arrange(name, layer, plan, stack)
    if not stacks:
        raise ModelError(
            "sequence_norms cuts activations between the layers of a ModuleList, and the model has none with layers "
            "that are cut; leave sequence_norms out"
        )
    return list(stacks.values())


def _arrange(name: str, layer: nn.Module, plan: Plan, stack: Stack) -> None:
    inside: list[str] = []
    for leaf, child in layer.named_children():
        inner = f"{name}.{leaf}"
        if not _token_by_token(inner, child, plan):
            inside.append(inner)
    for inner in inside:
        if any(not below(cut.name, inner) for chain in _chains(inner, plan) for cut in plan.chain(chain)):
            raise ModelError(
                f"sequence_norms can't cut the sequence around {inner}: a chain of layers begins in it and ends "
                f"elsewhere; leave sequence_norms out, or its layers whole by parallel.tensor_table"
            )
    stack.whole += inside
    stack.chains |= {chain for chain in _chains(name, plan) if not any(below(chain, inner) for inner in inside)}
    for parameter, value in layer.named_parameters(prefix=name):
        cut = plan.of(parameter) or plan.of(parameter.rpartition(".")[0])
        if value.dim() == 1 and cut is None and not any(below(parameter, inner) for inner in inside):
            stack.parts.append(parameter)


def _chains(name: str, plan: Plan) -> set[str]:
    return {cut.chain for cut in plan.cuts if cut.chain and (cut.name == name or below(cut.name, name))}


def _token_by_token(name: str, child: nn.Module, plan: Plan) -> bool:
    """Its layers are all cut, so that it may gather and scatter; or it has only norms."""
    here = [cut for cut in plan.cuts if cut.name == name or below(cut.name, name)]
    if any(cut.style not in (Style.COLUMN, Style.SHARED, Style.ROW, Style.PARAMETER, Style.PARTIAL) for cut in here):
        return False
    attention = [heads.name for heads in plan.heads]
    for inner, module in child.named_modules(prefix=name):
        held = any(below(inner, holder) or inner == holder for holder in attention)
        for parameter, value in module.named_parameters(prefix=inner, recurse=False):
            known = plan.of(parameter) is not None or plan.of(inner) is not None
            if not known and (value.dim() > 1 or held or linear(inner, module) is not None):
                return False
    return True
