"""Steps the optimizer on this rank's spans: the user's own optimizer class sees flat pieces of parameters.

An elementwise rule gives the same result on any piece of a parameter, so each rank runs the very class that the user
chose on its pieces of the master weights. The state that it makes, `step` included, is kept by piece, so a parameter
that had no gradient anywhere is skipped exactly as torch skips it.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from contextlib import nullcontext
from typing import ClassVar

import torch
from torch import nn

from windlass.base.errors import ModelError
from windlass.optim.cpu_optimizer import CPUOptimizer, StateFormat
from windlass.optim.elementwise_optimizers import SCALAR_STATES, supports_grad_scale
from windlass.optim.native_cpu_equivalent import make_native_cpu_equivalent
from windlass.storage.slot import Tier
from windlass.zero.core.unit import Unit
from windlass.zero.core.unit_layout import LayoutPiece
from windlass.zero.update.optimizer_step_session import OptimizerStepSession
from windlass.zero.update.rank_state import RankState
from windlass.zero.update.update_chunk import StateEntry, UpdateChunk, batch_chunks
from windlass.zero.update.update_protocol import UpdateContext


class ParameterSegment:
    """A piece of a parameter that this rank updates."""

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
        """See the master weights of the chunk `[stop - start]` here."""
        self.tensor.data = values.narrow(0, self.piece.offset, self.piece.numel)

    def detach_memory(self) -> None:
        """See no memory, so that a widened copy of master weights can be freed."""
        self.tensor.data = self.tensor.data.new_empty(0)

    def take_gradient(self, gradient: torch.Tensor) -> None:
        """Point `.grad` at this piece of the chunk's reduced gradient `[chunk]`."""
        self.tensor.grad = gradient.narrow(0, self.piece.offset, self.piece.numel)


def clone_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """An optimizer of the same class with the same attributes, and state and groups of its own, as yet empty."""
    twin: torch.optim.Optimizer = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    twin.__dict__.pop("step", None)  # a scheduler may have wrapped the original's; that would step the original
    twin._optimizer_step_pre_hooks, twin._optimizer_step_post_hooks = OrderedDict(), OrderedDict()  # see Turn
    twin.state = defaultdict(dict)
    twin.param_groups = []
    return twin


