"""Module `deepspeed.utils.groups`: process groups of each kind of parallelism, for the most recently built engine.

A query calls the method of the script's model-parallel unit (`mpu`) if it exists; otherwise it uses the engine's mesh.
Before there is an engine, all ranks are data ranks: sizes of other axes are 1, ranks in them are 0, and queries for
their groups raise an error.
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
    """Error for a call of a function that DeepSpeed has removed."""


def initialize(ep_size: int = 1, mpu: Any = None) -> NoReturn:
    """Raise: DeepSpeed has removed this function.

    Raises:
        DeprecatedException: always.
    """
    raise DeprecatedException(
        "DeepSpeed removed groups.initialize(): delete the call; deepspeed.moe.layer.MoE creates the groups of experts"
    )


def _current_mpu() -> Any:
    """Return the mpu set as `deepspeed.utils.groups.mpu` or in this module, else the one passed to `initialize`."""
    stand_in, axes = sys.modules.get("deepspeed.utils.groups"), current_groups()
    own = (stand_in.__dict__.get("mpu") if stand_in is not None else None) or mpu
    return own if own is not None or axes is None else axes.mpu


def _require_initialized() -> None:
    assert dist.is_initialized(), "no process group is initialized: call deepspeed.init_distributed() first"


def _ask_mpu(*names: str) -> Any:
    """Call the mpu's first existing method among `get_<name>` and return its result; None if it has none of them."""
    unit = _current_mpu()
    method = next((getattr(unit, f"get_{name}") for name in names if hasattr(unit, f"get_{name}")), None)
    return method() if method is not None else None


def _size_of(from_mpu: Any, group: RankGroup | None) -> int:
    """Return the mpu's size, else the size of the engine's group; 1 without either."""
    return int(from_mpu if from_mpu is not None else group.size if group is not None else 1)


def _rank_in(from_mpu: Any, group: RankGroup | None) -> int:
    return int(from_mpu if from_mpu is not None else group.index if group is not None else 0)


def _process_group_of(from_mpu: Any, group: RankGroup | None) -> dist.ProcessGroup | None:
    """Return the mpu's group, else the engine's group if it has more than one rank, else None."""
    made: dist.ProcessGroup | None = group.process_group if group is not None and group.size > 1 else None
    return from_mpu if from_mpu is not None else made


def _clone_world_group() -> dist.ProcessGroup:
    _require_initialized()
    world = dist.group.WORLD
    assert world is not None
    return world


def _world_rank_group() -> RankGroup:
    """Return a group of all ranks, for when there is no engine."""
    return RankGroup.of(_clone_world_group())


def _raise_no_group(kind: str) -> NoReturn:
    raise AssertionError(
        f"there is no {kind} group, since all ranks are data-parallel: initialize an engine that has one first"
    )


# Data parallelism: data-loading ranks.


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


# Model and tensor parallelism.


def _model_group() -> RankGroup | None:
    axes = current_groups()
    return axes.model_parallel_group if axes is not None else None


def _tensor_group() -> RankGroup | None:
    axes = current_groups()
    return axes.mesh.tp.group if axes is not None else None


def get_model_parallel_group() -> dist.ProcessGroup:
    """Return the group of ranks that together hold one copy of the model.

    Raises:
        AssertionError: every rank holds a full copy.
    """
    return _process_group_of(_ask_mpu("model_parallel_group"), _model_group()) or _raise_no_group("model-parallel")


def get_tensor_model_parallel_group() -> dist.ProcessGroup:
    """Return the tensor-parallel group, or the model-parallel group if an mpu has no tensor-parallel methods.

    Raises:
        AssertionError: there is no tensor parallelism.
    """
    answer = _ask_mpu("tensor_model_parallel_group", "model_parallel_group")
    return _process_group_of(answer, _tensor_group()) or _raise_no_group("tensor-parallel")


_overrides: dict[str, int] = {}


def set_tensor_model_parallel_world_size(world_size: int) -> None:
    """Override the tensor-parallel and model-parallel size that this module returns."""
    _overrides["world_size"] = world_size


def set_tensor_model_parallel_rank(rank: int) -> None:
    """Override the tensor-parallel and model-parallel rank that this module returns."""
    _overrides["rank"] = rank


def get_model_parallel_world_size() -> int:
    """Return the number of ranks that together hold one copy of the model."""
    return _overrides.get("world_size") or _size_of(_ask_mpu("model_parallel_world_size"), _model_group())


