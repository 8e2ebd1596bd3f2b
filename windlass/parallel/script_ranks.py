"""Sizes of mesh axes from a script's own numbering of the ranks: a model-parallel unit (`mpu`) or a topology.

The unit is passed to `initialize(mpu=...)`, the topology to a pipeline model. The rank order must be that of the mesh.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Protocol, TypeGuard

import torch.distributed as dist

from windlass.base.errors import ConfigError
from windlass.comm.mesh_shape import DATA_LOADING_AXES, MeshShape
from windlass.comm.rank_group import world_group


class ModelShardingUnit(Protocol):
    """Model-parallel unit that also shards the model. `initialize(mpu=...)` calls `apply` before all other sharding."""

    shards_model: bool
    """Always True. The attribute marks units whose `apply` may be called; Megatron's units lack it."""

    def apply(self, model: Any) -> None:
        """Shard `model` in place, unless it is sharded already. Collective over all ranks."""


def shards_model(mpu: Any) -> TypeGuard[ModelShardingUnit]:
    """Return True if `mpu` is a `ModelShardingUnit`."""
    return getattr(mpu, "shards_model", False) is True


_NAMES = {
    "pp": ("pipeline_model_parallel", "pipe_parallel"),
    "ep": ("expert_model_parallel", "expert_parallel"),
    "sp": ("context_parallel", "sequence_parallel"),
    "tp": ("tensor_model_parallel", "slice_parallel", "model_parallel"),
}
"""Names of each axis in Megatron, its forks and older units. Among the names that a unit has, the first one with
several ranks is used, or the first one if none has several ranks. For tp the first one is always used, because
`model_parallel` means pp and tp together in units that also have a name listed before it.
"""


