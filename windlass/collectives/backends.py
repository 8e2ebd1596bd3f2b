"""Which back end serves a tensor, and what it can reduce by itself; everything else is composed from that."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from windlass.base.errors import CommunicationError
from windlass.collectives.operators import ReduceOp

_BASIC = (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX)
_BITWISE = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)
_INTEGERS = frozenset({torch.int8, torch.uint8, torch.int32, torch.int64})
_FLOATS = frozenset({torch.float32, torch.float64})
_HALVES = frozenset({torch.float16, torch.bfloat16})


@dataclass(frozen=True)
class Abilities:
    """What a back end does by itself.

    Args:
        reduces: the dtypes of each operator, in which results are what they should be.
        scatters: its reduce-scatter moves less than an all-reduce.
        lists: its all-to-all takes lists of tensors of any size.
        anyone: it can receive from whoever sends.
        quiet: a reduction to one rank leaves the others' tensors alone.
    """

    reduces: dict[ReduceOp, frozenset[torch.dtype]]
    scatters: bool = False
    lists: bool = False
    anyone: bool = False
    quiet: bool = False


ABILITIES: dict[str, Abilities] = {
    # gloo could add 16-bit floats, rounding at every rank, and newer ones average; float32 on the way rounds once.
    "gloo": Abilities(
        {**dict.fromkeys(_BASIC, _INTEGERS | _FLOATS), **dict.fromkeys(_BITWISE, _INTEGERS)}, anyone=True
    ),
    "nccl": Abilities(
        {**dict.fromkeys(_BASIC, _INTEGERS | _FLOATS | _HALVES), ReduceOp.AVG: _FLOATS | _HALVES},
        scatters=True,
        lists=True,
        quiet=True,
    ),
}
_OTHER = Abilities(dict.fromkeys(_BASIC, _FLOATS | frozenset({torch.int32, torch.int64})))


def serving(group: Any, device: torch.device) -> str:
    """The back end of `group` for tensors on `device`.

    Raises:
        CommunicationError: there is none.
    """
    config = dist.get_backend_config(group)
    for entry in config.split(","):
        where, _, name = entry.partition(":")
        if where == device.type:
            return name
    raise CommunicationError(
        f"the process group ({config}) has no back end for {device.type} tensors; move the tensor, or let "
        "init_distributed choose (dist_backend=None)"
    )


def abilities(group: Any, device: torch.device) -> Abilities:
    """What the back end of `group` for tensors on `device` does by itself."""
    return ABILITIES.get(serving(group, device), _OTHER)


def is_member(group: Any, operation: str) -> bool:
    """Whether this rank is in `group`; where it is not, that is said, as torch says it, and nothing happens."""
    require_group()
    if dist.get_rank(group) >= 0:
        return True
    warnings.warn(
        f"rank {dist.get_rank()} runs {operation} on a group that it is not in: nothing happens", stacklevel=4
    )
    return False


def require_group() -> None:
    """Raise by name where no process group was started."""
    if not dist.is_initialized():
        raise CommunicationError(
            "there is no process group yet; call init_distributed() (or deepspeed.init_distributed) first"
        )


def group_of(group: Any) -> Any:
    """The group that a caller means: None is that of all ranks."""
    return dist.group.WORLD if group is None else group


def require_rank(name: str, rank: int, group: Any) -> None:
    """Raise by name unless the global `rank`, a caller's argument `name`, is in `group`."""
    ranks = dist.get_process_group_ranks(group_of(group))
    if rank not in ranks:
        raise CommunicationError(f"{name} = {rank} is not in the group of ranks {ranks}; it is a global rank")
