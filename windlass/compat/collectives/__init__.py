"""Collectives that a script calls itself, under the names of `deepspeed.comm`.

Reading order: reduce_operators, rank_order_reduction (semantics of the operators), byte_payload, collective_work,
backend_capabilities, native_reductions, byte_collectives, reductions, send_and_receive, timed_calls, collective_calls,
monitored_barrier, comms_logger_calls, launcher_queries, process_group_calls, torch_backend.
"""

from __future__ import annotations

from typing import Any

from torch.distributed import GradBucket as GradBucket  # type: ignore[attr-defined]
from torch.distributed import ProcessGroup as ProcessGroup

from windlass.comm.collective_bandwidth import calc_bw_log as calc_bw_log
from windlass.comm.collective_bandwidth import convert_size as convert_size
from windlass.comm.comms_logger import CommsLogger as CommsLogger
from windlass.comm.comms_logger import comms_logger as comms_logger
from windlass.compat.collectives.collective_calls import P2POp as P2POp
from windlass.compat.collectives.collective_calls import all_gather as all_gather
from windlass.compat.collectives.collective_calls import all_gather_coalesced as all_gather_coalesced
from windlass.compat.collectives.collective_calls import all_gather_into_tensor as all_gather_into_tensor
from windlass.compat.collectives.collective_calls import all_gather_object as all_gather_object
from windlass.compat.collectives.collective_calls import all_reduce as all_reduce
from windlass.compat.collectives.collective_calls import all_reduce_coalesced as all_reduce_coalesced
from windlass.compat.collectives.collective_calls import all_to_all as all_to_all
from windlass.compat.collectives.collective_calls import all_to_all_single as all_to_all_single
from windlass.compat.collectives.collective_calls import allgather_fn as allgather_fn
from windlass.compat.collectives.collective_calls import barrier as barrier
from windlass.compat.collectives.collective_calls import batch_isend_irecv as batch_isend_irecv
from windlass.compat.collectives.collective_calls import broadcast as broadcast
from windlass.compat.collectives.collective_calls import broadcast_object_list as broadcast_object_list
from windlass.compat.collectives.collective_calls import gather as gather
from windlass.compat.collectives.collective_calls import gatherv as gatherv
from windlass.compat.collectives.collective_calls import inference_all_reduce as inference_all_reduce
from windlass.compat.collectives.collective_calls import irecv as irecv
from windlass.compat.collectives.collective_calls import isend as isend
from windlass.compat.collectives.collective_calls import recv as recv
from windlass.compat.collectives.collective_calls import reduce as reduce
from windlass.compat.collectives.collective_calls import reduce_scatter as reduce_scatter
from windlass.compat.collectives.collective_calls import reduce_scatter_fn as reduce_scatter_fn
from windlass.compat.collectives.collective_calls import reduce_scatter_tensor as reduce_scatter_tensor
from windlass.compat.collectives.collective_calls import scatter as scatter
from windlass.compat.collectives.collective_calls import scatterv as scatterv
from windlass.compat.collectives.collective_calls import send as send
from windlass.compat.collectives.collective_work import CollectiveWork as CollectiveWork
from windlass.compat.collectives.comms_logger_calls import configure as configure
from windlass.compat.collectives.comms_logger_calls import get_comm_operation_count as get_comm_operation_count
from windlass.compat.collectives.comms_logger_calls import get_logged_comm_ops as get_logged_comm_ops
from windlass.compat.collectives.comms_logger_calls import has_comm_data as has_comm_data
from windlass.compat.collectives.comms_logger_calls import log_summary as log_summary
from windlass.compat.collectives.comms_logger_calls import reset_log as reset_log
from windlass.compat.collectives.launcher_queries import CCL_BACKEND as CCL_BACKEND
from windlass.compat.collectives.launcher_queries import GLOO_BACKEND as GLOO_BACKEND
from windlass.compat.collectives.launcher_queries import HCCL_BACKEND as HCCL_BACKEND
from windlass.compat.collectives.launcher_queries import MPI_BACKEND as MPI_BACKEND
from windlass.compat.collectives.launcher_queries import NCCL_BACKEND as NCCL_BACKEND
from windlass.compat.collectives.launcher_queries import SCCL_BACKEND as SCCL_BACKEND
from windlass.compat.collectives.launcher_queries import (
    TORCH_DISTRIBUTED_DEFAULT_PORT as TORCH_DISTRIBUTED_DEFAULT_PORT,
)
from windlass.compat.collectives.launcher_queries import enable_symm_mem_for_group as enable_symm_mem_for_group
from windlass.compat.collectives.launcher_queries import get_local_rank_from_launcher as get_local_rank_from_launcher
from windlass.compat.collectives.launcher_queries import get_world_rank_from_launcher as get_world_rank_from_launcher
from windlass.compat.collectives.launcher_queries import get_world_size_from_launcher as get_world_size_from_launcher
from windlass.compat.collectives.launcher_queries import in_aml as in_aml
from windlass.compat.collectives.launcher_queries import in_aws_sm as in_aws_sm
from windlass.compat.collectives.launcher_queries import in_dlts as in_dlts
from windlass.compat.collectives.launcher_queries import is_parallel as is_parallel
from windlass.compat.collectives.launcher_queries import mpi_discovery as mpi_discovery
from windlass.compat.collectives.launcher_queries import (
    patch_aml_env_for_torch_nccl_backend as patch_aml_env_for_torch_nccl_backend,
)
from windlass.compat.collectives.launcher_queries import (
    patch_aws_sm_env_for_torch_nccl_backend as patch_aws_sm_env_for_torch_nccl_backend,
)
from windlass.compat.collectives.monitored_barrier import monitored_barrier as monitored_barrier
from windlass.compat.collectives.process_group_calls import destroy_process_group as destroy_process_group
from windlass.compat.collectives.process_group_calls import get_all_ranks_from_group as get_all_ranks_from_group
from windlass.compat.collectives.process_group_calls import get_global_rank as get_global_rank
from windlass.compat.collectives.process_group_calls import get_local_rank as get_local_rank
from windlass.compat.collectives.process_group_calls import get_rank as get_rank
from windlass.compat.collectives.process_group_calls import get_world_group as get_world_group
from windlass.compat.collectives.process_group_calls import get_world_size as get_world_size
from windlass.compat.collectives.process_group_calls import has_all_gather_into_tensor as has_all_gather_into_tensor
from windlass.compat.collectives.process_group_calls import has_all_reduce_coalesced as has_all_reduce_coalesced
from windlass.compat.collectives.process_group_calls import has_coalescing_manager as has_coalescing_manager
from windlass.compat.collectives.process_group_calls import has_reduce_scatter_tensor as has_reduce_scatter_tensor
from windlass.compat.collectives.process_group_calls import init_distributed as init_distributed
from windlass.compat.collectives.process_group_calls import initialize_mesh_device as initialize_mesh_device
from windlass.compat.collectives.process_group_calls import is_available as is_available
from windlass.compat.collectives.process_group_calls import is_initialized as is_initialized
from windlass.compat.collectives.process_group_calls import new_group as new_group
from windlass.compat.collectives.process_group_calls import set_backend as set_backend
from windlass.compat.collectives.rank_order_reduction import reduce_in_rank_order as reduce_in_rank_order
from windlass.compat.collectives.rank_order_reduction import reduce_pairs_in_rank_order as reduce_pairs_in_rank_order
from windlass.compat.collectives.reduce_operators import ReduceOp as ReduceOp
from windlass.compat.collectives.reduce_operators import premul_sum as premul_sum
from windlass.compat.collectives.timed_calls import timed_op as timed_op
from windlass.compat.collectives.torch_backend import Backend as Backend
from windlass.compat.collectives.torch_backend import TorchBackend as TorchBackend


def __getattr__(name: str) -> Any:
    if name == "cdb":  # DeepSpeed's name of the backend in use; looked up at each access because it changes
        from windlass.compat.collectives.torch_backend import current_backend

        return current_backend()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
