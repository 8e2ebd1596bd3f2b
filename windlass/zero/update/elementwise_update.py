"""Update with an elementwise optimizer, whose class steps this rank's flat fragments of parameters.

An elementwise optimizer computes the same values for a fragment as for the full parameter. So each rank runs the user's
optimizer class, or a native equivalent for host memory, on its fragments of the master weights. Each fragment has its
own state, `step` included. So a parameter without a gradient is skipped exactly as torch skips it.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from contextlib import nullcontext
from typing import ClassVar

import torch
from torch import nn

from windlass.base.device_memory import device_has_own_memory
from windlass.base.errors import ModelError
from windlass.kernels.page_sums import PageSums
from windlass.optim.cpu_optimizer import CPUOptimizer, StateFormat
from windlass.optim.elementwise_optimizers import SCALAR_STATES, supports_grad_scale
from windlass.optim.native_cpu_equivalent import make_native_cpu_equivalent, updates_page_sums
from windlass.storage.slot import Tier
from windlass.zero.core.unit import Unit
from windlass.zero.core.unit_layout import LayoutPiece
from windlass.zero.update.optimizer_step_session import OptimizerStepSession, run_pre_step_hooks
from windlass.zero.update.rank_state import RankState
from windlass.zero.update.update_chunk import StateEntry, UpdateChunk, batch_chunks
from windlass.zero.update.update_protocol import OrdinaryUpdate, UpdateContext


class ParameterSegment:
    """Fragment of a parameter, as a flat `nn.Parameter` that the optimizer steps.

    Attributes:
        chunk: chunk that contains the fragment.
        piece: range of the fragment in its parameter, and offset in the chunk.
        tensor: `[piece.numel]` in `chunk.state_dtype`: a view of the master weights, or of their wider copy if the
            update makes one; empty while that memory does not exist.
    """

    def __init__(self, chunk: UpdateChunk, piece: LayoutPiece) -> None:
        self.chunk, self.piece = chunk, piece
        self.tensor = nn.Parameter(torch.empty(0, dtype=chunk.state_dtype, device=chunk.device), requires_grad=True)
        if chunk.master is not None and not _widened(chunk):
            self.point_to(chunk.master)

    @property
    def parameter(self) -> nn.Parameter:
        return self.chunk.unit.parameters[self.piece.index]

    @property
    def name(self) -> str:
        return self.chunk.unit.names[self.piece.index]

    def point_to(self, values: torch.Tensor) -> None:
        """Make `tensor` a view of its fragment of `values` `[chunk]`, the chunk's master weights or a wider copy."""
        self.tensor.data = values.narrow(0, self.piece.offset, self.piece.numel)

    def detach_memory(self) -> None:
        """Make `tensor` empty, so that a widened copy of the master weights can be freed."""
        self.tensor.data = self.tensor.data.new_empty(0)

    def take_gradient(self, gradient: torch.Tensor) -> None:
        """Make `tensor.grad` a view of its fragment of the chunk's reduced gradient `[chunk]`."""
        self.tensor.grad = gradient.narrow(0, self.piece.offset, self.piece.numel)


