"""The part of `deepspeed.utils.groups` that is about experts: groups of the engine's mesh, by a name that tells their
size."""

from __future__ import annotations

from typing import NoReturn

import torch.distributed as dist

from windlass.comm.mesh import Mesh
from windlass.compat.engine_axes import current

expert_tensor_parallel_world_size = 1


def _mesh(group_name: str) -> Mesh:
    axes = current()
    name = axes.experts if axes is not None else ""
    if axes is None or not name or group_name != name:
        known = f"there is {name!r}" if name else "no engine has layers of experts"
        raise AssertionError(f"there is no expert-parallel group {group_name!r}: {known}")
    return axes.mesh


def _name() -> str:
    axes = current()
    return axes.experts if axes is not None else ""


# ranks over which experts are spread


def _get_expert_parallel_group(group_name: str) -> dist.ProcessGroup:
    return _mesh(group_name).ep.group.process_group


def _get_expert_parallel_group_ranks(group_name: str) -> list[int]:
    return list(_mesh(group_name).ep.group.ranks)


def _get_expert_parallel_world_size(group_name: str) -> int:
    return _mesh(group_name).ep.size


def _get_expert_parallel_rank(group_name: str) -> int:
    return _mesh(group_name).ep.index


def _get_expert_parallel_src_rank(group_name: str) -> int:
    return _mesh(group_name).ep.group.ranks[0]


def _get_expert_parallel_group_dict() -> dict[str, dist.ProcessGroup]:
    name = _name()
    return {name: _get_expert_parallel_group(name)} if name else {}


# ranks that hold the same experts


def _get_expert_data_parallel_group(group_name: str) -> dist.ProcessGroup:
    return _mesh(group_name).experts.data.process_group


def _get_expert_data_parallel_group_ranks(group_name: str) -> list[int]:
    return list(_mesh(group_name).experts.data.ranks)


def _get_expert_data_parallel_world_size(group_name: str) -> int:
    return _mesh(group_name).experts.data.size


def _get_expert_data_parallel_rank(group_name: str) -> int:
    return _mesh(group_name).experts.data.index


def _get_expert_broadcast_src_rank(group_name: str) -> int:
    return _mesh(group_name).experts.data.ranks[0]


def _get_expert_data_parallel_group_dict() -> dict[str, dist.ProcessGroup]:
    name = _name()
    return {name: _get_expert_data_parallel_group(name)} if name else {}


# the largest of such groups, of which there is one kind


def _get_max_expert_size() -> int:
    return _mesh(_name()).ep.size


def _get_max_expert_size_name() -> str:
    return f"ep_size_{_get_max_expert_size()}"


def _get_max_expert_parallel_group() -> dist.ProcessGroup:
    return _get_expert_parallel_group(_get_max_expert_size_name())


def _get_expert_model_parallel_world_size() -> int:
    return expert_tensor_parallel_world_size


def _get_local_all_to_all_group() -> NoReturn:
    raise AssertionError("there are no all-to-all groups of nodes: gradients are not quantized between them")


def _get_expert_parallel_ranks(
    world_size: int,
    tensor_parallel_size_: int,
    expert_parallel_size_: int,
    pipeline_parallel_size_: int = 1,
    use_data_before_expert_parallel_: bool = False,
) -> tuple[list[list[int]], list[list[int]]]:
    """Return the ranks of each group over which experts are spread, and of each that holds the same experts.

    Args:
        use_data_before_expert_parallel_: neighbouring data ranks hold the same experts, not different ones.

    Raises:
        AssertionError: the sizes do not divide the world.
    """
    cut = tensor_parallel_size_ * pipeline_parallel_size_
    assert world_size % (cut * expert_parallel_size_) == 0, (
        f"{world_size} ranks are no multiple of tensor {tensor_parallel_size_} x pipeline {pipeline_parallel_size_} "
        f"x expert {expert_parallel_size_}"
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
