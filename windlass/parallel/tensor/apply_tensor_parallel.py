"""Application of tensor parallelism to a model, in place."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from windlass.base.errors import ConfigError, ModelError
from windlass.comm.mesh_axis import MeshAxis
from windlass.kernels.packed_linear import PackedMatrix
from windlass.parallel.placement import get_placement
from windlass.parallel.tensor.embedding_sharding import shard_embedding
from windlass.parallel.tensor.experts_sharding import DivideByRanksHook, fit_experts_to_local_features
from windlass.parallel.tensor.input_hooks import ChainInputHook
from windlass.parallel.tensor.layer_stacks import LayerStack, find_layer_stacks
from windlass.parallel.tensor.linear_layers import LinearLayer, as_linear_layer, is_inside, iterate_parent_names
from windlass.parallel.tensor.linear_sharding import (
    ColumnInputHook,
    hook_tail_features,
    select_needed_rows,
    shard_column,
    shard_row,
)
from windlass.parallel.tensor.local_attention_heads import fit_attention_to_local_heads
from windlass.parallel.tensor.local_rng import LocalRng, has_dropout, sync_rng_states
from windlass.parallel.tensor.lora_sharding import shard_adapters
from windlass.parallel.tensor.output_head_sharding import shard_output_head
from windlass.parallel.tensor.packed_sharding import plan_packed_part
from windlass.parallel.tensor.parameter_sharding import mark_partial_gradient, shard_parameter
from windlass.parallel.tensor.plan_builder import build_tensor_parallel_plan
from windlass.parallel.tensor.rank_ranges import count_elements
from windlass.parallel.tensor.stack_sequence_sharding import (
    ArgumentResultHook,
    AttentionGatherHook,
    FullSequenceHook,
    LocalRngEndHook,
    SizeErrorNote,
    StackInputHook,
    StackOutputHook,
    StackSequenceSharding,
    WholeCallHooks,
)
from windlass.parallel.tensor.tensor_parallel_plan import ModuleShard, ShardStyle, TensorParallelPlan


def apply_tensor_parallel(
    model: nn.Module,
    axis: MeshAxis,
    *,
    tensor_table: Mapping[str, str] | None = None,
    tp_sequence_norms: bool = False,
    tp_overlap_chunks: int = 1,
) -> TensorParallelPlan:
    """Shard a model in place over an axis whose ranks compute the same samples. Nothing changes on an axis of one rank.

    Parameters keep their names and become this rank's part, as recorded by `set_placement`. The model may be a full
    model, with the same values on all ranks, or be on the meta device. Module classes do not change: some modules get
    hooks, some a new forward. Losses are those of the full model. The gradient of a sharded parameter is the local part
    of the full gradient. The gradient of a replicated parameter is the full gradient, unless its placement has
    `partial_axes`.

    See `build_tensor_parallel_plan` for the choice of shards, `shard_output_head` for logits and the loss, and [Note:
    dropout in sharded layers] for random numbers.

    Args:
        model: model to shard. Its experts may already be distributed over other ranks.
        axis: mesh axis of tensor parallelism, usually "tp".
        tensor_table: sharding of modules that the model does not describe itself; see `read_tensor_table`.
        tp_sequence_norms: shard hidden states between layers along the sequence, so that each rank computes norms and
            residuals, and saves them for backward, for its part only (see `find_layer_stacks`).
        tp_overlap_chunks: split the tokens of each row-parallel sum into this many chunks, so that the all-reduce of
            one overlaps the product of the next.

    Returns:
        The plan that was applied.

    Raises:
        ConfigError: the table or `tp_overlap_chunks` is invalid, or `tp_sequence_norms` is combined with chunks.
        ModelError: a module cannot be sharded, or the model is sharded over the axis already. The model is unchanged,
            unless a parameter is used by two modules with different shards, or is sharded over another axis in the same
            dimension.
    """
    if tp_overlap_chunks < 1:
        raise ConfigError(f"tp_overlap_chunks = {tp_overlap_chunks}; write at least 1")
    if tp_sequence_norms and tp_overlap_chunks > 1:
        raise ConfigError(
            f"tp_sequence_norms leaves no all-reduce to overlap, and tp_overlap_chunks is {tp_overlap_chunks}; use "
            "only one of the two"
        )
    for name, parameter in model.named_parameters():
        if axis.name in get_placement(parameter).sharded_axes:
            raise ModelError(f"{name} is sharded over {axis.name} already; shard a model once")
    plan = build_tensor_parallel_plan(model, axis.size, tensor_table)
    stacks = find_layer_stacks(model, plan) if tp_sequence_norms else []
    if axis.size > 1:
        _PlanApplier(model, axis, plan, stacks, tp_overlap_chunks).run()
    return plan


_DIVIDED = (ShardStyle.COLUMN, ShardStyle.COLUMN_GATHERED, ShardStyle.ROW, ShardStyle.ROW_SPLIT)


class _PlanApplier:
    """Application of a plan to one model."""

    def __init__(
        self,
        model: nn.Module,
        axis: MeshAxis,
        plan: TensorParallelPlan,
        stacks: list[LayerStack],
        tp_overlap_chunks: int,
    ) -> None:
        self._model, self._axis, self._plan, self._tp_overlap_chunks = model, axis, plan, tp_overlap_chunks
        self._modules = dict(model.named_modules())
        self._parameters = dict(model.named_parameters(remove_duplicate=False))
        self._has_dropout = has_dropout(model)
        self._input_hooks: dict[str, ChainInputHook] = {}
        self._stacks = [
            (stack, StackSequenceSharding(axis, {one.rpartition(".")[0] for one in stack.partial_parameters}))
            for stack in stacks
        ]

    def run(self) -> None:
        """Apply all shards of the plan, then adapt attention modules to their local heads and shard the sequence of
        layer stacks.
        """
        self._check_packed_layers()
        sync_rng_states(self._axis)
        for shard in self._plan.shards:
            self._apply_shard(shard)
        for heads in self._plan.head_partitions:
            self._fit_attention(heads.module_name)
        for stack, sequence in self._stacks:
            self._shard_stack(stack, sequence)

    def _check_packed_layers(self) -> None:
        """Raise on all ranks, before the first module is sharded, if a packed layer cannot be divided."""
        for shard in self._plan.shards:
            layer = as_linear_layer(shard.name, module) if (module := self._modules.get(shard.name)) else None
            if layer is None or not isinstance(layer.module, PackedMatrix) or shard.style not in _DIVIDED:
                continue
            rows = shard.style in (ShardStyle.ROW, ShardStyle.ROW_SPLIT)
            for ranges in shard.rank_ranges:
                dim = layer.input_dim if rows else layer.output_dim
                plan_packed_part(layer.name, layer.module, dim, ranges, self._axis.name)

    def _apply_shard(self, shard: ModuleShard) -> None:
        axis, module = self._axis, self._modules.get(shard.name)
        if shard.style is ShardStyle.PARAMETER:
            self._shard_parameter(shard.name, shard.dim, shard)
        elif shard.style is ShardStyle.PARTIAL and module is None:
            mark_partial_gradient(self._parameters[shard.name], axis.name)
        elif module is None:
            return
        elif shard.style is ShardStyle.PARTIAL:
            for parameter in module.parameters():
                mark_partial_gradient(parameter, axis.name)
        elif shard.style is ShardStyle.VOCABULARY:
            self._shard_vocabulary(shard, module)
        elif shard.style is ShardStyle.EXPERTS:
            self._shard_experts(shard, module)
        elif shard.style is ShardStyle.IDENTITY:
            module.register_forward_hook(DivideByRanksHook(axis))
        else:
            layer = as_linear_layer(shard.name, module)
            if layer is not None:
                self._shard_linear(shard, layer)

    def _shard_linear(self, shard: ModuleShard, layer: LinearLayer) -> None:
        if shard.style is ShardStyle.TAIL_FEATURES:
            hook_tail_features(layer, shard.sharded_size, self._axis)
            return
        input_hook, sequence = self._input_hook(shard.chain), self._sequence_sharding(shard.chain)
        if shard.style in (ShardStyle.ROW, ShardStyle.ROW_SPLIT):
            shard_row(layer, shard, input_hook, sequence, self._tp_overlap_chunks)
            shard_adapters(layer, shard, input_hook, sequence, self._tp_overlap_chunks)
            return
        gathered = (
            sequence is not None and shard.chain in self._attention_chains()
        )  # the hook on the attention module gathers the sequence once for all its column-parallel layers
        before = None if gathered else ColumnInputHook(input_hook, sequence)
        (select_needed_rows if shard.style is ShardStyle.COLUMN_SHARED else shard_column)(
            layer, shard, input_hook, before
        )
        shard_adapters(layer, shard, input_hook, None, self._tp_overlap_chunks)

    def _shard_parameter(self, name: str, dim: int, shard: ModuleShard) -> None:
        shard_parameter(name, self._parameters[name], dim, shard.rank_ranges[self._axis.index], self._axis.name)

    def _shard_vocabulary(self, shard: ModuleShard, module: nn.Module) -> None:
        layer = as_linear_layer(shard.name, module)
        self._shard_parameter(f"{shard.name}.weight", layer.output_dim if layer is not None else 0, shard)
        if isinstance(module, nn.Embedding):
            shard_embedding(module, shard, self._axis)
        elif layer is not None:
            if module._parameters.get("bias") is not None:
                self._shard_parameter(f"{shard.name}.bias", 0, shard)
            shard_output_head(layer, shard, self._axis, self._model)

    def _shard_experts(self, shard: ModuleShard, module: nn.Module) -> None:
        second = next(one for one in self._plan.chain_shards(shard.name) if one.name.endswith(".down_proj"))
        here = count_elements(second.rank_ranges[self._axis.index])
        bias = next((one.name for one in self._plan.chain_shards(shard.name) if one.style is ShardStyle.PARTIAL), None)
        fit_experts_to_local_features(
            module, self._axis, second.sharded_size, here, bias.rpartition(".")[2] if bias else None
        )

    def _fit_attention(self, name: str) -> None:
        heads = next(heads for heads in self._plan.head_partitions if heads.module_name == name)
        row = self._output_shard(name)
        fit_attention_to_local_heads(self._modules[name], heads, self._axis, row.sharded_size)
        sequence = self._sequence_sharding(row.chain)
        if sequence is not None:
            members = [shard.name for shard in self._plan.chain_shards(row.chain) if shard.name in self._modules]
            layers = [as_linear_layer(one, self._modules[one]) for one in members if one != row.name]
            widths = {layer.in_features for layer in layers if layer is not None}
            gathered = AttentionGatherHook(name, self._input_hook(row.chain), sequence, widths)
            self._modules[name].register_forward_pre_hook(gathered, with_kwargs=True)

    def _output_shard(self, attention: str) -> ModuleShard:
        chain = next(shard.chain for shard in self._plan.shards if is_inside(shard.name, attention) and shard.chain)
        return next(shard for shard in self._plan.chain_shards(chain) if shard.name == chain)

    def _attention_chains(self) -> set[str]:
        return {self._output_shard(heads.module_name).chain for heads in self._plan.head_partitions}

    def _input_hook(self, chain: str) -> ChainInputHook:
        """Return the input hook of a chain of column- and row-parallel layers. The shared random generator is restored
        when the module that contains the chain returns.
        """
        if chain not in self._input_hooks:
            draws = LocalRng(self._axis) if self._has_dropout else None
            self._input_hooks[chain] = ChainInputHook(self._axis, draws)
            if draws is not None:
                members = [shard.name for shard in self._plan.chain_shards(chain)]
                holders = (
                    one for one in iterate_parent_names(chain) if all(is_inside(member, one) for member in members)
                )
                holder = next(one for one in holders if not isinstance(self._modules[one], nn.ModuleList))
                self._modules[holder].register_forward_hook(LocalRngEndHook(draws), always_call=True)
        return self._input_hooks[chain]

    def _sequence_sharding(self, chain: str) -> StackSequenceSharding | None:
        return next((sequence for stack, sequence in self._stacks if chain in stack.chains), None)

    def _shard_stack(self, stack: LayerStack, sequence_sharding: StackSequenceSharding) -> None:
        """Shard the hidden states before the first layer of the stack, and gather them after the last one."""
        for parameter in stack.partial_parameters:
            mark_partial_gradient(self._parameters[parameter], self._axis.name)
        draws = LocalRng(self._axis) if self._has_dropout else None
        # add these hooks before those of the layers, which run first: a layer may itself be such a module
        for salt, name in enumerate(stack.full_sequence_modules):
            inside = FullSequenceHook(sequence_sharding, salt if self._has_dropout else None)
            self._modules[name].register_forward_pre_hook(inside.pre_forward, prepend=True, with_kwargs=True)
            self._modules[name].register_forward_hook(inside.post_forward)
        for name in stack.layers:
            layer = self._modules[name]
            if isinstance(layer, nn.Sequential):
                WholeCallHooks(layer, name)
            before = StackInputHook(sequence_sharding, name == stack.layers[0], draws)
            layer.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
            for leaf, child in layer.named_children():
                child.register_forward_hook(ArgumentResultHook(f"{name}.{leaf}", sequence_sharding))
            if draws is not None:
                layer.register_forward_hook(LocalRngEndHook(draws), always_call=True)
        self._modules[stack.layers[-1]].register_forward_hook(StackOutputHook(sequence_sharding))
        SizeErrorNote(self._model, {name: self._modules[name] for name in stack.layers})
