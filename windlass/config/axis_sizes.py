"""Number of ranks along each mesh axis, resolved from all keys that set sizes and from the world size."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from windlass.base.errors import ConfigError

if TYPE_CHECKING:
    from windlass.config.root_config import Config

OtherAxisSizes = Mapping[str, Mapping[str, int]]
"""Axis sizes from other sources than the configuration (an `mpu`, a pipeline module), by the name of the source."""

_DECLARED_AXES = ("pp", "ep", "sp", "tp")  # axes with keys for their sizes; dp_shard gets the remaining ranks


@dataclass(frozen=True)
class Axes:
    """Number of ranks along each axis, outermost first.

    `secondary_size` is the number of ranks over which the backward all-gathers stage-3 parameters again, or None if it
    uses all ranks that shard them.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    ep: int = 1
    sp: int = 1
    tp: int = 1
    secondary_size: int | None = None

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes by axis, outermost first, as `comm.mesh_shape.MeshShape` takes them."""
        return {axis: getattr(self, axis) for axis in ("pp", "dp_replicate", "dp_shard", "ep", "sp", "tp")}

    @property
    def world_size(self) -> int:
        """Total number of ranks."""
        return math.prod(self.sizes.values())

    @property
    def data_loading_size(self) -> int:
        """Number of data-loading ranks: ranks that read samples of their own."""
        return self.dp_replicate * self.dp_shard * self.ep

    def __str__(self) -> str:
        return " x ".join(f"{axis} {size}" for axis, size in self.sizes.items())


@dataclass(frozen=True)
class _DeclaredSize:
    """An axis size and the key that sets it."""

    size: int
    key: str


def axis_size(config: Config, axis: str) -> int:
    """Return the size of axis pp, ep, sp or tp that the configuration sets; 1 by default."""
    declared = _declared_sizes(config)[axis]
    return declared[0].size if declared else 1


def conflicting_sizes(config: Config) -> Iterator[tuple[str, str]]:
    """Yield (key, sentence) for each axis for which two keys set different sizes."""
    for axis, declared in _declared_sizes(config).items():
        for other in declared[1:]:
            if other.size != declared[0].size:
                yield (
                    other.key,
                    f"{other.size}, but {declared[0].key} {declared[0].size} is the size of the same axis, {axis}; "
                    "delete one, or make them equal",
                )


def _declared_sizes(config: Config) -> dict[str, list[_DeclaredSize]]:
    """Return the sizes that keys set for each axis. A DeepSpeed key at its default value sets none."""
    own, tensor = config.parallel, config.tensor_parallel
    found = {
        axis: [_DeclaredSize(getattr(own, axis), f"parallel.{axis}")]
        for axis in _DECLARED_AXES
        if axis in own.model_fields_set
    }
    declared = {axis: found.get(axis, []) for axis in _DECLARED_AXES}
    if isinstance(config.pipeline.stages, int):
        declared["pp"].append(_DeclaredSize(config.pipeline.stages, "pipeline.stages"))
    if config.expert_parallel.enabled:
        declared["ep"].append(_DeclaredSize(config.expert_parallel.autoep_size, "expert_parallel.autoep_size"))
    if config.sequence_parallel_size is not None:
        declared["sp"].append(_DeclaredSize(config.sequence_parallel_size, "sequence_parallel_size"))
    if tensor.autotp_size > 1:
        declared["tp"].append(_DeclaredSize(tensor.autotp_size, "tensor_parallel.autotp_size"))
    if tensor.tp.tp_size > 1:
        declared["tp"].append(_DeclaredSize(tensor.tp.tp_size, "tensor_parallel.tp.tp_size"))
    return declared


def resolve_axes(config: Config, world_size: int, world_size_source: str, other_sizes: OtherAxisSizes) -> Axes:
    """Resolve the size of every axis for `world_size` ranks.

    Raises:
        ConfigError: two sources set different sizes of one axis; the sizes do not multiply to the world size; or
            `zero_hpz_partition_size`, `mics_shard_size`, `data_parallel_size` or `ulysses_degree` does not fit the
            sizes. The message has all the numbers, and sizes that would fit.
    """
    sizes = _model_axis_sizes(config, world_size, world_size_source, other_sizes)
    model = sizes["pp"] * sizes["tp"]
    data = world_size // model
    where = "world size" if model == 1 else f"world size {world_size} / (pp {sizes['pp']} x tp {sizes['tp']}) ="
    replicate = _replicate_size(config, data, sizes["ep"] * sizes["sp"], where)
    hpz = config.zero_optimization.zero_hpz_partition_size
    if hpz > 0 and data % hpz:
        raise _not_a_divisor("zero_hpz_partition_size", hpz, data, where)
    axes = Axes(
        dp_replicate=replicate,
        dp_shard=data // (replicate * sizes["ep"] * sizes["sp"]),
        secondary_size=hpz if hpz > 1 and config.zero_optimization.stage == 3 else None,
        **sizes,
    )
    readers = config.data_parallel_size
    if config.sequence_parallel_size is not None and readers is not None and readers != axes.data_loading_size:
        raise ConfigError(
            f"data_parallel_size = {readers}, but of the world size {world_size} ({world_size_source}) the axes {axes} "
            f"leave {axes.data_loading_size} data-loading ranks; write {axes.data_loading_size}, or delete the key"
        )
    degree = config.parallel.ulysses_size(axes.sp)
    if degree is not None and axes.sp % degree:
        raise ConfigError(
            f"parallel.ulysses_degree = {degree} does not divide the {axes.sp} ranks of parallel.sp; write one of "
            f"{_join_with_or(_divisors(axes.sp))}"
        )
    return axes


def data_loading_size_of(config: Config, world_size: int, world_size_source: str) -> int:
    """Return the number of data-loading ranks among `world_size` ranks, without resolving the data axes.

    Raises:
        ConfigError: two keys set different sizes of pp, ep, sp or tp, or the product of these sizes and dp_replicate
            does not divide the world size.
    """
    sizes = _model_axis_sizes(config, world_size, world_size_source, {})
    return world_size // (sizes["pp"] * sizes["sp"] * sizes["tp"])


def axes_from_data_loading_size(config: Config, data_loading_size: int) -> Axes:
    """Return axes with `data_loading_size` data-loading ranks, which form `parallel.dp_replicate` replica groups."""
    sizes = {axis: axis_size(config, axis) for axis in _DECLARED_AXES}
    replicate = config.parallel.dp_replicate
    return Axes(dp_replicate=replicate, dp_shard=data_loading_size // (replicate * sizes["ep"]), **sizes)


def _model_axis_sizes(config: Config, world: int, source: str, other_sizes: OtherAxisSizes) -> dict[str, int]:
    """Return the sizes of pp, ep, sp and tp. Raise ConfigError if their product with dp_replicate does not divide the
    world size."""
    if world < 1:
        raise ConfigError(f"the world size {world} is not positive; it is the number of ranks, at least 1")
    sizes = {axis: _agreed_size(axis, declared, other_sizes) for axis, declared in _declared_sizes(config).items()}
    _require_divisor_of_world({**sizes, "dp_replicate": config.parallel.dp_replicate}, world, source)
    return sizes


def _agreed_size(axis: str, declared: list[_DeclaredSize], other_sizes: OtherAxisSizes) -> int:
    known = [
        *declared,
        *(_DeclaredSize(sizes[axis], f"{name} ({axis})") for name, sizes in other_sizes.items() if axis in sizes),
    ]
    for other in known[1:]:
        if other.size != known[0].size:
            raise ConfigError(
                f"{known[0].key} = {known[0].size} and {other.key} = {other.size} are two sizes of one axis, {axis}; "
                "make them equal, or leave one out"
            )
    return known[0].size if known else 1


def _require_divisor_of_world(sizes: Mapping[str, int], world: int, source: str) -> None:
    """Raise ConfigError unless the product of `sizes` divides the world size, so that dp_shard is a whole number."""
    fixed = math.prod(sizes.values())
    if world % fixed == 0:
        return
    product = " x ".join(f"{axis} {sizes[axis]}" for axis in ("pp", "dp_replicate", "ep", "sp", "tp"))
    below = world // fixed * fixed
    ways = [f"start {_join_with_or([count for count in (below, below + fixed) if count])} ranks"]
    for axis, size in sizes.items():
        left, rest = divmod(world, fixed // size)
        if size > 1 and not rest:
            ways.append(f"{axis} {_join_with_or(_nearest_divisors(size, left))} with the others as they are")
    raise ConfigError(
        f"the axes do not multiply to the world: {product} = {fixed} ranks do not divide the world size {world} "
        f"({source}), so dp_shard would not be a whole number; possible sizes: {'; '.join(ways)}"
    )


def _replicate_size(config: Config, data_size: int, inner_size: int, where: str) -> int:
    """Return the size of dp_replicate: the value of its key, or data ranks / `mics_shard_size` if that is set."""
    mics, given = config.zero_optimization.mics_shard_size, config.parallel.dp_replicate
    if mics == -1:
        return given
    if data_size % mics:
        raise _not_a_divisor("mics_shard_size", mics, data_size, where)
    if mics % inner_size:
        raise ConfigError(
            f"zero_optimization.mics_shard_size = {mics} is not a multiple of ep x sp = {inner_size}, whose ranks "
            f"shard states; write one of {_join_with_or([n for n in _divisors(data_size) if n % inner_size == 0])}, or "
            "delete the key"
        )
    if "dp_replicate" in config.parallel.model_fields_set and given != data_size // mics:
        raise ConfigError(
            f"zero_optimization.mics_shard_size = {mics} makes {data_size // mics} groups of the {data_size} data "
            f"ranks, but parallel.dp_replicate = {given} sets the number of groups; delete one"
        )
    return data_size // mics


def _not_a_divisor(key: str, size: int, data: int, where: str) -> ConfigError:
    return ConfigError(
        f"zero_optimization.{key} = {size} does not divide the {where} {data}; write a divisor of {data}, or delete "
        "the key"
    )


def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def _nearest_divisors(size: int, left: int) -> list[int]:
    """Return the divisors of `left` nearest to `size`, below and above."""
    near = [max((n for n in _divisors(left) if n < size), default=None)]
    near.append(min((n for n in _divisors(left) if n > size), default=None))
    return [n for n in near if n is not None]


def _join_with_or(numbers: list[int]) -> str:
    return " or ".join(str(number) for number in numbers)
