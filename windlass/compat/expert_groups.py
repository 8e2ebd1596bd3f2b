"""Expert-parallel part of `deepspeed.utils.groups`: groups of the mesh, under names that contain their size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

import torch.distributed as dist

from windlass.comm.rank_group import RankGroup
from windlass.compat.engine_groups import current_groups

expert_tensor_parallel_world_size = 1


@dataclass(frozen=True)
class _Groups:
    """Ranks over which experts are spread (`spread`), and ranks that hold the same experts as this one (`same`)."""

    spread: RankGroup
    same: RankGroup
    world: object = None


_made: dict[str, _Groups] = {}
"""Groups created by a script with `_create_expert_and_data_parallel`, by name."""


def _known() -> dict[str, _Groups]:
    """Return all expert groups by name: those that a script created, and the engine's."""
    found = {name: groups for name, groups in _made.items() if groups.world is dist.group.WORLD}
    axes = current_groups()
    if axes is not None and axes.expert_group_name:
        found[axes.expert_group_name] = _Groups(axes.mesh.ep.group, axes.mesh.experts.data)
    return found


def _groups(group_name: str) -> _Groups:
    known = _known()
    if group_name not in known:
        hint = f"pass one of {', '.join(map(repr, known))}" if known else "first initialize an engine with MoE layers"
        raise AssertionError(f"there is no expert-parallel group {group_name!r}: {hint}")
    return known[group_name]


def _create_expert_and_data_parallel(
    expert_parallel_size_: int,
    mp_size: int | None = None,
    pp_size: int | None = None,
    mp_mode: str = "tp",
    use_data_before_expert_parallel_: bool = False,
) -> None:
    """Create the groups `ep_size_N` for N = `expert_parallel_size_`. Collective. Repeated calls do nothing.

    Args:
        mp_size: number of ranks along the tensor (or sequence) axis, which hold experts too; None: 1.
        pp_size: number of pipeline stages; None: 1.
        mp_mode: "tp": neighbouring ranks of an expert-parallel group are `mp_size` ranks apart; otherwise 1 apart.
        use_data_before_expert_parallel_: True if neighbouring data ranks hold the same experts, not different ones.

    Raises:
        AssertionError: the ranks of a stage are not a multiple of the sizes, or no process group is initialized.
        NotImplementedError: `use_data_before_expert_parallel_` with `mp_size` above 1, which DeepSpeed refuses too.
    """
    assert dist.is_initialized(), "no process group is initialized: call deepspeed.init_distributed() first"
    name, world, stages, model_parallel = f"ep_size_{expert_parallel_size_}", dist.get_world_size(), pp_size or 1, 1
    if mp_size is not None and mp_size > 1:
        if use_data_before_expert_parallel_:
            raise NotImplementedError(
                f"use_data_before_expert_parallel_ with mp_size = {mp_size}: leave one of the two arguments out"
            )
        model_parallel = mp_size if mp_mode == "tp" else 1
    if name in _known():
        return
    if model_parallel > 1:
        spread, same = _get_strided_expert_ranks(world, model_parallel, expert_parallel_size_, stages)
    else:
        spread, same = _get_expert_parallel_ranks(
            world, 1, expert_parallel_size_, stages, use_data_before_expert_parallel_=use_data_before_expert_parallel_
        )
    _made[name] = _Groups(_make(spread), _make(same), dist.group.WORLD)


def _get_strided_expert_ranks(
    world: int, stride: int, expert_parallel_size: int, stages: int
) -> tuple[list[list[int]], list[list[int]]]:
    """Return the groups of `_get_expert_parallel_ranks` for experts that are spread over all ranks of a stage.

    Neighbours in a group are `stride` ranks apart, and ranks with the same experts may differ along the tensor axis.
    """
    assert world % (stride * stages) == 0 and world // stages % expert_parallel_size == 0, (
        f"{world} ranks are not a multiple of tensor {stride} x pipeline {stages} and of expert "
        f"{expert_parallel_size} x pipeline {stages}; choose sizes that divide the ranks"
    )
    length, spread, same = world // stages, [], []
    for start in range(0, world, length):
        order = [rank for lane in range(stride) for rank in range(start + lane, start + length, stride)]
        rows = [order[at : at + expert_parallel_size] for at in range(0, length, expert_parallel_size)]
        spread += rows
        same += [list(column) for column in zip(*rows, strict=True)]
    return spread, same


