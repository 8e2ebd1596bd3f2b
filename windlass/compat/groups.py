"""`deepspeed.utils.groups`: the process groups of each kind of parallelism; data parallelism has all ranks.

What a script's model-parallel unit (`mpu`) knows of groups is its own to say. Without one, all ranks are data ranks,
and there is no other axis: sizes are 1, places are 0, and groups that nobody made are an error.
"""

from __future__ import annotations

import sys
from typing import Any, NoReturn

import torch.distributed as dist

mpu: Any = None
mesh_device: Any = None
expert_tensor_parallel_world_size = 1


class DeprecatedException(Exception):
    """A call that DeepSpeed has taken back."""


def initialize(ep_size: int = 1, mpu: Any = None) -> NoReturn:
    """Not the way any more.

    Raises:
        DeprecatedException: always.
    """
    raise DeprecatedException(
        "groups.initialize() was taken back: experts get their groups from deepspeed.moe.layer.MoE"
    )


def _mpu() -> Any:
    """What a script set as `deepspeed.utils.groups.mpu`, or windlass here."""
    stand_in = sys.modules.get("deepspeed.utils.groups")
    return (stand_in.__dict__.get("mpu") if stand_in is not None else None) or mpu


def _told(method: str) -> Any:
    """The model-parallel unit's method of that name, or None."""
    return getattr(_mpu(), method, None)


def _needs_ranks() -> None:
    assert dist.is_initialized(), "ranks do not know each other yet: call deepspeed.init_distributed() first"


def _of(name: str, default: Any) -> Any:
    """What the model-parallel unit says to `get_<name>`, else `default()`."""
    told = _told(f"get_{name}")
    return told() if told is not None else default()


def _clone_world_group() -> dist.ProcessGroup:
    _needs_ranks()
    world = dist.group.WORLD
    assert world is not None
    return world


# data parallelism


def _get_data_parallel_group() -> dist.ProcessGroup:
    _needs_ranks()
    group: dist.ProcessGroup = _of("data_parallel_group", _clone_world_group)
    return group


def _get_data_parallel_group_ranks() -> list[int]:
    return list(dist.get_process_group_ranks(_get_data_parallel_group()))


def _get_data_parallel_world_size() -> int:
    _needs_ranks()
    return int(_of("data_parallel_world_size", dist.get_world_size))


def _get_data_parallel_rank() -> int:
    _needs_ranks()
    return int(_of("data_parallel_rank", dist.get_rank))


def _get_broadcast_src_rank() -> int:
    return min(_get_data_parallel_group_ranks())


get_data_parallel_group = _get_data_parallel_group
get_data_parallel_world_size = _get_data_parallel_world_size
get_data_parallel_rank = _get_data_parallel_rank


# model and tensor parallelism


def _none_made(kind: str) -> NoReturn:
    raise AssertionError(f"there is no {kind} group: all ranks are data ranks")


def get_model_parallel_group() -> dist.ProcessGroup:
    """The model-parallel unit's group.

    Raises:
        AssertionError: there is none.
    """
    group: dist.ProcessGroup = _of("model_parallel_group", lambda: _none_made("model-parallel"))
    return group


def get_tensor_model_parallel_group() -> dist.ProcessGroup:
    """The model-parallel unit's group of tensor parallelism, or of model parallelism as a whole.

    Raises:
        AssertionError: there is none.
    """
    group: dist.ProcessGroup = _of("tensor_model_parallel_group", get_model_parallel_group)
    return group


_set: dict[str, int] = {}


def set_tensor_model_parallel_world_size(world_size: int) -> None:
    """Say how many ranks share a tensor, for scripts that ask here."""
    _set["world_size"] = world_size


def set_tensor_model_parallel_rank(rank: int) -> None:
    """Say which of them this is."""
    _set["rank"] = rank


def get_model_parallel_world_size() -> int:
    """How many ranks share a model."""
    return _set.get("world_size") or int(_of("model_parallel_world_size", lambda: 1))


def get_tensor_model_parallel_world_size() -> int:
    """How many ranks share a tensor."""
    return _set.get("world_size") or int(_of("tensor_model_parallel_world_size", get_model_parallel_world_size))


def get_model_parallel_rank() -> int:
    """Which of the ranks that share a model this is."""
    return _set["rank"] if "rank" in _set else int(_of("model_parallel_rank", lambda: 0))


