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
        "with 16-bit parameters they keep their dtype, as in DeepSpeed since 0.19, except the statistics of torch's "
        "norm layers, which get the dtype of the weights",
    ),
    "engine.communication_data_type": differs(
        "windlass.compat.deepspeed_engine:DeepSpeedEngine.communication_data_type",
        "DeepSpeed's answer; without the key, gradients are reduced in the accumulation dtype. Assigning raises: write "
        "the key of the configuration",
    ),
    "engine._config": differs(
        "windlass.compat.engine_config:EngineConfig",
        "assigning to `zero_enabled` changes its value and nothing else; "
        "`zero_config.gather_16bit_weights_on_model_save` can be set; assigning to any other key raises",
    ),
    "engine.compile": differs(
        "windlass.compat.deepspeed_engine:DeepSpeedEngine.compile",
        "torch.compile of the module's forward, or at stage 3 of the forward of each block; no DeepCompile schedules",
    ),
    "engine.no_sync": differs(
        "windlass.compat.deepspeed_engine:DeepSpeedEngine.no_sync",
        "refused at stages 2 and 3, as in DeepSpeed; the engine of `windlass.initialize` allows it at every stage",
    ),
    "engine.optimizer": differs(
        "windlass.engine.sharded_optimizer:ShardedOptimizer",
        "one class at every stage, a torch optimizer; at stage 0 in fp32 also an instance of the script's class; at "
        "stage 3 without an optimizer, the same object as `parameter_offload`",
    ),
    "optimizer.step": differs(
        "windlass.engine.sharded_optimizer:ShardedOptimizer.step",
        "counts as a step of the engine (`global_steps`), and before the accumulation boundary only ends a "
        "micro-batch; as in DeepSpeed the script steps the schedule",
    ),
    "optimizer.state": differs(
        "windlass.compat.optimizer_group_views:TrainedStates",
        "`state[parameter]`, or `state[flat]` of flat master weights, reads this rank's part; the mapping itself is "
        "empty",
    ),
    "engine.coalesce_grad_reduction": differs(
        "windlass.compat.deepspeed_engine:DeepSpeedEngine.coalesce_grad_reduction",
        "refused where DeepSpeed refuses it; with `no_sync` of the engine of `windlass.initialize`, which works "
        "everywhere, the next step reduces",
    ),
    "engine.step": differs(
        "",
        "a step whose gradient is not finite is skipped at stage 0 in fp32 too, where DeepSpeed applies it",
    ),
    "engine.state_dict": differs(
        "windlass.zero.core.sharded_parameter:StateDictStub",
        "at stage 3 it has names and shapes; all ranks must read values together, and values are read-only",
    ),
    "engine.module_state_dict": differs(
        "windlass.engine.checkpoint_methods:CheckpointMethods.module_state_dict",
        "for a model sharded over ranks, the local part under the full names; full_state_dict has all values",
    ),
    "engine.save_checkpoint": differs(
        "windlass.engine.checkpoint_methods:CheckpointMethods.save_checkpoint",
        "every rank loads the `client_state` of rank 0, as in DeepSpeed below stage 3, where stage 3 returns each "
        "rank's own; random states of each rank are saved and restored without it",
    ),
    "engine.train_batch_size": differs(
        "",
        "counts samples: with autotp_size, where DeepSpeed counts every rank, it is the configured value divided by "
        "autotp_size",
    ),
    "engine.allreduce_gradients": differs("", "does nothing: gradients are reduced during the backward pass"),
    "engine.empty_partition_cache": differs(
        "", "does nothing: a forward frees the parameters that it gathered when it ends"
    ),
    "engine.get_compile_time": differs("", "0: torch compiles at the first forward and does not report the time"),
    "optimizer.state_dict": differs(
        "windlass.engine.sharded_optimizer:ShardedOptimizer.state_dict",
        "that of a plain torch optimizer at every stage, with full states and without `fp32_flat_groups` and the like; "
        "collective, where DeepSpeed's returns the states of one rank",
    ),
    "optimizer.quantize_nontrainable_params": refused(
        "set zero_quantized_nontrainable_weights, with which each gather of a frozen weight is quantized"
    ),
    "optimizer.bit16_groups_flat": differs(
        "windlass.compat.optimizer_group_views:FlatParameters", "copies, made at each access"
    ),
    "optimizer.parallel_partitioned_bit16_groups": differs(
        "windlass.compat.optimizer_group_views:ParameterPartitions",
        "equal parts of a padded copy, made at each access; windlass's own shards follow the units of its model",
    ),
    "optimizer.fp32_groups_gradients_flat": differs(
        "windlass.compat.optimizer_group_views:FlatGradients",
        "reduced gradients without padding, copied at each access, which is collective",
    ),
    "optimizer.unscale_and_clip_grads": differs(
        "windlass.compat.gradient_unscaling:GradientUnscaling",
        "scales the gradients that it is given; engine.step() does not call it, and scales its own by itself",
    ),
    "optimizer._get_norm_groups": differs(
        "windlass.compat.optimizer_group_views:norms_of_groups",
        "collective at every stage: full gradients are gathered one by one",
    ),
    "optimizer.parameter_offload": differs(
        "windlass.compat.parameter_offload:ParameterOffload",
        "its hooks can be removed and restored; they do nothing",
    ),
    "parameter.data": differs(
        "", "at stage 3 it has the full shape, not an empty one; reading it outside a gather raises"
    ),
    "parameter.shape": differs(
        "",
        "at stage 3 a released parameter keeps the shape of the whole, as `ds_shape` has it; in strict mode it is "
        "(0,), outside of a forward, a backward and a gather",
    ),
    "optimizer.get_fp32_grad_partitions": differs(
        "windlass.compat.optimizer_group_views:padded_gradients_in_fp32",
        "collective at stage 3: all ranks gather the gradients one by one",
    ),
    "optimizer.param_to_partition_ids": differs(
        "windlass.compat.optimizer_group_views:ParameterRanks",
        "computed at each access from windlass's own shards, which follow the units of its model",
    ),
    "parameter.ds_tensor": differs(
        "windlass.compat.parameter_shard:PaddedShard",
        "reading or writing its values is collective after `initialize`, because units are sharded otherwise: all "
        "ranks access the same parameter. A write also sets the master weights, which DeepSpeed's leaves as they were",
    ),
    "parameter.grad": differs(
        "",
        "None after a backward; at stage 0 in fp32 and fp16, where DeepSpeed has one, reading its values raises: "
        "`safe_get_full_grad` reads the reduced gradient. A gradient that a script assigns is averaged over ranks and "
        "applied at stage 0, and dropped at the step with a warning at other stages; assigning None drops the gradient "
        "at every stage",
    ),
    "engine.zero_grad": differs(
        "windlass.engine.training_engine:Engine.zero_grad",
        "this, `optimizer.zero_grad` and `module.zero_grad` drop gradients at every stage, where DeepSpeed's stage 2 "
        "(and 1, once reduced) keeps them. Between an `engine.step()` before the accumulation boundary and the next "
        "backward they keep the accumulated gradients, where DeepSpeed's stages 0, 1 and 3 drop them",
    ),
    "parameter.partition_gradients": refused("windlass reduces gradients itself; use windlass.zero.full_grad"),
    "parameter.reduce_gradients_at_owner": refused("windlass reduces gradients itself; use windlass.zero.full_grad"),
    "module.ds_external_parameters": differs(
        "",
        "has parameters passed to register_external_parameter, and those that a module returned in the first forward; "
        "windlass does not need it",
    ),
}
