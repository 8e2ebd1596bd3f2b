"""Table of the names of DeepSpeed for checkpoints, their conversion scripts, and launcher programs."""

from windlass.compat import checkpoint_constants
from windlass.compat.stand_in_entry import StandInEntry, differs, refused, works

_WHOLE = "windlass.compat.checkpoint.consolidated"
_NAMES = (
    "get_fp32_state_dict_from_zero_checkpoint",
    "convert_zero_checkpoint_to_fp32_state_dict",
    "load_state_dict_from_zero_checkpoint",
    "get_model_state_file",
    "get_optim_files",
    "get_model_state_files",
)

_FILES = "windlass.compat.checkpoint_constants"
_LAYOUT = "windlass.compat.checkpoint_layout"
_FILE_NAMES = ("get_model_ckpt_name_for_rank", "get_zero_ckpt_name_for_rank", "get_layer_ckpt_name_for_rank")
_FILE_KEYS = tuple(name for name in vars(checkpoint_constants) if name.isupper())
_READER = refused("DeepSpeed's checkpoint reader is not built; load_checkpoint and zero_to_fp32 read its files")

_HOSTS = ("fetch_hostfile", "parse_resource_filter", "parse_inclusion_exclusion", "encode_world_info")
_RUNNERS = (
    "MultiNodeRunner",
    "PDSHRunner",
    "OpenMPIRunner",
    "MPICHRunner",
    "IMPIRunner",
    "SlurmRunner",
    "MVAPICHRunner",
)
_BACK_ENDS = "builds DeepSpeed's command; --launcher builds another one, which passes on windlass's launch plan"

TABLE: dict[str, StandInEntry] = {
    "deepspeed.checkpoint.utils.clone_tensors_for_torch_save": works(
        "windlass.compat.clone_tensors:clone_tensors_for_torch_save"
    ),
    **{f"deepspeed.checkpoint.utils.{name}": works(f"{_FILES}:{name}") for name in _FILE_NAMES},
    **{f"deepspeed.checkpoint.{name}": works(f"{_FILES}:{name}") for name in _FILE_NAMES},
    "deepspeed.checkpoint.constants": works(_FILES),
    **{f"deepspeed.checkpoint.{name}": works(f"{_FILES}:{name}") for name in _FILE_KEYS},
    "deepspeed.checkpoint.model_3d_desc": works("windlass.compat.checkpoint_reshape:model_3d_desc"),
    "deepspeed.runtime.swap_tensor.MIN_SWAPPABLE_BYTES": works(
        "windlass.compat.launcher_constants:MIN_SWAPPABLE_BYTES"
    ),
    "deepspeed.checkpoint.DeepSpeedCheckpoint": _READER,
    "deepspeed.checkpoint.ZeROCheckpoint": differs(
        f"{_LAYOUT}:ZeROCheckpoint", "lists the files of each rank but reads no states: use load_checkpoint"
    ),
    "deepspeed.checkpoint.get_model_3d_descriptor": works(f"{_LAYOUT}:get_model_3d_descriptor"),
    "deepspeed.checkpoint.ds_to_universal": differs(
        "windlass.compat.checkpoint.to_windlass", "writes a windlass checkpoint, which loads on any number of ranks"
    ),
    **{
        f"deepspeed.runtime.checkpoint_engine.{name}": differs(
            f"windlass.compat.script_checkpoint_engine:{name.rpartition('.')[2]}",
            "for scripts: the engine reads and writes its own files and calls none of its methods",
        )
        for name in (
            "checkpoint_engine.CheckpointCommitInfo",
            "checkpoint_engine.CheckpointEngine",
            "torch_checkpoint_engine.TorchCheckpointEngine",
        )
    },
    "deepspeed.launcher.runner": works("windlass.compat.deepspeed_command"),
    "deepspeed.launcher.runner.main": works("windlass.compat.deepspeed_command:run"),
    "deepspeed.launcher.runner.DEEPSPEED_ENVIRONMENT_NAME": works(
        "windlass.launch.exported_environment:ENVIRONMENT_FILE_NAME"
    ),
    "deepspeed.launcher.runner.EXPORT_ENVS": works("windlass.launch.exported_environment:EXPORTED_PREFIXES"),
    "deepspeed.launcher.runner.DLTS_HOSTFILE": works("windlass.launch.hostfile:DEFAULT_HOSTFILE"),
    **{f"deepspeed.launcher.runner.{name}": works(f"windlass.launch.hostfile:{name}") for name in _HOSTS},
    "deepspeed.launcher.runner._parse_hostfile": works("windlass.launch.hostfile:parse_hostfile"),
    "deepspeed.launcher.runner.apply_num_nodes_and_gpus": works("windlass.launch.hostfile:limit_hosts"),
    **{
        f"deepspeed.launcher.multinode_runner.{name}": differs(f"windlass.compat.multinode_runners:{name}", _BACK_ENDS)
        for name in _RUNNERS
    },
    "deepspeed.launcher.launch": works("windlass.compat.deepspeed_node_command"),
    "deepspeed.env_report": works("windlass.compat.ds_report"),
    "deepspeed.utils.zero_to_fp32": works(_WHOLE),
    "deepspeed.utils.zero_to_torch": works("windlass.compat.zero_to_torch"),
    **{f"deepspeed.utils.zero_to_fp32.{name}": works(f"{_WHOLE}:{name}") for name in _NAMES},
    "deepspeed.utils.zero_to_torch.convert_zero_checkpoint_to_state_dict": works(
        f"{_WHOLE}:convert_zero_checkpoint_to_state_dict"
    ),
}
