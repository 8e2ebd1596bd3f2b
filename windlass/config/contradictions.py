"""Contradictions between keys: all rules that span several sections."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from windlass.config.axis_sizes import axis_size, conflicting_sizes
from windlass.config.batch_sizes import KEYS
from windlass.config.compression_contradictions import compression_contradictions, packing_contradictions
from windlass.config.config_problems import ConfigProblem, ProblemKind, format_value
from windlass.config.offload_section import OffloadOptimizer, is_offloaded
from windlass.config.optimizer_section import COMPRESSED_OPTIMIZERS
from windlass.config.root_config import Config

ContradictionRule = Callable[[Config], Iterator[tuple[str, str]]]
"""Rule that yields (key, sentence) for each contradiction."""


def find_contradictions(config: Config) -> list[ConfigProblem]:
    """Return a problem for every rule that `config` breaks."""
    return [
        ConfigProblem(ProblemKind.CONTRADICTION, key, sentence)
        for rule in CONTRADICTION_RULES
        for key, sentence in rule(config)
    ]


def _one_precision(config: Config) -> Iterator[tuple[str, str]]:
    on = [name for name in ("fp16", "bf16", "torch_autocast") if getattr(config, name).enabled]
    if on == ["bf16", "torch_autocast"] and config.torch_autocast.dtype in (None, "bf16"):
        return  # compatible: parameters are bf16, and autocast chooses the precision of operations
    if len(on) > 1:
        yield f"{on[0]}.enabled", f"{' and '.join(on)} are enabled together; leave one true"


def _param_dtype(config: Config) -> Iterator[tuple[str, str]]:
    requested = config.data_types.param_dtype
    implied = config.dtype_table().param_dtype
    if requested and requested != implied:
        yield (
            "data_types.param_dtype",
            f'"{requested}" disagrees with fp16.enabled and bf16.enabled, which make parameters {implied}; delete one',
        )


def _buffer_dtype(config: Config) -> Iterator[tuple[str, str]]:
    if config.data_types.buffer_dtype and not (config.fp16.enabled or config.bf16.enabled):
        yield (
            "data_types.buffer_dtype",
            f'"{config.data_types.buffer_dtype}", but buffers are cast only if fp16 or bf16 is enabled; delete it, or '
            "cast the model's buffers yourself",
        )


def _half_precision_masters(config: Config) -> Iterator[tuple[str, str]]:
    section = config.bf16
    if section.enabled and section.bf16_optimizer_states and not section.bf16_master_weights_and_grads:
        yield (
            "bf16.bf16_optimizer_states",
            "true, but bf16_master_weights_and_grads is false, and states are at least as wide as master weights; "
            "write true there, or false here",
        )
    requested, master = config.data_types.grad_accum_dtype, config.dtype_table().master_dtype
    if requested and master != "fp32" and requested != master:
        yield (
            "data_types.grad_accum_dtype",
            f'"{requested}" disagrees with {master}.{master}_master_weights_and_grads, which accumulates gradients in '
            f"{master}; delete one",
        )


def _predivide(config: Config) -> Iterator[tuple[str, str]]:
    if config.prescale_gradients and config.gradient_predivide_factor != 1.0:
        yield (
            "gradient_predivide_factor",
            f"{config.gradient_predivide_factor} has nothing left to divide, since prescale_gradients divides by the "
            "whole world size; delete one",
        )


def _unmanaged_accumulation(config: Config) -> Iterator[tuple[str, str]]:
    if not config.managed_gradient_accumulation and axis_size(config, "pp") > 1:
        yield (
            "managed_gradient_accumulation",
            "false, but a pipeline (parallel.pp) runs all micro-batches of a step in one train_batch; write true",
        )


def _offload(config: Config) -> Iterator[tuple[str, str]]:
    zero = config.zero_optimization
    if is_offloaded(zero.offload_param) and zero.stage < 3:
        yield (
            "zero_optimization.offload_param",
            f"parameters are sharded, and can be offloaded, only at stage 3, not {zero.stage}; "
            'write stage 3 or "device": "none"',
        )
    for name in ("offload_param", "offload_optimizer"):
        section = getattr(zero, name)
        if section is not None and section.device == "nvme" and not section.nvme_path:
            yield f"zero_optimization.{name}.nvme_path", 'absent, but "device" is "nvme"; add the path of a folder'
    yield from _delayed_update(zero.offload_optimizer)
    for old, new in (("cpu_offload", "offload_optimizer"), ("cpu_offload_param", "offload_param")):
        if getattr(zero, old) is not None and getattr(zero, new) is not None:
            yield f"zero_optimization.{old}", f"the older spelling of {new}, which is given too; delete {old}"


def _delayed_update(section: OffloadOptimizer | None) -> Iterator[tuple[str, str]]:
    key = "zero_optimization.offload_optimizer"
    if section is None:
        return
    if not section.delayed_update:
        if section.delayed_update_start:
            yield (
                f"{key}.delayed_update_start",
                f"{section.delayed_update_start}, but delayed_update is false, so nothing starts then; delete it",
            )
        return
    if section.device == "none":
        yield (
            f"{key}.delayed_update",
            'true, but "device" is "none": only a step on the host can be delayed; write "cpu" or "nvme"',
        )
    if section.ratio != 1.0:
        yield (
            f"{key}.delayed_update",
            f"true, but ratio {section.ratio} leaves a part of the step on the device, which would not be delayed; "
            "write ratio 1.0, or delayed_update false",
        )


def _auto_offload(config: Config) -> Iterator[tuple[str, str]]:
    zero = config.zero_optimization
    if config.offload is None:
        return
    for name in ("offload_optimizer", "offload_param"):
        if is_offloaded(getattr(zero, name)):
            yield (
                "offload",
                f"set, and zero_optimization.{name}.device is {format_value(getattr(zero, name).device)}: both choose "
                "tiers; delete one",
            )
    if zero.stage == 0:
        yield (
            "offload",
            "set at zero_optimization.stage 0, where nothing is sharded and every rank updates all states on its "
            "device; write stage 1, 2 or 3",
        )
    if zero.zero_hpz_partition_size > 1:
        yield (
            "offload",
            f"set, and zero_hpz_partition_size {zero.zero_hpz_partition_size} keeps a second shard on the device, "
            "which would undo an offload; delete one",
        )


def _two_shard_groups(config: Config) -> Iterator[tuple[str, str]]:
    zero = config.zero_optimization
    if zero.mics_shard_size > 0 and zero.zero_hpz_partition_size > 1:
        yield (
            "zero_optimization.mics_shard_size",
            f"{zero.mics_shard_size} and zero_hpz_partition_size {zero.zero_hpz_partition_size} both choose the ranks "
            "over which parameters are all-gathered; delete one",
        )
    if config.parallel.dp_replicate > 1 and zero.zero_hpz_partition_size > 1:
        yield (
            "parallel.dp_replicate",
            f"{config.parallel.dp_replicate} and zero_optimization.zero_hpz_partition_size "
            f"{zero.zero_hpz_partition_size} both choose the ranks over which parameters are all-gathered; delete one",
        )


def _quantized_messages(config: Config) -> Iterator[tuple[str, str]]:
    zero = config.zero_optimization
    keys = ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients")
    on = [key for key in keys if getattr(zero, key)]
    if on and zero.stage != 3:
        yield (
            f"zero_optimization.{on[0]}",
            f"true at stage {zero.stage}, but messages are quantized only at stage 3; write stage 3, or false",
        )
    if zero.zeropp_loco_param is not None and not zero.zero_quantized_gradients:
        yield (
            "zero_optimization.zeropp_loco_param",
            "set, but zero_quantized_gradients is false, so there is no quantization error to feed back; write true "
            "there, or delete it",
        )
    if zero.zero_quantized_gradients and not zero.reduce_scatter:
        yield (
            "zero_optimization.reduce_scatter",
            "false, which sends every rank whole sums, and zero_quantized_gradients sends shards; delete it",
        )
    if on and not zero.allgather_partitions:
        yield (
            "zero_optimization.allgather_partitions",
            "false, which broadcasts shards one by one, and quantized shards are gathered together; delete it",
        )
    if on and config.comm.transport == "shm":
        yield (
            "comm.transport",
            f'"shm", where ranks read memory of each other in place, and {on[0]} sends messages; write "gloo"',
        )


def _compressed_optimizer_stage(config: Config) -> Iterator[tuple[str, str]]:
    stage, name = config.zero_optimization.stage, config.optimizer.type if config.optimizer is not None else ""
    highest = COMPRESSED_OPTIMIZERS.get(name, 3)
    if stage <= highest:
        return
    if highest == 0:
        yield (
            "optimizer.type",
            f'"{name}" at zero_optimization.stage {stage}, and every rank needs whole states; write stage 0, '
            'or "OneBitAdam", "ZeroOneAdam" or "OneBitLamb" with stage 1 or 2',
        )
    else:
        yield (
            "optimizer.type",
            f'"{name}" at zero_optimization.stage 3, where every use of a parameter gathers it in full, so '
            "that one bit for each gradient would save little; write stage 0, 1 or 2, or AdamW with "
            "zero_quantized_weights and zero_quantized_gradients",
        )


def _ulysses(config: Config) -> Iterator[tuple[str, str]]:
    section = config.parallel
    if section.sp_mode == "ulysses+ring":
        if section.ulysses_degree is not None and axis_size(config, "sp") % section.ulysses_degree:
            yield (
                "parallel.ulysses_degree",
                f"{section.ulysses_degree} does not divide the {axis_size(config, 'sp')} ranks of parallel.sp; write a "
                "divisor",
            )
    elif section.ulysses_degree is not None:
        yield (
            "parallel.ulysses_degree",
            f'{section.ulysses_degree}, but "sp_mode" is "{section.sp_mode}", and only "ulysses+ring" '
            'divides the ranks by a degree; delete it, or write sp_mode "ulysses+ring"',
        )


def _activation_tier(config: Config) -> Iterator[tuple[str, str]]:
    section = config.parallel
    if section.activation_tier != "device" and not section.recompute:
        yield (
            "parallel.activation_tier",
            f'"{section.activation_tier}", but parallel.recompute is false, so no layer inputs are saved; write true '
            'there, or "device" here',
        )
    if section.activation_tier == "nvme" and not config.activation_paths:
        yield (
            "parallel.activation_tier",
            '"nvme", but no section has a folder for the files; add activation_checkpointing.nvme_path, or nvme_path '
            "of zero_optimization.offload_optimizer, zero_optimization.offload_param or offload",
        )
    if section.tp_sequence_norms and section.tiled_mlp:
        yield (
            "parallel.tiled_mlp",
            f"{section.tiled_mlp}, but tp_sequence_norms is true, with which MLPs receive parts of unequal lengths; "
            "write false in one of them",
        )


def _deepspeed_checkpoint_format(config: Config) -> Iterator[tuple[str, str]]:
    model_axes = [f"{axis} {axis_size(config, axis)}" for axis in ("pp", "ep", "tp") if axis_size(config, axis) > 1]
    if config.checkpoint.format == "deepspeed" and model_axes:
        yield (
            "checkpoint.format",
            f'"deepspeed", whose files contain full parameters of every data rank, with {", ".join(model_axes)}; write '
            '"windlass" (`windlass export` writes full weights)',
        )


def _deepspeed_format_of_compressed_optimizers(config: Config) -> Iterator[tuple[str, str]]:
    name = config.optimizer.type if config.optimizer is not None else ""
    if config.checkpoint.format == "deepspeed" and name in COMPRESSED_OPTIMIZERS:
        yield (
            "checkpoint.format",
            f'"deepspeed", whose files cannot hold the per-rank states that {name} keeps; write "windlass"',
        )


def _sequence_parallel_norms(config: Config) -> Iterator[tuple[str, str]]:
    if config.parallel.tp_sequence_norms and config.tp_overlap_chunks > 1:
        yield (
            "parallel.tp_sequence_norms",
            f"true, which leaves no all-reduce to overlap, but tp_overlap_chunks is {config.tp_overlap_chunks}; write "
            "false, or 1 there",
        )


def _pipeline_schedule(config: Config) -> Iterator[tuple[str, str]]:
    section = config.pipeline
    if section.virtual_stages is not None:
        if section.schedule == "interleaved" and section.virtual_stages == 1:
            yield (
                "pipeline.virtual_stages",
                '1, but the schedule is "interleaved", which needs several per rank; write 2, or "1f1b"',
            )
        if section.schedule in ("1f1b", "gpipe") and section.virtual_stages > 1:
            yield (
                "pipeline.virtual_stages",
                f'{section.virtual_stages}, but the schedule "{section.schedule}" has one part per rank; delete it, or '
                'write "interleaved"',
            )
    accumulation = config.gradient_accumulation_steps
    if None not in (section.micro_batches, accumulation) and section.micro_batches != accumulation:
        yield (
            "pipeline.micro_batches",
            f"{section.micro_batches}, but gradient_accumulation_steps is {accumulation}: both are the micro-batches "
            "of a step; delete one",
        )


def _gradient_norm(config: Config) -> Iterator[tuple[str, str]]:
    clips = "gradient_clipping" in config.model_fields_set and config.gradient_clipping > 0
    if clips and not config.zero_optimization.compute_grad_norm:
        yield (
            "zero_optimization.compute_grad_norm",
            f"false, but gradient_clipping {config.gradient_clipping} needs the norm; write true",
        )


def _learning_rate(config: Config) -> Iterator[tuple[str, str]]:
    if config.optimizer is None or config.scheduler is None:
        return
    base, peak = config.optimizer.params.get("lr"), config.scheduler.params.get("warmup_max_lr")
    if "auto" in (base, peak) or None in (base, peak) or isinstance(peak, list):
        return
    if base != peak:
        yield (
            "scheduler.params.warmup_max_lr",
            f"{format_value(peak)} and optimizer.params.lr {format_value(base)} are two learning rates; delete one, or "
            "make them equal",
        )


def _lr_schedule_bounds(config: Config) -> Iterator[tuple[str, str]]:
    if config.scheduler is None:
        return
    params = config.scheduler.params
    for low, high in (
        ("warmup_min_lr", "warmup_max_lr"),
        ("cycle_min_lr", "cycle_max_lr"),
        ("cycle_min_mom", "cycle_max_mom"),
        ("warmup_num_steps", "total_num_steps"),
    ):
        first, last = params.get(low), params.get(high)
        if isinstance(first, int | float) and isinstance(last, int | float) and first > last:
            yield f"scheduler.params.{low}", f"{first} is more than {high} {last}; exchange them"


def _checkpointed_activations(config: Config) -> Iterator[tuple[str, str]]:
    section = config.activation_checkpointing
    if section.contiguous_memory_optimization and not section.number_checkpoints:
        yield (
            "activation_checkpointing.contiguous_memory_optimization",
            "true, but the buffer's size comes from number_checkpoints, which is absent; add it or write false",
        )
    for name in ("cpu_checkpointing", "contiguous_memory_optimization"):
        if section.nvme_path and getattr(section, name):
            yield (
                f"activation_checkpointing.{name}",
                "true, but nvme_path keeps activations in files; delete one of the two",
            )


def _watchdog(config: Config) -> Iterator[tuple[str, str]]:
    section = config.watchdog
    if section.timeout_s < section.report_after_s:
        yield (
            "watchdog.timeout_s",
            f"{section.timeout_s:g} is less than watchdog.report_after_s {section.report_after_s:g}, so a run would "
            "end before the report of its hang; exchange them",
        )


def _axis_sizes(config: Config) -> Iterator[tuple[str, str]]:
    yield from conflicting_sizes(config)


def _elastic_batch(config: Config) -> Iterator[tuple[str, str]]:
    section = config.elasticity
    if not section.enabled or section.ignore_non_elastic_batch_info:
        return
    given = {key: getattr(config, key) for key in KEYS} | {"pipeline.micro_batches": config.pipeline.micro_batches}
    for key, value in given.items():
        if value is not None:
            yield (
                key,
                f"{value}, but elasticity.enabled computes the batch; delete one, or set "
                "elasticity.ignore_non_elastic_batch_info to true",
            )


CONTRADICTION_RULES: tuple[ContradictionRule, ...] = (
    _one_precision,
    _param_dtype,
    _buffer_dtype,
    _half_precision_masters,
    _predivide,
    _unmanaged_accumulation,
    _offload,
    _auto_offload,
    _two_shard_groups,
    _compressed_optimizer_stage,
    _quantized_messages,
    _axis_sizes,
    _ulysses,
    _sequence_parallel_norms,
    _activation_tier,
    _deepspeed_checkpoint_format,
    _deepspeed_format_of_compressed_optimizers,
    _pipeline_schedule,
    _gradient_norm,
    _learning_rate,
    _lr_schedule_bounds,
    _checkpointed_activations,
    _watchdog,
    _elastic_batch,
    compression_contradictions,
    packing_contradictions,
)
