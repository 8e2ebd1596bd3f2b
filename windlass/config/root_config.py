"""Root of the configuration: all sections, and values that follow from several of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PrivateAttr

from windlass.base.errors import ConfigError
from windlass.config import batch_sizes
from windlass.config.activation_checkpointing_section import ActivationCheckpointing
from windlass.config.autotuning_section import Autotuning
from windlass.config.axis_sizes import (
    Axes,
    OtherAxisSizes,
    axes_from_data_loading_size,
    data_loading_size_of,
    resolve_axes,
)
from windlass.config.batch_sizes import BatchSizes, GivenBatchSize
from windlass.config.checkpoint_section import CheckpointConfig
from windlass.config.comm_section import CommConfig, CommsLoggerConfig
from windlass.config.compile_section import CompileConfig
from windlass.config.compression_section import CompressionTraining, Eigenvalue, WeightQuantization
from windlass.config.config_problems import ConfigRefusal, numbered_list
from windlass.config.config_refusals import find_refusals
from windlass.config.config_section import NUMBER, ConfigSection, Count, DtypeName, Int, Positive
from windlass.config.data_sections import CurriculumLearning, DataEfficiency, ProgressiveLayerDrop
from windlass.config.distillation_section import DistillationConfig
from windlass.config.elastic_batch import solve_elastic_batch
from windlass.config.elasticity_section import Elasticity
from windlass.config.expert_parallel_section import ExpertParallel
from windlass.config.inference_section import HybridEngine
from windlass.config.key_status import accepted, honoured, refused
from windlass.config.monitor_section import (
    Comet,
    CsvMonitor,
    FlopsProfiler,
    JsonlMonitor,
    TensorBoard,
    TimersConfig,
    Wandb,
)
from windlass.config.offload_section import AioConfig, AutoOffload
from windlass.config.optimizer_section import OptimizerConfig
from windlass.config.parallel_section import ParallelConfig
from windlass.config.pipeline_section import PipelineConfig
from windlass.config.precision_section import Bf16, DataTypes, DtypeTable, Fp16, TorchAutocast
from windlass.config.quantize_training_section import QuantizeTraining
from windlass.config.retired_sections import Amp, InferenceInTrainingConfig, MsAmp, Nebula
from windlass.config.scheduler_section import SchedulerConfig
from windlass.config.sparse_attention_section import SparseAttention
from windlass.config.tensor_parallel_section import TensorParallelConfig, merge_tensor_tables
from windlass.config.watchdog_section import WatchdogConfig
from windlass.config.zero_section import ZeroConfig


def _to_lower(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


def _norm(value: Any) -> Any:
    return float(value) if isinstance(value, bool) else value


LogLevel = Annotated[Literal["debug", "info", "warning", "error", "critical"], BeforeValidator(_to_lower)]
GradientReduction = Annotated[Literal["mean", "sum"], BeforeValidator(_to_lower)]


class Config(ConfigSection):
    """Training configuration with the keys of `ds_config.json`."""

    train_batch_size: Positive | None = honoured(None)
    """Number of samples in one optimizer step, over all ranks and micro-batches."""
    train_micro_batch_size_per_gpu: Positive | None = honoured(None)
    """Number of samples in one forward on one rank."""
    gradient_accumulation_steps: Positive | None = honoured(None)
    """Number of micro-batches in one optimizer step; 1 if it does not follow from the other batch sizes."""
    gradient_clipping: Annotated[float, Field(ge=0, allow_inf_nan=False), BeforeValidator(_norm)] = honoured(1.0)
    """Maximum norm of the whole gradient; 0 turns clipping off. As in DeepSpeed, `true` is 1.0 and `false` is 0."""
    steps_per_print: Annotated[float, Field(gt=0), NUMBER] | None = honoured(None)
    """Number of steps between log lines; null or infinity: never."""
    wall_clock_breakdown: bool = honoured(False)
    """Log the time of forward, backward and step."""
    memory_breakdown: bool = honoured(False)
    """Log the memory in use whenever a step is logged (steps_per_print)."""
    fingerprint_interval: Count = honoured(0, windlass_only=True)
    """Number of steps between logged fingerprints of parameters and optimizer states; 0: never."""
    dump_state: bool = honoured(False)
    """Log the resolved configuration."""
    log_level: LogLevel | None = honoured(None)
    """Minimum level of log records; the environment variable WINDLASS_LOG_LEVEL overrides it."""
    disable_python_gc: bool = honoured(False)
    """Disable Python's garbage collector in this process until `engine.destroy()`."""
    dataloader_drop_last: bool = honoured(False)
    """Drop the last batch if it is not full."""
    prescale_gradients: bool = honoured(False)
    """Divide gradients by the world size before the reduction. If false, gradients that are reduced in 16 bits are
    divided after the reduction, so that small ones do not underflow."""
    gradient_predivide_factor: Annotated[float, Field(gt=0, allow_inf_nan=False), NUMBER] = honoured(1.0)
    """Divide gradients by this factor before the reduction, and by world size / factor after it."""
    communication_data_type: DtypeName | None = honoured(None)
    """Dtype in which gradients are reduced; the accumulation dtype when absent."""
    allgather_size: Count = honoured(500_000_000)
    """Older name of zero_optimization.allgather_bucket_size, read only beside `"zero_optimization": true`."""
    sequence_parallel_size: Positive | None = honoured(None)
    """Same as parallel.sp."""
    data_parallel_size: Positive | None = honoured(None)
    """Number of data-loading ranks, which must equal the number that follows from the axis sizes. Read only if
    sequence_parallel_size is set."""

    managed_gradient_accumulation: bool = honoured(True)
    """false: every `engine.step()` updates parameters, after any number of backwards; each loss is still divided by
    gradient_accumulation_steps."""
    gradient_allreduce_op: GradientReduction = honoured("mean")
    """`sum`: gradients are summed over the data-loading ranks, at every stage; `mean`: averaged."""
    seq_parallel_communication_data_type: DtypeName = accepted(
        "fp32", "gradients are reduced along sp as along the data axes, in communication_data_type"
    )
    use_data_before_expert_parallelism: bool = refused(
        False, "ranks along ep are always adjacent, so that tokens stay inside a node; write false"
    )
    sparse_gradients: bool = accepted(
        False, "gradients of embeddings, sparse=True included, are added into one flat buffer; the sums are the same"
    )
    graph_harvesting: bool = refused(False, "retired: CUDA graphs of the step; write false")
    datastates_ckpt: Any = refused(False, "retired: the DataStates checkpoint service; delete the key")
    vocabulary_size: Int | None = accepted(None, "DeepSpeed only warns if it is not a multiple of 8")
    disable_allgather: bool = accepted(False, "DeepSpeed itself does not read it")
    zero_allow_untested_optimizer: bool = accepted(False, "every optimizer is allowed; there is no list to override")
    zero_force_ds_cpu_optimizer: bool = accepted(True, "there is no separate class of CPU optimizers to force")

    optimizer: OptimizerConfig | None = honoured(None)
    """Optimizer that the engine constructs if the caller passes none."""
    scheduler: SchedulerConfig | None = honoured(None)
    """Learning-rate schedule that the engine constructs if the caller passes none."""
    fp16: Fp16 = honoured(Fp16)
    """fp16 with a loss scale."""
    bf16: Bf16 = honoured(Bf16, aliases=("bfloat16",))
    """bf16 with fp32 master weights."""
    torch_autocast: TorchAutocast = honoured(TorchAutocast)
    """`torch.autocast` around the forward."""
    data_types: DataTypes = honoured(DataTypes)
    """Dtypes that do not follow from the sections fp16 and bf16."""
    zero_optimization: ZeroConfig = honoured(ZeroConfig)
    """Stage of ZeRO and its options; `true` is an older spelling of stage 1."""
    offload: AutoOffload | None = honoured(None, windlass_only=True)
    """`"auto"` or a section of limits: each unit's tiers are chosen at start-up by measured rates and free memory."""
    parallel: ParallelConfig = honoured(ParallelConfig, windlass_only=True)
    """Number of ranks along each axis besides data-parallel sharding."""
    pipeline: PipelineConfig = honoured(PipelineConfig)
    """Distribution of layers over ranks."""
    tensor_parallel: TensorParallelConfig = honoured(TensorParallelConfig)
    """DeepSpeed's keys for tensor parallelism."""
    expert_parallel: ExpertParallel = honoured(ExpertParallel)
    """DeepSpeed's keys for expert parallelism."""
    comm: CommConfig = honoured(CommConfig, windlass_only=True)
    """Transport of the collectives."""
    elasticity: Elasticity = honoured(Elasticity)
    """One batch size for many numbers of ranks."""
    watchdog: WatchdogConfig = honoured(WatchdogConfig, windlass_only=True)
    """Detection and reports of hangs."""
    tensorboard: TensorBoard = honoured(TensorBoard)
    """TensorBoard event files."""
    csv_monitor: CsvMonitor = honoured(CsvMonitor)
    """CSV files of metrics."""
    jsonl_monitor: JsonlMonitor = honoured(JsonlMonitor, windlass_only=True)
    """Record of the run for `windlass report`."""
    wandb: Wandb = honoured(Wandb)
    """Weights & Biases."""
    comet: Comet = honoured(Comet)
    """Comet."""
    timers: TimersConfig = honoured(TimersConfig)
    """Timers that can be set one by one."""
    checkpoint: CheckpointConfig = honoured(CheckpointConfig)
    """Saving and loading of checkpoints."""
    activation_checkpointing: ActivationCheckpointing = honoured(ActivationCheckpointing)
    """Options of activation recomputation."""
    aio: AioConfig = honoured(AioConfig)
    """Tuning of file I/O."""

    comms_logger: CommsLoggerConfig = honoured(CommsLoggerConfig)
    """Log of collectives."""
    flops_profiler: FlopsProfiler = honoured(FlopsProfiler)
    """Floating-point operations of one step, by module."""
    compile: CompileConfig = honoured(CompileConfig)
    """Compilation of the model."""
    hybrid_engine: HybridEngine = honoured(HybridEngine)
    """Generation during training."""
    weight_quantization: WeightQuantization = honoured(WeightQuantization)
    """Packed, frozen weights."""
    compression_training: CompressionTraining = refused(CompressionTraining, "")
    distillation: DistillationConfig = honoured(DistillationConfig, windlass_only=True)
    """Training against the outputs of a teacher."""
    eigenvalue: Eigenvalue = honoured(Eigenvalue)
    """Curvature of blocks, for `quantize_training`."""
    quantize_training: QuantizeTraining | None = honoured(None)
    """Training in which the number of bits of the weights decreases (MoQ)."""
    data_efficiency: DataEfficiency = refused(DataEfficiency, "")
    curriculum_learning: CurriculumLearning = refused(CurriculumLearning, "")
    progressive_layer_drop: ProgressiveLayerDrop = refused(ProgressiveLayerDrop, "")
    autotuning: Autotuning = honoured(Autotuning)
    """Search for the fastest configuration."""
    sparse_attention: SparseAttention | None = refused(None, "")
    nebula: Nebula = refused(Nebula, "")
    amp: Amp = refused(Amp, "")
    msamp: MsAmp | None = refused(None, "")
    inference: InferenceInTrainingConfig | None = refused(None, "")

    _raw: dict[str, Any] = PrivateAttr(default_factory=dict)
    _name: str = PrivateAttr(default="config")
    _lines: dict[str, int] = PrivateAttr(default_factory=dict)
    _auto_keys: frozenset[str] = PrivateAttr(default=frozenset())
    _comments: tuple[str, ...] = PrivateAttr(default=())

    @property
    def raw(self) -> dict[str, Any]:
        """The caller's own dict, or the data parsed from the caller's file."""
        return self._raw

    @property
    def name(self) -> str:
        """Name of the source in messages: path of the file, `config` for a dict, or `base64 configuration`."""
        return self._name

    def set_origin(
        self,
        raw: dict[str, Any],
        name: str,
        lines: Mapping[str, int],
        auto_keys: frozenset[str],
        comments: tuple[str, ...] = (),
    ) -> None:
        """Record the origin of this configuration: raw input, its name, lines by dotted key, the keys at "auto", and
        the comment keys."""
        self._raw, self._name, self._lines, self._auto_keys, self._comments = (
            raw,
            name,
            dict(lines),
            auto_keys,
            comments,
        )

    def axes(
        self, world_size: int, world_size_source: str = "torch.distributed", other_sizes: OtherAxisSizes | None = None
    ) -> Axes:
        """Resolve the number of ranks along each axis for `world_size` ranks.

        Args:
            other_sizes: axis sizes from other sources, by the name of the source: `{"mpu": {"tp": 2}}`.

        Raises:
            ConfigError: two sources set different sizes of one axis, the sizes do not multiply to the world size, or
                another key contradicts them. The message has every number, and sizes that would fit.
        """
        return resolve_axes(self, world_size, world_size_source, other_sizes or {})

    def resolve_batch(
        self, world_size: int, world_size_source: str = "torch.distributed", axes: Axes | None = None
    ) -> BatchSizes:
        """Resolve the three batch sizes for `world_size` ranks. Ranks along pp, sp and tp read the same samples.

        Args:
            axes: resolved axes of these ranks; None: they are resolved from the configuration.

        Raises:
            ConfigError: the batch sizes are inconsistent. The message has every number, its origin and the line to
                change.
        """
        count = (
            axes.data_loading_size if axes is not None else data_loading_size_of(self, world_size, world_size_source)
        )
        if self.elasticity.enabled:
            return solve_elastic_batch(self.elasticity, count)
        ranks = batch_sizes.DataLoadingRanks(count, "world size", world_size_source)
        if count != world_size:
            where = axes or axes_from_data_loading_size(self, count)
            origin = f"dp_replicate x dp_shard x ep of the world size {world_size} ({world_size_source}): {where}"
            ranks = batch_sizes.DataLoadingRanks(count, "data-loading ranks", origin)
        return batch_sizes.solve_batch_sizes({key: self._given_batch_size(key) for key in batch_sizes.KEYS}, ranks)

    def _given_batch_size(self, key: str) -> GivenBatchSize:
        value = getattr(self, key)
        if key == batch_sizes.ACCUMULATION and value is None and self.pipeline.micro_batches is not None:
            key, value = "pipeline.micro_batches", self.pipeline.micro_batches
        place = f"{self._name} line {self._lines[key]}" if key in self._lines else self._name
        origin = f'"auto" in {place}' if key in self._auto_keys else "absent" if value is None else place
        return GivenBatchSize(value, origin, place)

    def dtype_table(self, model_dtype: str = "fp32") -> DtypeTable:
        """Return the dtypes, by short name, for a model whose parameters have `model_dtype`."""
        parameter = "fp16" if self.fp16.enabled else "bf16" if self.bf16.enabled else model_dtype
        autocast = (self.torch_autocast.dtype or "bf16") if self.torch_autocast.enabled else parameter
        master = (
            "fp16"
            if self.fp16.enabled and self.fp16.fp16_master_weights_and_grads
            else "bf16"
            if self.bf16.enabled and self.bf16.bf16_master_weights_and_grads
            else "fp32"
        )
        if parameter == "fp64":
            return DtypeTable(parameter, autocast, *["fp64"] * 4)
        accumulate = self.data_types.grad_accum_dtype or master
        return DtypeTable(
            param_dtype=parameter,
            compute_dtype=autocast,
            accumulation_dtype=accumulate,
            reduce_dtype=self.communication_data_type or accumulate,
            master_dtype=master,
            state_dtype="bf16" if self.bf16.enabled and self.bf16.bf16_optimizer_states else "fp32",
        )

    def tensor_table(self, names: Iterable[str], model_type: str | None = None) -> dict[str, str]:
        """Return the sharding styles that the user set, by regular expression of module names. The last match applies.

        Args:
            names: names of the model's linear layers, for DeepSpeed's `partition_config`, which matches names of
                weights.
            model_type: type of a transformers model; rules for other types are left out.
        """
        return merge_tensor_tables(self.parallel.tensor_table, self.tensor_parallel, names, model_type)

    @property
    def tp_overlap_chunks(self) -> int:
        """Number of parts in which the output of a row-parallel layer is all-reduced."""
        if self.tensor_parallel.tp_overlap_comm and "tp_overlap_chunks" not in self.parallel.model_fields_set:
            return 2
        return self.parallel.tp_overlap_chunks

    @property
    def activation_paths(self) -> list[str]:
        """Folders of the files of `parallel.activation_tier` "nvme": those of `activation_checkpointing`, else those of
        the first offload section that has some; empty: no section has one."""
        zero = self.zero_optimization
        sections = (self.activation_checkpointing, zero.offload_param, zero.offload_optimizer, self.offload)
        given = (list(one.nvme_path) for one in sections if one is not None and one.nvme_path)
        return next(given, [])

    def refusals(self) -> list[ConfigRefusal]:
        """List every unsupported setting of this configuration; empty means that it can be trained.

        Loading and support are separate: `load_config` raises for an invalid configuration; `initialize` and
        `windlass check` report the refusals listed here.
        """
        return find_refusals(self)

    def ensure_supported(self) -> None:
        """Raise one ConfigError that lists every refusal, if there is any."""
        found = self.refusals()
        if found:
            raise ConfigError(f"{self._name} has unsupported settings:\n{numbered_list(found)}")

    @property
    def comments(self) -> tuple[str, ...]:
        """Dotted keys that were ignored because they are comments."""
        return self._comments

    @property
    def auto_keys(self) -> frozenset[str]:
        """Dotted keys at "auto"."""
        return self._auto_keys