def clone_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return an optimizer of the same class with the same attributes, but without states, groups and step hooks."""
    clone: torch.optim.Optimizer = object.__new__(type(optimizer))
    clone.__dict__.update(optimizer.__dict__)
    # A scheduler may have wrapped `step`, and `modes_of` replaces the others: they call the original optimizer.
    for name in ("step", "train", "eval"):
        clone.__dict__.pop(name, None)
    # The hooks run once a step with the original optimizer, see `OptimizerStepSession`.
    clone._optimizer_step_pre_hooks, clone._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    clone.state = defaultdict(dict)
    clone.param_groups = []
    return clone


class ElementwiseUpdate(OrdinaryUpdate):
    """Update of this rank's master weights with an elementwise optimizer, a bounded number of elements at a time.

    Args:
        optimizer: the user's optimizer. Its groups give the parameters and hyper-parameters; its existing states are
            moved to this rank's fragments.
        context: parts of the model that the update works on. `max_update_numel` is the maximum number of elements of
            one optimizer call and bounds its temporary memory.
    """

    needs_whole_parameters: ClassVar[bool] = False
    reduces_itself: ClassVar[bool] = False
    steps_whole_units: ClassVar[bool] = False

    def __init__(self, optimizer: torch.optim.Optimizer, context: UpdateContext) -> None:
        masters = context.masters
        chunks, state_offload = masters.chunks, masters.state_offload
        self.optimizer, self.chunks, self.state_offload, self._masters = optimizer, chunks, state_offload, masters
        self._inner = self._native() or clone_optimizer(optimizer)
        state_offload.states = self._inner.state
        # A native `_inner` steps only float32 chunks in host memory, and `_on_device` steps the others.
        self._on_device = clone_optimizer(optimizer) if self._has_native_equivalent else self._inner
        self._on_device.state = self._inner.state
        self._scales: dict[int, bool] = {}  # by id of an optimizer: True if its step divides gradients by a scale
        self._of_chunk: dict[int, list[ParameterSegment]] = {}
        self._max_update_numel = context.max_update_numel
        self._lowered: dict[torch.Tensor, torch.Tensor] = {}
        self._page_sums: list[PageSums] = []
        self.add_chunks(chunks)
        for chunk in chunks:
            # `resident` also writes a chunk back to NVMe, with the states that are added here.
            with state_offload.resident([chunk]) if optimizer.state else nullcontext():
                self._shard_existing_state(chunk)
        optimizer.state.clear()  # the states are in `_inner` now; a second copy would only take memory

    def add_chunks(self, chunks: list[UpdateChunk]) -> None:
        """Include these chunks in all later updates. They must be in `masters.chunks` already."""
        for chunk in chunks:
            segments = self._of_chunk[id(chunk)] = [ParameterSegment(chunk, piece) for piece in chunk.pieces()]
            chunk.state_keys = [segment.tensor for segment in segments]
        self._batches = batch_chunks(self.chunks, self._max_update_numel)

    def cannot_step(self, dtype: torch.dtype, tier: Tier) -> bool:
        """Return True if master weights of this dtype on tier `tier` cannot be updated together with the existing ones.

        This is so if the user's class is replaced by the native kernel, which updates only float32 in host memory.
        """
        return self._has_native_equivalent and (dtype != torch.float32 or tier is Tier.DEVICE)

    def state_entries(self, unit: Unit | None = None) -> Iterator[StateEntry]:
        """Yield the state entries of one unit or all, one for each fragment that this rank updates."""
        for chunk in self.chunks if unit is None else self._masters.chunks_of(unit):
            for segment in self._of_chunk[id(chunk)]:
                piece = segment.piece
                shape = torch.Size([piece.numel])
                yield StateEntry(chunk, segment.tensor, piece.index, piece.start, piece.stop, shape)

    def rank_states(self) -> Iterator[RankState]:
        """Yield nothing, because no state is particular to a rank: ranks keep equal states, or shards of them."""
        return iter(())

    def formats(self) -> dict[int, dict[str, StateFormat]]:
        """Return the storage format of each state, by id of the parameter and name of the state.

        Empty if the optimizer does not define formats.
        """
        return formats_of(self.optimizer, self._inner)

    def run(self, used: dict[int, list[bool]], divisor: float) -> Iterator[list[UpdateChunk]]:
        """Return an iterator that updates the chunks batch by batch, and yields each batch once it is updated.

        This call runs the pre-step hooks and reads the hyper-parameters, so later changes of them do not affect the
        iterator. Between two iterations, the master weights and states of the yielded batch are in memory.

        Args:
            used: one flag for each parameter of a unit, by unit index. False: the parameter has no gradient and is
                skipped.
            divisor: divisor of the gradients (loss scale over clip coefficient).
        """
        run_pre_step_hooks(self.optimizer)
        session = OptimizerStepSession(self.optimizer)
        session.keep_options()
        group_of = self._groups()
        # Examined in every step, because groups may change. A clone has no groups before its first call, so examine the
        # user's optimizer.
        self._scales = {
            id(inner): supports_grad_scale(inner if isinstance(inner, CPUOptimizer) else self.optimizer)
            for inner in (self._inner, self._on_device)
        }
        return self._run(session, used, divisor, group_of)

    def _run(
        self, session: OptimizerStepSession, used: dict[int, list[bool]], divisor: float, group_of: dict[int, int]
    ) -> Iterator[list[UpdateChunk]]:
        sums_pages = updates_page_sums(self._inner)
        for batch in self.state_offload.iterate_batches(self._batches, sums_pages=sums_pages):
            chosen: dict[int, list[ParameterSegment]] = defaultdict(list)
            inner = self._inner_of(batch)
            # The divisor that an optimizer reads has 32 bits, too few for float64.
            scales = self._scales[id(inner)] and all(chunk.state_dtype != torch.float64 for chunk in batch)
            widened: list[tuple[UpdateChunk, torch.Tensor]] = []
            for chunk in batch:
                self._masters.drop_lowered_params(chunk)  # a failed step may have left lowered parameters
                if chunk.gradient is None:  # the unit has no gradient in this step
                    continue
                gradient, values = self._gradient(chunk, chunk.gradient, 1.0 if scales else divisor), chunk.values()
                if _widened(chunk):
                    self.state_offload.compare_pages(chunk)  # verify the narrow weights before they are overwritten
                    values = values.to(chunk.state_dtype)
                    widened.append((chunk, values))
                if (sums := self.state_offload.page_sums(chunk)) is not None:
                    self._page_sums.append(sums)
                skipped = False
                for segment in self._of_chunk[id(chunk)]:
                    group = group_of.get(id(segment.parameter))
                    if group is not None and used[chunk.unit.index][segment.piece.index]:
                        # The address of these values differs in each step; other segments are views since construction.
                        if chunk.tier is Tier.NVME or values is not chunk.master:
                            segment.point_to(values)
                        segment.take_gradient(gradient)
                        chosen[group].append(segment)
                    else:
                        skipped = True
                # The kernel writes only segments that are stepped: a skipped segment would leave a gap in the copy.
                if not skipped and values is chunk.master:
                    self._lower(inner, chunk)
            self._step(session, inner, chosen, divisor if scales else 1.0)
            for chunk, values in widened:
                chunk.values().copy_(values)  # rounds to the dtype of the master weights
                for segment in self._of_chunk[id(chunk)]:
                    segment.detach_memory()
            yield batch
        session.end()

    @property
    def _has_native_equivalent(self) -> bool:
        return isinstance(self._inner, CPUOptimizer) and type(self._inner) is not type(self.optimizer)

    def _inner_of(self, batch: list[UpdateChunk]) -> torch.optim.Optimizer:
        """Return the optimizer that steps a batch, whose chunks are on one tier."""
        # The memory of a CPU is host memory, unless it emulates a device.
        in_host_memory = batch[0].tier is not Tier.DEVICE or not device_has_own_memory(batch[0].device)
        is_native = in_host_memory and all(chunk.state_dtype == torch.float32 for chunk in batch)
        return self._inner if is_native else self._on_device

    def _native(self) -> torch.optim.Optimizer | None:
        """Return the native equivalent of the optimizer, which steps host memory in one pass.

        None if there is no equivalent, if all chunks are on the device, or if a chunk off the device has a state dtype
        other than float32.
        """
        held = [chunk for chunk in self.chunks if chunk.numel]
        offloaded = [chunk for chunk in held if chunk.tier is not Tier.DEVICE]
        # A rank without elements makes the same choice as a rank with elements off the device.
        if (held and not offloaded) or any(chunk.state_dtype != torch.float32 for chunk in offloaded):
            return None
        native = make_native_cpu_equivalent(self.optimizer)
        if native is not None:  # drop its copies of the user's states and groups: segments have their own
            native.state, native.param_groups = defaultdict(dict), []
        return native

    def _lower(self, inner: torch.optim.Optimizer, chunk: UpdateChunk) -> None:
        """Let the optimizer call also write the chunk's 16-bit parameters, if the optimizer supports that.

        All segments of the chunk must be stepped.
        """
        if not isinstance(inner, CPUOptimizer) or chunk.unit.dtype not in (torch.bfloat16, torch.float16):
            return
        chunk.lowered_params = self._masters.lowered_output(chunk)
        for segment in self._of_chunk[id(chunk)]:
            piece = segment.piece
            self._lowered[segment.tensor] = chunk.lowered_params.narrow(0, piece.offset, piece.numel)

    def _groups(self) -> dict[int, int]:
        """Return the group number of each parameter, by id. Read at every step, since groups may change."""
        return {id(p): n for n, group in enumerate(self.optimizer.param_groups) for p in group["params"]}

    @staticmethod
    def _gradient(chunk: UpdateChunk, gradient: torch.Tensor, divisor: float) -> torch.Tensor:
        if gradient.dtype != chunk.state_dtype:
            gradient = gradient.to(chunk.state_dtype)
        # Scale in place: the gradient is dropped after the step.
        if divisor != 1.0:
            gradient.div_(divisor)
        return gradient

    def _step(
        self,
        session: OptimizerStepSession,
        inner: torch.optim.Optimizer,
        chosen: dict[int, list[ParameterSegment]],
        divisor: float,
    ) -> None:
        if divisor != 1.0 and chosen:
            device = next(iter(chosen.values()))[0].tensor.device
            inner.grad_scale = torch.full((), divisor, dtype=torch.float32, device=device)  # type: ignore[attr-defined]
            # The attributes that `GradScaler` sets. `found_inf` is 0: the engine has already decided to apply the step.
            inner.found_inf = torch.zeros((), dtype=torch.float32, device=device)  # type: ignore[attr-defined]
        if self._page_sums:
            inner.page_sums = self._page_sums  # type: ignore[attr-defined]
        if self._lowered:
            inner.low_precision_copies = self._lowered  # type: ignore[attr-defined]
        try:
            for part in self._parts(inner, chosen):
                session.step(inner, part)
        finally:  # also after an error: the next batch sets its own divisor and copies, or none
            for name in ("grad_scale", "found_inf", "low_precision_copies", "page_sums"):
                inner.__dict__.pop(name, None)
            self._lowered, self._page_sums = {}, []

    @staticmethod
    def _parts(
        inner: torch.optim.Optimizer, chosen: dict[int, list[ParameterSegment]]
    ) -> list[dict[int, list[nn.Parameter]]]:
        """Divide the tensors, by group number, into parts for one optimizer call each.

        Torch's fused SGD requires that either all tensors of a call have a momentum or none.
        """
        tensors = {number: [segment.tensor for segment in segments] for number, segments in chosen.items()}
        if type(inner) is not torch.optim.SGD:
            return [tensors]
        parts: list[dict[int, list[nn.Parameter]]] = [{}, {}]
        for number, group in tensors.items():
            for tensor in group:
                parts[bool(inner.state.get(tensor))].setdefault(number, []).append(tensor)
        return [part for part in parts if part]

    def _shard_existing_state(self, chunk: UpdateChunk) -> None:
        """Copy this rank's fragments of states that the user's optimizer already has."""
        for segment in self._of_chunk[id(chunk)]:
            given = self.optimizer.state.get(segment.parameter)
            if not given:
                continue
            piece, device = segment.piece, segment.tensor.device
            shape = segment.chunk.unit.shapes[piece.index]
            for key, value in given.items():
                if isinstance(value, torch.Tensor) and value.shape == shape and key not in SCALAR_STATES:
                    value = value.detach().reshape(-1)[piece.start : piece.stop].to(device, copy=True)
                    value = value.to(state_dtype(self.optimizer, value.dtype, chunk))
                elif isinstance(value, torch.Tensor):
                    value = value.detach().clone()  # e.g. `step`: each segment has its own
                self._inner.state[segment.tensor][key] = value


def _widened(chunk: UpdateChunk) -> bool:
    """Return True if the update needs a wider copy of a chunk's master weights."""
    return chunk.dtype != chunk.state_dtype


