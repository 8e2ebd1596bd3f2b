"""What tensor parallelism does with each module of a model: plain data that prints as a table."""

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
    """How a module, or a parameter by itself, is cut."""

    COLUMN = "column"
    """A linear layer's output features are cut; its input is whole."""
    COLUMN_GATHERED = "column, gathered"
    """As COLUMN, and the output is put together again."""
    COLUMN_SHARED = "column, shared"
    """Whole weights, of which each rank uses the rows that it needs; some rows are used on several ranks."""
    ROW = "row"
    """A linear layer's input features are cut as they come; outputs are added up."""
    ROW_SPLIT = "row, split"
    """As ROW, of an input that is whole and of which each rank takes its part."""
    VOCABULARY = "vocabulary"
    """An embedding, or the layer that makes logits: cut by tokens of the vocabulary."""
    EXPERTS = "experts"
    """A module of experts with fused weights, each expert cut; its output is added up."""
    PARAMETER = "parameter"
    """A parameter by itself is cut along one dim."""
    PARTIAL = "partial"
    """Whole on every rank; a rank's gradient is a part of the sum."""
    TAIL_FEATURES = "tail"
    """Whole; the last features of its output go straight to what is cut."""
    IDENTITY = "identity"
    """Each rank adds its share of what is the same on all of them."""
    REPLICATED = "replicated"
    """Whole on every rank."""


@dataclass(frozen=True)
class ModuleShard:
    """What becomes of one module, or of one parameter.

    Attributes:
        name: of the module, or of the parameter (`PARAMETER`).
        style: how.
        size: elements along the dimension that is cut.
        shares: for each rank the ranges of them that it has, or needs (`SHARED`); none where nothing is cut.
        what: the same in words.
        chain: the layers that are left together are named by their last one, whose outputs are added up.
        dim: along which a parameter by itself is cut.
        picks: `SHARED` alone: for each rank, ranges of the features that it computed, one after another what its
            attention sees.
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
    """What tensor parallelism does with a model over `ranks` ranks. `str(plan)` is a table.

    Attributes:
        ranks: of the axis.
        source: where it comes from, in words.
        cuts: by module, in the order of the model.
        heads: of attention modules whose heads are spread.
        whole: linear layers and embeddings that stay whole on every rank.
    """

    ranks: int
    source: str
    shards: tuple[ModuleShard, ...]
    head_partitions: tuple[HeadPartition, ...] = ()
    replicated: tuple[str, ...] = ()
    _by_name: dict[str, ModuleShard] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._by_name.update({cut.name: cut for cut in self.shards})

    def shard_of(self, name: str) -> ModuleShard | None:
        """What becomes of the module or parameter of this name; None: nothing."""
        return self._by_name.get(name)

    def chain_shards(self, name: str) -> list[ModuleShard]:
        """The cuts of one chain."""
        return [cut for cut in self.shards if cut.chain == name]

    def __str__(self) -> str:
        rows = [(name, cut.style.value, _describe_ranges(cut)) for name, cut in _merge_equal_shards(self.shards)]
        widths = [max((len(row[column]) for row in rows), default=0) for column in (0, 1)]
        lines = [f"tensor parallelism over {self.ranks} ranks, from {self.source}"]
        lines += [f"  {name:<{widths[0]}}  {style:<{widths[1]}}  {what}".rstrip() for name, style, what in rows]
        whole = ", ".join(_merge_numbered_names(self.replicated))
        return "\n".join([*lines, f"  whole on every rank: {whole or 'norms and biases alone'}"])


def make_cannot_shard_error(name: str, reason: str, *lines: tuple[str, str]) -> ModelError:
    """The error that says why a module can't be cut, and how to write its lines of the table."""
    shown = ", ".join(f'"{make_name_pattern(module)}": "{style}"' for module, style in lines or ((name, "replicated"),))
    return ModelError(
        f"tensor parallelism can't cut {name}: {reason}. Say how in the table parallel.tensor_table, by regular "
        f"expressions of modules' names with column, row, vocabulary, partial or replicated, e.g. {{{shown}}}"
    )


def make_name_pattern(name: str) -> str:
    """A regular expression for this name in every layer, as it stands in JSON."""
    escaped = name.replace(".", "\\\\.")
    return re.sub(r"(?<=\.)\d+(?=\\|$)", r"\\\\d+", escaped)


def _describe_ranges(shard: ModuleShard) -> str:
    each = count_rank_elements(shard.rank_ranges)
    if not each:
        return shard.description
    numbers = f"{each[0]} each" if len(set(each)) == 1 else " + ".join(map(str, each))
    return f"{shard.description or shard.sharded_size}: {numbers}"


def _merge_equal_shards(shards: Iterable[ModuleShard]) -> list[tuple[str, ModuleShard]]:
    """Cuts of layers that are alike as one, by a name with their numbers."""
    alike: dict[tuple[object, ...], list[ModuleShard]] = {}
    for cut in shards:
        key = (
            re.sub(r"\.\d+(?=\.|$)", ".*", cut.name),
            cut.style,
            cut.sharded_size,
            cut.rank_ranges,
            cut.description,
            cut.dim,
        )
        alike.setdefault(key, []).append(cut)
    return [(_merge_numbered_names([cut.name for cut in same])[0], same[0]) for same in alike.values()]


def _merge_numbered_names(names: Iterable[str]) -> list[str]:
    """Names that differ in one number alone as one, with all numbers: `layers.{0-3}.mlp`."""
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
