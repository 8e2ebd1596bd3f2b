"""Table of DeepSpeed names that windlass does not implement. They can be imported; using one raises with the reason."""

from windlass.compat.stand_in_entry import StandInEntry, refused


def _refused_names(reason: str, names: str) -> dict[str, StandInEntry]:
    """Return an entry for each name `deepspeed.<name>`; using such a name raises with `reason`."""
    return {f"deepspeed.{name}": refused(reason) for name in names.split()}


_RAGGED = "batches are scheduled by the engine, not by the script; use windlass.LLM, mii.pipeline or init_inference"
_INJECT = "the model's layers are not replaced but sharded in place; set tensor_parallel.autotp_size"
_LAYER = "windlass has no transformer layers; use torch.nn.TransformerEncoderLayer, or a transformers model"
_COMPRESSION = "init_compression replaces layers itself and engines run their schedules; use init_compression"
_SHARDED = "compression does not run with sharded matrices; compress the whole model"
_NORMS = "batch norms keep their class; use channel_pruning to mask their channels, and redundancy_clean to cut them"
_SPARSE = "block-sparse attention is not built; use torch.nn.attention.flex_attention with a block mask"
_SENDS = "stages exchange tensors inside train_batch and eval_batch; use torch.distributed.send and recv for others"
_DATA = "the data pipeline of DeepSpeed is not built yet; use windlass.data, or a torch DataLoader"
_LTD = "random layer-token dropping is not built; train on all tokens"
_CURRICULUM = "batches of varying size are not built yet; use a torch batch sampler and pass the loader's batches"
_DOMINO = "Domino is not built; train with ZeRO, whose collectives overlap the computation"
_DEEP_COMPILE = "DeepCompile's passes are not built; use engine.compile or torch.compile"
_TUNING = "tuning is a command, not a class; use windlass tune, or --autotuning of the launcher"
_STATES = "DataStates checkpoints are not built; use the checkpoint section with async saving"
_INSIDE = "this is internal to DeepSpeed's optimizers, which are not built; use safe_get_full_* and the engine"
_QUANTIZED = "the engine quantizes its reductions itself; set zero_quantized_gradients"
_ROUTES = "routing is done by TopKGate, which returns experts and weights instead of a dense mask; use MoE"
_CHUNKS = "attention in chunks offloaded to the host is not built; set parallel.sp_mode to ring, or parallel.recompute"
_READER = "DeepSpeed's checkpoint reader is not built; load_checkpoint and zero_to_fp32 read its files"
_GONE = "DeepSpeed itself removed this name, so windlass lacks it too; remove its use from the script"

