"""`deepspeed.utils.groups`: the process groups of each kind of parallelism, as the engine made last has them.

What a script's model-parallel unit (`mpu`) knows of groups is its own to say. What it does not know, and all where
there is no unit, is of the engine's mesh. Before there is an engine all ranks are data ranks, and there is no other
axis: sizes are 1, places are 0, and groups that nobody made are an error.
"""

from __future__ import annotations

import sys
from typing import Any, NoReturn

import torch.distributed as dist

from windlass.comm.rank_group import RankGroup
from windlass.compat.engine_groups import current_groups
from windlass.compat.expert_groups import _create_expert_and_data_parallel as _create_expert_and_data_parallel
from windlass.compat.expert_groups import _get_expert_broadcast_src_rank as _get_expert_broadcast_src_rank
from windlass.compat.expert_groups import _get_expert_data_parallel_group as _get_expert_data_parallel_group
from windlass.compat.expert_groups import _get_expert_data_parallel_group_dict as _get_expert_data_parallel_group_dict
from windlass.compat.expert_groups import _get_expert_data_parallel_group_ranks as _get_expert_data_parallel_group_ranks
from windlass.compat.expert_groups import _get_expert_data_parallel_rank as _get_expert_data_parallel_rank
from windlass.compat.expert_groups import _get_expert_data_parallel_world_size as _get_expert_data_parallel_world_size
from windlass.compat.expert_groups import _get_expert_model_parallel_world_size as _get_expert_model_parallel_world_size
from windlass.compat.expert_groups import _get_expert_parallel_group as _get_expert_parallel_group
from windlass.compat.expert_groups import _get_expert_parallel_group_dict as _get_expert_parallel_group_dict
from windlass.compat.expert_groups import _get_expert_parallel_group_ranks as _get_expert_parallel_group_ranks
from windlass.compat.expert_groups import _get_expert_parallel_rank as _get_expert_parallel_rank
from windlass.compat.expert_groups import _get_expert_parallel_ranks as _get_expert_parallel_ranks
from windlass.compat.expert_groups import _get_expert_parallel_src_rank as _get_expert_parallel_src_rank
from windlass.compat.expert_groups import _get_expert_parallel_world_size as _get_expert_parallel_world_size
from windlass.compat.expert_groups import _get_local_all_to_all_group as _get_local_all_to_all_group
from windlass.compat.expert_groups import _get_max_expert_parallel_group as _get_max_expert_parallel_group
from windlass.compat.expert_groups import _get_max_expert_size as _get_max_expert_size
from windlass.compat.expert_groups import _get_max_expert_size_name as _get_max_expert_size_name
from windlass.compat.expert_groups import expert_tensor_parallel_world_size as expert_tensor_parallel_world_size

mpu: Any = None
mesh_device: Any = None


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


def _current_mpu() -> Any:
    """What a script set as `deepspeed.utils.groups.mpu`, or windlass here, or gave to `initialize`."""
    stand_in, axes = sys.modules.get("deepspeed.utils.groups"), current_groups()
    own = (stand_in.__dict__.get("mpu") if stand_in is not None else None) or mpu
    return own if own is not None or axes is None else axes.mpu


def _require_initialized() -> None:
    assert dist.is_initialized(), "ranks do not know each other yet: call deepspeed.init_distributed() first"


def _ask_mpu(*names: str) -> Any:
    """What the model-parallel unit says to the first `get_<name>` that it has; None if it has none."""
    unit = _current_mpu()
    method = next((getattr(unit, f"get_{name}") for name in names if hasattr(unit, f"get_{name}")), None)
    return method() if method is not None else None


def _size_of(from_mpu: Any, group: RankGroup | None) -> int:
    """What a unit told, or else the size of a group of the engine; 1 without either."""
    return int(from_mpu if from_mpu is not None else group.size if group is not None else 1)


def _rank_in(from_mpu: Any, group: RankGroup | None) -> int:
    return int(from_mpu if from_mpu is not None else group.index if group is not None else 0)


