"""Table of `deepspeed.comm`: collectives that scripts call."""

from windlass.compat.stand_in_entry import StandInEntry, works

_STARTED = {
    "init_distributed": works("windlass.compat.accelerate_bootstrap:init_distributed"),
    "is_initialized": works("windlass.compat.accelerate_bootstrap:is_initialized"),
}
_LAUNCHED = (
    "get_local_rank_from_launcher",
    "get_world_rank_from_launcher",
    "get_world_size_from_launcher",
)
_CONSTANTS = ("NCCL_BACKEND", "CCL_BACKEND", "MPI_BACKEND", "GLOO_BACKEND", "SCCL_BACKEND", "HCCL_BACKEND")

TABLE: dict[str, StandInEntry] = {
    "deepspeed.init_distributed": _STARTED["init_distributed"],
    "deepspeed.comm": works("windlass.compat.collectives"),
    "deepspeed.comm.comm": works("windlass.compat.collectives"),
    **{f"deepspeed.comm.{name}": entry for name, entry in _STARTED.items()},
    **{f"deepspeed.comm.comm.{name}": entry for name, entry in _STARTED.items()},
    "deepspeed.comm.reduce_op.ReduceOp": works("windlass.compat.collectives:ReduceOp"),
    "deepspeed.comm.backend.Backend": works("windlass.compat.collectives:Backend"),
    "deepspeed.comm.torch.TorchBackend": works("windlass.compat.collectives:TorchBackend"),
    "deepspeed.comm.torch.has_all_reduce_coalesced": works("windlass.compat.collectives:has_all_reduce_coalesced"),
    "deepspeed.comm.torch.has_coalescing_manager": works("windlass.compat.collectives:has_coalescing_manager"),
    "deepspeed.comm.config.CommsLoggerConfig": works("windlass.config.comm_section:CommsLoggerConfig"),
    **{
        f"deepspeed.comm.utils.{name}": works(f"windlass.compat.collectives.launcher_queries:{name}")
        for name in _LAUNCHED
    },
    "deepspeed.comm.pg_utils.is_parallel": works("windlass.compat.collectives.launcher_queries:is_parallel"),
    **{
        f"deepspeed.comm.constants.{name}": works(f"windlass.compat.collectives.launcher_queries:{name}")
        for name in _CONSTANTS
    },
    "deepspeed.utils.comms_logging.CommsLogger": works("windlass.compat.collectives:CommsLogger"),
    "deepspeed.utils.comms_logging.calc_bw_log": works("windlass.compat.collectives:calc_bw_log"),
    "deepspeed.utils.comms_logging.trim_mean": works("windlass.comm.collective_bandwidth:trimmed_mean"),
    "deepspeed.utils.comms_logging.convert_size": works("windlass.compat.collectives:convert_size"),
}