TABLE: dict[str, StandInEntry] = {
    **_refused_names(
        _RAGGED,
        "inference.InferenceEngineV2 inference.build_hf_engine inference.v2.engine_v2.InferenceEngineV2 "
        "inference.v2.engine_factory.build_hf_engine",
    ),
    **_refused_names(
        _LAYER, "model_implementations.DeepSpeedTransformerInference model_implementations.DeepSpeedInferenceConfig"
    ),
    **_refused_names(
        _INJECT,
        "replace_transformer_layer module_inject.replace_transformer_layer module_inject.revert_transformer_layer "
        "module_inject.ReplaceWithTensorSlicing module_inject.LinearLayer module_inject.LinearAllreduce "
        "module_inject.replace_module.replace_transformer_layer module_inject.layers.LinearLayer "
        "module_inject.layers.LinearAllreduce "
        "module_inject.replace_policy.HFGPT2LayerPolicy module_inject.replace_policy.HFBertLayerPolicy "
        "module_inject.HFGPT2LayerPolicy module_inject.HFBertLayerPolicy module_inject.auto_tp.AutoTP",
    ),
    **_refused_names(_LAYER, "DeepSpeedTransformerLayer DeepSpeedTransformerConfig"),
    **_refused_names(
        _COMPRESSION,
        "compression.scheduler.compression_scheduler "
        "compression.helper.module_replacement compression.helper.compression_preparation "
        "compression.helper.fix_compression",
    ),
    **_refused_names(
        _SHARDED,
        "compression.basic_layer.ColumnParallelLinear_Compress compression.basic_layer.RowParallelLinear_Compress",
    ),
    **_refused_names(_NORMS, "compression.basic_layer.BNLayer_Compress"),
    **_refused_names(
        _SPARSE,
        "ops.sparse_attention.SparseSelfAttention ops.sparse_attention.BertSparseSelfAttention "
        "ops.sparse_attention.SparseAttentionUtils ops.sparse_attention.MatMul ops.sparse_attention.Softmax",
    ),
    **_refused_names(
        _SPARSE,
        " ".join(
            f"ops.sparse_attention.{module}{name}"
            for module in ("", "sparsity_config.")
            for name in [
                "SparsityConfig",
                "DenseSparsityConfig",
                "FixedSparsityConfig",
                "VariableSparsityConfig",
                "BigBirdSparsityConfig",
                "BSLongformerSparsityConfig",
                "LocalSlidingWindowSparsityConfig",
            ]
        ),
    ),
    **_refused_names(
        _SENDS,
        "runtime.pipe.p2p.init_process_groups runtime.pipe.p2p.can_send_recv runtime.pipe.p2p.send "
        "runtime.pipe.p2p.recv runtime.pipe.p2p.wait",
    ),
    **_refused_names(
        _DATA,
        "runtime.data_pipeline.data_sampling.data_analyzer.DataAnalyzer "
        "runtime.data_pipeline.data_sampling.data_analyzer.DistributedDataAnalyzer "
        "runtime.data_pipeline.data_sampling.data_sampler.DeepSpeedDataSampler "
        "runtime.data_pipeline.data_sampling.indexed_dataset.MMapIndexedDataset "
        "runtime.data_pipeline.data_sampling.indexed_dataset.MMapIndexedDatasetBuilder "
        "runtime.data_pipeline.data_sampling.indexed_dataset.make_dataset "
        "runtime.data_pipeline.data_sampling.indexed_dataset.make_builder "
        "runtime.data_pipeline.curriculum_scheduler.CurriculumScheduler",
    ),
    **_refused_names(
        _LTD,
        "runtime.data_pipeline.data_routing.helper.convert_to_random_ltd "
        "runtime.data_pipeline.data_routing.helper.save_without_random_ltd "
        "runtime.data_pipeline.data_routing.helper.remove_random_ltd_state_dict "
        "runtime.data_pipeline.data_routing.basic_layer.RandomLayerTokenDrop "
        "runtime.data_pipeline.data_routing.scheduler.RandomLTDScheduler",
    ),
    **_refused_names(
        _CURRICULUM,
        "runtime.data_pipeline.data_sampling.variable_batch_size_and_lr."
        "get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed "
        "runtime.data_pipeline.data_sampling.variable_batch_size_and_lr.batch_by_seqlens",
    ),
    **_refused_names(
        _DOMINO, "runtime.domino.transformer.DominoTransformer runtime.domino.transformer.DominoTransformerLayer"
    ),
    **_refused_names(
        _DEEP_COMPILE,
        "compile.passes.zero3_compile.add_z3_gather_release compile.passes.offload_adam_states.move_opt_states "
        "compile.passes.offload_adam_states.move_opt_states_sync "
        "compile.passes.offload_adam_states.offload_adam_states_for_init "
        "compile.passes.sp_compile.prepare_autosp_inputs compile.passes.prefetch.schedule_prefetch "
        "compile.passes.selective_gather.selective_gather compile.backend.make_backend compile.init_z3.init_z3",
    ),
    **_refused_names(
        _TUNING,
        "autotuning.Autotuner autotuning.autotuner.Autotuner autotuning.config.DeepSpeedAutotuningConfig "
        "autotuning.scheduler.ResourceManager",
    ),
    **_refused_names(_STATES, "datastates.config.DeepSpeedDataStatesConfig datastates.DeepSpeedDataStatesConfig"),
    **_refused_names(
        _INSIDE,
        "utils.tensor_fragment utils.get_full_hp_param utils.get_full_hp_grad utils.set_full_hp_param "
        "utils.set_full_hp_grad utils.get_hp_fragment_mapping utils.lazy_init_hp_params_optimizer_state "
        "utils.link_hp_params utils.map_to_flat_opt_states runtime.utils.all_gather_dp_groups "
        "runtime.utils.all_gather_into_tensor_dp_groups runtime.utils.register_output_backward_hooks "
        "runtime.utils.OutputBackwardHookManager "
        "runtime.utils.offload_adam_states runtime.utils.reload_adam_states runtime.utils.get_norm_with_moe_layers "
        "runtime.utils.TLinear",
    ),
    **_refused_names(
        _INSIDE,
        "runtime.zero.stage_1_and_2.IPGBucket "
        "runtime.zero.partition_parameters.get_allgather_dtype runtime.zero.offload_states.get_state_devices "
        "runtime.engine._checkpoint_parallel_metadata",
    ),
    **_refused_names(
        _QUANTIZED,
        "runtime.comm.coalesced_collectives.all_to_all_quant_reduce",
    ),
    **_refused_names(_ROUTES, "moe.sharded_moe._AllToAll"),
    **_refused_names(
        _CHUNKS,
        "sequence.fpdt_layer.FPDT_FFN sequence.fpdt_layer.FPDT_InputConstruct sequence.fpdt_layer.FPDT_LogitsLoss "
        "sequence.fpdt_layer._FPDTGPUAttentionImpl_ sequence.fpdt_layer._FPDTGPUOffloadingAttentionImpl_",
    ),
    **_refused_names(
        _READER,
        "checkpoint.ds_to_universal._aggregate_autoep_zero12_metadata runtime.state_dict_factory.SDLoaderFactory "
        "runtime.state_dict_factory.SDLoaderBase runtime.state_dict_factory.MegatronSDLoader",
    ),
    **_refused_names(
        _GONE,
        "elasticity.compute_elastic_config elasticity.elasticity_enabled nebula.config.DeepSpeedNebulaConfig "
        "runtime.eigenvalue.Eigenvalue runtime.progressive_layer_drop.ProgressiveLayerDrop "
        "runtime.quantize.Quantizer",
    ),
}