def _process_group_of(from_mpu: Any, group: RankGroup | None) -> dist.ProcessGroup | None:
    """None where a rank would be alone in it, unless the unit knows such a one."""
    made: dist.ProcessGroup | None = group.process_group if group is not None and group.size > 1 else None
    return from_mpu if from_mpu is not None else made


def _clone_world_group() -> dist.ProcessGroup:
    _require_initialized()
    world = dist.group.WORLD
    assert world is not None
    return world


def _world_rank_group() -> RankGroup:
    """All ranks, where there is no engine."""
    world = _clone_world_group()
    return RankGroup(world, tuple(range(dist.get_world_size())), dist.get_rank())


def _raise_no_group(kind: str) -> NoReturn:
    raise AssertionError(f"there is no {kind} group: all ranks are data ranks")


# data parallelism: ranks that read samples of their own


def _data_loading_group() -> RankGroup:
    _require_initialized()
    axes = current_groups()
    return axes.data_loading_group if axes is not None else _world_rank_group()


def _get_data_parallel_group() -> dist.ProcessGroup:
    group: dist.ProcessGroup = _ask_mpu("data_parallel_group") or _data_loading_group().process_group
    return group


def _get_data_parallel_group_ranks() -> list[int]:
    return list(dist.get_process_group_ranks(_get_data_parallel_group()))


def _get_data_parallel_world_size() -> int:
    return _size_of(_ask_mpu("data_parallel_world_size"), _data_loading_group())


def _get_data_parallel_rank() -> int:
    return _rank_in(_ask_mpu("data_parallel_rank"), _data_loading_group())


def _get_broadcast_src_rank() -> int:
    return min(dist.get_process_group_ranks(_get_sequence_data_parallel_group()))


get_data_parallel_group = _get_data_parallel_group
get_data_parallel_world_size = _get_data_parallel_world_size
get_data_parallel_rank = _get_data_parallel_rank


# model and tensor parallelism


def _model_group() -> RankGroup | None:
    axes = current_groups()
    return axes.model_parallel_group if axes is not None else None


def _tensor_group() -> RankGroup | None:
    axes = current_groups()
    return axes.mesh.tp.group if axes is not None else None


def get_model_parallel_group() -> dist.ProcessGroup:
    """The ranks that have one copy of the model together.

    Raises:
        AssertionError: each rank has one.
    """
    return _process_group_of(_ask_mpu("model_parallel_group"), _model_group()) or _raise_no_group("model-parallel")


def get_tensor_model_parallel_group() -> dist.ProcessGroup:
    """The ranks over which matrices are cut; by a unit without that word, its model-parallel ones.

    Raises:
        AssertionError: there are none.
    """
    told = _ask_mpu("tensor_model_parallel_group", "model_parallel_group")
    return _process_group_of(told, _tensor_group()) or _raise_no_group("tensor-parallel")


_overrides: dict[str, int] = {}


def set_tensor_model_parallel_world_size(world_size: int) -> None:
    """Say how many ranks share a tensor, for scripts that ask here."""
    _overrides["world_size"] = world_size


def set_tensor_model_parallel_rank(rank: int) -> None:
    """Say which of them this is."""
    _overrides["rank"] = rank


def get_model_parallel_world_size() -> int:
    """How many ranks share a model."""
    return _overrides.get("world_size") or _size_of(_ask_mpu("model_parallel_world_size"), _model_group())


def get_tensor_model_parallel_world_size() -> int:
    """How many ranks share a tensor."""
    told = _ask_mpu("tensor_model_parallel_world_size", "model_parallel_world_size")
    return _overrides.get("world_size") or _size_of(told, _tensor_group())


def get_model_parallel_rank() -> int:
    """Which of the ranks that share a model this is."""
    return _overrides["rank"] if "rank" in _overrides else _rank_in(_ask_mpu("model_parallel_rank"), _model_group())


def get_tensor_model_parallel_rank() -> int:
    """Which of the ranks that share a tensor this is."""
    told = _ask_mpu("tensor_model_parallel_rank", "model_parallel_rank")
    return _overrides["rank"] if "rank" in _overrides else _rank_in(told, _tensor_group())


