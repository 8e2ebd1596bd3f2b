"""Engine that `deepspeed.initialize` returns: windlass's engine, with DeepSpeed's additional methods and behavior."""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from windlass.base.dtypes import parse_dtype
from windlass.base.errors import ConfigError, ModelError
from windlass.base.log import logger
from windlass.base.tensor_tree import iterate_tensors
from windlass.compat.checkpoint.deepspeed_metadata_reader import DEEPSPEED_KEY
from windlass.compat.checkpoint_file_names import CheckpointFileNames
from windlass.compat.config_assertions import NCCL_START_ALIGNMENT_FACTOR
from windlass.compat.config_queries import COMPUTED_ANSWERS, CONFIG_KEYS, config_value
from windlass.compat.deepspeed_data_loader import DeepSpeedDataLoader, make_engine_loader
from windlass.compat.engine_config import EngineConfig, as_engine_config
from windlass.compat.engine_groups import groups_of_engine, set_current_engine
from windlass.compat.flops_profiler import EngineFlopsProfiler
from windlass.compat.full_state_dicts import FullStateDicts
from windlass.compat.gradient_unscaling import GradientUnscaling
from windlass.compat.loss_scaler_view import DynamicLossScalerView, LossScalerView, scale_of
from windlass.compat.not_built import NotBuiltError
from windlass.compat.optimized_linear import LoRAOptimizedLinear
from windlass.compat.optimizer_classes import KIND_ATTRIBUTE as KIND
from windlass.compat.optimizer_classes import optimizer_kind_of, pass_for_basic
from windlass.compat.optimizer_group_views import (
    MASTER_ATTRIBUTES,
    PARAMETER_ATTRIBUTES,
    FlatGradients,
    FlatParameters,
    GradientGroups,
    HostGradients,
    MasterWeightGroups,
    ParameterGroups,
    ParameterPartitions,
    ParameterRanks,
    TrainedStates,
    gradients_in_fp32,
    index_of_parameter,
    norms_of_groups,
    padded_gradients_in_fp32,
)
from windlass.compat.parallel_state_queries import ParallelStateQueries
from windlass.compat.parameter_attributes import enable_state_dict_stubs, mark_external, number_parameters
from windlass.compat.parameter_offload import ParameterOffload
from windlass.compat.precision import Precision
from windlass.compat.rank_logging import logger as script_logger
from windlass.compat.returned_parameters import ReturnedParameterRecorder
from windlass.compat.script_config import load_ds_config
from windlass.compat.stand_in_version import VERSION
from windlass.compat.strict_mode import VARIABLE, is_strict
from windlass.compat.wall_clock_timers import SynchronizedWallClockTimer, ThroughputTimer
from windlass.engine.query_methods import QueryMethods
from windlass.engine.training_engine import Engine
from windlass.observe.monitor_writers import RunMonitor
from windlass.optim.loss_scale import StaticLossScale
from windlass.parallel.pipeline.pipeline_sequential import PipelineSequential
from windlass.zero.access.script_gradients import format_foreign_gradients
from windlass.zero.core.sharded_parameter import raw_grad
from windlass.zero.sharded_model import ShardedModel

_REDUCTION_REASON = "gradients are reduced by the engine, in the same order on all ranks; call engine.backward"
_COMPILER_REASON = "DeepSpeed's compilers are not built; engine.compile() uses torch.compile"
_DENSE_GRADIENT_REASON = "the engine reduces gradients of embeddings as dense tensors; call engine.step()"
REFUSED_METHODS = {
    "allreduce_and_copy": _REDUCTION_REASON,
    "allreduce_bucket": _REDUCTION_REASON,
    "allreduce_no_retain": _REDUCTION_REASON,
    "buffered_allreduce_fallback": _REDUCTION_REASON,
    "get_autosp_backend": _COMPILER_REASON,
    "get_autotp_backend": _COMPILER_REASON,
    "get_deepcompile_backend": _COMPILER_REASON,
    "get_deepspeed_compile_backend": _COMPILER_REASON,
    "get_optimizer_configuration": "`initialize` constructs optimizers from the configuration",
    "print_forward_breakdown": "experts are not timed individually; use torch.profiler",
    "set_data_post_process_func": "it belongs to DeepSpeed's curriculum sampler, which is not built; use a collate_fn",
    "set_custom_curriculum_learning_schedule": "curriculum learning is not built; change the data in the script",
    "random_ltd_initialize": "random layer-token dropping is not built; train on all tokens",
    "register_compile_pass": "DeepCompile is not built; engine.compile() compiles the module",
    "sparse_allreduce": _DENSE_GRADIENT_REASON,
    "sparse_allreduce_bucket": _DENSE_GRADIENT_REASON,
    "sparse_allreduce_no_retain": _DENSE_GRADIENT_REASON,
    "sparse_all_gather": _DENSE_GRADIENT_REASON,
    "load_moe_state_dict": "call load_checkpoint, which also loads experts that any number of ranks saved",
}