def state_dtype(optimizer: torch.optim.Optimizer, dtype: torch.dtype, chunk: UpdateChunk) -> torch.dtype:
    """Return the dtype in which to keep an existing state of `dtype` that has one value per element.

    Optimizers create states in the dtype of the parameters, which may have been another 16-bit dtype before
    `initialize` cast the model. Such a state is therefore widened to the dtype in which the chunk is updated. A
    `CPUOptimizer` chooses the dtype of its states itself, so these keep their dtype.
    """
    like_the_parameter = dtype == chunk.unit.dtype or {dtype, chunk.unit.dtype} <= {torch.float16, torch.bfloat16}
    like_the_parameter = like_the_parameter and dtype.itemsize < chunk.state_dtype.itemsize
    return chunk.state_dtype if like_the_parameter and not isinstance(optimizer, CPUOptimizer) else dtype


def formats_of(optimizer: torch.optim.Optimizer, inner: torch.optim.Optimizer) -> dict[int, dict[str, StateFormat]]:
    """Return the storage format of each state that `inner` keeps, by id of the parameter and name of the state.

    Empty if `inner` does not define formats. Only a `CPUOptimizer` does.
    """
    if not isinstance(inner, CPUOptimizer):
        return {}
    kept = [(inner.state_formats(group), group["params"]) for group in optimizer.param_groups]
    return {id(p): formats for formats, parameters in kept for p in parameters}


def check_parameters(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Check that all parameters of the optimizer are parameters of the model.

    Raises:
        ModelError: a parameter is not in the model. The message gives its group, position and shape.
    """
    own = {id(p) for p in model.parameters()}
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            if id(parameter) not in own:
                raise ModelError(
                    f"optimizer group {number}, parameter {place}, of shape {tuple(parameter.shape)}, is not a "
                    "parameter of the model; build the optimizer from the parameters of the model that is passed "
                    "(after moving or wrapping it); during a run, remove parameters that left the model from the "
                    "group"
                )