def _make(partition: list[list[int]]) -> RankGroup:
    """Create the groups of a partition of all ranks. Return this rank's group. Collective."""
    own, _ = dist.new_subgroups_by_enumeration(partition)
    assert own is not None
    return RankGroup.of(own)


# Ranks over which experts are spread.


def _get_expert_parallel_group(group_name: str) -> dist.ProcessGroup:
    return _groups(group_name).spread.process_group


def _get_expert_parallel_group_ranks(group_name: str) -> list[int]:
    return list(_groups(group_name).spread.ranks)


def _get_expert_parallel_world_size(group_name: str) -> int:
    return _groups(group_name).spread.size


def _get_expert_parallel_rank(group_name: str) -> int:
    return _groups(group_name).spread.index


def _get_expert_parallel_src_rank(group_name: str) -> int:
    return _groups(group_name).spread.ranks[0]


def _get_expert_parallel_group_dict() -> dict[str, dist.ProcessGroup]:
    return {name: groups.spread.process_group for name, groups in _known().items()}


# Ranks that hold the same experts.


def _get_expert_data_parallel_group(group_name: str) -> dist.ProcessGroup:
    return _groups(group_name).same.process_group


def _get_expert_data_parallel_group_ranks(group_name: str) -> list[int]:
    return list(_groups(group_name).same.ranks)


def _get_expert_data_parallel_world_size(group_name: str) -> int:
    return _groups(group_name).same.size


def _get_expert_data_parallel_rank(group_name: str) -> int:
    return _groups(group_name).same.index


def _get_expert_broadcast_src_rank(group_name: str) -> int:
    return _groups(group_name).same.ranks[0]


def _get_expert_data_parallel_group_dict() -> dict[str, dist.ProcessGroup]:
    return {name: groups.same.process_group for name, groups in _known().items()}


# The largest expert-parallel group.


def _get_max_expert_size() -> int:
    sizes = [groups.spread.size for groups in _known().values()]
    if not sizes:
        raise AssertionError("there is no expert-parallel group: first initialize an engine with MoE layers")
    return max(sizes)


def _get_max_expert_size_name() -> str:
    return f"ep_size_{_get_max_expert_size()}"


def _get_max_expert_parallel_group() -> dist.ProcessGroup:
    return _get_expert_parallel_group(_get_max_expert_size_name())


def _get_expert_model_parallel_world_size() -> int:
    return expert_tensor_parallel_world_size


def _get_local_all_to_all_group() -> NoReturn:
    raise AssertionError(
        "there are no all-to-all groups, since gradients between nodes are not quantized: delete the call"
    )


def _get_expert_parallel_ranks(
    world_size: int,
    tensor_parallel_size_: int,
    expert_parallel_size_: int,
    pipeline_parallel_size_: int = 1,
    use_data_before_expert_parallel_: bool = False,
) -> tuple[list[list[int]], list[list[int]]]:
    """Return the ranks of each group over which experts are spread, and of each group of ranks with the same experts.

    Args:
        use_data_before_expert_parallel_: True if neighbouring data ranks hold the same experts, not different ones.

    Raises:
        AssertionError: the product of the sizes does not divide the world size.
    """
    model_parallel_size = tensor_parallel_size_ * pipeline_parallel_size_
    assert world_size % (model_parallel_size * expert_parallel_size_) == 0, (
        f"{world_size} ranks are not a multiple of tensor {tensor_parallel_size_} x pipeline {pipeline_parallel_size_} "
        f"x expert {expert_parallel_size_}; choose sizes whose product divides the ranks"
    )
    stage = world_size // pipeline_parallel_size_
    spread, same = [], []
    for start in range(0, world_size, stage):
        for index in range(tensor_parallel_size_):
            data = list(range(start + index, start + stage, tensor_parallel_size_))
            groups = len(data) // expert_parallel_size_
            if use_data_before_expert_parallel_:
                rows = [data[first::groups] for first in range(groups)]
            else:
                rows = [data[at : at + expert_parallel_size_] for at in range(0, len(data), expert_parallel_size_)]
            spread += rows
            same += [list(column) for column in zip(*rows, strict=True)]
    return spread, same