class ElementwiseUpdate:
    """Runs an elementwise optimizer on this rank's segments, a bounded number of elements at a time.

    Args:
        optimizer: the user's; its groups say which parameters and with which hyper-parameters.
        context: see there; `sub_group_numel` is the elements of one call and bounds what a rule takes for temporaries.
    """

    needs_whole_parameters: ClassVar[bool] = False
    reduces_itself: ClassVar[bool] = False

    def __init__(self, optimizer: torch.optim.Optimizer, context: UpdateContext) -> None:
        masters = context.masters
        chunks, residence = masters.chunks, masters.state_offload
        self.optimizer, self.chunks, self.state_offload, self._masters = optimizer, chunks, residence, masters
        self._inner = self._native() or clone_optimizer(optimizer)
        residence.states = self._inner.state
        self._scales = supports_grad_scale(self._inner)
        self._of_chunk: dict[int, list[ParameterSegment]] = {}
        self._sub_group = context.sub_group_numel
        self._lowered: dict[torch.Tensor, torch.Tensor] = {}
        self.add_chunks(chunks)
        for chunk in chunks:
            with residence.resident([chunk]) if optimizer.state else nullcontext():
                self._shard_existing_state(chunk)
        optimizer.state.clear()

    def add_chunks(self, chunks: list[UpdateChunk]) -> None:
        """Step these chunks too; they are among the masters' already."""
        for chunk in chunks:
            found = self._of_chunk[id(chunk)] = [ParameterSegment(chunk, piece) for piece in chunk.pieces()]
            chunk.state_keys = [segment.tensor for segment in found]
        self._batches = batch_chunks(self.chunks, self._sub_group)

    def cannot_step(self, dtype: torch.dtype, home: Tier) -> bool:
        """Whether masters of this dtype, at this home, cannot be stepped beside those that are: by a kernel that takes
        float32 in host memory."""
        native = isinstance(self._inner, CPUOptimizer) and type(self._inner) is not type(self.optimizer)
        return native and (dtype != torch.float32 or home is Tier.DEVICE)

    def state_entries(self, unit: Unit | None = None) -> Iterator[StateEntry]:
        """Whose optimizer states this rank has, of one unit or all: one for each piece that it steps."""
        for chunk in self.chunks if unit is None else self._masters.chunks_of(unit):
            for segment in self._of_chunk[id(chunk)]:
                piece = segment.piece
                shape = torch.Size([piece.numel])
                yield StateEntry(chunk, segment.tensor, piece.index, piece.start, piece.stop, shape)

    def rank_states(self) -> Iterator[RankState]:
        """Yield none: ranks keep equal states, or shards of them."""
        return iter(())

    def formats(self) -> dict[int, dict[str, StateFormat]]:
        """How states are kept where the rule says so: by id of a parameter, then by name."""
        return formats_of(self.optimizer, self._inner)

    def run(self, used: dict[int, list[bool]], divisor: float) -> Iterator[list[UpdateChunk]]:
        """Update batch after batch, under the hyper-parameters of this moment; yields each once its masters are new.

        Args:
            used: by unit and parameter; the unused are skipped.
            divisor: gradients are divided by it (loss scale over clip coefficient).
        """
        turn = OptimizerStepSession(self.optimizer, self._inner)
        turn.keep_options()
        group_of = self._groups()
        scaled = self._inner if isinstance(self._inner, CPUOptimizer) else self.optimizer
        self._scales = supports_grad_scale(scaled)  # of the groups as they are now
        return self._run(turn, used, divisor, group_of)

    def _run(
        self, turn: OptimizerStepSession, used: dict[int, list[bool]], divisor: float, group_of: dict[int, int]
    ) -> Iterator[list[UpdateChunk]]:
        for batch in self.state_offload.iterate_batches(self._batches):
            chosen: dict[int, list[ParameterSegment]] = defaultdict(list)
            widened: list[tuple[UpdateChunk, torch.Tensor]] = []
            for chunk in batch:
                self._masters.drop_lowered_params(chunk)
                if chunk.gradient is None:
                    continue
                gradient, values = self._gradient(chunk, chunk.gradient, divisor), chunk.values()
                if _widened(chunk):
                    values = values.to(chunk.state_dtype)
                    widened.append((chunk, values))
                skipped = False
                for segment in self._of_chunk[id(chunk)]:
                    group = group_of.get(id(segment.parameter))
                    if group is not None and used[chunk.unit.index][segment.piece.index]:
                        if chunk.tier is Tier.NVME or values is not chunk.master:
                            segment.point_to(values)
                        segment.take_gradient(gradient)
                        chosen[group].append(segment)
                    else:
                        skipped = True
                if not skipped and values is chunk.master:
                    self._lower(chunk)
            self._step(turn, chosen, divisor)
            for chunk, values in widened:
                chunk.values().copy_(values)
                for segment in self._of_chunk[id(chunk)]:
                    segment.detach_memory()
            yield batch
        turn.end()

    def _native(self) -> torch.optim.Optimizer | None:
        """The same rule in one pass over host memory, where all of it is updated there, and in float32."""
        held = [chunk for chunk in self.chunks if chunk.numel]
        if any(chunk.tier is Tier.DEVICE or chunk.state_dtype != torch.float32 for chunk in held):
            return None
        native = make_native_cpu_equivalent(self.optimizer)
        if native is not None:
            native.state, native.param_groups = defaultdict(dict), []
        return native

    def _lower(self, chunk: UpdateChunk) -> None:
        """Have the 16-bit copy of a chunk written in the same pass; every piece of it is updated now."""
        if not isinstance(self._inner, CPUOptimizer) or chunk.unit.dtype not in (torch.bfloat16, torch.float16):
            return
        chunk.lowered_params = self._masters.lowered_output(chunk)
        for segment in self._of_chunk[id(chunk)]:
            piece = segment.piece
            self._lowered[segment.tensor] = chunk.lowered_params.narrow(0, piece.offset, piece.numel)

    def _groups(self) -> dict[int, int]:
        """By parameter, the number of its group; read at every step, since groups may change."""
        return {id(p): n for n, group in enumerate(self.optimizer.param_groups) for p in group["params"]}

    def _gradient(self, chunk: UpdateChunk, gradient: torch.Tensor, divisor: float) -> torch.Tensor:
        if gradient.dtype != chunk.state_dtype:
            gradient = gradient.to(chunk.state_dtype)
        if divisor != 1.0 and not self._scales:
            gradient.div_(divisor)
        return gradient

    def _step(self, turn: OptimizerStepSession, chosen: dict[int, list[ParameterSegment]], divisor: float) -> None:
        inner = self._inner
        if self._scales and divisor != 1.0 and chosen:
            device = next(iter(chosen.values()))[0].tensor.device
            inner.grad_scale = torch.full((), divisor, dtype=torch.float32, device=device)  # type: ignore[attr-defined]
            inner.found_inf = torch.zeros((), dtype=torch.float32, device=device)  # type: ignore[attr-defined]
        if self._lowered:
            inner.low_precision_copies = self._lowered  # type: ignore[attr-defined]
        try:
            for part in self._parts(chosen):
                turn.step(part)
        finally:  # also where a step fails: the next one has a divisor and copies of its own, or none
            for name in ("grad_scale", "found_inf", "low_precision_copies"):
                inner.__dict__.pop(name, None)
            self._lowered = {}

    def _parts(self, chosen: dict[int, list[ParameterSegment]]) -> list[dict[int, list[nn.Parameter]]]:
        """What may be stepped in one call. Torch's fused SGD takes tensors with a momentum or ones without, not
        both."""
        tensors = {number: [segment.tensor for segment in segments] for number, segments in chosen.items()}
        if type(self._inner) is not torch.optim.SGD:
            return [tensors]
        parts: list[dict[int, list[nn.Parameter]]] = [{}, {}]
        for number, group in tensors.items():
            for tensor in group:
                parts[bool(self._inner.state.get(tensor))].setdefault(number, []).append(tensor)
        return [part for part in parts if part]

    def _shard_existing_state(self, chunk: UpdateChunk) -> None:
        """State that the user's optimizer brought along, cut to this rank's segments."""
        for segment in self._of_chunk[id(chunk)]:
            given = self.optimizer.state.get(segment.parameter)
            if not given:
                continue
            piece, home = segment.piece, segment.tensor.device
            shape = segment.chunk.unit.shapes[piece.index]
            for key, value in given.items():
                if isinstance(value, torch.Tensor) and value.shape == shape and key not in SCALAR_STATES:
                    value = value.detach().reshape(-1)[piece.start : piece.stop].to(home, copy=True)
                    value = value.to(state_dtype(self.optimizer, value.dtype, chunk))
                elif isinstance(value, torch.Tensor):
                    value = value.detach().clone()
                self._inner.state[segment.tensor][key] = value


