"""Work of one optimizer step: a model's shape under a configuration, on a number of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from windlass.base.dtypes import parse_dtype
from windlass.base.errors import ConfigError, ModelError
from windlass.comm.mesh_shape import MeshShape
from windlass.config import Config
from windlass.config.pipeline_section import PipelineConfig
from windlass.parallel.comm_volumes import StepWorkload
from windlass.parallel.model_shape import ModelShape, from_transformers
from windlass.parallel.pipeline.layer_partition import partition_layers
from windlass.parallel.pipeline.pipeline_schedules import ScheduleName
from windlass.plan.optimizer_states import OptimizerStates
from windlass.simulate.layer_work import ITEMSIZE, ComputeStyle
from windlass.simulate.step_messages import KindOfStep, StepMessages, kinds_of_steps, messages_of_step
from windlass.zero.setup.zero_settings import UnitRules


@dataclass(frozen=True)
class Offloading:
    """Tiers (device, host memory or NVMe) in which a run stores states, parameters, gradients and layer inputs.

    Attributes:
        states, parameters: Tier of optimizer states and of parameters: `none`, `cpu` or `nvme`.
        gradients_on_disk: Reduced gradients are on NVMe until the step.
        ratio: Fraction of the states that is offloaded.
        delayed: The update runs during the next forward and backward.
        activations: Tier of saved layer inputs: `device`, `cpu` or `nvme`.
    """

    states: str = "none"
    parameters: str = "none"
    gradients_on_disk: bool = False
    ratio: float = 1.0
    delayed: bool = False
    activations: str = "device"


@dataclass(frozen=True)
class QuantizedMessages:
    """Codecs of ZeRO++ for parameters, for gradients inside a node, and for gradients across nodes; empty: no codec."""

    weights: str = ""
    gradients: str = ""
    gradients_across: str = ""


@dataclass(frozen=True)
class StepWork:
    """Work of one optimizer step.

    Attributes:
        shape: Sizes of the model.
        grid: Ranks along each axis.
        samples, length: Micro-batch of one data-loading rank: sequences, and tokens of each.
        volumes: Micro-batches, stage, dtypes and axes, as the formulas of `comm_volumes` take them.
        style: Style of the model's computation.
        accumulation_bytes, master_bytes, state_bytes: Bytes per element of accumulated gradients, of master weights
            (0: the parameters are the master weights), and of optimizer states.
        schedule: Schedule of a pipeline.
        tp_chunks: Number of parts in which the output of a row-parallel layer is all-reduced.
        layer_bounds: Chunk `c` of a pipeline has the layers `[layer_bounds[c], layer_bounds[c + 1])`.
        unit_rules: Rules for the partition into units.
        node_size: Number of ranks of a node for the codecs of ZeRO++; 0: the ranks of a host.
        prefetch_numel, max_live_numel, max_reuse_distance: Settings of stage 3.
        overlaps_reduction: Reductions run during the backward.
        transport: `auto`, `shm`, `gloo`, `nccl` or `mpi`.
        model_numel: Number of elements of all parameters; 0: only the sizes of the model are known.
        reduces_itself: Class of an optimizer that reduces gradients itself in some of its steps; empty: the engine
            reduces them in all steps.
        messages: Messages of the step, if the optimizer sends them itself.
        kinds: Kinds of steps of the optimizer; one kind if all its steps are equal.
        whole_states: Number of optimizer states per element before the step, if the optimizer updates whole parameters
            and does not shard its states; else None.
        data_rank: Data-parallel rank whose compressed messages are counted; other ranks' may differ by some bytes.
        tp_rank: Rank along tp whose parts are counted; those of the first ranks are the largest.
        model: Model whose units are used, or, with pp, ep or tp, whose frozen parameters are frozen in a decoder of its
            sizes; None: the units are those of a decoder, all trained.
    """

    shape: ModelShape
    grid: MeshShape
    samples: int
    length: int
    volumes: StepWorkload
    style: ComputeStyle
    layer_bounds: tuple[int, ...]
    accumulation_bytes: int = 4
    master_bytes: int = 4
    state_bytes: int = 8
    schedule: ScheduleName = "1f1b"
    tp_chunks: int = 1
    unit_rules: UnitRules = UnitRules()
    node_size: int = 0
    prefetch_numel: int = 50_000_000
    max_live_numel: int = 1_000_000_000
    max_reuse_distance: int = 1_000_000_000
    overlaps_reduction: bool = True
    transport: str = "auto"
    offloading: Offloading = Offloading()
    codecs: QuantizedMessages = QuantizedMessages()
    model_numel: int = 0
    reduces_itself: str = ""
    messages: StepMessages = StepMessages()
    kinds: tuple[KindOfStep, ...] = ()
    whole_states: int | None = None
    data_rank: int = 0
    tp_rank: int = 0
    model: nn.Module | None = None

    @property
    def tokens(self) -> int:
        """Tokens of the global batch."""
        return self.volumes.tokens * self.volumes.micro_batches * self.grid.data_loading_size

    @property
    def rank_tokens(self) -> int:
        """Tokens of a micro-batch on the rank along sp that has the most: each sequence is divided by itself."""
        return self.samples * -(-self.length // self.grid.sp)

    def chunk_layers(self, chunk: int) -> int:
        """Return the number of layers of one model chunk of a pipeline."""
        return self.layer_bounds[chunk + 1] - self.layer_bounds[chunk]

    @property
    def sharding_stage(self) -> int:
        """ZeRO stage with which the engine shards: 0 if there are no ranks to shard over and nothing is offloaded."""
        offloads = (self.offloading.states, self.offloading.parameters) != ("none", "none")
        return self.volumes.zero_stage if offloads or self.grid.data > self.grid.dp_replicate else 0

    @property
    def chunks(self) -> int:
        """Number of model chunks on all stages of a pipeline together."""
        return self.grid.pp * self.volumes.virtual_stages


def describe_step(
    model: nn.Module | ModelShape,
    config: Config,
    world_size: int,
    length: int,
    *,
    checkpointing: str | None = None,
    fused: bool = False,
    linear_dtype: str = "",
    step: int = 1,
    data_rank: int = 0,
    tp_rank: int = 0,
) -> StepWork:
    """Describe the step of a model under a configuration.

    Args:
        model: A transformers model, possibly on the meta device, or its sizes.
        length: Tokens of a sample.
        checkpointing: See `ComputeStyle`; None: `full` if the configuration sets `activation_checkpointing.enabled`,
            else `none`. `parallel.recompute` and `pipeline.activation_checkpoint_interval` always imply `full`.
        fused, linear_dtype: See `ComputeStyle`. `compile.enabled` of the configuration fuses operations too.
        step: Number of the step, from 1, for an optimizer whose steps differ ([Note: kinds of steps]).
        data_rank, tp_rank: See `StepWork`.

    Raises:
        ConfigError: the batch or the axes do not fit the ranks, the layers or experts do not fit the axes, `offload` is
            set, or `step` is below 1.
        ModelError: the model's sizes are unknown.
    """
    shape = shape_of(model)
    axes = config.axes(world_size, "--world-size")
    grid = MeshShape(**axes.sizes)
    batch = config.resolve_batch(world_size, "--world-size", axes)
    model_dtype = "fp32" if isinstance(model, ModelShape) else _dtype_name(model)
    dtypes = config.dtype_table(model_dtype)
    zero, parallel, pipeline = config.zero_optimization, config.parallel, config.pipeline
    if grid.pp * pipeline.resolved_virtual_stages > shape.layers:
        raise ConfigError(
            f"a pipeline of {grid.pp} stages with {pipeline.resolved_virtual_stages} parts each needs at least "
            f"{grid.pp * pipeline.resolved_virtual_stages} layers, and the model has {shape.layers}; lower parallel.pp "
            "or pipeline.virtual_stages"
        )
    if grid.ep > max(1, shape.experts):
        raise ConfigError(
            f"parallel.ep is {grid.ep}, the model has {shape.experts} experts, and each rank needs one; set "
            f"parallel.ep to at most {max(1, shape.experts)}"
        )
    if checkpointing is None:
        checkpointing = "full" if config.activation_checkpointing.enabled else "none"
    if parallel.recompute or pipeline.activation_checkpoint_interval:
        checkpointing = "full"
    style = ComputeStyle(dtypes.compute_dtype, fused or config.compile.enabled, linear_dtype, checkpointing)
    ulysses = parallel.ulysses_size(grid.sp)
    if ulysses is None:
        ulysses = _default_ulysses(shape, grid)
    volumes = StepWorkload(
        tokens=batch.micro * length,
        micro_batches=batch.accumulation,
        zero_stage=zero.stage,
        activation_bytes=style.itemsize,
        parameter_bytes=ITEMSIZE[dtypes.param_dtype],
        gradient_bytes=ITEMSIZE[dtypes.reduce_dtype],
        backward_gather_ranks=axes.secondary_size or 0,
        unshards_once=pipeline.unshard_per == "step",
        recompute=checkpointing == "full",
        tp_sequence_norms=parallel.tp_sequence_norms,
        ulysses_degree=ulysses,
        virtual_stages=pipeline.resolved_virtual_stages,
        samples=batch.micro,
    )
    state = parse_dtype(dtypes.state_dtype)
    if step < 1:
        raise ConfigError(f"step {step} does not exist; steps are counted from 1")
    shards_states = zero.stage > 0 and grid.data > 1
    states = OptimizerStates(config, state, shards_states=shards_states)
    separates = states.separates_masters or dtypes.master_dtype != dtypes.param_dtype
    return StepWork(
        shape=shape,
        grid=grid,
        samples=batch.micro,
        length=length,
        volumes=volumes,
        style=style,
        layer_bounds=tuple(_layer_bounds(shape, grid, pipeline)),
        accumulation_bytes=ITEMSIZE[dtypes.accumulation_dtype],
        master_bytes=ITEMSIZE[dtypes.master_dtype] if separates else 0,
        state_bytes=_state_bytes(states, shape),
        reduces_itself=states.name if states.reduces_itself else "",
        messages=messages_of_step(states.name, states.options, step, shards=shards_states),
        kinds=kinds_of_steps(states.name, states.options, shards=shards_states),
        whole_states=_whole_states(states, step) if not shards_states else None,
        data_rank=data_rank,
        tp_rank=tp_rank,
        schedule=pipeline.schedule,
        tp_chunks=config.tp_overlap_chunks,
        unit_rules=UnitRules(
            persistence_threshold=zero.stage3_param_persistence_threshold,
            max_persistent_numel=zero.stage3_model_persistence_threshold,
            merge_below=zero.unit_merge_threshold,
            split_above=max(zero.stage3_max_live_parameters, 1 << 20),
        ),
        node_size=zero.zero_hpz_partition_size if zero.zero_hpz_partition_size > 1 else 0,
        prefetch_numel=zero.stage3_prefetch_bucket_size,
        max_live_numel=zero.stage3_max_live_parameters,
        max_reuse_distance=zero.stage3_max_reuse_distance,
        overlaps_reduction=zero.overlap_comm_enabled,
        transport=config.comm.transport,
        offloading=_offloading(config),
        codecs=QuantizedMessages(
            zero.zero_quantized_weights_codec if zero.zero_quantized_weights and zero.stage == 3 else "",
            zero.zero_quantized_gradients_codec if zero.zero_quantized_gradients else "",
            zero.zero_quantized_gradients_codec_across if zero.zero_quantized_gradients else "",
        ),
        model_numel=0 if isinstance(model, ModelShape) else _numel(model),
        model=model if isinstance(model, nn.Module) else None,
    )


def shape_of(model: nn.Module | ModelShape) -> ModelShape:
    """Return the sizes of a model; those of its decoder if it also reads images.

    Raises:
        ConfigError: the model's configuration lacks a size, or has an encoder and a decoder.
        ModelError: the model has no configuration of transformers.
    """
    if isinstance(model, ModelShape):
        return model
    own: Any = getattr(model, "config", None)
    plain = own.to_dict() if hasattr(own, "to_dict") else None
    if plain is None:
        raise ModelError(
            f"the sizes of {type(model).__name__} are unknown, since it has no configuration of transformers; give its "
            "sizes as a windlass.parallel.model_shape.ModelShape, or with --shape hidden=4096,layers=32,..."
        )
    text = plain.get("text_config")
    if isinstance(text, Mapping) and not plain.get("hidden_size"):
        return from_transformers(text)  # a model that also reads images: its other parts have parameters too
    shape, numel = from_transformers(plain), _numel(model)
    variants = [replace(shape, gated=gated, tied=tied) for gated in (shape.gated, not shape.gated)
                for tied in (shape.tied, not shape.tied)]  # fmt: skip
    # The configuration keys for gated and tied differ between model families, so the number of parameters decides.
    return min(variants, key=lambda one: abs(one.numel - numel)) if numel else shape


def _whole_states(states: OptimizerStates, step: int) -> int | None:
    """Return the number of optimizer states per element before `step`; None: the optimizer is elementwise."""
    if not states.steps_whole:
        return None
    if step == 1:
        return 0
    # From its first compressed step on, 1-bit LAMB has a third state. It is not counted, since compressed steps gather
    # no states.
    return 2 if states.name == "OneBitLamb" else states.bytes_per_element // 4


def _state_bytes(states: OptimizerStates, shape: ModelShape) -> int:
    """Return the bytes of optimizer states per element. They depend on the shape if the optimizer updates whole
    parameters: then return those of a square matrix.
    """
    if not states.steps_whole:
        return states.bytes_per_element
    square = torch.Size([shape.hidden, shape.hidden])
    return sum(states.of_parameter(square, hidden=True)) // square.numel()


def _numel(model: nn.Module) -> int:
    return sum(int(getattr(p, "ds_numel", p.numel())) for p in model.parameters())


def _layer_bounds(shape: ModelShape, grid: MeshShape, pipeline: PipelineConfig) -> list[int]:
    """Return the bounds of a pipeline's chunks, equal to the engine's: each chunk's first layer, then the number of
    layers.
    """
    chunks = grid.pp * pipeline.resolved_virtual_stages
    if chunks == 1:
        return [0, shape.layers]
    weights = [1.0] * shape.layers  # all layers have one class and take equal times
    if pipeline.partition_method == "parameters":
        weights = [float(shape.layer_numel)] * shape.layers
        weights[0] += shape.embedding_numel
        weights[-1] += shape.embedding_numel + shape.hidden
    return partition_layers(weights, chunks)


def _default_ulysses(shape: ModelShape, grid: MeshShape) -> int:
    """Return the largest divisor of sp that also divides the key heads of a tp rank."""
    keys = max(1, shape.resolved_kv_heads // grid.tp)
    return max(n for n in range(1, grid.sp + 1) if grid.sp % n == 0 and keys % n == 0)


def _dtype_name(model: nn.Module) -> str:
    first = next(iter(model.parameters()), None)
    names = {"torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.float64": "fp64"}
    return "fp32" if first is None else names.get(str(first.dtype), "fp32")


def _offloading(config: Config) -> Offloading:
    zero = config.zero_optimization
    if config.offload is not None:
        raise ConfigError(
            "offload is set: a run chooses its tiers at its start, from the rates and the memory of its machines; "
            "write the tiers to simulate in zero_optimization.offload_optimizer and offload_param instead"
        )
    states, parameters = zero.offload_optimizer, zero.offload_param
    return Offloading(
        states=states.device if states is not None else "none",
        parameters=parameters.device if parameters is not None and zero.stage == 3 else "none",
        gradients_on_disk=states is not None and states.device != "none" and states.gradient_device == "nvme",
        ratio=states.ratio if states is not None else 1.0,
        delayed=states is not None and states.delayed_update,
        activations=config.parallel.activation_tier,
    )
