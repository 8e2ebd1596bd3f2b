"""Backend of a group for a tensor's device, and the reductions that the backend supports natively."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from windlass.base.errors import CommunicationError
from windlass.comm.mpi_library import BACKEND as MPI_BACKEND
from windlass.compat.collectives.reduce_operators import ReduceOp

_BASIC = (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX)
_BITWISE = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)
_INTEGERS = frozenset({torch.int8, torch.uint8, torch.int32, torch.int64})
_FLOATS = frozenset({torch.float32, torch.float64})
_HALVES = frozenset({torch.float16, torch.bfloat16})


@dataclass(frozen=True)
class BackendCapabilities:
    """Native features of a backend.

    Args:
        reduce_dtypes: for each operator, the dtypes in which the backend's results are correct.
        has_reduce_scatter: True if the backend's reduce-scatter moves fewer bytes than an all-reduce.
        has_all_to_all_lists: True if the backend's all-to-all takes lists of tensors of different sizes.
        receives_from_any: True if a receive works without naming the sender.
        preserves_reduce_inputs: True if a reduce to one rank leaves the other ranks' tensors unchanged.
    """

    reduce_dtypes: dict[ReduceOp, frozenset[torch.dtype]]
    has_reduce_scatter: bool = False
    has_all_to_all_lists: bool = False
    receives_from_any: bool = False
    preserves_reduce_inputs: bool = False


BACKEND_CAPABILITIES: dict[str, BackendCapabilities] = {
    # Gloo has no 16-bit floats here, because it rounds at every rank where a sum in float32 rounds once; nor averages,
    # which only newer versions support.
    "gloo": BackendCapabilities(
        {**dict.fromkeys(_BASIC, _INTEGERS | _FLOATS), **dict.fromkeys(_BITWISE, _INTEGERS)}, receives_from_any=True
    ),
    "nccl": BackendCapabilities(
        {**dict.fromkeys(_BASIC, _INTEGERS | _FLOATS | _HALVES), ReduceOp.AVG: _FLOATS | _HALVES},
        has_reduce_scatter=True,
        has_all_to_all_lists=True,
        preserves_reduce_inputs=True,
    ),
}
BACKEND_CAPABILITIES[MPI_BACKEND] = BackendCapabilities(
    {
        **dict.fromkeys(_BASIC, _INTEGERS | _FLOATS | frozenset({torch.int16})),
        **dict.fromkeys(_BITWISE, _INTEGERS | frozenset({torch.int16})),
    },
    has_reduce_scatter=True,
    has_all_to_all_lists=True,
    receives_from_any=True,
    preserves_reduce_inputs=True,
)
_DEFAULT_CAPABILITIES = BackendCapabilities(dict.fromkeys(_BASIC, _FLOATS | frozenset({torch.int32, torch.int64})))


def backend_of(group: Any, device: torch.device) -> str:
    """Return the name of the backend of `group` for tensors on `device`.

    Raises:
        CommunicationError: the group has no backend for this device.
    """
    config = dist.get_backend_config(group)
    for entry in config.split(","):
        where, _, name = entry.partition(":")
        if where == device.type:
            return name
    raise CommunicationError(
        f"the process group ({config}) has no backend for {device.type} tensors; move the tensor, or let "
        "init_distributed choose the backend (dist_backend=None)"
    )


def capabilities_of(group: Any, device: torch.device) -> BackendCapabilities:
    """Return the capabilities of the backend of `group` for tensors on `device`."""
    return BACKEND_CAPABILITIES.get(backend_of(group, device), _DEFAULT_CAPABILITIES)


def warn_unless_member(group: Any, operation: str, *, stacklevel: int = 4) -> bool:
    """Return True if this rank is in `group`; otherwise warn and return False.

    The warning cites the line of the calling script, as torch's warnings do.
    """
    require_initialized()
    if dist.get_rank(group) >= 0:
        return True
    warnings.warn(
        f"rank {dist.get_rank()} calls {operation} on a group that it is not in: the call does nothing; call it on "
        "ranks of the group",
        stacklevel=stacklevel,
    )
    return False


def require_initialized() -> None:
    """Raise CommunicationError if no process group is initialized."""
    if not dist.is_initialized():
        raise CommunicationError(
            "no process group is initialized; call init_distributed() (or deepspeed.init_distributed) first"
        )


def group_or_world(group: Any) -> Any:
    """Return `group`, or the group of all ranks if it is None."""
    return dist.group.WORLD if group is None else group


def require_rank(name: str, rank: int, group: Any) -> None:
    """Raise CommunicationError, naming the argument `name`, unless the global `rank` is in `group`."""
    ranks = dist.get_process_group_ranks(group_or_world(group))
    if rank not in ranks:
        raise CommunicationError(
            f"{name} = {rank} is not in the group of ranks {ranks}; pass a global rank of the group"
        )
