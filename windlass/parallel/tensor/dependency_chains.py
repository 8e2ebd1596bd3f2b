"""Derivation of shards from plan entries: layers that depend on each other get matching shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from windlass.parallel.tensor.attention_parameters import shard_attention_parameters
from windlass.parallel.tensor.attention_sharding import HeadProjection, shard_attention
from windlass.parallel.tensor.find_language_model import find_language_model
from windlass.parallel.tensor.fused_qkv import (
    FUSED_GATE_UP_NAMES,
    FusedQkvLayout,
    compute_qkv_sections,
    find_fused_qkv_layout,
)
from windlass.parallel.tensor.head_counts import (
    FUSED_NAMES,
    KEY_NAMES,
    VALUE_NAMES,
    count_heads,
    is_attention,
    requires_input_width,
)
from windlass.parallel.tensor.head_partition import HeadPartition, partition_heads
from windlass.parallel.tensor.linear_layers import (
    LinearLayer,
    as_linear_layer,
    has_plain_lora,
    is_inside,
    is_plain_linear,
    iterate_parent_names,
)
from windlass.parallel.tensor.plan_entry import PlanEntry
from windlass.parallel.tensor.rank_ranges import join_sections, make_even_ranges
from windlass.parallel.tensor.tensor_parallel_plan import ModuleShard, ShardStyle, make_cannot_shard_error


@dataclass(frozen=True)
class DependencyChain:
    """Column-parallel layers, and the row-parallel layer that takes their outputs; below, column layers and row layer.

    For a column layer with gathered outputs and without a row layer, `row` is a
    `REPLICATED` entry with the column's name.
    """

    row: PlanEntry
    columns: tuple[PlanEntry, ...]


def find_dependency_chains(entries: Mapping[str, PlanEntry]) -> list[DependencyChain]:
    """Assign to each row layer its column layers: those that name the row layer, otherwise those in the nearest module
    that contains both. A gathered column layer without a row layer is a chain of its own.

    Raises:
        ModelError: a `COLUMN` layer has no row layer, or a `ROW` layer has no column layer.
    """
    rows = [entry for entry in entries.values() if entry.style in (ShardStyle.ROW, ShardStyle.ROW_SPLIT)]
    free = {
        name: entry for name, entry in entries.items() if entry.style in (ShardStyle.COLUMN, ShardStyle.COLUMN_GATHERED)
    }
    found: dict[str, list[PlanEntry]] = {
        row.name: [free.pop(name) for name in _columns_naming_row(free, row)] for row in rows
    }
    for row in sorted(rows, key=lambda entry: -entry.name.count(".")):
        if found[row.name]:
            continue
        holder = next(
            (one for one in iterate_parent_names(row.name) if any(is_inside(name, one) for name in free)), None
        )
        found[row.name] = [free.pop(name) for name in list(free) if holder is not None and is_inside(name, holder)]
    for row in rows:
        if not found[row.name] and row.style is ShardStyle.ROW:
            raise make_cannot_shard_error(row.name, "its input features are sharded, but no column layer computes them")
    for entry in free.values():
        if entry.style is ShardStyle.COLUMN:
            raise make_cannot_shard_error(entry.name, "its output features are sharded, but no row layer consumes them")
    alone = [DependencyChain(PlanEntry(entry.name, ShardStyle.REPLICATED), (entry,)) for entry in free.values()]
    return [*(DependencyChain(row, tuple(found[row.name])) for row in rows), *alone]


def _columns_naming_row(free: Mapping[str, PlanEntry], row: PlanEntry) -> list[str]:
    return [name for name, entry in free.items() if entry.chain and entry.chain == row.name]


_ACTIVATION_NAMES = frozenset(
    {"act", "act_fn", "act_func", "activation", "activation_fn", "activation_func", "activation_function"}
)


def _is_trained_scalar(module: nn.Module) -> bool:
    parameters = list(module.parameters())
    return bool(parameters) and all(parameter.numel() == 1 for parameter in parameters)


def _is_trained(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def _is_trained_number(parameter: nn.Parameter) -> bool:
    return parameter.numel() == 1 and parameter.requires_grad


def _is_between(key: str, parent: str, keys: Sequence[str], columns: Sequence[LinearLayer], row: LinearLayer) -> bool:
    """Return True if child `key` of the sequential module `parent`, with children `keys`, runs after the
    column-parallel layers `columns` and before the row-parallel layer `row`."""

    def place(layer: LinearLayer) -> int | None:
        inside = [at for at, one in enumerate(keys) if f"{layer.name}.".startswith(f"{parent}.{one}.".lstrip("."))]
        return inside[0] if inside else None

    at, last = keys.index(key), place(row)
    first = [found for found in map(place, columns) if found is not None]
    return all(found < at for found in first) and (last is None or at < last)


class ChainResolver:
    """Builder of the shards of chains for `ranks` ranks.

    Args:
        model: model that contains the chains.
        entries: plan entries, including those for single parameters and for norms between layers.
        ranks: size of the axis.
    """

    def __init__(self, model: nn.Module, entries: Mapping[str, PlanEntry], ranks: int) -> None:
        self._modules = dict(model.named_modules())
        self._parameter_names = {parameter: name for name, parameter in model.named_parameters()}  # the first names
        config: Any = getattr(find_language_model(model)[1], "config", None)
        text = getattr(config, "get_text_config", None)
        self._config = text() if callable(text) else config
        self._entries, self._ranks = entries, ranks
        self.head_partitions: list[HeadPartition] = []
        self._activations: set[str] = set()  # names of trained activations that have a shard

    def shards_of(self, chain: DependencyChain) -> list[ModuleShard]:
        """Return the shards of one chain.

        Raises:
            ModelError: sizes do not match, or there are fewer heads than ranks.
        """
        columns = [self._require_linear(entry) for entry in chain.columns]
        if chain.row.style is ShardStyle.REPLICATED:
            return [self._shard_gathered(layer, layer.name) for layer in columns]
        row = self._require_linear(chain.row)
        chain = self._without_gather(chain, columns, row)
        if (
            any(entry.style is ShardStyle.COLUMN_GATHERED for entry in chain.columns)
            or chain.row.style is ShardStyle.ROW_SPLIT
        ):
            return self._shard_gathered_chain(chain, columns, row)
        holder = self._common_module(columns)
        counts = self._head_counts(chain, columns, row, holder)
        if counts is None:
            return self._shard_feed_forward(chain, columns, row)
        return self._shard_attention(chain, columns, row, holder, counts)

    def _require_linear(self, entry: PlanEntry) -> LinearLayer:
        layer = as_linear_layer(entry.name, self._modules[entry.name]) if entry.name in self._modules else None
        if layer is None:
            kind = type(self._modules[entry.name]).__name__ if entry.name in self._modules else "parameter"
            raise make_cannot_shard_error(
                entry.name, f"its style is {entry.style}, but it is a {kind}, not a linear layer"
            )
        if entry.style in (ShardStyle.ROW, ShardStyle.ROW_SPLIT) and not is_plain_linear(layer.module):
            raise make_cannot_shard_error(
                entry.name, f"{type(layer.module).__name__} computes more than a product with its weight"
            )
        if layer.adapter_module is not None and not has_plain_lora(layer.adapter_module):
            raise make_cannot_shard_error(
                entry.name,
                f"its adapters (a {type(layer.adapter_module).__name__} of peft) are DoRA's or another variant of "
                f"LoRA, which "
                "use norms of full weight rows",
            )
        return layer

    def _common_module(self, columns: Sequence[LinearLayer]) -> str:
        """Return the name of the nearest module that contains all column layers."""
        first, *others = columns
        return next(
            one for one in iterate_parent_names(first.name) if all(is_inside(other.name, one) for other in others)
        )

    def _without_gather(
        self, chain: DependencyChain, columns: Sequence[LinearLayer], row: LinearLayer
    ) -> DependencyChain:
        """Remove the gather from a chain with one fused projection, if its sections are known and can be sharded.

        The model's own plan gathers such a projection only because it cannot describe the sections.
        """
        gathers = (
            chain.row.style is ShardStyle.ROW_SPLIT
            and len(columns) == 1
            and chain.columns[0].style is ShardStyle.COLUMN_GATHERED
        )
        if not gathers:
            return chain
        known = columns[0].leaf_name in FUSED_GATE_UP_NAMES and columns[0].out_features == 2 * row.in_features
        known |= (
            columns[0].leaf_name in FUSED_NAMES
            and find_fused_qkv_layout(self._modules[self._common_module(columns)]) is not None
        )
        if not known:
            return chain
        return DependencyChain(
            replace(chain.row, style=ShardStyle.ROW), (replace(chain.columns[0], style=ShardStyle.COLUMN),)
        )

    def _shard_gathered(self, layer: LinearLayer, chain: str) -> ModuleShard:
        shares = make_even_ranges(layer.out_features, self._ranks)
        return ModuleShard(
            layer.name, ShardStyle.COLUMN_GATHERED, layer.out_features, shares, f"{layer.out_features} features", chain
        )

    def _shard_gathered_chain(
        self, chain: DependencyChain, columns: Sequence[LinearLayer], row: LinearLayer
    ) -> list[ModuleShard]:
        """Return the shards of a chain with gathered intermediate features, which may be split at any feature."""
        if chain.row.style is not ShardStyle.ROW_SPLIT or any(
            entry.style is not ShardStyle.COLUMN_GATHERED for entry in chain.columns
        ):
            raise make_cannot_shard_error(
                row.name,
                "the outputs of some column layers of its chain are gathered, and those of other column layers are not",
            )
        shard = ModuleShard(
            row.name,
            ShardStyle.ROW_SPLIT,
            row.in_features,
            make_even_ranges(row.in_features, self._ranks),
            f"{row.in_features} features",
            row.name,
        )
        return [*(self._shard_gathered(layer, row.name) for layer in columns), shard]

    def _head_counts(
        self, chain: DependencyChain, columns: Sequence[LinearLayer], row: LinearLayer, module_name: str
    ) -> tuple[int, int] | None:
        """Return the numbers of query heads and key heads, or None if the chain has no heads."""
        declared_heads = [entry.heads for entry in (*chain.columns, chain.row) if entry.heads]
        if declared_heads:
            each = [count for heads in declared_heads for count in heads]
            return max(each), min(each)
        module = self._modules[module_name]
        if not is_attention(module, columns):
            return None
        return count_heads(module_name, module, self._config, columns, row)

    def _shard_feed_forward(
        self, chain: DependencyChain, columns: Sequence[LinearLayer], row: LinearLayer
    ) -> list[ModuleShard]:
        """Return the shards of a feed-forward chain. Each section of a column layer's output has as many features as
        the row layer's input."""
        shares = make_even_ranges(row.in_features, self._ranks)
        if row.in_features < self._ranks:
            raise make_cannot_shard_error(row.name, f"{row.in_features} features are too few for {self._ranks} ranks")
        shards = []
        for entry, layer in zip(chain.columns, columns, strict=True):
            sections = entry.sections or (layer.out_features,)
            if (
                not entry.sections
                and layer.leaf_name in FUSED_GATE_UP_NAMES
                and layer.out_features == 2 * row.in_features
            ):
                sections = (row.in_features, row.in_features)
            if sum(sections) != layer.out_features or set(sections) != {row.in_features}:
                raise make_cannot_shard_error(
                    layer.name,
                    f"its {'+'.join(map(str, sections))} of {layer.out_features} output features don't match the "
                    f"{row.in_features} input features of {row.leaf_name}",
                    (layer.name, f"column:{row.in_features}+{row.in_features}"),
                    (row.name, "row"),
                )
            what = f"{'2 x ' if len(sections) == 2 else ''}{row.in_features} features"
            both = join_sections([(size, shares) for size in sections])
            shards.append(ModuleShard(layer.name, ShardStyle.COLUMN, layer.out_features, both, what, row.name))
        return [
            *shards,
            *self._shard_activations(columns, row),
            ModuleShard(row.name, ShardStyle.ROW, row.in_features, shares, f"{row.in_features} features", row.name),
        ]

    def _shard_activations(self, columns: Sequence[LinearLayer], row: LinearLayer) -> list[ModuleShard]:
        """Return the shards of trained activations between the column layers and the row layer, whose parameters all
        features share. Each rank computes their gradient for its features only.

        Raises:
            ModelError: a trained activation or another trained number may be between these layers or outside of them.
        """
        members = [layer.name for layer in (*columns, row)]
        holder = next(one for one in iterate_parent_names(row.name) if all(is_inside(name, one) for name in members))
        names = {module: name for name, module in self._modules.items()}  # a shared module has its first name
        shards = []
        for parent in dict.fromkeys([holder, *(layer.name.rpartition(".")[0] for layer in columns)]):
            module = self._modules[parent]
            inner = {
                key: child for key, child in module._modules.items() if child is not None and _is_trained_scalar(child)
            }
            if isinstance(module, nn.Sequential):
                keys = [key for key in inner if _is_between(key, parent, list(module._modules), columns, row)]
            else:
                keys = [key for key in inner if key in _ACTIVATION_NAMES or isinstance(inner[key], nn.PReLU)]
            keys = [key for key in keys if names[inner[key]] not in self._entries]
            found = [names[inner[key]] for key in keys]
            is_certain = isinstance(module, nn.Sequential) or (len(keys) == 1 and keys[0] in _ACTIVATION_NAMES)
            unknown = [] if is_certain else list(found)
            if not isinstance(module, nn.Sequential):  # the forward of any other class may use them anywhere
                others = [child for key, child in inner.items() if key not in keys and _is_trained(child)]
                direct = [one for one in module._parameters.values() if one is not None and _is_trained_number(one)]
                unknown += [names[child] for child in others] + [self._parameter_names[one] for one in direct]
            unknown = [name for name in unknown if name not in self._entries]
            if unknown:
                raise make_cannot_shard_error(
                    unknown[0],
                    f"it trains one number for all features, and it is unknown whether it is between "
                    f"{columns[0].name} and {row.name}, where each rank computes a part of its gradient (partial), "
                    "or not (replicated)",
                    (unknown[0], "partial"),
                )
            shards += [ModuleShard(name, ShardStyle.PARTIAL, chain=row.name) for name in found]
        shards = [one for one in shards if one.name not in self._activations]
        self._activations.update(one.name for one in shards)
        return shards

    def _shard_attention(
        self,
        chain: DependencyChain,
        columns: Sequence[LinearLayer],
        row: LinearLayer,
        module_name: str,
        head_counts: tuple[int, int],
    ) -> list[ModuleShard]:
        query, key = head_counts
        if query < self._ranks:
            raise make_cannot_shard_error(
                module_name,
                f"{query} query heads are too few for {self._ranks} ranks; use at most {query}, or replicate it",
                *((name, "replicated") for name in (*(layer.name for layer in columns), row.name)),
            )
        if self._ranks > 1 and requires_input_width(self._modules[module_name], row.leaf_name):
            raise make_cannot_shard_error(
                module_name,
                f"the forward of {type(self._modules[module_name]).__name__} gives its result as many features as its "
                "input has, and the heads of one rank have fewer; replicate it",
                *((name, "replicated") for name in (*(layer.name for layer in columns), row.name)),
            )
        projections = [
            self._head_projection(entry, layer, row, module_name, head_counts)
            for entry, layer in zip(chain.columns, columns, strict=True)
        ]
        by_head = any(projection.is_interleaved for projection in projections) and key < query
        heads = partition_heads(module_name, query, key, self._ranks, keep_groups=by_head)
        self.head_partitions.append(heads)
        shards = shard_attention(heads, projections, row)
        plain = [layer.name for layer in (*columns, row)]
        grain = row.in_features // query
        head_size = None if any(layer.in_features == grain for layer in columns) else grain
        return shards + shard_attention_parameters(
            module_name, self._modules[module_name], heads, self._entries, plain, row.name, head_size
        )

    def _head_projection(
        self, entry: PlanEntry, layer: LinearLayer, row: LinearLayer, module_name: str, head_counts: tuple[int, int]
    ) -> HeadProjection:
        """Return the arrangement of heads in one column layer."""
        query, key = head_counts
        if entry.sections:
            heads = entry.heads if len(entry.heads) == len(entry.sections) else (query, key, key)[: len(entry.sections)]
            if sum(entry.sections) != layer.out_features or len(heads) != len(entry.sections):
                raise make_cannot_shard_error(
                    layer.name,
                    f"sections of {'+'.join(map(str, entry.sections))} don't add up to its {layer.out_features} "
                    "output features",
                )
            return HeadProjection(layer, entry.sections, heads)
        if layer.leaf_name in FUSED_NAMES and not entry.heads:
            return self._fused_projection(layer, row, module_name, head_counts)
        count = entry.heads[0] if entry.heads else key if layer.leaf_name in (*KEY_NAMES, *VALUE_NAMES) else query
        return HeadProjection(layer, (layer.out_features,), (count,))

    def _fused_projection(
        self, layer: LinearLayer, row: LinearLayer, module_name: str, head_counts: tuple[int, int]
    ) -> HeadProjection:
        query, key = head_counts
        sections = compute_qkv_sections(query, key, layer)
        layout = find_fused_qkv_layout(self._modules[module_name])
        if sections is None or layout is None:
            why = f"the order of {query} query and {key} key heads in its {layer.out_features} features is unknown"
            sizes = "+".join(map(str, sections or (layer.out_features // 3,) * 3))
            raise make_cannot_shard_error(layer.name, why, (layer.name, f"column:{sizes}"), (row.name, "row"))
        if layout is FusedQkvLayout.CONCATENATED:
            return HeadProjection(layer, sections, (query, key, key))
        return HeadProjection(layer, (layer.out_features,), (key,), is_interleaved=True)