def get_tensor_model_parallel_src_rank() -> int:
    """The first, by its number in the world, of the ranks that share a tensor with this one."""
    size = get_tensor_model_parallel_world_size()
    return dist.get_rank() // size * size


_get_model_parallel_world_size = get_model_parallel_world_size


# sequence parallelism


def _sequence_group() -> RankGroup | None:
    axes = current_groups()
    return axes.mesh.sp.group if axes is not None else None


def _dense_data_group() -> RankGroup:
    """Ranks over which gradients are reduced: readers, and those along sp."""
    axes = current_groups()
    return axes.mesh.dense.data if axes is not None else _world_rank_group()


def _get_sequence_parallel_group() -> dist.ProcessGroup:
    group = _process_group_of(_ask_mpu("sequence_parallel_group"), _sequence_group())
    if group is None:
        raise KeyError("there is no sequence-parallel group: every rank has whole sequences")
    return group


def _get_sequence_parallel_world_size() -> int:
    _require_initialized()
    return _size_of(_ask_mpu("sequence_parallel_world_size"), _sequence_group())


def _get_sequence_parallel_rank() -> int:
    return _rank_in(_ask_mpu("sequence_parallel_rank"), _sequence_group())


def _get_sequence_data_parallel_group() -> dist.ProcessGroup:
    found: dist.ProcessGroup = _ask_mpu(*_sequence_data_methods("group")) or _dense_data_group().process_group
    return found


def _get_sequence_data_parallel_world_size() -> int:
    return _size_of(_ask_mpu(*_sequence_data_methods("world_size")), _dense_data_group())


def _get_sequence_data_parallel_rank() -> int:
    return _rank_in(_ask_mpu(*_sequence_data_methods("rank")), _dense_data_group())


def _sequence_data_methods(what: str) -> tuple[str, ...]:
    """What a unit calls the data ranks along all axes: one that knows no sequences has no other."""
    own = f"sequence_data_parallel_{what}"
    return (own,) if hasattr(_current_mpu(), "get_sequence_parallel_world_size") else (own, f"data_parallel_{what}")


# a second copy of the parameters among neighbours (hpZ) is windlass' own affair


def _get_zero_param_intra_parallel_group() -> None:
    return None


def _zero_param_parallel_is_initialized() -> bool:
    return False


# the same questions to a unit that may be absent


def bwc_tensor_model_parallel_world_size(mpu: Any = None) -> int:
    """How many ranks share a tensor, under any of the names that such units have had."""
    return int(
        _call_first_method(mpu, ("get_tensor_model_parallel_world_size", "get_slice_parallel_world_size"), 1, "model")
    )


def bwc_tensor_model_parallel_rank(mpu: Any = None) -> int:
    """Which of them this is."""
    return int(
        _call_first_method(mpu, ("get_tensor_model_parallel_rank", "get_slice_parallel_rank"), 0, "model", "rank")
    )


def bwc_tensor_model_parallel_group(mpu: Any = None) -> Any:
    """Their group; None without one."""
    return _call_first_method(
        mpu, ("get_tensor_model_parallel_group", "get_slice_parallel_group"), None, "model", "group"
    )


def bwc_pipeline_parallel_world_size(mpu: Any = None) -> int:
    """How many stages a pipeline has."""
    return int(_call_first_method(mpu, ("get_pipeline_model_parallel_world_size", "get_pipe_parallel_world_size"), 1))


def bwc_pipeline_parallel_group(mpu: Any = None) -> Any:
    """The ranks of one pipeline; None without one."""
    return _call_first_method(mpu, ("get_pipeline_model_parallel_group", "get_pipe_parallel_group"), None)


def _call_first_method(
    mpu: Any, methods: tuple[str, ...], default: Any, kind: str = "", what: str = "world_size"
) -> Any:
    names = (*methods, f"get_{kind}_parallel_{what}") if kind else methods
    found = next((getattr(mpu, name) for name in names if hasattr(mpu, name)), None)
    return default if found is None else found()