def sizes_of_mpu(mpu: Any, world: int) -> dict[str, int]:
    """Return the numbers of ranks along pp, ep, sp and tp in `mpu`. Collective over all ranks.

    Args:
        mpu: Any object with Megatron's methods (`get_tensor_model_parallel_world_size()`, `..._rank()`, `..._group()`,
            and so on). Axes that it does not have count as one rank.
        world: World size.

    Raises:
        ConfigError: on all ranks: the product of the sizes is not the world size, the sizes differ between ranks, the
            rank order is not that of `MeshShape`, or a method of the mpu failed.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    sizes: dict[str, int] = {}
    problem = ""
    try:
        sizes, problem = _read(mpu, world, rank)
    except (AssertionError, RuntimeError, ValueError, TypeError) as error:  # the unit's groups were never created
        problem = f"the mpu failed: {type(error).__name__}: {error}"
    read = (sizes, problem)
    gathered = world_group().all_gather_object(read) if dist.is_initialized() else [read]
    for other, (_, message) in enumerate(gathered):
        if message:
            raise ConfigError(f"rank {other}: {message}")
    for other, (found, _) in enumerate(gathered):
        if found != gathered[0][0]:
            raise ConfigError(
                f"the mpu has {gathered[0][0]} on rank 0 and {found} on rank {other}; create its groups with the same "
                "sizes on every rank"
            )
    return sizes


class RankTopology(Protocol):
    """Numbering of ranks along named axes."""

    def world_size(self) -> int:
        """Return the number of ranks."""

    def get_dim(self, axis: str) -> int:
        """Return the number of ranks along `axis`; 0 if the axis does not exist."""

    def get_coord(self, rank: int) -> Any:
        """Return the coordinates of `rank`, with an attribute for each axis."""


def sizes_of_topology(topology: RankTopology, world: int) -> dict[str, int]:
    """Return the numbers of ranks along pp and tp in a topology with the axes `pipe` and `model`. No communication.

    Raises:
        ConfigError: the topology does not have `world` ranks, or its rank order is not that of `MeshShape`.
    """
    if topology.world_size() != world:
        raise ConfigError(
            f"the topology {topology} has {topology.world_size()} ranks, but the job has {world}; start as many "
            "ranks as the topology has, or pass a topology of the job's size"
        )
    sizes = {"pp": max(1, topology.get_dim("pipe")), "tp": max(1, topology.get_dim("model"))}
    grid = MeshShape(dp_shard=world // math.prod(sizes.values()), **sizes)
    for rank in range(world):
        for name, axis in (("pipe", "pp"), ("model", "tp")):
            here, requested = int(getattr(topology.get_coord(rank), name, 0)), grid.coordinates(rank)[axis]
            if here != requested:
                raise ConfigError(_other_order("topology", f"{name} of rank {rank}", here, requested, grid))
    return sizes


def known_sizes(mpu: Any) -> dict[str, int]:
    """Return the numbers of ranks along the axes that `mpu` has, as seen on this rank."""
    return {axis: _ask(mpu, word, "world_size") for axis in _NAMES if (word := _word(mpu, axis)) is not None}


def _read(mpu: Any, world: int, rank: int) -> tuple[dict[str, int], str]:
    words = {axis: word for axis in _NAMES if (word := _word(mpu, axis)) is not None}
    sizes = dict.fromkeys(_NAMES, 1) | known_sizes(mpu)
    model, sp = sizes["pp"] * sizes["tp"], sizes["sp"]
    product = f"pp {sizes['pp']} x sp {sp} x tp {sizes['tp']}"
    if world % (model * sp * sizes["ep"]):
        return sizes, (
            f"the mpu's axes {product} x ep {sizes['ep']} do not divide the world of {world} ranks; set sizes whose "
            "product divides it"
        )
    readers = world // (model * sp)
    data = _ask(mpu, "data_parallel", "world_size") if hasattr(mpu, "get_data_parallel_world_size") else readers
    # Megatron's data-parallel group may include context parallelism (sp).
    if data not in (readers, readers * sp):
        message = f"the mpu's axes {product} leave {readers} data ranks of a world of {world}, but it has {data}"
        return sizes, f"{message}; the product of the sizes must be the world size"
    grid = MeshShape(dp_shard=readers // sizes["ep"], **sizes)
    for axis, word in words.items():
        for what, here, requested in _places(mpu, word, grid, rank, axis):
            if here != requested:
                return sizes, _other_order("mpu", what, here, requested, grid)
    if hasattr(mpu, "get_data_parallel_rank") and data == readers:
        for what, here, requested in _places(mpu, "data_parallel", grid, rank, *DATA_LOADING_AXES):
            if here != requested:
                return sizes, _other_order("mpu", what, here, requested, grid)
    return sizes, ""


def _word(mpu: Any, axis: str) -> str | None:
    """Return the unit's name for an axis, or None if it does not have the axis."""
    known = [name for name in _NAMES[axis] if hasattr(mpu, f"get_{name}_world_size")]
    if axis == "tp":
        # A unit may have its sequence-parallel methods under a name of tp, too. That name does not mean tp then.
        sp = getattr(mpu, "get_sequence_parallel_world_size", None)
        known = [name for name in known if sp is None or getattr(mpu, f"get_{name}_world_size") != sp]
    several = [name for name in known if _ask(mpu, name, "world_size") > 1]
    return several[0] if several and axis != "tp" else known[0] if known else None


def _ask(mpu: Any, name: str, what: str) -> int:
    return int(getattr(mpu, f"get_{name}_{what}")())


def _places(mpu: Any, name: str, grid: MeshShape, rank: int, *axes: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield `(method, value that the unit returns, value in the mesh)` for this rank's place along `axes`."""
    ranks = grid.along(rank, *axes)
    if len(ranks) == 1:
        return
    if hasattr(mpu, f"get_{name}_rank"):
        yield f"get_{name}_rank()", _ask(mpu, name, "rank"), ranks.index(rank)
    group = getattr(mpu, f"get_{name}_group", lambda: None)()
    if isinstance(group, dist.ProcessGroup):
        yield f"the ranks of get_{name}_group()", sorted(dist.get_process_group_ranks(group)), list(ranks)


def _other_order(source: str, what: str, here: Any, wanted: Any, grid: MeshShape) -> str:
    return (
        f"the {source} orders ranks differently from the mesh: {what} is {here}, and along {grid}, tp fastest, it "
        f"would be {wanted}; build it in this order (Megatron's tp-cp-ep-dp-pp), or pass no {source} and write the "
        "sizes in the section parallel"
    )
