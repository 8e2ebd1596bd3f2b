"""DeepSpeed's backend object: the functions of this package as methods."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from windlass.comm.mpi_library import BACKEND as MPI_BACKEND
from windlass.compat.collectives import collective_calls, process_group_calls
from windlass.compat.collectives.monitored_barrier import monitored_barrier

_COLLECTIVE_CALLS = (
    "all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object", "all_reduce",
    "all_reduce_coalesced", "all_to_all", "all_to_all_single", "barrier", "batch_isend_irecv", "broadcast",
    "broadcast_object_list", "gather", "inference_all_reduce", "irecv", "isend", "recv", "reduce", "reduce_scatter",
    "reduce_scatter_tensor", "scatter", "send",
)  # fmt: skip
_PROCESS_GROUP_CALLS = (
    "destroy_process_group", "get_global_rank", "get_rank", "get_world_group", "get_world_size",
    "has_all_gather_into_tensor", "has_reduce_scatter_tensor", "is_initialized", "new_group",
)  # fmt: skip


class Backend:
    """Name and state of a backend."""

    def __init__(self, name: str = "backend", rank: int = 0, size: int = 1) -> None:
        self.name, self.world_rank, self.world_size = name, rank, size
        self.world_group: Any = None
        self.process_groups: list[Any] = []
        self.initialized = False


class TorchBackend(Backend):
    """Backend torch.distributed. The constructor initializes it unless it is initialized.

    Args:
        backend, timeout, init_method, rank, world_size: see `init_distributed`.
    """

    def __init__(
        self,
        backend: str | None = None,
        timeout: timedelta | None = None,
        init_method: str | None = None,
        rank: int = -1,
        world_size: int = -1,
        name: str = "torch",
    ) -> None:
        super().__init__(name)
        process_group_calls.init_distributed(
            backend, timeout=timeout, init_method=init_method, rank=rank, world_size=world_size, verbose=False
        )
        self.world_group, self.initialized = dist.group.WORLD, True
        self.world_rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.using_mpi = dist.get_backend() in ("mpi", MPI_BACKEND)
        self.has_all_reduce_coalesced, self.has_coalescing_manager = True, process_group_calls.has_coalescing_manager()

    @classmethod
    def get_all_gather_function(cls) -> Callable[..., Any]:
        """Return `f(output_tensor, input_tensor, group=None, async_op=False)`."""
        return collective_calls.allgather_fn

    @classmethod
    def get_reduce_scatter_function(cls) -> Callable[..., Any]:
        """Return `f(output_tensor, tensor, op, group=None, async_op=False)`."""
        return collective_calls.reduce_scatter_fn

    def get_backend(self, group: Any = None) -> str:
        """Return torch's name of the group's backend."""
        return str(dist.get_backend(group))

    def init_device_mesh(self, mesh_shape: Any, mesh_dim_names: Any) -> Any:
        """Create a device mesh; see `initialize_mesh_device`."""
        return process_group_calls.initialize_mesh_device(mesh_shape, mesh_dim_names)


for _name in _COLLECTIVE_CALLS:
    setattr(TorchBackend, _name, staticmethod(getattr(collective_calls, _name)))
for _name in _PROCESS_GROUP_CALLS:
    setattr(TorchBackend, _name, staticmethod(getattr(process_group_calls, _name)))
TorchBackend.monitored_barrier = staticmethod(monitored_barrier)  # type: ignore[attr-defined]


def current_backend() -> TorchBackend | None:
    """Return the backend in use; None before the process group is initialized."""
    return TorchBackend() if dist.is_initialized() else None