def _widened(chunk: UpdateChunk) -> bool:
    """Whether the optimizer steps a wider copy of a chunk's master weights."""
    return chunk.dtype != chunk.state_dtype


def state_dtype(optimizer: torch.optim.Optimizer, dtype: torch.dtype, chunk: UpdateChunk) -> torch.dtype:
    """The dtype in which to keep a state of `dtype` and of its parameter's shape, which was made elsewhere.

    A rule makes states like the parameters it was given. Were these narrow, their masters are not, and a rule computes
    with both; so the state becomes as wide. Optimizers that choose the dtype of their states themselves keep it.
    """
    like_the_parameter = dtype == chunk.unit.dtype and dtype.itemsize < chunk.state_dtype.itemsize
    return chunk.state_dtype if like_the_parameter and not isinstance(optimizer, CPUOptimizer) else dtype


def formats_of(optimizer: torch.optim.Optimizer, inner: torch.optim.Optimizer) -> dict[int, dict[str, StateFormat]]:
    """How `inner`, which steps for `optimizer`, keeps states; empty for a rule that does not say."""
    if not isinstance(inner, CPUOptimizer):
        return {}
    kept = [(inner.state_formats(group), group["params"]) for group in optimizer.param_groups]
    return {id(p): formats for formats, parameters in kept for p in parameters}


def check_parameters(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """The optimizer's parameters are the model's.

    Raises:
        ModelError: one is not; says its group, place and shape.
    """
    own = {id(p) for p in model.parameters()}
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            if id(parameter) not in own:
                raise ModelError(
                    f"optimizer group {number}, parameter {place}, of shape {tuple(parameter.shape)}, is none of the "
                    "model's; build the optimizer from the parameters of the very model that is passed (after moving "
                    "or wrapping it); in mid-run, take what left the model out of the group"
                )
