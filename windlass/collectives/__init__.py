"""The collectives that a script calls itself, with the names of `deepspeed.comm`; in reading order: operators, fold
(what they mean), payload, work, backends, recipes, moves, reductions, point_to_point, bandwidth, straggling, comms_log,
timed, calls, monitored, log_calls, launched, world, torch_backend."""

from __future__ import annotations

from typing import Any

from torch.distributed import GradBucket as GradBucket  # type: ignore[attr-defined]
from torch.distributed import ProcessGroup as ProcessGroup

from windlass.collectives.bandwidth import calc_bw_log as calc_bw_log
from windlass.collectives.bandwidth import convert_size as convert_size
from windlass.collectives.calls import P2POp as P2POp
from windlass.collectives.calls import all_gather as all_gather
from windlass.collectives.calls import all_gather_coalesced as all_gather_coalesced
from windlass.collectives.calls import all_gather_into_tensor as all_gather_into_tensor
from windlass.collectives.calls import all_gather_object as all_gather_object
from windlass.collectives.calls import all_reduce as all_reduce
from windlass.collectives.calls import all_reduce_coalesced as all_reduce_coalesced
from windlass.collectives.calls import all_to_all as all_to_all
from windlass.collectives.calls import all_to_all_single as all_to_all_single
from windlass.collectives.calls import allgather_fn as allgather_fn
from windlass.collectives.calls import barrier as barrier
from windlass.collectives.calls import batch_isend_irecv as batch_isend_irecv
from windlass.collectives.calls import broadcast as broadcast
from windlass.collectives.calls import broadcast_object_list as broadcast_object_list
from windlass.collectives.calls import gather as gather
from windlass.collectives.calls import inference_all_reduce as inference_all_reduce
from windlass.collectives.calls import irecv as irecv
from windlass.collectives.calls import isend as isend
from windlass.collectives.calls import recv as recv
from windlass.collectives.calls import reduce as reduce
from windlass.collectives.calls import reduce_scatter as reduce_scatter
from windlass.collectives.calls import reduce_scatter_fn as reduce_scatter_fn
from windlass.collectives.calls import reduce_scatter_tensor as reduce_scatter_tensor
from windlass.collectives.calls import scatter as scatter
from windlass.collectives.calls import send as send
from windlass.collectives.comms_log import CommsLogger as CommsLogger
from windlass.collectives.comms_log import comms_logger as comms_logger
from windlass.collectives.fold import fold as fold
from windlass.collectives.fold import fold_pairs as fold_pairs
from windlass.collectives.launched import CCL_BACKEND as CCL_BACKEND
from windlass.collectives.launched import GLOO_BACKEND as GLOO_BACKEND
from windlass.collectives.launched import HCCL_BACKEND as HCCL_BACKEND
from windlass.collectives.launched import MPI_BACKEND as MPI_BACKEND
from windlass.collectives.launched import NCCL_BACKEND as NCCL_BACKEND
from windlass.collectives.launched import SCCL_BACKEND as SCCL_BACKEND
from windlass.collectives.launched import TORCH_DISTRIBUTED_DEFAULT_PORT as TORCH_DISTRIBUTED_DEFAULT_PORT
from windlass.collectives.launched import enable_symm_mem_for_group as enable_symm_mem_for_group
from windlass.collectives.launched import get_local_rank_from_launcher as get_local_rank_from_launcher
from windlass.collectives.launched import get_world_rank_from_launcher as get_world_rank_from_launcher
from windlass.collectives.launched import get_world_size_from_launcher as get_world_size_from_launcher
from windlass.collectives.launched import in_aml as in_aml
from windlass.collectives.launched import in_aws_sm as in_aws_sm
from windlass.collectives.launched import in_dlts as in_dlts
from windlass.collectives.launched import is_parallel as is_parallel
from windlass.collectives.launched import mpi_discovery as mpi_discovery
from windlass.collectives.launched import patch_aml_env_for_torch_nccl_backend as patch_aml_env_for_torch_nccl_backend
from windlass.collectives.launched import (
    patch_aws_sm_env_for_torch_nccl_backend as patch_aws_sm_env_for_torch_nccl_backend,
)
from windlass.collectives.log_calls import configure as configure
from windlass.collectives.log_calls import get_comm_operation_count as get_comm_operation_count
from windlass.collectives.log_calls import get_logged_comm_ops as get_logged_comm_ops
from windlass.collectives.log_calls import has_comm_data as has_comm_data
from windlass.collectives.log_calls import log_summary as log_summary
from windlass.collectives.log_calls import reset_log as reset_log
from windlass.collectives.monitored import monitored_barrier as monitored_barrier
from windlass.collectives.operators import ReduceOp as ReduceOp
from windlass.collectives.operators import premul_sum as premul_sum
from windlass.collectives.timed import timed_op as timed_op
from windlass.collectives.torch_backend import Backend as Backend
from windlass.collectives.torch_backend import TorchBackend as TorchBackend
from windlass.collectives.work import Work as Work
from windlass.collectives.world import destroy_process_group as destroy_process_group
from windlass.collectives.world import get_all_ranks_from_group as get_all_ranks_from_group
from windlass.collectives.world import get_global_rank as get_global_rank
from windlass.collectives.world import get_local_rank as get_local_rank
from windlass.collectives.world import get_rank as get_rank
from windlass.collectives.world import get_world_group as get_world_group
from windlass.collectives.world import get_world_size as get_world_size
from windlass.collectives.world import has_all_gather_into_tensor as has_all_gather_into_tensor
from windlass.collectives.world import has_all_reduce_coalesced as has_all_reduce_coalesced
from windlass.collectives.world import has_coalescing_manager as has_coalescing_manager
from windlass.collectives.world import has_reduce_scatter_tensor as has_reduce_scatter_tensor
from windlass.collectives.world import init_distributed as init_distributed
from windlass.collectives.world import initialize_mesh_device as initialize_mesh_device
from windlass.collectives.world import is_available as is_available
from windlass.collectives.world import is_initialized as is_initialized
from windlass.collectives.world import new_group as new_group
from windlass.collectives.world import set_backend as set_backend


def __getattr__(name: str) -> Any:
    if name == "cdb":  # DeepSpeed's name of the back end in use, which changes
        from windlass.collectives.torch_backend import current

        return current()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