class DirectBackwardError(ModelError, RuntimeError):
    """Error for a `loss.backward()` that a script calls at stage 0 in strict mode ([Note: strict mode])."""


class DeepSpeedEngine(ParallelStateQueries, CheckpointFileNames, FullStateDicts, Precision, Engine):
    """Engine with DeepSpeed's API.

    `windlass.Engine` does the training; this class adds methods and attributes of DeepSpeed's engine that scripts use.
    """

    allows_repeated_steps = drops_external_gradients = keeps_accumulated_gradients = skips_nonfinite_steps = (
        keeps_buffers
    ) = True
    mpu: Any = None
    enable_backward_allreduce = True
    inside_no_sync_ctxt = False
    pipeline_parallelism = False  # True if the model is a PipelineModule or its layers are spread over stages
    _warned_external_gradients = False
    _has_recorded_returns = False
    _running_engine_backward = False
    _advances_schedule = True
    scale_wrt_gas = True
    use_ds_comm = False  # windlass uses torch.distributed and its own transports
    warn_unscaled_loss = True
    dont_change_device = False
    first_dataloader_check = False
    optimized_linear_base_weight_sharding = False
    save_non_zero_checkpoint = save_zero_checkpoint = True  # every rank writes its part
    # None for features that are not implemented or not in use.
    all_to_all_group: Any = None
    local_all_to_all_group: Any = None
    checkpoint_engine: Any = None
    _flops_profiler: EngineFlopsProfiler | None = None
    _script_monitor: RunMonitor | None = None
    random_ltd_scheduler: Any = None
    torch_autocast_z0_gradscaler: Any = None
    loaded_checkpoint_mp_world_size: Any = None
    loaded_checkpoint_dp_world_size: Any = None
    flatten = staticmethod(torch._utils._flatten_dense_tensors)
    unflatten = staticmethod(torch._utils._unflatten_dense_tensors)
    _config: EngineConfig
    _groups: Any = None
    collate_fn: Any = None
    _saved_config: Any = None
    tput_timer: Any = None
    sparse_tensor_module_names: frozenset[str] = frozenset()  # no gradient is sent as a sparse tensor

    def record_arguments(
        self,
        given_config: Any,
        mpu: Any,
        client_optimizer: Any,
        client_lr_scheduler: Any,
        training_data: Any,
        collate_fn: Any,
    ) -> None:
        """Store the arguments of `initialize`, which scripts read back. Collective."""
        self.config, self.mpu, self._config = given_config, mpu, as_engine_config(self._config, self.progress.batch)
        self._saved_config = json.loads(json.dumps(load_ds_config(given_config), default=str))
        self._scaler = scale_of(self._scaler, zero=self.zero_optimization())
        self._publish_groups()
        self.client_lr_scheduler = client_lr_scheduler
        self.summary_events: list[Any] = []
        self.client_optimizer, self.training_data, self.collate_fn = client_optimizer, training_data, collate_fn
        self.basic_optimizer = self._optimizer.optimizer if self._optimizer is not None else None
        self.losses: Any = None
        self.timers = SynchronizedWallClockTimer()
        self.tput_timer = ThroughputTimer(self._config.timers.throughput, batch_size=self.train_batch_size())
        if isinstance(self.training_dataloader, DeepSpeedDataLoader):
            self.training_dataloader.tput_timer = self.tput_timer
        if self._optimizer is not None:
            self._add_optimizer_attributes(self._optimizer)
        elif self.zero_optimization_stage() == 3:
            self.optimizer = ParameterOffload(self)

    def _checkpoint_metadata(self) -> dict[str, Any]:
        return {DEEPSPEED_KEY: {"ds_config": self._saved_config, "ds_version": VERSION}}

    def _loaded_client_state(self, plain: dict[str, Any]) -> dict[str, Any]:
        """Return the client state with the keys that DeepSpeed adds: `ds_config`, `ds_version` and `global_samples`."""
        known = plain.get(DEEPSPEED_KEY)
        known = known if isinstance(known, Mapping) else {}
        return {
            **{key: known[key] for key in ("ds_config", "ds_version") if key in known},
            "global_samples": plain["engine"]["global_samples"],
            **super()._loaded_client_state(plain),
        }

    def log_level(self) -> str | None:
        """Return the log level exactly as it is written in the configuration."""
        given = getattr(self, "config", None)
        level: str | None = given.get("log_level") if isinstance(given, Mapping) else self._config.log_level
        return level

    def _add_optimizer_attributes(self, optimizer: Any) -> None:
        """Add the attributes that DeepSpeed's optimizers have in addition to torch's."""
        if self.zero_optimization_stage() == 3:
            optimizer.parameter_offload = ParameterOffload(self)
        optimizer.offload_states, optimizer.reload_states = self.offload_states, self.reload_states
        optimizer.backward = self.backward
        view = DynamicLossScalerView if self._scaler.dynamic else LossScalerView
        optimizer.loss_scaler = view(
            self._scaler, optimizer, self.progress, self._config.fp16, self.scale, self._update_loss_scale
        )
        optimizer.dynamic_loss_scale = self._scaler.dynamic
        optimizer.scale_window, optimizer.min_loss_scale = (
            optimizer.loss_scaler.scale_window,
            self._config.fp16.min_loss_scale,
        )
        optimizer.needs_scaler = lambda: self._scaler.scale != 1.0
        optimizer.check_overflow = lambda *_: optimizer.overflow
        if not self.zero_optimization():
            optimizer.loss_scale_config = optimizer.loss_scaler
        optimizer.skip_step = False
        optimizer.micro_step_id = 0  # number of reductions since the last step
        optimizer.optimizer.state = optimizer.state = TrainedStates(optimizer.optimizer.state)
        setattr(optimizer, KIND, kind := optimizer_kind_of(self._config))
        if kind == "basic":
            pass_for_basic(optimizer, self._config, named=self.client_optimizer is None)
        else:
            optimizer.clip_grad = self._config.gradient_clipping
            optimizer.custom_loss_scaler, optimizer.external_loss_scale = False, None
            optimizer._global_grad_norm = 0.0
        if kind not in ("basic", "bf16"):
            optimizer.override_loss_scale = self._override_loss_scale
        if kind in ("fused", "unfused", "stages 1 and 2"):
            optimizer.unscale_and_clip_grads = GradientUnscaling(optimizer, takes_gradients=kind != "unfused")
        if name := MASTER_ATTRIBUTES.get(self.zero_optimization_stage()):
            setattr(optimizer, name, MasterWeightGroups(optimizer))
            setattr(optimizer, PARAMETER_ATTRIBUTES[self.zero_optimization_stage()], ParameterGroups(optimizer))
            optimizer.averaged_gradients = GradientGroups(optimizer)
            optimizer._get_norm_groups = lambda: norms_of_groups(optimizer)
            read = padded_gradients_in_fp32 if self.zero_optimization_stage() == 3 else gradients_in_fp32
            optimizer.get_fp32_grad_partitions = lambda: read(optimizer)
        if self.zero_optimization_stage() in (1, 2):
            optimizer.get_param_id = partial(index_of_parameter, optimizer)
            optimizer.param_to_partition_ids = ParameterRanks(optimizer)
            optimizer.bit16_groups_flat = FlatParameters(optimizer)
            optimizer.nccl_start_alignment_factor = NCCL_START_ALIGNMENT_FACTOR
            optimizer.parallel_partitioned_bit16_groups = ParameterPartitions(optimizer, self.dp_world_size)
            if kind == "bf16":
                optimizer.fp32_groups_gradients_flat = FlatGradients(optimizer)
            if self.zero_cpu_offload():
                optimizer.accumulated_grads_in_cpu = HostGradients(optimizer)
        optimizer.quantize_nontrainable_params = _refused_method(
            "optimizer.quantize_nontrainable_params",
            "set zero_quantized_nontrainable_weights, with which each gather of a frozen weight is quantized",
        )

    def _override_loss_scale(self, loss_scale: float) -> None:
        """Scale losses by a constant from the next backward on, in place of the scale of the configuration."""
        optimizer: Any = self._optimizer
        former, self._scaler = self._scaler, StaticLossScale(self._scaler.scale)  # allows values below `min_loss_scale`
        try:
            optimizer.loss_scale = loss_scale
        except Exception:
            self._scaler = former
            raise
        optimizer.custom_loss_scaler, optimizer.external_loss_scale = True, loss_scale

    def gradient_clipping(self) -> float:
        """Return the norm above which gradients are clipped.

        It is `optimizer.clip_grad`, which a script may change; for an optimizer of the kind "basic"
        (`optimizer_kind_of`), the configuration's.
        """
        # Read `_optimizer`, because scripts replace `optimizer` by a wrapper. A substitute of the engine may lack both.
        optimizer: Any = getattr(self, "_optimizer", None)
        own = getattr(optimizer, KIND, "basic") == "basic"  # windlass sets no `clip_grad` on optimizers of this kind
        return self._config.gradient_clipping if own else float(optimizer.clip_grad)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        if self.zero_optimization_stage() == 3 and not self._has_recorded_returns:
            self._has_recorded_returns = True
            if _is_compiled(self.module):  # torch.compile would trace the hooks into the graph
                return super().forward(*args, **kwargs)
            recorder = ReturnedParameterRecorder(self.module, mark_external)
            try:
                return super().forward(*args, **kwargs)
            finally:
                recorder.close()
        output = super().forward(*args, **kwargs)
        if is_strict() and not self.zero_optimization() and torch.is_grad_enabled():
            for tensor in iterate_tensors(output):
                if tensor.requires_grad and not torch._C._are_functorch_transforms_active():
                    tensor.register_hook(self._refuse_direct_backward)
        return output

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Backpropagate the scalar loss like `Engine.backward`."""
        with self._allow_backward():
            return super().backward(loss, retain_graph, scale_wrt_gas)

    @contextmanager
    def _allow_backward(self) -> Iterator[None]:
        """Allow a backward of the engine, while strict mode refuses backwards of the script."""
        self._running_engine_backward = True
        try:
            yield
        finally:
            self._running_engine_backward = False

    def _refuse_direct_backward(self, gradient: torch.Tensor) -> None:
        if not self._running_engine_backward:
            raise DirectBackwardError(
                "Direct calls to tensor.backward() are not supported by DeepSpeed at stage 0: call "
                f"engine.backward(loss), or unset {VARIABLE}, so that windlass allows them"
            )

    @property
    def hides_gradients(self) -> bool:  # type: ignore[override]
        """True if `.grad` reads as None, as with DeepSpeed's optimizers except those of stage 0 in fp32 and fp16."""
        return self.zero_optimization() or self._config.bf16.enabled

    @property
    def applies_nonfinite_steps(self) -> bool:  # type: ignore[override]
        """True if `bf16.check_grad_overflow` is false at stage 1 or 2, where DeepSpeed then checks no gradient."""
        bf16 = self._config.bf16
        return bf16.enabled and not bf16.check_grad_overflow and self.zero_optimization_stage() in (1, 2)

    def _attach(self, sharded: ShardedModel) -> None:
        super()._attach(sharded)
        enable_state_dict_stubs(sharded)
        number_parameters(sharded)
        if self._groups is not None:  # the model was sharded again, by `refresh`
            self._publish_groups()

    def _publish_groups(self) -> None:
        """Let `deepspeed.utils.groups` return this engine's process groups."""
        if isinstance(self.module, PipelineSequential) or self.mesh.pp.size > 1:
            self.pipeline_parallelism = True
        self._groups = groups_of_engine(self, self.mpu, has_experts=self.has_moe_layers)
        set_current_engine(self, self._groups)

    # Methods that DeepSpeed restricts.

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Declare whether the next `step` ends an accumulation.

        Raises:
            AssertionError: `managed_gradient_accumulation` is false.
        """
        assert self._config.managed_gradient_accumulation, (
            "set_gradient_accumulation_boundary: managed_gradient_accumulation is false, so every engine.step() "
            "updates the parameters; delete this call, or set the key to true"
        )
        super().set_gradient_accumulation_boundary(is_boundary)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without reductions. Raises AssertionError if nested, and at stages 2 and 3."""
        stage = self.zero_optimization_stage()
        assert stage < 2, (
            f"no_sync context manager is incompatible with gradient partitioning logic of ZeRO stage {stage}: set "
            "gradient_accumulation_steps, or use windlass.initialize, whose no_sync works at every stage"
        )
        assert not self.inside_no_sync_ctxt, "no_sync context manager reentry is unsupported: exit the outer one first"
        with self._without_reductions():
            yield

    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Accumulate the gradients of all backward passes in the context locally, and reduce them once at its end.

        Collective. After an exception in the context nothing is reduced.

        Raises:
            NotBuiltError: the stage is 0, which has `no_sync`; a pipeline runs the backward passes; or the
                configuration selects DeepSpeed's optimizer for bf16 with float32 accumulation (stage 1).
            AssertionError: the context is nested in another one, or `managed_gradient_accumulation` is false.
        """
        if self.zero_optimization_stage() == 0:
            raise NotBuiltError("coalesce_grad_reduction requires ZeRO stage 1, 2 or 3; use no_sync at stage 0")
        if getattr(self.optimizer, KIND, None) == "bf16":
            raise NotBuiltError(
                "coalesce_grad_reduction is not supported by the optimizer wrapper of stage 1 with bf16 and fp32 "
                "accumulation, as in DeepSpeed; use no_sync"
            )
        if self.pipeline_parallelism:
            raise NotBuiltError("coalesce_grad_reduction is not supported under pipeline parallelism; use train_batch")
        assert self.managed_gradient_accumulation(), (
            "coalesce_grad_reduction: managed_gradient_accumulation is false, so every engine.step() applies all "
            "backward passes since the last step; remove the context"
        )
        assert not self.inside_no_sync_ctxt, (
            "coalesce_grad_reduction cannot be nested inside another no_sync context: exit the outer one first"
        )
        with self._without_reductions():
            yield
        if self.zero_optimization_stage() == 3:
            self._flush_coalesced_reduction_zero3(self.optimizer)
        else:
            self._flush_coalesced_reduction_zero12(self.optimizer)

    def _flush_coalesced_reduction(self, optimizer: Any) -> None:
        """Reduce the gradients that were accumulated locally. Collective."""
        self._sharded.reduce_accumulated()
        optimizer.micro_step_id += 1

    # DeepSpeed has one method for ZeRO stages 1 and 2 and one for stage 3; scripts may replace either of them.
    _flush_coalesced_reduction_zero12 = _flush_coalesced_reduction
    _flush_coalesced_reduction_zero3 = _flush_coalesced_reduction

    def _end_gradients(self) -> None:
        super()._end_gradients()
        if self._optimizer is not None and self._is_syncing():
            self._optimizer.micro_step_id += 1  # type: ignore[attr-defined]

    @contextmanager
    def _without_reductions(self) -> Iterator[None]:
        """Accumulate gradients locally inside this context, and set `inside_no_sync_ctxt` for its duration."""
        self.inside_no_sync_ctxt = True
        try:
            with super().no_sync():
                yield
        finally:
            self.inside_no_sync_ctxt = False

    @property
    def _is_gradient_accumulation_boundary(self) -> bool | None:
        """Value last passed to `set_gradient_accumulation_boundary`; None: the configuration sets the boundary."""
        return self.progress.boundary_override

    @_is_gradient_accumulation_boundary.setter
    def _is_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        self.progress.boundary_override = None if is_boundary is None else bool(is_boundary)

    @property
    def micro_steps(self) -> int:
        """Micro-batches so far. Setting a number at which a step begins drops the gradients of an unfinished step."""
        return self.progress.micro_steps

    @micro_steps.setter
    def micro_steps(self, number: int) -> None:
        # Scripts call `zero_grad()` and set 0 at the start of an epoch, when a step may be unfinished.
        self.progress.micro_steps = int(number)
        if self.progress.is_step_started and number % self.progress.batch.accumulation == 0:
            self.progress.open_micro_batches = 0
            self._sharded.drop_gradients()
            self._drop_token_counts()
            self._nonfinite_locator.clear()
            self._note_step_start()

    def scale(self, loss: torch.Tensor, retain_graph: bool = False) -> torch.Tensor:
        """Scale a loss like `Engine.scale`.

        Raises:
            AssertionError: the loss is not a scalar.
        """
        shape = tuple(loss.shape)
        assert loss.numel() == 1, f"engine.scale: loss has shape {shape}; pass a scalar tensor, e.g. loss.mean()"
        return super().scale(loss, retain_graph)

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """Run `Engine.step`. Raises AssertionError inside `no_sync`."""
        assert not self.inside_no_sync_ctxt, (
            "It is illegal to call Engine.step() inside no_sync context manager: exit the context first"
        )
        acts = self.progress.would_end_step()
        if acts and not self.zero_optimization():
            self._adopt_gradients()
        super().step(lr_kwargs)
        if acts and self._optimizer is not None:
            self._optimizer.micro_step_id = 0  # type: ignore[attr-defined]
        if acts and getattr(self._optimizer, KIND, "basic") != "basic":
            self.optimizer._global_grad_norm = self.get_global_grad_norm()
        self.tput_timer.stop(global_step=acts)

    def _adopt_gradients(self) -> None:
        """Reduce gradients that a script assigned to `.grad`, and step with them instead of those of backward passes.

        DeepSpeed's stage 0 steps with the contents of `.grad`. Collective if a script assigned any.
        """
        self._sharded.runtime.end_failed_backwards()  # a failed backward's gradients in `.grad` are not the script's
        trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        given = [(parameter, gradient) for parameter in trained if (gradient := raw_grad(parameter)) is not None]
        if not given:
            return
        parameters, gradients = [parameter for parameter, _ in given], [gradient.detach() for _, gradient in given]
        self._sharded.script_gradients.drop_all(parameters, zero=False)
        # Treat the values as gradients of a scaled loss, if there is a scale.
        weight, self._loss_weight, self._loss_is_scaled = self._loss_weight, 1.0, True
        try:
            torch.autograd.backward(parameters, gradients)
        finally:
            self._loss_weight = weight
            self._on_backward_end()

    def _step_by_optimizer(self) -> None:
        """Run `step` without the learning-rate schedule.

        DeepSpeed's optimizers do not step a schedule, and a script that calls `optimizer.step` steps its schedule
        itself.
        """
        self._advances_schedule = False
        try:
            self.step()
        finally:
            self._advances_schedule = True

    def _step_lr_scheduler(self, lr_kwargs: dict[str, Any]) -> None:
        if self._advances_schedule:
            super()._step_lr_scheduler(lr_kwargs)

    def _autocast(self) -> AbstractContextManager[Any]:
        """Return the autocast context of `torch_autocast`, ignoring any autocast around the call, as DeepSpeed does."""
        if torch.is_autocast_enabled() and not self._config.torch_autocast.enabled:
            self._reporter.log_once(
                "autocast", "torch.autocast around the engine is ignored: set torch_autocast.enabled to use it"
            )
            return torch.autocast(self.device.type, enabled=False)
        return super()._autocast()

    def _report_external_gradients(self, names: list[str]) -> None:
        """Only warn, once, about gradients that a script assigned: DeepSpeed's ZeRO ignores them without an error."""
        if not self._warned_external_gradients:
            self._warned_external_gradients = True
            logger.warning("%s", format_foreign_gradients(names))

    # Queries.

    def get_global_grad_norm(self) -> Any:
        """Return `grad_norm`; at stages 1 to 3 as a scalar tensor, because scripts call its `item()`.

        A NaN is returned as infinity.
        """
        norm = self.grad_norm()
        if norm is not None and math.isnan(norm):
            norm = math.inf
        return norm if norm is None or not self.zero_optimization() else torch.tensor(norm, device=self.device)

    @property
    def optimized_linear_lora_enabled(self) -> bool:
        """True if the model has layers of `deepspeed.linear` with adapters."""
        return any(isinstance(module, LoRAOptimizedLinear) for module in self.module.modules())

    @property
    def communication_data_type(self) -> torch.dtype:
        """Value of `communication_data_type`; if the key is absent: fp16 or bf16 if enabled, else fp32. No other
        value can be assigned."""
        trained = "fp16" if self.fp16_enabled() else "bf16" if self.bfloat16_enabled() else "fp32"
        return parse_dtype(self._config.communication_data_type or trained)

    @communication_data_type.setter
    def communication_data_type(self, value: Any) -> None:
        if value == self.communication_data_type:
            return
        raise NotBuiltError(
            f"engine.communication_data_type = {value}: the buffers of the reductions exist already; write "
            "communication_data_type in the configuration"
        )

    @property
    def monitor(self) -> Any:
        """Monitor that writes to TensorBoard, CSV files, W&B and Comet, as configured.

        An engine without an optimizer writes nothing by itself, and opens the writers at the first access.
        """
        if self._reporter.monitor is not None:
            return self._reporter.monitor
        if self._script_monitor is None:
            self._script_monitor = RunMonitor(self._config, self.global_rank)
        return self._script_monitor

    @property
    def flops_profiler(self) -> EngineFlopsProfiler | None:
        """Profiler of the model, with the totals of the profiled step on rank 0; None unless its section is enabled."""
        section = self._config.flops_profiler
        if self._flops_profiler is None and section.enabled:
            self._flops_profiler = EngineFlopsProfiler(
                self, section.recompute_fwd_factor, lambda: self._reporter.flop_profile
            )
        return self._flops_profiler

    def all_gather_scalar(self, value: torch.Tensor, dp_group: Any) -> list[torch.Tensor]:
        """Return `value` of every rank of the group. Collective."""
        found = [value.new_zeros(value.size()) for _ in range(dist.get_world_size(dp_group))]
        dist.all_gather(found, value, group=dp_group)
        return found

    def get_batch_info(self) -> tuple[int, int, int]:
        """Return three numbers: samples in a step, samples in a rank's micro-batch, and micro-batches in a step."""
        return self.train_batch_size(), self.train_micro_batch_size_per_gpu(), self.gradient_accumulation_steps()

    @property
    def dist_backend(self) -> str:
        """Backend of the default process group."""
        return str(dist.get_backend())

    @property
    def param_names(self) -> dict[nn.Parameter, str]:
        """Name of each parameter."""
        return {parameter: name for name, parameter in self.module.named_parameters()}

    @property
    def gradient_average(self) -> bool:
        """True if gradients are averaged over ranks, not summed."""
        return self._config.gradient_allreduce_op == "mean"

    def is_first_weights_partition_group(self) -> bool:
        """Return True if this rank is in the first group of ranks that together hold all weights."""
        return self._sharded.mesh.dense.replicate.index == 0

    def get_compile_time(self) -> float:
        """Return 0: torch compiles at the first forward and does not report the time."""
        return 0.0

    def get_wall_clock_timers(self) -> dict[str, float]:
        """Return the milliseconds of each timer of `engine.timers`."""
        return {name: timer.elapsed(reset=False) for name, timer in self.timers.timers.items()}

    def get_type(self) -> list[str | None]:
        """Return the `type` set on each parameter group of the optimizer."""
        groups = self._optimizer.param_groups if self._optimizer is not None else []
        return [group.get("type") for group in groups]

    def dump_state(self) -> None:
        """Print, on rank 0, the configuration values that differ from their defaults."""
        if self.global_rank == 0:
            print(self._config.model_dump_json(indent=2, exclude_defaults=True))

    # Actions.

    def deepspeed_io(self, dataset: Any, *args: Any, **kwargs: Any) -> DeepSpeedDataLoader:
        """Create a loader; see `windlass.compat.deepspeed_data_loader.make_engine_loader`.

        The first loader for training becomes `training_dataloader`.
        """
        return make_engine_loader(self, dataset, *args, **kwargs)

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the number of samples in a step by changing the number of micro-batches.

        Raises:
            ConfigError: the number is not a multiple of ranks times micro-batch size.
        """
        micro, ranks = self.train_micro_batch_size_per_gpu(), self.dp_world_size
        if train_batch_size % (micro * ranks) or train_batch_size <= 0:
            raise ConfigError(
                f"train_batch_size is {train_batch_size}; pass a positive multiple of {micro} samples a micro-batch x "
                f"{ranks} ranks = {micro * ranks}"
            )
        self.set_batch_sizes(train_batch_size, micro, train_batch_size // (micro * ranks))

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the number of samples in a micro-batch, with the same number of micro-batches in a step."""
        steps = self.gradient_accumulation_steps()
        self.set_batch_sizes(micro_batch_size * steps * self.dp_world_size, micro_batch_size, steps)

    def set_batch_sizes(self, train_batch_size: int, micro_batch_size: int, gradient_accumulation_steps: int) -> None:
        """Change the batch sizes like `Engine.set_batch_sizes`, and those of `engine._config`."""
        super().set_batch_sizes(train_batch_size, micro_batch_size, gradient_accumulation_steps)
        self._config.record_batch(self.progress.batch)

    def compile(
        self,
        backend: Any = "inductor",
        compile_kwargs: dict[str, Any] | None = None,
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """Compile the module in place like `Engine.compile`.

        Raises:
            NotBuiltError: a DeepCompile schedule, or compiled autograd, is requested.
        """
        if schedule is not None or compiled_autograd_enabled:
            raise NotBuiltError(
                "engine.compile: schedules of DeepCompile and compiled autograd are not built; leave out schedule and "
                "compiled_autograd_enabled"
            )
        super().compile(backend, compile_kwargs)

    def destroy(self) -> None:
        """Destroy the engine like `Engine.destroy`, and close the monitor."""
        if self._script_monitor is not None:
            self._script_monitor.close()
        super().destroy()

    def allreduce_gradients(self, bucket_size: int = 0) -> None:
        """Do nothing: the engine starts reductions during the backward, and completes them by the end of `step`."""

    def _change_recovery_script_permissions(self, dst: str) -> None:
        """Make a file executable. If the file system does not allow it, log that and continue."""
        try:
            os.chmod(dst, os.stat(dst).st_mode | stat.S_IEXEC)
        except (FileNotFoundError, PermissionError) as error:
            script_logger.info(f"{dst} was not made executable: {error}; run python {dst}")

    def _backward_prologue(self) -> None:
        """Do nothing: autograd hooks detect the start of a backward pass that the script runs itself."""

    def _backward_epilogue(self) -> None:
        """Do nothing: autograd hooks detect the end of a backward pass that the script runs itself.

        They also detect it if one backward pass covers the losses of several engines.
        """

    def empty_partition_cache(self) -> None:
        """Do nothing: at its end, a forward frees the parameters that it gathered."""

    def collect_python_gc(self) -> None:
        """Run Python's garbage collector."""
        import gc

        gc.collect()

    @staticmethod
    def is_map_style_dataset(obj: Any) -> bool:
        """Return True if a dataset has items and a length."""
        return hasattr(obj, "__getitem__") and hasattr(obj, "__len__")

    @staticmethod
    def is_iterable_style_dataset(obj: Any) -> bool:
        """Return True if a dataset is a torch `IterableDataset`."""
        return isinstance(obj, torch.utils.data.IterableDataset)


def _is_compiled(model: nn.Module) -> bool:
    """Return True if torch.compile wraps the model, a module of it, or a forward."""
    # Each of the three ways to compile sets another attribute.
    return any(
        module._compiled_call_impl is not None
        or "_orig_mod" in module._modules
        or hasattr(module.__dict__.get("forward"), "_torchdynamo_orig_callable")
        for module in model.modules()
    )


def _config_method(name: str, path: str) -> Any:
    def answer(self: DeepSpeedEngine) -> Any:
        return config_value(self._config, path)

    return _rename_function(answer, name, f"Return `{path}` of the configuration.")


def _computed_method(name: str, compute: Callable[[Any], Any]) -> Any:
    def answer(self: DeepSpeedEngine) -> Any:
        return compute(self._config)

    return _rename_function(answer, name, "Return a value computed from the configuration.")


def _refused_method(name: str, reason: str) -> Any:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise NotBuiltError(f"engine.{name}: {reason}")

    return _rename_function(refuse, name, f"Raise NotBuiltError: {reason}.")


def _rename_function(function: Any, name: str, text: str) -> Any:
    function.__name__, function.__qualname__, function.__doc__ = name, f"DeepSpeedEngine.{name}", text
    return function


for _name, _path in CONFIG_KEYS.items():
    setattr(DeepSpeedEngine, _name, _config_method(_name, _path))
for _name, _make in COMPUTED_ANSWERS.items():
    setattr(DeepSpeedEngine, _name, _computed_method(_name, _make))
for _name, _why in REFUSED_METHODS.items():
    setattr(DeepSpeedEngine, _name, _refused_method(_name, _why))


def _settable(name: str) -> property:
    """Return the property of a counter with a setter, which scripts use when they continue a run by hand."""
    counter: property = getattr(QueryMethods, name)
    return counter.setter(lambda self, number: setattr(self.progress, name, int(number)))


for _name in ("global_steps", "global_samples", "skipped_steps"):
    setattr(DeepSpeedEngine, _name, _settable(_name))
