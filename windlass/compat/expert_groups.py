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
