"""A model is cut over the ranks of an axis, in place."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from windlass.base.errors import ConfigError, ModelError
from windlass.comm.axis import Axis
from windlass.parallel.placement import placement_of
from windlass.parallel.tensor.adapters_cut import cut_adapters
from windlass.parallel.tensor.attention_cut import adapt_attention
from windlass.parallel.tensor.build import build_plan
from windlass.parallel.tensor.cutting import cut_parameter, see_a_part
from windlass.parallel.tensor.draws import Draws, agree, draws_numbers
from windlass.parallel.tensor.embedding_cut import adapt_embedding
from windlass.parallel.tensor.entrance import Entrance
from windlass.parallel.tensor.experts_cut import Share, adapt_experts
from windlass.parallel.tensor.head import adapt_head
from windlass.parallel.tensor.linear_cut import ColumnInput, cut_column, cut_row, cut_shared, cut_tail
from windlass.parallel.tensor.linear_layers import Linear, below, linear, parents
from windlass.parallel.tensor.plan import Cut, Plan, Style
from windlass.parallel.tensor.sequence_cut import (
    DrawsEnd,
    GatheredInput,
    LayerInput,
    LayerOutput,
    SequenceCut,
    WholeInside,
)
from windlass.parallel.tensor.sequence_norms import Stack, find_stacks
from windlass.parallel.tensor.shares import length


def apply_tensor_parallel(
    model: nn.Module,
    axis: Axis,
    *,
    table: Mapping[str, str] | None = None,
    sequence_norms: bool = False,
    overlap_chunks: int = 1,
) -> Plan:
    """Cut a model over an axis whose ranks compute the same samples; nothing changes on an axis of one rank.

    Parameters keep their names and become this rank's part of themselves, which `placement_of` tells; a model may be
    whole, with the same values on all ranks, or on the meta device. Classes of modules stay what they are: single
    modules get hooks, some a forward of their own. Losses and gradients are those of the whole model: of a parameter
    that is cut the part, of one that is not the whole, but where its placement says `parts`.

    See `build_plan` for what is cut, `adapt_head` for logits and the loss, [Note: dropout in cut layers] for random
    numbers.

    Args:
        model: that is cut. Experts may be spread over other ranks already.
        axis: of tensor parallelism, usually "tp".
        table: for models that don't tell how; see `read_table`.
        sequence_norms: hidden states between layers are cut along the sequence, so norms and residuals are computed,
            and kept for backward, in parts (see `find_stacks`).
        overlap_chunks: tokens of each sum over ranks are cut into so many parts; while one travels, the next is
            computed.

    Returns:
        What was done.

    Raises:
        ConfigError: a table or numbers that can't be honoured.
        ModelError: a module can't be cut; nothing was changed.
    """
    if overlap_chunks < 1:
        raise ConfigError(f"overlap_chunks = {overlap_chunks}; it is at least 1")
    if sequence_norms and overlap_chunks > 1:
        raise ConfigError(
            f"sequence_norms leaves no all-reduce to overlap, and overlap_chunks is {overlap_chunks}; take one of them"
        )
    for name, parameter in model.named_parameters():
        if axis.name in placement_of(parameter).cut:
            raise ModelError(f"{name} is cut over {axis.name} already; cut a model once")
    plan = build_plan(model, axis.size, table)
    stacks = find_stacks(model, plan) if sequence_norms else []
    if axis.size > 1:
        _Application(model, axis, plan, stacks, overlap_chunks).run()
    return plan


class _Application:
    """The plan, carried out on one model."""

    def __init__(self, model: nn.Module, axis: Axis, plan: Plan, stacks: list[Stack], chunks: int) -> None:
        self._model, self._axis, self._plan, self._chunks = model, axis, plan, chunks
        self._modules = dict(model.named_modules())
        self._parameters = dict(model.named_parameters(remove_duplicate=False))
        self._draws = draws_numbers(model)
        self._entrances: dict[str, Entrance] = {}
        self._stacks = [(stack, SequenceCut(axis)) for stack in stacks]
        self._cut: set[int] = set()

    def run(self) -> None:
        """Cut everything; parameters first by their chains, then what is beside."""
        if self._draws:
            agree(self._axis)
        for cut in self._plan.cuts:
            self._one(cut)
        for heads in self._plan.heads:
            self._attention(heads.name)
        for stack, sequence in self._stacks:
            self._stack(stack, sequence)

    def _one(self, cut: Cut) -> None:
        axis, module = self._axis, self._modules.get(cut.name)
        if cut.style is Style.PARAMETER:
            self._part(cut.name, cut.dim, cut)
        elif cut.style is Style.PARTIAL and module is None:
            see_a_part(self._parameters[cut.name], axis.name)
        elif module is None:
            return
        elif cut.style is Style.PARTIAL:
            for parameter in module.parameters():
                see_a_part(parameter, axis.name)
        elif cut.style is Style.VOCABULARY:
            self._vocabulary(cut, module)
        elif cut.style is Style.EXPERTS:
            self._experts(cut, module)
        elif cut.style is Style.IDENTITY:
            module.register_forward_hook(Share(axis))
        else:
            layer = linear(cut.name, module)
            if layer is not None:
                self._linear(cut, layer)

    def _linear(self, cut: Cut, layer: Linear) -> None:
        if cut.style is Style.TAIL:
            cut_tail(layer, cut.size, self._axis)
            return
        entrance, sequence = self._entrance(cut.chain), self._sequence(cut.chain)
        if cut.style in (Style.ROW, Style.SPLIT):
            cut_row(layer, cut, entrance, sequence, self._chunks)
            cut_adapters(layer, cut, entrance, sequence, self._chunks)
            return
        gathered = sequence is not None and cut.chain in self._with_heads()  # by the module, for all its layers at once
        before = None if gathered else ColumnInput(entrance, sequence)
        (cut_shared if cut.style is Style.SHARED else cut_column)(layer, cut, entrance, before)
        cut_adapters(layer, cut, entrance, None, self._chunks)

    def _part(self, name: str, dim: int, cut: Cut) -> None:
        """Cut one parameter; what modules share is cut once."""
        parameter = self._parameters[name]
        if id(parameter) not in self._cut:
            self._cut.add(id(parameter))
            cut_parameter(name, parameter, dim, cut.shares[self._axis.index], self._axis.name)

    def _vocabulary(self, cut: Cut, module: nn.Module) -> None:
        layer = linear(cut.name, module)
        self._part(f"{cut.name}.weight", layer.output_dim if layer is not None else 0, cut)
        if isinstance(module, nn.Embedding):
            adapt_embedding(module, cut, self._axis)
        elif layer is not None:
            if module._parameters.get("bias") is not None:
                self._part(f"{cut.name}.bias", 0, cut)
            adapt_head(layer, cut, self._axis, self._model)

    def _experts(self, cut: Cut, module: nn.Module) -> None:
        second = next(one for one in self._plan.chain(cut.name) if one.name.endswith(".down_proj"))
        here = length(second.shares[self._axis.index])
        bias = next((one.name for one in self._plan.chain(cut.name) if one.style is Style.PARTIAL), None)
        adapt_experts(module, self._axis, second.size, here, bias.rpartition(".")[2] if bias else None)

    def _attention(self, name: str) -> None:
        heads = next(heads for heads in self._plan.heads if heads.name == name)
        row = self._row_of(name)
        adapt_attention(self._modules[name], heads, self._axis.index, row.size)
        sequence = self._sequence(row.chain)
        if sequence is not None:
            gathered = GatheredInput(self._entrance(row.chain), sequence)
            self._modules[name].register_forward_pre_hook(gathered, with_kwargs=True)

    def _row_of(self, attention: str) -> Cut:
        chain = next(cut.chain for cut in self._plan.cuts if below(cut.name, attention) and cut.chain)
        return next(cut for cut in self._plan.chain(chain) if cut.name == chain)

    def _with_heads(self) -> set[str]:
        return {self._row_of(heads.name).chain for heads in self._plan.heads}

    def _entrance(self, chain: str) -> Entrance:
        """The entrance of a chain; random numbers become common again where the module ends that holds the chain."""
        if chain not in self._entrances:
            draws = Draws(self._axis) if self._draws else None
            self._entrances[chain] = Entrance(self._axis, draws)
            if draws is not None:
                members = [cut.name for cut in self._plan.chain(chain)]
                holders = (one for one in parents(chain) if all(below(member, one) for member in members))
                holder = next(one for one in holders if not isinstance(self._modules[one], nn.ModuleList))
                self._modules[holder].register_forward_hook(DrawsEnd(draws), always_call=True)
        return self._entrances[chain]

    def _sequence(self, chain: str) -> SequenceCut | None:
        return next((sequence for stack, sequence in self._stacks if chain in stack.chains), None)

    def _stack(self, stack: Stack, sequence: SequenceCut) -> None:
        """Hidden states are cut before the first layer, and put together after the last one."""
        for parameter in stack.parts:
            see_a_part(self._parameters[parameter], self._axis.name)
        draws = Draws(self._axis) if self._draws else None
        for name in stack.layers:
            layer = self._modules[name]
            before = LayerInput(sequence, name == stack.layers[0], draws)
            layer.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
            if draws is not None:
                layer.register_forward_hook(DrawsEnd(draws), always_call=True)
        for salt, name in enumerate(stack.whole):
            inside = WholeInside(sequence, salt if self._draws else None)
            self._modules[name].register_forward_pre_hook(inside.before, prepend=True, with_kwargs=True)
            self._modules[name].register_forward_hook(inside.after)
        self._modules[stack.layers[-1]].register_forward_hook(LayerOutput(sequence))
