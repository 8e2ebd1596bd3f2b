"""Model whose parameters, gradients and optimizer states are sharded by one policy: construction, step and release."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING
from weakref import finalize

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from windlass.base.device_memory import DeviceMemoryLedger, emulated_device_memory
from windlass.base.errors import ModelError, StorageError, UpdateError
from windlass.base.log import logger
from windlass.base.pending import Pending
from windlass.comm.mesh import Mesh
from windlass.comm.mesh_shape import AXES
from windlass.comm.rank_group import RankGroup
from windlass.comm.transport import Transport
from windlass.optim.elementwise_optimizers import enable_fused_step, measure_state_bytes
from windlass.storage.disk_tier import DiskTier
from windlass.storage.extent_allocator import page_up
from windlass.storage.extent_transfer import Extent
from windlass.storage.slot import Tier
from windlass.zero import parameter_registry
from windlass.zero.access import parameter_properties
from windlass.zero.access.script_gradients import ScriptGradients
from windlass.zero.access.sharded_generate import ShardedGenerate, attach_generation
from windlass.zero.core.collective_scheduler import CollectiveScheduler, SchedulerCallbacks, SyncPoint
from windlass.zero.core.completion_order import CompletionOrder
from windlass.zero.core.gradient_norm import StepStatus, clip_coefficient
from windlass.zero.core.gradient_offload import GradientOffload, GradientOffloadCallbacks
from windlass.zero.core.gradient_reducer import GradientReducer, ReducerCallbacks
from windlass.zero.core.gradient_slot import GradientSlot
from windlass.zero.core.module_hooks import (
    ObservedModules,
    register_block_hooks,
    register_gradient_hooks,
    register_model_hooks,
)
from windlass.zero.core.prefetcher import Prefetcher
from windlass.zero.core.sharded_parameter import ShardedParameter, mark_unsharded, put_data, put_grad, raw_data
from windlass.zero.core.step_agreement import StepAgreement
from windlass.zero.core.unit import ShardState, Unit, UnitCallbacks, expert_data_group, recapture_parameters
from windlass.zero.core.unit_plan import Block
from windlass.zero.core.unshard_runtime import RuntimeCallbacks, UnshardRuntime
from windlass.zero.differing_replicas import DifferingReplicas, DifferingReplicasCallbacks
from windlass.zero.engine_callbacks import EngineCallbacks
from windlass.zero.setup.dp_group_builder import build_dp_groups
from windlass.zero.setup.existing_states import select_local_states
from windlass.zero.setup.model_consistency import (
    check_renormalized_embeddings,
    check_same_model,
    check_same_units,
)
from windlass.zero.setup.unit_builder import UnitBuilder, check_devices, effective_tiers, make_units
from windlass.zero.setup.unit_partition import plan_units
from windlass.zero.setup.zero_settings import ZeroSettings
from windlass.zero.step_outcome import StepOutcome
from windlass.zero.update.delayed_update import DelayedUpdate
from windlass.zero.update.disk_health import DiskHealth
from windlass.zero.update.elementwise_update import check_parameters
from windlass.zero.update.master_weights import MasterWeights, MasterWeightsCallbacks
from windlass.zero.update.offload_states import StateOffloader
from windlass.zero.update.quantization_errors import QuantizationErrors
from windlass.zero.update.update_chunk import UpdateChunk, pipeline_numel
from windlass.zero.update.update_class import check_self_reducing, update_class
from windlass.zero.update.update_protocol import Update, UpdateContext

if TYPE_CHECKING:
    from windlass.zero.access.moving_average import ExponentialMovingAverage


_BAD_FORWARD = "this forward could not read parameters, and its results are wrong"
_WIDENED = 1 << 26  # elements of 16-bit master weights that are widened at a time: 512 MiB with their gradient


class ShardedModel:
    """Units of one model, with their gradients, master weights and optimizer, from `initialize` to `destroy`.

    Args:
        model: The model, with the same architecture on every rank. Parameters start from rank 0's values.
        optimizer: Optimizer of the model's parameters. None: the model is only evaluated.
        settings: Settings of the ZeRO core.
        mesh: Mesh of all ranks, with the groups that shard and replicate the parameters.
        device: Device on which this rank computes.
        callbacks: Callables of the engine.
        trains: The model will have gradients. If False, all parameters count as frozen.

    Raises:
        ModelError: a parameter or the model is not supported, the optimizer has a parameter that is not in the model or
            does not support the settings, or the ranks have different models.
        ConfigError: the optimizer reduces gradients itself, and the settings exclude local gradients.
        StorageError: the disk of a rank has too little space, or a write to it failed.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        settings: ZeroSettings,
        mesh: Mesh,
        device: torch.device,
        callbacks: EngineCallbacks,
        *,
        trains: bool,
    ) -> None:
        check_devices(model, device)
        check_same_model(model, optimizer, mesh.dense.data)
        check_renormalized_embeddings(model, mesh.dense.data, mesh.world, trains=trains)
        if optimizer is not None:
            check_parameters(optimizer, model)
            if settings.delayed_update and update_class(optimizer, settings.policy.state).needs_whole_parameters:
                raise ModelError(
                    f"offload_optimizer.delayed_update does not support {type(optimizer).__name__}, which needs whole "
                    "parameters and communicates during an update: set delayed_update to false, or use an elementwise "
                    "optimizer (Adam, AdamW, Lion, SGD, Adagrad, ...)"
                )
            check_self_reducing(optimizer, settings, mesh)
        self.model, self.settings, self.mesh, self.device, self.trains = model, settings, mesh, device, trains
        self.callbacks = callbacks
        policy = self.policy = settings.policy
        late = settings.delayed_update and optimizer is not None
        tiers = self.tiers = effective_tiers(settings.tiers, device, delayed=late)
        self.ledger = DeviceMemoryLedger()
        self.dp_groups = build_dp_groups(mesh, settings, tiers, device)
        blocks, plans = plan_units(model, settings.unit_rules)
        if mesh.experts is not mesh.dense:
            check_same_units(plans, mesh.dense.data)
        self._unshards_on_access = False  # True from the end of the construction to `destroy`
        completion = CompletionOrder()
        unit_callbacks = UnitCallbacks(self._unshard_for_current_block, completion.enqueue)
        self.units = make_units(plans, settings, tiers, mesh, self.dp_groups, unit_callbacks, trains=trains)
        self._builder = UnitBuilder(model, settings, tiers, self.dp_groups, device, self.ledger)
        self.make_slot = self._builder.make_slot
        self.averages: dict[str, ExponentialMovingAverage] = {}
        trainable = [unit for unit in self.units if unit.trainable]
        self._planned_unstepped = [unit for unit in trainable if unit.unstepped]
        self.reducer = self._make_reducer(trainable, completion)
        self.disk_health = DiskHealth(tiers.disk, tiers.staging, mesh.world, device, self._temporary_extents)
        # Stages have different units and unshard them at different times, so failures of a stage's reads are exchanged
        # only by the ranks of that stage.
        self._stage_ranks: RankGroup | None = None
        if mesh.pp.size > 1 and tiers.disk is not None:
            self._stage_ranks = mesh.over(*(axis for axis in AXES if axis != "pp"))
        self.scheduler = self._make_scheduler(completion)
        at_once = self._choose_update_numel(optimizer)
        self.masters = self._make_masters(optimizer, at_once, delayed=late)
        # Number of states per unit that differ between ranks. Errors of quantized reductions are not counted.
        self._rank_states = 0
        if optimizer is not None:
            self._rank_states += len(update_class(optimizer, policy.state).rank_state_keys(optimizer, policy.state))
        try:
            self.reserve("initialize cannot start")
        except BaseException:
            _close(mesh, self.ledger, tiers.disk)
            raise
        for unit, span in self._builder.fill(self.units, plans, self.reducer):
            self.masters.create(unit, span)
            del span  # free the initial values before the next unit is filled
        dense = self.dp_groups[0]
        if dense.group.size > 1 and (trainable or any(unit.frees_memory for unit in self.units)):
            self.scheduler.use_board(dense.transport.board())
        self.state_offloader = StateOffloader(self.units, self.slots, self.masters, device, self.ledger)
        self.runtime = self._make_runtime(blocks)
        self._unshards_on_access = True
        self.update: Update | None = None
        self.delayed_update: DelayedUpdate | None = None
        if optimizer is not None:
            self._use_optimizer(optimizer, at_once)
        self.quantization_errors = QuantizationErrors(self.reducer, self.make_slot, self.slots)
        if late:
            dtype, make = settings.accumulation_dtype, self._builder.make_slot
            self.delayed_update = DelayedUpdate(
                self.slots, self.masters, self.units, device, tiers.gradient, make, dtype
            )
        self._handles: list[RemovableHandle | ShardedGenerate | ObservedModules] = []
        self._hooked_parameters: set[int] = set()  # ids of parameters with gradient hooks
        self._has_outside = False  # True: some of them were in no group of the optimizer in the last step
        self.destroyed = False
        self._closer = finalize(self, _close, mesh, self.ledger, tiers.disk)
        self.disk_health.check("initialize could not write the model to disk", loses=True)
        if tiers.staging is not None:
            tiers.staging.free_returned()  # the first step adds states to the disk records: larger buffers are needed
        self._attach(blocks)
        self.agreement = StepAgreement(
            self.reducer, self.units, policy, mesh, dense.transport.traffic, device, self._has_step_failure
        )
        self.replicas = DifferingReplicas(
            self.update,
            self.masters,
            self.slots,
            DifferingReplicasCallbacks(recapture=self.recapture_parameters, gather=self._gather_updated),
        )
        self.masters.remember_versions(self.units)
        self.script_gradients = ScriptGradients(self.reducer, callbacks.script_gradients)
        self._gradients_consumed = False  # True after an update: until the next backward, a step has no gradients
        parameter_registry.register(self)
        self._forget_properties = parameter_properties.install(self)

    def _make_reducer(self, trainable: list[Unit], completion: CompletionOrder) -> GradientReducer:
        """Return the reducer of the gradients of trainable units."""
        settings = self.settings
        # with this factor, the mean of the local gradients over ranks equals the result of the reduction
        local_factor = settings.predivide_factor * settings.postdivide_factor * self.mesh.dense.data.size
        return GradientReducer(
            trainable,
            self.policy,
            completion,
            ReducerCallbacks(
                gradient_weight=self.callbacks.gradient_weight,
                reduces_this_backward=self.callbacks.reduces_this_backward,
                on_gradient=self.callbacks.on_gradient,
                on_reduced=self._on_reduced,
                on_drop=self.callbacks.on_gradient_dropped,
            ),
            accumulation_dtype=settings.accumulation_dtype,
            reduce_dtype=settings.reduce_dtype,
            lowered_reduce_dtype=settings.lowered_reduce_dtype,
            overlap=settings.overlap_comm,
            predivide_factor=settings.predivide_factor,
            postdivide_factor=settings.postdivide_factor,
            contiguous=settings.contiguous_gradients,
            offload=GradientOffload(
                settings.accumulation_dtype,
                self.device,
                self.ledger,
                GradientOffloadCallbacks(
                    tier_of=lambda slot: slot.unit.gradient_tier, make_slot=self._builder.make_slot
                ),
            ),
            local_factor=local_factor,
        )

    def _make_scheduler(self, completion: CompletionOrder) -> CollectiveScheduler:
        """Return the scheduler of all collectives of this model."""
        return CollectiveScheduler(
            self.units,
            completion,
            SchedulerCallbacks(
                start_reduction=self.reducer.start_reduction,
                is_gradient_ready=self.reducer.is_gradient_ready,
                reshard_unused=lambda unit: self.runtime.reshard(unit),
                has_local_failure=self._has_forward_failure,
                raise_failure=self._raise_forward_failure,
            ),
            hoist_gathers=self.settings.prefetch_numel > 0,
        )

    def _choose_update_numel(self, optimizer: torch.optim.Optimizer | None) -> int:
        """Return the maximum number of elements that one call of the optimizer updates."""
        full = optimizer is not None and update_class(optimizer, self.policy.state).steps_whole_units
        at_once = min(self.settings.sub_group_size, pipeline_numel(self.slots))
        # An optimizer of full parameters communicates in every call, so all ranks must make calls of the same sizes.
        # `max_update_numel` may differ between ranks, so it applies only to elementwise optimizers.
        if not full:
            at_once = min(at_once, self.tiers.max_update_numel)
        if self.settings.widens_masters:
            at_once = min(at_once, _WIDENED)
        return at_once

    def _make_masters(self, optimizer: torch.optim.Optimizer | None, at_once: int, *, delayed: bool) -> MasterWeights:
        """Return the master weights, in chunks of at most `at_once` elements, or one chunk per unit if the optimizer
        steps full units.
        """
        settings = self.settings
        full = optimizer is not None and update_class(optimizer, self.policy.state).steps_whole_units
        return MasterWeights(
            self.slots,
            1 << 62 if full else at_once,
            self.tiers,
            self.device,
            self.ledger,
            self.disk_health,
            MasterWeightsCallbacks(
                state_bytes=lambda dtype: (
                    measure_state_bytes(optimizer, settings.state_dtype or dtype)
                    if optimizer is not None and not full
                    else 0
                ),
                state_name_of=self._state_name,
            ),
            dtype=settings.master_dtype,
            state_dtype=settings.state_dtype,
            stage_ranks=self._stage_ranks,
            delayed=delayed,
            separate=optimizer is not None
            and update_class(optimizer, self.policy.state).separates_masters(self.policy.state),
        )

    def _make_runtime(self, blocks: list[Block]) -> UnshardRuntime:
        """Return the runtime that unshards and reshards the units around each block."""
        prefetcher = Prefetcher(
            self.settings.prefetch_numel,
            self._max_live_numel(),
            self.settings.max_reuse_distance,
            self.tiers.read_ahead_numel,
        )
        return UnshardRuntime(
            self.units,
            blocks,
            prefetcher,
            self.scheduler,
            RuntimeCallbacks(
                will_reduce=lambda: bool(self.slots) and self.callbacks.reduces_this_backward(),
                on_backward_begin=self._on_backward_begin,
                on_backward_end=self._on_backward_end,
                on_backward_failed=self.reducer.end_failed_backward,
                after_unshard_all=self._after_unshard_all,
                require_parameters=lambda units: self.state_offloader.require_for_compute(units, "parameters"),
            ),
        )

    def reserve(self, what: str) -> None:
        """Reserve all the disk space that this rank will need, before any data move there. Collective.

        Args:
            what: Start of the error message.

        Raises:
            StorageError: a rank has too little disk space. Raised on all ranks; the model is unchanged.
        """
        disk = self.tiers.disk
        if disk is None:
            return
        sizes = [n for unit in self.units for n in self.masters.disk_record_sizes(unit)]
        for unit in self.units:
            if unit.reshards and unit.tier is Tier.NVME:
                sizes.append(unit.layout.padded // unit.dp_group.group.size * unit.dtype.itemsize)
            if unit.trainable and unit.gradient_tier is Tier.NVME:
                nbytes = (unit.state_stop - unit.state_start) * self.settings.accumulation_dtype.itemsize
                sizes += [nbytes, nbytes] if self.settings.delayed_update else [nbytes]
            if unit.trainable and unit.state_tier is Tier.NVME:
                has_errors = self.settings.keeps_quantization_errors and unit.dp_group.group.size > 1
                sizes += [unit.layout.padded * torch.float32.itemsize] * (self._rank_states + has_errors)
        disk.reserve(sum(page_up(nbytes) for nbytes in sizes))
        self.disk_health.check(what, then="nothing was changed")

    def _temporary_extents(self) -> set[Extent]:
        extents = (
            place.extent for slot in self.slots for place in (slot.storage, slot.spare_storage) if place is not None
        )
        return {extent for extent in extents if extent is not None}

    def discard_disk_state(self) -> None:
        """Discard all data of this rank on disk after a part was lost. A load must write all of the data again."""
        self.reducer.reset()
        for unit in self.units:
            if unit.shard_slot is not None:
                unit.shard_slot.discard()
        for slot in self.slots:
            for place in (slot.storage, slot.spare_storage):
                if place is not None:
                    place.discard()
        self.masters.state_offload.discard()
        if self.update is not None:
            self.update.open_rank_states(frozenset())
        self.quantization_errors.forget()
        self.disk_health.clear_failure()

    def after_forward(self) -> None:
        """Check, at the end of the outermost forward, that all of the forward's reads from NVMe succeeded.

        Collective if parameters are on NVMe and are sharded over all ranks.

        Raises:
            StorageError: a read failed on some rank. Raised on all ranks. But if parameters are sharded over only a
                part of the ranks, nothing is raised here: the rank logs its failure, and the next step raises.
        """
        if self.tiers.param is not Tier.NVME:
            return
        try:
            self._check_forward_reads()
        except StorageError:
            self._discard_reads()
            raise

    def _check_forward_reads(self) -> None:
        # Ranks of another group may be at another call or have no forward, so no exchange with them is possible.
        if self.dp_groups[0].group.size < self.mesh.world.size:
            if self.disk_health.has_local_failure():
                logger.error("%s; the next step is refused on all ranks", _BAD_FORWARD)
            return
        if self.scheduler.is_single_rank:
            self.disk_health.check(_BAD_FORWARD, loses=self._update_in_progress())
            return
        self.scheduler.share_failures()

    def _has_forward_failure(self) -> float:
        """Return nonzero if this rank has a failure that `after_forward` must raise on all ranks."""
        return self.disk_health.has_local_failure() if self.tiers.param is Tier.NVME else 0.0

    def _has_step_failure(self) -> float:
        """Return 1 if a disk transfer or an update of this rank has failed; else 0. First wait for the writes of
        quantization errors.
        """
        self.quantization_errors.wait()
        return self.disk_health.has_local_failure()

    def _raise_forward_failure(self) -> None:
        self.disk_health.raise_failures(_BAD_FORWARD, loses=self._update_in_progress())

    def _after_unshard_all(self, among: RankGroup | None) -> None:
        if self.tiers.param is Tier.NVME:
            group = among or self._stage_ranks
            self.disk_health.check("parameters could not be gathered", loses=self._update_in_progress(), among=group)

    def _on_backward_begin(self) -> None:
        self.state_offloader.require_for_compute(self.units, "parameters", "gradients")
        self.callbacks.on_backward_begin()

    def _on_backward_end(self) -> None:
        self.reducer.end_backward(self.scheduler.reduce_remaining)
        self.callbacks.on_backward_end()

    def _unshard_for_current_block(self, unit: Unit) -> bool:
        return self._unshards_on_access and self.runtime.unshard_for_current_block(unit)

    def _discard_reads(self) -> None:
        """Discard data that were read from disk or are being read, because they may contain NaN.

        Their next use reads them again.
        """
        self.runtime.reshard_all()
        for unit in self.units:
            if unit.shard_slot is not None:
                unit.shard_slot.drop_staged()
        self.masters.state_offload.discard_read_ahead()
        self.disk_health.clear_failure()

    @property
    def transport(self) -> Transport:
        """Transport of the data-parallel group of dense parameters."""
        return self.dp_groups[0].transport

    @property
    def slots(self) -> list[GradientSlot]:
        """Slots with the gradient of each trainable unit, in model order. Units that are unfrozen later come last."""
        return self.reducer.slots

    def _use_optimizer(self, optimizer: torch.optim.Optimizer, at_once: int) -> None:
        enable_fused_step(optimizer)
        select_local_states(optimizer, self.units)
        context = UpdateContext(
            self.masters,
            self.dp_groups,
            self.mesh.second_data_group,
            self.make_slot,
            self.mesh.axes,
            self.policy.state,
            at_once,
            self.settings.timeout,
        )
        self.update = update_class(optimizer, self.policy.state)(optimizer, context)
        self.reducer.keep_local_gradients(self.update.takes_local_gradients)
        self._refuse_quantized_states()

    def _state_name(self, chunk: UpdateChunk, state_key: nn.Parameter) -> str:
        entries = self.update.state_entries(chunk.unit) if self.update is not None else ()
        return next((one.name for one in entries if one.state_key is state_key), "?")

    def _refuse_quantized_states(self) -> None:
        """Raise ModelError if a step would have to gather 8-bit states and quantize them again.

        An optimizer that is not elementwise (e.g. Lamb) quantizes its states in blocks of the full parameter. If
        tensor or expert parallelism shards the parameter, each step would dequantize the states, gather them, and
        quantize them again. Elementwise optimizers quantize each rank's fragment by itself.
        """
        assert self.update is not None
        if not self.update.needs_whole_parameters:
            return
        coded = {
            number for number, kept in self.update.formats().items() if any(one.is_quantized for one in kept.values())
        }
        for unit in self.units if coded else ():
            for name, parameter, placement in zip(unit.names, unit.parameters, unit.placements, strict=True):
                if id(parameter) in coded and not placement.is_full:
                    raise ModelError(
                        f"{type(self.update.optimizer).__name__} updates whole parameters with 8-bit states, and "
                        f"{name!r} is sharded over {', '.join(sorted(placement.sharded_axes))}: its states would be "
                        'rounded once more at each step; set state_dtype to "bf16" or "fp32", or that axis to 1'
                    )

    def reduce_accumulated(self) -> None:
        """Reduce the gradients that backwards without a reduction accumulated. Collective.

        A step does this itself.
        """
        self.runtime.end_failed_backwards()
        self.scheduler.sync(SyncPoint.GRADIENT_READ)
        self.agreement.reduce_remaining()

    def step(
        self,
        limit: float,
        scale: float,
        *,
        skip_overflow: bool,
        flags: list[float] | None = None,
        delay: bool = False,
        repeats: bool = True,
        apply_nonfinite: bool = False,
    ) -> StepOutcome:
        """Reduce the remaining gradients, agree on their norm, update the parameters and publish them. Collective.

        The caller drops the gradients if this raises.

        Args:
            limit: Clip the gradient to this norm; 0: do not clip.
            scale: Loss scale by which the gradients are multiplied.
            skip_overflow: Non-finite gradients are expected at times: do not search for the parameter that has them.
            flags: Numbers to sum over ranks, in the exchange of the norm.
            delay: Only start the update, if the settings have `delayed_update`. The next step, or `finish_update`,
                publishes the new parameters.
            repeats: Accept a step without a backward on any rank since the last step. Such a step changes nothing.
            apply_nonfinite: Update with non-finite gradients too, unclipped.

        Raises:
            ModelError: there is no optimizer, a parameter has no gradient and the settings forbid that, ranks have
                different gradients, an in-place change of a parameter was refused or lost, a parameter was given
                another shape or dtype, or there was no backward since the last step and `repeats` is False.
            UpdateError: the update of the previous step failed on some rank.
            StorageError: a transfer to or from NVMe failed on some rank, or the state was lost by an earlier failure.
            Exception: the optimizer raised on this rank.
        """
        if self.update is None:
            raise ModelError("there is no optimizer to step: pass one to initialize, or name one in the configuration")
        self.disk_health.require_intact("a step")
        self.scheduler.sync(SyncPoint.STEP)
        # The delayed update of the previous step has to end before this step changes the same master weights.
        trouble = self._await_result()
        self._find_unstepped()
        self.replicas.restore_local_weights()
        lost = self.replicas.refused_edit() or self.masters.pop_lost_edit(self.units)
        none_since = float(self._gradients_consumed and not self.reducer.backward_count)
        retries = float(self.disk_health.update_changed_nothing)
        # One exchange carries the norm, the caller's flags and the errors of all ranks, so that all decide the same.
        status = self.agreement.agree(
            [float(trouble is not None), *(flags or []), none_since, float(lost != ""), retries]
        )
        self.scheduler.new_step()
        failures = status.flags.pop()  # number of ranks with a failed disk transfer or update; `agree` appends it
        retries, lost_edits, none_since = (status.flags.pop() for _ in range(3))
        if retries == self.mesh.world.size:  # no rank's optimizer changed anything before it raised
            self.disk_health.clear_update_error()
        elif failures + retries > 0:
            self.drop_gradients()  # before the exchange of failures, because transfers of gradients may fail too
            self._drop_result()
            try:
                self.disk_health.raise_failures("this step was skipped, and its gradients are dropped")
            finally:
                self._discard_reads()
        self.runtime.reshard_all()  # units left unsharded by an evaluation would hold outdated values
        self._finish_result(trouble, status.flags.pop(0))
        self._refuse_step(
            status, lost if lost_edits else None, without_backward=none_since == self.mesh.world.size and not repeats
        )
        norm = status.norm / scale
        applies = status.is_finite or apply_nonfinite
        if not applies and (skip_overflow or (bad := self.agreement.first_nonfinite())):
            self.drop_gradients()
            return StepOutcome(norm, applied=False, clip=1.0, flags=status.flags, bad="" if skip_overflow else bad)
        if not self.settings.ignore_unused_parameters:
            self.agreement.refuse_unused(status.used)
        self.reducer.all_gather_gradients()
        self.recapture_parameters()
        clip = clip_coefficient(norm, limit) if status.is_finite or not apply_nonfinite else 1.0
        self.callbacks.before_update(norm, clip)
        # A parameter is updated if it has a gradient on any rank.
        used = {slot.unit.index: flags for slot, flags in zip(self.slots, status.used, strict=True)}
        self.update.has_stepped = False
        try:
            # `clip` is 0 if the squares of a finite gradient overflow. The divisor infinity then gives a zero gradient,
            # as `torch.nn.utils.clip_grad_norm_` does.
            batches = _stepped(self.update.run(used, scale / clip if clip else math.inf))
            # From here on, an update with local gradients changes states before it yields its first batch.
            self.update.has_stepped = self.update.takes_local_gradients
        except Exception as error:
            # A hook of the optimizer raised. The other ranks update and wait for this rank, so raise only after the
            # collectives of `_publish_update`.
            batches = _raised(error)
        if delay and self.delayed_update is not None:
            # From `start` on, only the background thread may use the master weights, so copy in-place changes of
            # parameters into them first.
            self.masters.copy_all_edits(self.units)
            self.delayed_update.start(batches)
        else:
            self._publish_update(batches)
            if self.replicas.differ and self.update.equalizes_replicas:
                self.replicas.equalize()
        self.drop_gradients(keeps_unstepped=True)
        self.choose_gradient_mode()
        self._gradients_consumed = True
        return StepOutcome(norm, applied=True, clip=clip, flags=status.flags)

    def _refuse_step(self, status: StepStatus, lost: str | None, *, without_backward: bool) -> None:
        """Raise on all ranks if this step must not be applied.

        Args:
            lost: Name of a parameter whose in-place change was lost on this rank; empty: a change was lost on another
                rank; None: no rank lost a change.
            without_backward: No rank has run a backward since the last step, and the caller does not accept that.
        """
        if status.diverged:
            self.agreement.refuse_diverged()
        if lost is not None:
            lost = self.agreement.first_name(lost)
            if self.replicas.differ:
                self.replicas.equalize()
                raise self.replicas.edit_error(lost, ", and this step was skipped")
            raise ModelError(
                f"{lost!r} was changed in place while it was gathered for a forward or backward, and the change was "
                "lost when its gathered values were freed (stage 3): change it inside `with windlass.zero."
                "GatheredParameters([parameter], modifier_rank=0)`, build an embedding with max_norm=None, or use a "
                "stage below 3. This step was skipped"
            )
        if without_backward:
            self._gradients_consumed = False
            raise ModelError(
                "step() without a backward since the last step, on any rank: a step consumes its gradients, so a "
                "second step has none, unlike in plain PyTorch. Call backward again, or remove the second step"
            )

    def _find_unstepped(self) -> None:
        """Update the units and parameters that steps skip ([Note: gradients that stay]), since groups may have
        changed."""
        assert self.update is not None
        grouped = {id(p) for group in self.update.optimizer.param_groups for p in group["params"]}
        for unit in self._planned_unstepped:
            unit.unstepped = not any(id(parameter) in grouped for parameter in unit.parameters)
        # Frozen parameters have no gradient that could count.
        outside = self._hooked_parameters - grouped
        for slot in self.slots if outside or self._has_outside else ():
            unit = slot.unit
            unit.outside = frozenset(index for index, p in enumerate(unit.parameters) if id(p) in outside)
        self._has_outside = bool(outside)

    def rescale_unstepped(self, factor: float) -> None:
        """Multiply the gradients that stayed after the step by `factor`, because the loss scale has changed."""
        for slot in self.slots:
            if slot.unit.unstepped and slot.has_reduced:
                values = slot.read()
                slot.write(values.mul_(factor))

    def wait_for_update(self) -> None:
        """Wait for a delayed update. Master weights and optimizer states are then up to date on this rank.

        The parameters may still have the values from before the update; `finish_update` publishes the new ones.
        """
        if self.delayed_update is not None:
            self.delayed_update.wait()

    def finish_update(self) -> None:
        """Finish a delayed update: wait for it and publish the new parameters. Make replicas equal to master weights.

        Collective if an update is in progress or replicas differ ([Note: 1-bit phase]), to be called between a step
        and the next forward. Otherwise nothing is done.

        Raises:
            ModelError: a parameter was changed in place while replicas differed, and the change was undone; or this
                rank changed a parameter in place during the delayed update.
            UpdateError: the update failed on some rank.
            StorageError: a transfer to or from NVMe failed on some rank.
        """
        if self.replicas.differ:
            self.scheduler.sync(SyncPoint.STATE_CHANGE)
            edited = self.agreement.first_name(self.replicas.refused_edit())
            self.replicas.equalize()
            if edited:
                raise self.replicas.edit_error(edited)
        if self.delayed_update is None or not self.delayed_update.in_progress:
            return
        self.scheduler.sync(SyncPoint.DELAYED_UPDATE_END)
        trouble = self._await_result()
        failed = torch.tensor([float(trouble is not None)], dtype=torch.float64, device=self.device)
        if self.mesh.world.size > 1:  # also ensures that no peer still computes with the old parameters
            self.mesh.world.all_reduce(failed)
        self._finish_result(trouble, failed.item())

    def forget_unsent(self) -> None:
        """Reset unsent changes and quantization errors, which belong to the weights before a load.

        Called after weights were loaded without optimizer states.
        """
        if self.update is not None:
            self.update.forget_unsent()
        self.quantization_errors.forget()

    def choose_gradient_mode(self) -> None:
        """Choose whether the gradients of the next step are reduced or stay local. A change drops all gradients.

        Called at the end of a step, and after a load.
        """
        if self.update is not None and self.update.takes_local_gradients != self.reducer.keeps_local_gradients:
            self.drop_gradients()
            self.reducer.keep_local_gradients(self.update.takes_local_gradients)

    def unhooked_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the named parameters without gradient hooks: those that were frozen when hooks were last registered."""
        for unit in self.units:
            for name, parameter in zip(unit.names, unit.parameters, strict=True):
                if id(parameter) not in self._hooked_parameters:
                    yield name, parameter

    def all_trained(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Return True if all of `parameters` that require a gradient have gradient hooks and memory for a gradient."""
        return all(id(p) in self._hooked_parameters or not p.requires_grad for p in parameters)

    def recapture_parameters(self) -> None:
        """Make parameters that were given other memory (`p.data = ...`, `module.to(...)`) views of their units again.

        They keep their current values. Applies to the units that are never resharded.

        Raises:
            ModelError: a parameter was given another shape or dtype.
        """
        recapture_parameters([unit for unit in self.units if not unit.reshards])

    def require_weights_on_device(self, unit: Unit, name: str) -> None:
        """Check that the weights of a unit from which full values are read are not offloaded: the master weights, or
        the parameters if these are the same memory or frozen.

        Args:
            name: parameter that is read, for the message.

        Raises:
            ModelError: the weights are offloaded.
        """
        kind = "master_weights" if self.masters.is_separate(unit) else "parameters"
        self.state_offloader.require_on_device(name, unit, kind)

    def track_data_edits(self, place: parameter_registry.ParameterLocation) -> None:
        """Record that a script reads `.data` of a parameter, so that changes made through it are detected."""
        late = self.replicas.differ or self._update_in_progress()
        self.masters.track_data_edits(place.unit, place.index, late=late)

    def drop_gradients(self, *, keeps_unstepped: bool = False) -> None:
        """Drop the gradients of this step, and reshard all units that are not in use.

        Args:
            keeps_unstepped: See `GradientReducer.reset`.
        """
        # Call `reset` before `reshard_all`, which ends a backward that raised: `reshard_all` would copy the gradients
        # of that backward, although memory may be short.
        self.reducer.reset(keeps_unstepped=keeps_unstepped)
        self.agreement.forget()
        self.runtime.reshard_all()

    @contextmanager
    def editing_parameters(self, units: list[Unit], *, experts_only: bool = False) -> Iterator[None]:
        """Return a context in which master weights, optimizer states, and the local shards of frozen units may be set.

        At the end of the context, the parameters are updated from them. Collective.

        Args:
            units: Units to be set.
            experts_only: Collective over the ranks that hold the same experts only. All `units` must be expert units.

        Raises:
            StorageError: a transfer to or from NVMe failed on some rank, or the state was lost by an earlier failure.
        """
        trained = [unit for unit in units if self.masters.chunks_of(unit)]
        among = expert_data_group(units) if experts_only else None
        with (
            self.replacing_parameters(units, experts_only=experts_only),
            self.masters.resident(trained, changes=True, among=among),
        ):
            yield
            _wait([self.masters.write_back(chunk) for unit in trained for chunk in self.masters.chunks_of(unit)])

    @contextmanager
    def replacing_parameters(self, units: list[Unit], *, experts_only: bool = False) -> Iterator[None]:
        """Return a context like `editing_parameters`, in which the caller loads and writes back the values itself.

        Collective.
        """
        for unit in units:
            self.state_offloader.require_on_device(unit.names[0], unit, "parameters", "master_weights")
        self.callbacks.on_weights_edited()
        self.scheduler.sync(SyncPoint.STATE_CHANGE, experts_only=experts_only)
        self.finish_update()
        # Otherwise new values would go to `Unit.full`, and the next recapture would overwrite them.
        self.recapture_parameters()
        for group in self._groups_of([unit for unit in units if unit.buffer.parts]):
            # A peer may still run its backward and read this rank's shards in shared memory.
            group.barrier()
        yield
        trained = [unit for unit in units if self.masters.chunks_of(unit)]
        self._gather_updated(trained)
        for unit in units:
            if unit.reshards and unit not in trained:
                unit.mark_updated()
        _mark_updated(units)
        self.masters.remember_versions(units)

    def destroy(self, *, keeps_mesh: bool = False) -> None:
        """Restore the plain model, with copies of the full parameters and without hooks.

        Collective. Finishes a delayed update first; an error of the update is raised after the model is restored.
        Further calls do nothing.

        Args:
            keeps_mesh: Leave the process groups of the mesh open, for another `ShardedModel` that uses them.
        """
        if not self._handles and not self.units:
            return
        was_lost = bool(self.disk_health.loss_reason)
        try:
            self.finish_update()
        except StorageError:
            if not was_lost:  # else an earlier call raised that the state is lost, and `_undo` logs it
                raise
        finally:
            self._undo(keeps_mesh)

    def _undo(self, keeps_mesh: bool) -> None:
        self.destroyed, self._unshards_on_access = True, False
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self.delayed_update is not None:
            self.delayed_update.close()
        self.state_offloader.reload()
        self.scheduler.sync(SyncPoint.DESTROY)
        self.reducer.finish()
        for unit in self.units:
            if unit.gather_codec is not None:
                views = unit.gather_exact()
            else:
                self.scheduler.unshard_synced(unit)
                unit.wait_for_unshard()
                views = unit.views()
            for parameter, view in zip(unit.parameters, views, strict=True):
                if isinstance(parameter, ShardedParameter):
                    mark_unsharded(parameter)
                # The parameter of a unit that is never resharded may have been given other memory, of any dtype.
                put_data(parameter, (view if unit.reshards else raw_data(parameter)).clone())
                put_grad(parameter, None)
            unit.unmark_freed(range(len(unit.parameters)))
        parameter_registry.unregister(self)
        self._forget_properties()
        self._log_lost_state()
        self.units = []
        for dp_group in self.dp_groups:
            if dp_group.group.size > 1:  # peers may still read this rank's shards in shared memory, freed below
                dp_group.group.barrier()
        if keeps_mesh:
            self._closer.detach()
            _close(None, self.ledger, self.tiers.disk)
        else:
            self._closer()

    def _groups_of(self, units: list[Unit]) -> list[RankGroup]:
        """Return the groups over which any of `units` is sharded, in the same order on all ranks.

        Groups of one rank are left out.
        """
        requested = {id(unit.dp_group) for unit in units}
        return [dp_group.group for dp_group in self.dp_groups if id(dp_group) in requested and dp_group.group.size > 1]

    def _log_lost_state(self) -> None:
        """Log an error if some parameters of the model that `destroy` returns are lost."""
        if self.tiers.staging is not None:
            self.tiers.staging.wait_all()
        lost = self.disk_health.loss_reason
        if lost:
            logger.error(
                "the model that destroy() returns mixes parameters of different steps (%s); load the last checkpoint "
                "into it",
                lost,
            )
        try:
            self.disk_health.check(
                "the model that destroy() returns is incomplete", then="parameters that were not read are NaN"
            )
        except StorageError as error:
            if not lost:
                logger.error("%s", error)

    def compile_safe(self) -> list[nn.Module]:
        """Return the modules that can be compiled because no hook of a block runs inside their forward.

        These are the innermost blocks, or the model itself if no unit is resharded.
        """
        if not any(unit.reshards for unit in self.units):
            return [self.model]
        of_blocks = {id(block.module): block.module for block in self._blocks}
        return [
            module
            for module in of_blocks.values()
            if not any(id(inner) in of_blocks for inner in module.modules() if inner is not module)
        ]

    def _attach(self, blocks: list[Block]) -> None:
        self._blocks = blocks
        self.hook_gradients()
        if any(unit.reshards for unit in self.units):
            of_blocks = {id(block.module) for block in blocks}
            for block in blocks:
                inner = list(_modules_outside(block.module, of_blocks))
                self._handles += register_block_hooks(block, self.runtime, inner)
            self._handles += attach_generation(self.model, self)
        self._handles += register_model_hooks(self.model, self.runtime)

    def hook_gradients(self) -> None:
        """Register gradient hooks on the trainable parameters that have none yet."""
        places = []
        for number, slot in enumerate(self.slots):
            for index, parameter in enumerate(slot.unit.parameters):
                if parameter.requires_grad and id(parameter) not in self._hooked_parameters:
                    self._hooked_parameters.add(id(parameter))
                    places.append((number, index, parameter))
        self._handles += register_gradient_hooks(places, self.runtime, self.reducer)

    def _on_reduced(self, slot: GradientSlot) -> None:
        """Start to read a unit's master weights and states from disk, if a step follows the backward and no delayed
        update is in progress.
        """
        if self.callbacks.is_step_next() and not self._update_in_progress():
            self.masters.read_ahead(slot.unit)

    def _max_live_numel(self) -> int:
        """Return the maximum number of unsharded elements, for the prefetcher.

        This is the configured number. If device memory is emulated and parameters are offloaded, it is also limited to
        half of the remaining memory budget.
        """
        place, largest = emulated_device_memory(), max((unit.dtype.itemsize for unit in self.units), default=4)
        if place is None or self.tiers.param is Tier.DEVICE:
            return self.settings.max_live_numel
        return min(self.settings.max_live_numel, (place.budget - place.used) // (2 * largest))

    # Steps and delayed updates.

    def _await_result(self) -> Exception | None:
        """Wait for a delayed update in progress. Return this rank's error that makes the result unusable; or None."""
        if self.delayed_update is None or not self.delayed_update.in_progress:
            return None
        self.delayed_update.wait()
        self.recapture_parameters()
        return self.delayed_update.local_error()

    def _update_in_progress(self) -> bool:
        return self.delayed_update is not None and self.delayed_update.in_progress

    def _drop_result(self) -> None:
        """Drop the result of a delayed update in progress, after a disk transfer or an update failed. Collective.

        Raises:
            StorageError, UpdateError: an update was in progress. It is applied in part, so the state is lost.
        """
        if self.delayed_update is not None and self.delayed_update.in_progress:
            self.delayed_update.finish(use=False)
            self.disk_health.raise_failures("a delayed update was applied in part", loses=True)

    def _finish_result(self, trouble: Exception | None, failed: float) -> None:
        """Publish the result of a delayed update in progress, or drop it if the update failed on any rank.

        Args:
            trouble: Error of this rank's update, or None.
            failed: Number of ranks with an error.

        Raises:
            UpdateError: the update failed on some rank. Raised on all ranks, except those that raise ModelError.
            ModelError: a parameter was changed in place on this rank during the update.
            StorageError: a transfer to or from NVMe failed on some rank. Raised on all ranks.
        """
        if self.delayed_update is None or not self.delayed_update.in_progress:
            return
        batches = self.delayed_update.finish(use=not failed)
        if not failed:
            self._publish_update(batches)
            return
        self.drop_gradients()
        raise trouble or UpdateError(
            f"the delayed update of the previous step failed on {failed:.0f} of the other ranks, which raise the "
            "cause; master weights no longer match the parameters, so load the last checkpoint"
        )

    def _publish_update(self, batches: Iterable[list[UpdateChunk]]) -> None:
        """Run the update batch by batch, and make the new parameters available to all ranks. Collective.

        Args:
            batches: Lists of chunks of master weights. Taking a list from the iterator updates its chunks.

        Raises:
            StorageError: a transfer to or from NVMe failed on some rank. Raised on all ranks.
            UpdateError: the model has data on NVMe, and the update of some rank failed in part. Raised on all ranks.
            Exception: the optimizer raised on this rank. The other ranks raise at their next step.
        """
        updated: dict[int, Unit] = {}
        written: list[Pending] = []
        failed: Exception | None = None
        assert self.update is not None
        # Read these properties before the update runs, because it may change both for the next step.
        publishes, communicates = self.update.publishes_itself, self.update.takes_local_gradients
        try:
            for batch in batches:
                _wait(written)
                for chunk in batch:
                    updated[chunk.unit.index] = chunk.unit
                    if not publishes:
                        written.append(self.masters.write_back(chunk, keep=True))
        except Exception as error:
            # The other ranks wait for the new parameters, so take part in the collectives below, unless they wait for
            # messages of the update itself. The next step exchanges the error.
            failed = self.disk_health.update_error = error
            # Without sharded states all ranks update the same elements. Other ranks may have succeeded, so the replicas
            # may differ although this rank changed nothing.
            # An update of full parameters raises only after all batches, so `updated` does not show if it has begun.
            has_begun = self.update.has_stepped or (bool(updated) and not self.update.needs_whole_parameters)
            self.disk_health.update_changed_nothing = not has_begun and bool(
                self.policy.state or self.mesh.world.size == 1
            )
            updated = {slot.unit.index: slot.unit for slot in self.slots if slot.has_reduced}
        finally:  # after an error too: parameters must match the master weights that were updated
            _wait(written)
        try:  # failures of writes still in flight surface at the next check
            self.disk_health.check("this step was applied in part", loses=True)
        except (StorageError, UpdateError):
            self.drop_gradients()
            raise
        # All ranks must start the collectives in the same order.
        units = [updated[index] for index in sorted(updated, reverse=True)]
        if failed is None or not communicates:  # after a failure, peers may still be inside the update
            if publishes:
                self.replicas.publish(units)
            else:
                self._gather_updated(units)
        _mark_updated(units)
        for unit in units:
            # A backward through a graph from before this update must raise, as after an in-place change.
            torch.autograd.graph.increment_version(unit.parameters)
        self.masters.remember_versions(self.units)
        if publishes:
            self.masters.follow_edits(self.units, refuses=True)
        if failed is not None:
            self.drop_gradients()
            raise failed

    def _gather_updated(self, units: list[Unit]) -> None:
        """Publish the updated shards to peers, and all-gather the units that are never resharded. Collective.

        The other units are gathered at their next use.
        """
        pending = []
        for unit in units:
            if unit.reshards:
                unit.mark_updated()
            elif self.policy.state:
                unit.transport.publish(unit.buffer)
        for unit in units:
            if not unit.reshards and self.policy.state:
                pending.append(unit.transport.all_gather(unit.buffer, elements=unit.numel))
        for one in pending:
            one.wait()
        for unit in units:  # the caller may change parameters in place, so wait until peers have read them
            if not unit.reshards and self.policy.state:
                unit.transport.wait_until_read(unit.buffer)


def _modules_outside(module: nn.Module, of_blocks: set[int]) -> Iterator[nn.Module]:
    """Yield the modules inside `module`, without the blocks in it and the modules inside these blocks.

    Args:
        of_blocks: ids of the modules of all blocks.
    """
    for child in module.children():
        if id(child) not in of_blocks:
            yield child
            yield from _modules_outside(child, of_blocks)


def _stepped(batches: Iterable[list[UpdateChunk]]) -> Iterator[list[UpdateChunk]]:
    """Yield from each batch the chunks that have a gradient, while the batch is resident."""
    for batch in batches:
        yield [chunk for chunk in batch if chunk.gradient is not None]


def _raised(error: Exception) -> Iterator[list[UpdateChunk]]:
    """Return an iterator that raises `error`, for an update that failed before its first batch."""
    yield from ()
    raise error


def _mark_updated(units: list[Unit]) -> None:
    """Reshard `units` because their unsharded values are outdated. A unit in use is all-gathered again at once.

    An unsharded unit in shared memory stays so, once all peers have written their shards.
    """
    for unit in units:
        if unit.shard_state is ShardState.SHARDED:
            continue
        if unit.frees_memory:
            unit.reshard(stale=True)
            if unit.users:
                unit.wait_for_unshard()
        elif unit.reshards:
            unit.wait_for_peers()


def _wait(written: list[Pending]) -> None:
    for pending in written:
        pending.wait()
    written.clear()


def _close(mesh: Mesh | None, ledger: DeviceMemoryLedger, disk: DiskTier | None) -> None:
    """Close the disk tier and the process groups, and remove all entries of `ledger`, which counts device memory.

    Also runs as a finalizer, because these resources outlive the model's memory.
    """
    if disk is not None:
        disk.close()
    ledger.release_all()
    if mesh is not None:
        mesh.close_with_model()
