"""Plan of tensor parallelism for a model: plain data that prints as a table."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from windlass.base.errors import ModelError
from windlass.parallel.placement import Ranges
from windlass.parallel.tensor.head_partition import HeadPartition
from windlass.parallel.tensor.rank_ranges import RankRanges, count_rank_elements


class ShardStyle(StrEnum):
    """Sharding style of a module or of a single parameter."""

    COLUMN = "column"
    """Linear layer with sharded output features and a replicated input."""
    COLUMN_GATHERED = "column, gathered"
    """Like COLUMN, but the output is all-gathered."""
    COLUMN_SHARED = "column, shared"
    """Linear layer with a replicated weight. Each rank uses only the rows that it needs; ranks may share rows."""
    ROW = "row"
    """Linear layer with sharded input features; the outputs are summed over the ranks."""
    ROW_SPLIT = "row, split"
    """Like ROW, but the input is replicated, and each rank takes its part of it."""
    VOCABULARY = "vocabulary"
    """Embedding or output head, sharded along the vocabulary."""
    EXPERTS = "experts"
    """Module of experts with fused weights, each expert sharded; the output is summed over the ranks."""
    PARAMETER = "parameter"
    """Single parameter sharded along one dimension."""
    PARTIAL = "partial"
    """Replicated; each rank computes a part of the gradient."""
    TAIL_FEATURES = "tail"
    """Replicated; the last features of the output are the input of sharded layers."""
    IDENTITY = "identity"
    """Replicated; the output is summed over the ranks later, so it is divided by the number of ranks."""
    REPLICATED = "replicated"
    """Replicated on every rank."""


@dataclass(frozen=True)
class ModuleShard:
    """Sharding of one module or parameter.

    Attributes:
        name: name of the module, or of the parameter (`PARAMETER`).
        style: sharding style.
        sharded_size: size of the sharded dimension.
        rank_ranges: for each rank, the ranges of this dimension that the rank holds, or needs (`COLUMN_SHARED`); empty
            if nothing is sharded.
        description: the sharding in words.
        chain: chain of dependent layers that the shard belongs to, by the name of its last layer, whose outputs are
            summed; empty: no chain.
        dim: sharded dimension of a single parameter.
        repeated_ranges: for `COLUMN_SHARED` only: for each rank, the ranges of its computed features that make up the
            input of its attention, in order.
    """

    name: str
    style: ShardStyle
    sharded_size: int = 0
    rank_ranges: RankRanges = ()
    description: str = ""
    chain: str = ""
    dim: int = 0
    repeated_ranges: tuple[Ranges, ...] = ()


@dataclass(frozen=True)
class TensorParallelPlan:
    """Sharding of a model over `ranks` ranks. `str(plan)` is a table.

    Attributes:
        ranks: size of the tensor-parallel axis.
        source: description of the plan's origin.
        shards: one entry for each sharded module or parameter, in the order of the model.
        head_partitions: partitions of the heads of sharded attention modules.
        replicated: linear layers and embeddings that stay replicated on every rank.
    """

    ranks: int
    source: str
    shards: tuple[ModuleShard, ...]
    head_partitions: tuple[HeadPartition, ...] = ()
    replicated: tuple[str, ...] = ()
    _by_name: dict[str, ModuleShard] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._by_name.update({shard.name: shard for shard in self.shards})

    def shard_of(self, name: str) -> ModuleShard | None:
        """Return the shard of the module or parameter of this name, or None."""
        return self._by_name.get(name)

    def chain_shards(self, name: str) -> list[ModuleShard]:
        """Return the shards of one chain."""
        return [shard for shard in self.shards if shard.chain == name]

    def __str__(self) -> str:
        rows = [(name, shard.style.value, _describe_ranges(shard)) for name, shard in _merge_equal_shards(self.shards)]
        widths = [max((len(row[column]) for row in rows), default=0) for column in (0, 1)]
        lines = [f"tensor parallelism over {self.ranks} ranks, from {self.source}"]
        lines += [f"  {name:<{widths[0]}}  {style:<{widths[1]}}  {what}".rstrip() for name, style, what in rows]
        full = ", ".join(_merge_numbered_names(self.replicated))
        return "\n".join([*lines, f"  replicated: {full or 'only norms and biases'}"])


def make_cannot_shard_error(name: str, reason: str, *lines: tuple[str, str]) -> ModelError:
    """Build the error for a module that cannot be sharded, with the reason and examples for `parallel.tensor_table`."""
    shown = ", ".join(f'"{make_name_pattern(module)}": "{style}"' for module, style in lines or ((name, "replicated"),))
    return ModelError(
        f"tensor parallelism can't shard {name}: {reason}. Set its style in parallel.tensor_table, which maps "
        f"regular expressions for module names to column, row, vocabulary, partial or replicated, e.g. {{{shown}}}"
    )


def make_name_pattern(name: str) -> str:
    """Return a regular expression that matches this name in every layer, escaped as in JSON."""
    escaped = name.replace(".", "\\\\.")
    return re.sub(r"(?<=\.)\d+(?=\\|$)", r"\\\\d+", escaped)


def _describe_ranges(shard: ModuleShard) -> str:
    each = count_rank_elements(shard.rank_ranges)
    if not each:
        return shard.description
    numbers = f"{each[0]} each" if len(set(each)) == 1 else " + ".join(map(str, each))
    return f"{shard.description or shard.sharded_size}: {numbers}"


def _merge_equal_shards(shards: Iterable[ModuleShard]) -> list[tuple[str, ModuleShard]]:
    """Merge equal shards of repeated layers, under a name with all layer numbers."""
    groups: dict[tuple[object, ...], list[ModuleShard]] = {}
    for shard in shards:
        key = (
            re.sub(r"\.\d+(?=\.|$)", ".*", shard.name),
            shard.style,
            shard.sharded_size,
            shard.rank_ranges,
            shard.description,
            shard.dim,
        )
        groups.setdefault(key, []).append(shard)
    return [(_merge_numbered_names([shard.name for shard in same])[0], same[0]) for same in groups.values()]


def _merge_numbered_names(names: Iterable[str]) -> list[str]:
    """Merge names that differ in one number only: `layers.{0-3}.mlp`."""
    forms: dict[tuple[str, str], list[int]] = {}
    for name in names:
        found = re.match(r"(.*?\.)(\d+)(\..*|$)", name)
        key = (found[1], found[3]) if found else (name, "")
        forms.setdefault(key, []).extend([int(found[2])] if found else [])
    return [f"{before}{_format_numbers(numbers)}{after}" for (before, after), numbers in forms.items()]


def _format_numbers(numbers: list[int]) -> str:
    if len(numbers) <= 1:
        return str(numbers[0]) if numbers else ""
    if numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{{{numbers[0]}-{numbers[-1]}}}"
    return "{" + ",".join(map(str, numbers)) + "}"