def get_tensor_model_parallel_world_size() -> int:
    """Return the number of ranks in the tensor-parallel group."""
    answer = _ask_mpu("tensor_model_parallel_world_size", "model_parallel_world_size")
    return _overrides.get("world_size") or _size_of(answer, _tensor_group())


def get_model_parallel_rank() -> int:
    """Return this rank's index among the ranks that together hold one copy of the model."""
    return _overrides["rank"] if "rank" in _overrides else _rank_in(_ask_mpu("model_parallel_rank"), _model_group())


def get_tensor_model_parallel_rank() -> int:
    """Return this rank's index in its tensor-parallel group."""
    answer = _ask_mpu("tensor_model_parallel_rank", "model_parallel_rank")
    return _overrides["rank"] if "rank" in _overrides else _rank_in(answer, _tensor_group())


def get_tensor_model_parallel_src_rank() -> int:
    """Return the first global rank of this rank's tensor-parallel group.

    If a script has overridden the size of the group, the ranks are assumed to be consecutive.
    """
    group = _process_group_of(_ask_mpu("tensor_model_parallel_group", "model_parallel_group"), _tensor_group())
    if group is not None and "world_size" not in _overrides:
        return dist.get_process_group_ranks(group)[0]
    size = get_tensor_model_parallel_world_size()
    return dist.get_rank() // size * size


_get_model_parallel_world_size = get_model_parallel_world_size


# Sequence parallelism.


def _sequence_group() -> RankGroup | None:
    axes = current_groups()
    return axes.mesh.sp.group if axes is not None else None


def _dense_data_group() -> RankGroup:
    """Return the ranks over which dense gradients are reduced: data-loading ranks, and ranks along sp."""
    axes = current_groups()
    return axes.mesh.dense.data if axes is not None else _world_rank_group()


def _get_sequence_parallel_group() -> dist.ProcessGroup:
    group = _process_group_of(_ask_mpu("sequence_parallel_group"), _sequence_group())
    if group is None:
        raise KeyError("there is no sequence-parallel group: initialize an engine that shards sequences first")
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
    """Return the names of the mpu's methods for the ranks over which gradients are reduced, in order of preference.

    An mpu without sequence parallelism has only `data_parallel` methods for these ranks.
    """
    own = f"sequence_data_parallel_{what}"
    return (own,) if hasattr(_current_mpu(), "get_sequence_parallel_world_size") else (own, f"data_parallel_{what}")


# Secondary copies of the parameters within a node (hpZ) are internal to windlass, so there is no group to return.


def _get_zero_param_intra_parallel_group() -> None:
    return None


def _zero_param_parallel_is_initialized() -> bool:
    return False


# The same queries on an explicit mpu, which may be None.


def bwc_tensor_model_parallel_world_size(mpu: Any = None) -> int:
    """Return the number of tensor-parallel ranks, by any of the method names that mpus have used."""
    return int(
        _call_first_method(mpu, ("get_tensor_model_parallel_world_size", "get_slice_parallel_world_size"), 1, "model")
    )


def bwc_tensor_model_parallel_rank(mpu: Any = None) -> int:
    """Return this rank's index in its tensor-parallel group; 0 without one."""
    return int(
        _call_first_method(mpu, ("get_tensor_model_parallel_rank", "get_slice_parallel_rank"), 0, "model", "rank")
    )


def bwc_tensor_model_parallel_group(mpu: Any = None) -> Any:
    """Return the tensor-parallel group; None without one."""
    return _call_first_method(
        mpu, ("get_tensor_model_parallel_group", "get_slice_parallel_group"), None, "model", "group"
    )


def bwc_pipeline_parallel_world_size(mpu: Any = None) -> int:
    """Return the number of pipeline stages."""
    return int(_call_first_method(mpu, ("get_pipeline_model_parallel_world_size", "get_pipe_parallel_world_size"), 1))


def bwc_pipeline_parallel_group(mpu: Any = None) -> Any:
    """Return the group of ranks of one pipeline; None without one."""
    return _call_first_method(mpu, ("get_pipeline_model_parallel_group", "get_pipe_parallel_group"), None)


def _call_first_method(
    mpu: Any, methods: tuple[str, ...], default: Any, kind: str = "", what: str = "world_size"
) -> Any:
    names = (*methods, f"get_{kind}_parallel_{what}") if kind else methods
    found = next((getattr(mpu, name) for name in names if hasattr(mpu, name)), None)
    return default if found is None else found()
