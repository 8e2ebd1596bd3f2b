"""Table of DeepSpeed's names for expert, sequence, tensor and pipeline parallelism."""

from windlass.compat.stand_in_entry import StandInEntry, differs, refused, works

_EXPERTS = "windlass.compat.expert_parameters"
_MOE = {
    "deepspeed.moe.layer.MoE": differs(
        "windlass.compat.moe_layer:MoE",
        "built with all experts, of which initialize keeps each rank's own; loads a state dict of one rank's experts "
        "too; with top2_2nd_expert_sampling the second expert is sampled in training only; use_tutel has no effect",
    ),
    "deepspeed.moe.experts.Experts": differs(
        "windlass.parallel.experts.expert_list:Experts",
        "created by MoE; takes tokens, their expert indices and weights, not tokens sorted by expert",
    ),
    "deepspeed.moe.sharded_moe.TopKGate": differs(
        "windlass.parallel.experts.top_k_gate:TopKGate",
        "created by MoE; returns each token's experts and weights instead of a dense mask",
    ),
    **{
        f"deepspeed.moe.sharded_moe.{name}": differs(
            f"windlass.compat.mask_gating:{name}",
            "computes the same routes; MoE has its own router and does not use it",
        )
        for name in ("top1gating", "top2gating", "topkgating", "_route_slots", "_sparse_encode", "_sparse_decode")
    },
    "deepspeed.moe.sharded_moe.dist": works("windlass.compat.mask_gating:dist"),
    "deepspeed.moe.sharded_moe.TUTEL_INSTALLED": works("windlass.compat.mask_gating:TUTEL_INSTALLED"),
    "deepspeed.moe.sharded_moe.MOELayer": refused(
        "MoE combines gate and experts; use deepspeed.moe.layer.MoE, whose deepspeed_moe has both"
    ),
    **{
        f"deepspeed.moe.utils.{name}": works(f"{_EXPERTS}:{name}")
        for name in (
            "configure_moe_param_groups",
            "has_moe_layers",
            "is_autoep_expert_param",
            "is_moe_param",
            "is_moe_param_group",
            "split_params_grads_into_shared_and_expert_params",
            "split_params_into_shared_and_expert_params",
            "split_params_into_different_moe_groups_for_optimizer",
        )
    },
}

_ULYSSES = "deepspeed.runtime.sequence_parallel.ulysses_sp"
_SEQUENCES = {
    "deepspeed.sequence.layer.DistributedAttention": differs(
        "windlass.compat.distributed_attention:DistributedAttention",
        "heads are dimension 2, tokens dimension 0 or 1, in any numbers; rotary_pos_emb is refused: apply it before",
    ),
    "deepspeed.sequence.cross_entropy.vocab_sequence_parallel_cross_entropy": differs(
        "windlass.compat.distributed_attention:vocab_sequence_parallel_cross_entropy", 'backend "liger" is refused'
    ),
    "deepspeed.sequence.layer._SeqAllToAll": differs(
        "windlass.compat.sequence_exchange:SequenceAllToAll", "not overlapped; handle and num_kv_heads are refused"
    ),
    "deepspeed.sequence.fpdt_layer.FPDT_Attention": refused(
        "attention in chunks offloaded to the host is not built; set parallel.sp_mode to ring, or parallel.recompute"
    ),
    f"{_ULYSSES}.UlyssesSPAttentionHF": differs(
        "windlass.compat.ulysses_sp:UlyssesSPAttentionHF",
        "every rank returns the loss over full sequences; any lengths, head counts and window masks; eager "
        "attention is refused",
    ),
    f"{_ULYSSES}.UlyssesSPDataLoaderAdapter": works("windlass.compat.ulysses_sp:UlyssesSPDataLoaderAdapter"),
    **{
        f"{_ULYSSES}.{name}": works(f"windlass.compat.tiled_compute:{name}")
        for name in ("SequenceTiledCompute", "TiledFusedLogitsLoss", "TiledMLP", "sequence_tiled_compute")
    },
    "deepspeed.runtime.sequence_parallel.parallel_state_sp": differs(
        "windlass.compat.parallel_state_sp",
        "has only the groups of initialize_sequence_parallel; register_with_transformers creates and returns its own",
    ),
}

