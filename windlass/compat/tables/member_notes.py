"""Notes on members of objects that scripts hold: the engine, its optimizer, parameters.

Unlisted members work as in DeepSpeed.

Members are not dotted module names, so the import hook does not use this table: the classes implement them
(`windlass.compat.deepspeed_engine`, `windlass.compat.parameter_attributes`). A test checks that the refused members
raise the messages in this table.
"""

from windlass.compat.deepspeed_engine import REFUSED_METHODS as OF_ENGINE
from windlass.compat.stand_in_entry import StandInEntry, differs, refused

MEMBER_NOTES: dict[str, StandInEntry] = {
    **{f"engine.{name}": refused(why) for name, why in OF_ENGINE.items()},
    "engine.buffers": differs(
        "",
        "beside 16-bit parameters they keep their dtype, as in DeepSpeed since 0.19, but for the statistics of torch's "
        "norms, which follow the weights",
    ),
    "engine.compile": differs(
        "windlass.compat.deepspeed_engine:DeepSpeedEngine.compile",
        "by torch: the module's forward, or at stage 3 the forward of each block; no schedules of DeepCompile",
    ),
    "engine.no_sync": differs(
        "windlass.compat.deepspeed_engine:DeepSpeedEngine.no_sync",
        "refused at stages 2 and 3, as in DeepSpeed; that of `windlass.initialize` works at every stage",
    ),
    "engine.optimizer": differs(
        "windlass.engine.sharded_optimizer:ShardedOptimizer",
        "one class at every stage, a torch optimizer, "
        "at stage 0 in fp32 also an instance of the script's class; where none is given, at stage 3 "
        "what `parameter_offload` is",
    ),
    "optimizer.step": differs(
        "windlass.engine.sharded_optimizer:ShardedOptimizer.step",
        "counts as a step of the engine (`global_steps`), and inside an accumulation only ends a micro-batch; as in "
        "DeepSpeed it leaves the schedule to the script",
    ),
    "engine.step": differs(
        "",
        "a step whose gradient is not finite is skipped at stage 0 in fp32 too, where DeepSpeed makes it",
    ),
    "engine.state_dict": differs(
        "windlass.zero.core.sharded_parameter:StateDictStub",
        "at stage 3 it has names and shapes; values are read by all ranks together, and cannot be changed",
    ),
    "engine.module_state_dict": differs(
        "windlass.engine.checkpoint_methods:CheckpointMethods.module_state_dict",
        "of a model that is cut over ranks what this one has, by the names of the whole; full_state_dict has all",
    ),
    "engine.train_batch_size": differs(
        "",
        "counts samples: with autotp_size, whose ranks DeepSpeed counts each, it is that of the configuration divided "
        "by it",
    ),
    "engine.allreduce_gradients": differs("", "nothing to do: gradients are reduced as they come"),
    "engine.empty_partition_cache": differs("", "nothing to do: what a forward gathered is released when it ends"),
    "engine.get_compile_time": differs("", "0: torch compiles at the first forward, and does not tell"),
    "optimizer.quantize_nontrainable_params": refused("quantized gathers are not built"),
    "optimizer.bit16_groups_flat": differs(
        "windlass.compat.optimizer_group_views:FlatParameters", "copies, made when asked for"
    ),
    "optimizer._get_norm_groups": differs(
        "windlass.compat.optimizer_group_views:norms_of_groups",
        "collective at every stage: whole gradients are gathered one by one",
    ),
    "optimizer.parameter_offload": differs(
        "windlass.compat.parameter_offload:ParameterOffload",
        "hooks can be taken off and put back; they are in nobody's way",
    ),
    "parameter.data": differs("", "at stage 3 of the whole shape, not empty; reading it outside a gather raises"),
    "parameter.ds_tensor": differs("", "this rank's part of the unit that the parameter is in, flat"),
    "parameter.grad": differs(
        "",
        "None after a backward; at stage 0 in fp32 and fp16, where DeepSpeed has one, reading its values raises: "
        "`safe_get_full_grad` reads what was reduced. One that is set by hand is stepped at stage 0, as the mean over "
        "ranks, and dropped at the step at others, with a warning; setting None drops the gradient, at every stage",
    ),
    "engine.zero_grad": differs(
        "windlass.engine.training_engine:Engine.zero_grad",
        "this, `optimizer.zero_grad` and `module.zero_grad` drop gradients at every stage, where DeepSpeed's stage 2 "
        "(and 1, once reduced) keeps them. Between an `engine.step()` that does not end the step and the next backward "
        "they keep what was accumulated, where DeepSpeed's stages 0, 1 and 3 drop it",
    ),
    "parameter.partition_gradients": refused("windlass moves gradients by itself; use windlass.zero.full_grad"),
    "parameter.reduce_gradients_at_owner": refused("windlass moves gradients by itself; use windlass.zero.full_grad"),
    "module.ds_external_parameters": differs("", "only what register_external_parameter was told; nothing needs it"),
}
