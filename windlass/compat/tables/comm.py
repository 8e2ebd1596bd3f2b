"""`deepspeed.comm`: the collectives that scripts call themselves."""

from windlass.compat.entry import Entry, works

_STARTED = {
    "init_distributed": works("windlass.compat.clients:init_distributed"),
    "is_initialized": works("windlass.compat.clients:is_initialized"),
}

TABLE: dict[str, Entry] = {
    "deepspeed.init_distributed": _STARTED["init_distributed"],
    "deepspeed.comm": works("windlass.collectives"),
    "deepspeed.comm.comm": works("windlass.collectives"),
    **{f"deepspeed.comm.{name}": entry for name, entry in _STARTED.items()},
    **{f"deepspeed.comm.comm.{name}": entry for name, entry in _STARTED.items()},
    "deepspeed.comm.reduce_op.ReduceOp": works("windlass.collectives:ReduceOp"),
    "deepspeed.comm.backend.Backend": works("windlass.collectives:Backend"),
    "deepspeed.comm.torch.TorchBackend": works("windlass.collectives:TorchBackend"),
    "deepspeed.comm.torch.has_all_reduce_coalesced": works("windlass.collectives:has_all_reduce_coalesced"),
    "deepspeed.comm.torch.has_coalescing_manager": works("windlass.collectives:has_coalescing_manager"),
    "deepspeed.comm.config.DeepSpeedCommsConfig": works("windlass.config.comm:CommsLogger"),
    "deepspeed.utils.comms_logging.CommsLogger": works("windlass.collectives:CommsLogger"),
    "deepspeed.utils.comms_logging.calc_bw_log": works("windlass.collectives:calc_bw_log"),
    "deepspeed.utils.comms_logging.convert_size": works("windlass.collectives:convert_size"),
}