_TENSOR = "windlass.compat.tp_model_init"
_CUT = "initialize shards the model over neighbouring ranks; a group of other ranks is refused"
_TENSORS = {
    "deepspeed.tp_model_init": differs(f"{_TENSOR}:tp_model_init", _CUT),
    "deepspeed.record_tp_model_init_args": differs(f"{_TENSOR}:record_tp_model_init_args", _CUT),
    "deepspeed.runtime.tensor_parallel.init_utils.record_tp_model_init_args": differs(
        f"{_TENSOR}:record_tp_model_init_args", _CUT
    ),
    "deepspeed.merge_tp_model_init_into_config": works(f"{_TENSOR}:merge_tp_model_init_into_config"),
    "deepspeed.runtime.tensor_parallel.init_utils.merge_tp_model_init_into_config": works(
        f"{_TENSOR}:merge_tp_model_init_into_config"
    ),
    **{
        f"deepspeed.{name}": differs(
            f"{_TENSOR}:set_autotp_mode", "does nothing: the configuration determines whether a model is sharded"
        )
        for name in ("set_autotp_mode", "module_inject.set_autotp_mode", "module_inject.layers.set_autotp_mode")
    },
    "deepspeed.module_inject.tp_shard.get_shard_size_list": refused(
        "initialize shards matrices as evenly as their heads allow; set tensor_parallel.autotp_size"
    ),
    "deepspeed.runtime.tensor_parallel.TpTrainingManager": refused(
        "deepspeed.initialize shards matrices; set tensor_parallel.autotp_size in the configuration"
    ),
    "deepspeed.resolve_per_head_muon_after_sharding": refused(
        "per-head Muon is not built; Muon orthogonalises full matrices, which must not be sharded"
    ),
}

_MODULE = differs(
    "windlass.compat.deepspeed_pipeline:PipelineModule",
    "micro-batches may be dicts or tuples of any tensors; every rank of a pipeline reads them, not only the first and "
    "last stage; without num_stages and topology `initialize` splits it by the configuration; `_partition_layers` of a "
    "subclass sets the bounds of all stages in `self.parts`",
)
_ENGINE = differs(
    "windlass.engine.pipeline_engine:PipelineEngine",
    "ZeRO stages 2 and 3 and offload inside stages, too; activations between stages are sent whole",
)
_TOPOLOGY = "windlass.compat.process_topology"
_SCHEDULES = (
    "PipeSchedule InferenceSchedule TrainSchedule DataParallelSchedule PipeInstruction BufferOpInstruction "
    "OptimizerStep ReduceGrads ReduceTiedGrads LoadMicroBatch ForwardPass BackwardPass SendActivation RecvActivation "
    "SendGrad RecvGrad CommitP2P"
)
_STAGES: dict[str, StandInEntry] = {}
for _prefix in ("deepspeed.pipe", "deepspeed.runtime.pipe"):
    _STAGES |= {
        f"{_prefix}.PipelineModule": _MODULE,
        f"{_prefix}.LayerSpec": works("windlass.parallel.pipeline.layer_specs:LayerSpec"),
        f"{_prefix}.TiedLayerSpec": works("windlass.parallel.pipeline.layer_specs:TiedLayerSpec"),
        f"{_prefix}.ProcessTopology": works(f"{_TOPOLOGY}:ProcessTopology"),
    }
_STAGES |= {
    **{
        f"deepspeed.runtime.pipe.schedule.{name}": differs(
            f"windlass.compat.pipe_schedule:{name}", "lists DeepSpeed's instructions; the engine runs its own schedules"
        )
        for name in _SCHEDULES.split()
    },
    "deepspeed.PipelineModule": _MODULE,
    "deepspeed.PipelineEngine": _ENGINE,
    "deepspeed.pipe.PipelineEngine": _ENGINE,
    "deepspeed.runtime.pipe.engine.PipelineEngine": _ENGINE,
    "deepspeed.runtime.pipe.engine.DeepSpeedEngine": works("windlass.compat.deepspeed_engine:DeepSpeedEngine"),
    "deepspeed.runtime.pipe.engine._tensor_bytes": works("windlass.compat.pipe_schedule:tensor_bytes"),
    "deepspeed.runtime.pipe.module.PipelineModule": _MODULE,
    "deepspeed.runtime.pipe.module.LayerSpec": works("windlass.parallel.pipeline.layer_specs:LayerSpec"),
    "deepspeed.runtime.pipe.module.TiedLayerSpec": works("windlass.parallel.pipeline.layer_specs:TiedLayerSpec"),
    **{
        f"deepspeed.runtime.pipe.topology.{name}": works(f"{_TOPOLOGY}:{name}")
        for name in ("ProcessTopology", "PipeDataParallelTopology", "PipeModelDataParallelTopology")
    },
    "deepspeed.runtime.pipe.topology._prime_factors": works("windlass.compat.pipeline_grid:prime_factors"),
    "deepspeed.runtime.pipe.topology.PipelineParallelGrid": works("windlass.compat.pipeline_grid:PipelineParallelGrid"),
    **{
        f"deepspeed.{name}": refused(
            "the schedule DualPipeV is not built; use PipelineModule with pipeline.schedule zero-bubble or interleaved"
        )
        for name in ("DualPipeVEngine", "DualPipeVModule")
    },
    "deepspeed.runtime.utils.PartitionedTensor": refused(
        "pipeline stages send full tensors; use torch.distributed.tensor for sharded tensors"
    ),
}

TABLE: dict[str, StandInEntry] = {**_MOE, **_SEQUENCES, **_TENSORS, **_STAGES}