def get_tensor_model_parallel_rank() -> int:
    """Which of the ranks that share a tensor this is."""
    return _set["rank"] if "rank" in _set else int(_of("tensor_model_parallel_rank", get_model_parallel_rank))


def get_tensor_model_parallel_src_rank() -> int:
    """The first, by its number in the world, of the ranks that share a tensor with this one."""
    size = get_tensor_model_parallel_world_size()
    return dist.get_rank() // size * size


_get_model_parallel_world_size = get_model_parallel_world_size


# sequence parallelism


def _get_sequence_parallel_group() -> dist.ProcessGroup:
    told = _told("get_sequence_parallel_group")
    if told is None:
        raise KeyError("there is no sequence-parallel group: all ranks are data ranks")
    group: dist.ProcessGroup = told()
    return group


def _get_sequence_parallel_world_size() -> int:
    _needs_ranks()
    return int(_of("sequence_parallel_world_size", lambda: 1))


def _get_sequence_parallel_rank() -> int:
    return int(_of("sequence_parallel_rank", lambda: 0))


def _get_sequence_data_parallel_group() -> dist.ProcessGroup:
    group: dist.ProcessGroup = _of("sequence_data_parallel_group", _get_data_parallel_group)
    return group


def _get_sequence_data_parallel_world_size() -> int:
    return int(_of("sequence_data_parallel_world_size", _get_data_parallel_world_size))


def _get_sequence_data_parallel_rank() -> int:
    return int(_of("sequence_data_parallel_rank", _get_data_parallel_rank))


# experts: none are spread over ranks


def _no_experts(group_name: str = "") -> NoReturn:
    raise AssertionError(f"there is no expert-parallel group {group_name!r}: experts are not spread over ranks")


_get_expert_parallel_group = _get_expert_data_parallel_group = _no_experts
_get_expert_parallel_group_ranks = _get_expert_data_parallel_group_ranks = _no_experts
_get_expert_parallel_world_size = _get_expert_data_parallel_world_size = _no_experts
_get_expert_parallel_rank = _get_expert_data_parallel_rank = _no_experts
_get_expert_parallel_src_rank = _get_expert_broadcast_src_rank = _no_experts
_get_max_expert_size_name = _get_max_expert_parallel_group = _get_local_all_to_all_group = _no_experts


def _get_expert_parallel_group_dict() -> dict[str, dist.ProcessGroup]:
    return {}


def _get_expert_data_parallel_group_dict() -> dict[str, dist.ProcessGroup]:
    return {}


def _get_max_expert_size() -> int:
    _no_experts()


def _get_expert_model_parallel_world_size() -> int:
    return expert_tensor_parallel_world_size


# a second copy of the parameters among neighbours (hpZ) is windlass' own affair


def _get_zero_param_intra_parallel_group() -> None:
    return None


def _zero_param_parallel_is_initialized() -> bool:
    return False


# the same questions to a unit that may be absent


def bwc_tensor_model_parallel_world_size(mpu: Any = None) -> int:
    """How many ranks share a tensor, under any of the names that such units have had."""
    return int(_first(mpu, ("get_tensor_model_parallel_world_size", "get_slice_parallel_world_size"), 1, "model"))


def bwc_tensor_model_parallel_rank(mpu: Any = None) -> int:
    """Which of them this is."""
    return int(_first(mpu, ("get_tensor_model_parallel_rank", "get_slice_parallel_rank"), 0, "model", "rank"))


def bwc_tensor_model_parallel_group(mpu: Any = None) -> Any:
    """Their group; None without one."""
    return _first(mpu, ("get_tensor_model_parallel_group", "get_slice_parallel_group"), None, "model", "group")


def bwc_pipeline_parallel_world_size(mpu: Any = None) -> int:
    """How many stages a pipeline has."""
    return int(_first(mpu, ("get_pipeline_model_parallel_world_size", "get_pipe_parallel_world_size"), 1))


def bwc_pipeline_parallel_group(mpu: Any = None) -> Any:
    """The ranks of one pipeline; None without one."""
    return _first(mpu, ("get_pipeline_model_parallel_group", "get_pipe_parallel_group"), None)


def _first(mpu: Any, methods: tuple[str, ...], default: Any, kind: str = "", what: str = "world_size") -> Any:
    names = (*methods, f"get_{kind}_parallel_{what}") if kind else methods
    found = next((getattr(mpu, name) for name in names if hasattr(mpu, name)), None)
    return default if found is None else found()
