"""Trace of one forward and backward without memory: live bytes at each moment, and the order of blocks.

[Note: traced memory] The model runs on tensors that have shapes and no memory (`FakeTensorMode`, so that a CPU's
kernels are chosen as in a run: SDPA saves the tensors that its fused kernel saves). Every storage that an operator
creates counts from its creation until it is freed: tensors that autograd saves, intermediate gradients, temporary
tensors of losses. Memory that a kernel allocates internally does not count. A gradient is removed from `.grad` as soon
as it is complete, as in a run with `contiguous_gradients`.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from windlass.base.errors import ModelError
from windlass.base.tensor_tree import iterate_tensors
from windlass.comm.mesh_axis import MeshAxis
from windlass.parallel.activation_store import ActivationTier
from windlass.parallel.pipeline.apply_pipeline_parallel import get_pipeline_stages
from windlass.parallel.pipeline.pipeline_action import RankActions
from windlass.parallel.pipeline.pipeline_stages import PipelineStages
from windlass.parallel.pipeline.planned_transfers import PlannedTransfers
from windlass.parallel.pipeline.schedule_executor import ExecutorCallbacks, ScheduleFailed, execute_schedule
from windlass.parallel.pipeline.staged_model import StagedModel
from windlass.plan.heap_model import BLOCK_ENDED
from windlass.plan.model_copy import copy_without_values
from windlass.plan.offloaded_activations import PlannedActivationStore

_BELOW = {getattr(getattr(torch.ops.aten, name), kind) for name in ("lt", "le") for kind in ("Scalar", "Tensor")}
_ALLOCATION = 64  # bytes: every block of memory is a multiple of this, in torch's CPU allocator

FORWARD, BACKWARD = "forward", "backward"


@dataclass(frozen=True)
class MemoryEvent:
    """Event of a traced step.

    Attributes:
        phase: `forward` or `backward`.
        kind: `begin` or `end` of a block's part of the phase, `gradient` of a parameter, or `done`: end of the phase.
        name: Name of the block's module, or of the parameter; empty for `done`.
        peak: Largest number of live bytes since the previous event.
        live: Live bytes at the event.
    """

    phase: str
    kind: str
    name: str
    peak: int
    live: int


@dataclass
class ActivationTrace:
    """Memory of one forward and backward of a micro-batch, in bytes, without parameters and their gradient buffers.

    Attributes:
        events: All events in their order. The last event of each phase has the kind `done`; a pipeline has one such
            event for each forward and backward of its schedule.
        saved: Live bytes at the end of the forward: tensors that autograd saved, the batch and the output. For a
            pipeline's schedule, the largest number at the end of a forward.
        saved_by_autograd: The part of `saved` that autograd saved, without parameters. For a pipeline, the sum over all
            forwards.
        inputs: Bytes of the batch; for a pipeline, of all batches of its schedule.
        stored: Bytes of inputs of checkpointed layers that are in host memory or in files, at most.
        tier: Tier of these inputs.
        storages: Log of created and freed storages and of the ends of blocks, in the format of `HeapModel.run`.
        assumes_loss: The forward returns no loss, and the mean of its first output stands for it.
    """

    events: list[MemoryEvent] = field(default_factory=list)
    saved: int = 0
    saved_by_autograd: int = 0
    inputs: int = 0
    stored: int = 0
    tier: ActivationTier = "device"
    storages: list[tuple[int, int]] = field(default_factory=list)
    assumes_loss: bool = False

    def peak(self, phase: str) -> int:
        """Return the largest number of live bytes of a phase."""
        return max((event.peak for event in self.events if event.phase == phase), default=0)


@dataclass(frozen=True)
class ForwardArguments:
    """Arguments of a forward."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class _LiveStorages(TorchDispatchMode):
    """Dispatch mode that counts the bytes of all storages that operators create, until they are freed.

    Args:
        log: List that receives (number, bytes) of each created storage, and (number, 0) when the storage is freed.
    """

    def __init__(self, log: list[tuple[int, int]]) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: dict[int, Any] = {}
        self._log, self._numbers = log, count(1)
        self._draws, self._unmet = WeakTensorKeyDictionary(), WeakTensorKeyDictionary()

    def ignore(self, tensor: torch.Tensor) -> None:
        """Do not count the memory of `tensor`."""
        self._follow(tensor.untyped_storage(), 0)

    def take_peak(self) -> int:
        """Return the largest number of live bytes since the last call."""
        peak, self.peak = max(self.peak, self.live), self.live
        return peak

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            if args[0] in self._unmet:
                return False
            # Tensors have no values, so `item()` returns True for a bool (transformers then recognizes a plain batch),
            # 1.0 for a float, and 0.0 for an integer.
            return args[0].dtype == torch.bool or args[0].new_zeros(()).dtype.is_floating_point * 1.0
        if func is torch.ops.aten._grouped_mm.default:
            result = _grouped_product(*args, **(kwargs or {}))
        else:
            result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.rand.default and result.numel() == 1:
            self._draws[result] = None
        elif func in _BELOW and args[0] in self._draws:
            # `item()` returns False for this comparison, so that LayerDrop, which skips a layer if a draw is below its
            # probability, skips none.
            self._unmet[result] = None
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
                storage = leaf.untyped_storage()
                if storage._cdata not in self._known:
                    self._follow(storage, -(-storage.nbytes() // _ALLOCATION) * _ALLOCATION)
        return result

    def _follow(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        key = storage._cdata
        self.live += nbytes
        self.peak = max(self.peak, self.live)
        number = next(self._numbers)
        if nbytes:
            self._log.append((number, nbytes))

        def freed(_: Any) -> None:
            self._known.pop(key, None)
            self.live -= nbytes
            if nbytes:
                self._log.append((number, 0))

        self._known[key] = weakref.ref(storage, freed)


def _grouped_product(
    first: torch.Tensor, second: torch.Tensor, offs: torch.Tensor | None = None, bias: Any = None, out_dtype: Any = None
) -> torch.Tensor:
    """Return an empty output of `torch._grouped_mm`. Torch computes its shape for 16-bit factors only.

    A factor with two dimensions has its groups side by side, as spans of its rows or columns with their ends in `offs`.
    """
    rows, columns = first.shape[-2], second.shape[-1]
    groups = first.shape[0] if first.dim() == second.dim() == 3 else None
    if first.dim() == second.dim() == 2 and offs is not None:  # groups: spans of the inner dimension
        groups = offs.shape[0]
    shape = (rows, columns) if groups is None else (groups, rows, columns)
    return first.new_empty(shape, dtype=out_dtype or first.dtype)


def copy_without_memory(model: nn.Module, mode: FakeTensorMode, dtype: torch.dtype | None = None) -> nn.Module:
    """Return a copy of `model` whose parameters, buffers and tensor attributes have shapes and no memory.

    Args:
        mode: `FakeTensorMode` of the copies.
        dtype: Dtype of floating-point parameters; None: each keeps its own.
    """

    def empty(tensor: torch.Tensor) -> torch.Tensor:
        casts = isinstance(tensor, nn.Parameter) and dtype is not None and tensor.is_floating_point()
        with mode:
            return torch.empty(tensor.shape, dtype=dtype if casts else tensor.dtype, device="cpu")

    return copy_without_values(model, empty)


def trace_step(
    model: nn.Module,
    make_batch: Callable[[], Any],
    blocks: list[str],
    *,
    param_dtype: torch.dtype | None = None,
    autocast_dtype: torch.dtype | None = None,
    trains: bool = True,
    activation_tier: ActivationTier = "device",
) -> ActivationTrace:
    """Trace a forward and backward of `model`, whose parameters may be on the meta device.

    Args:
        make_batch: Function that returns the forward's keyword arguments (a dict), its one positional argument, or
            `ForwardArguments`. Only shapes matter.
        blocks: Names of the modules whose begin and end are events.
        param_dtype: Dtype of floating-point parameters; None: each keeps its own.
        autocast_dtype: Dtype of `torch.autocast`; None: no autocast.
        trains: False: trace a forward without gradients, and no backward.
        activation_tier: Tier in which checkpointed layers store their inputs.

    Raises:
        ModelError: shapes in the forward or backward depend on values, as with experts that are called one by one. The
            message names the module.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)  # the forward may use constant tensors from outside the mode
    meta_model = copy_without_memory(model, mode, param_dtype)
    recorder = _TraceRecorder(meta_model, set(blocks), activation_tier)
    try:
        with _quiet_shape_errors(), mode, _plain_masks(), recorder.storages:
            batch = _arguments(make_batch())
            given = iterate_tensors((batch.args, batch.kwargs))
            recorder.trace.inputs = sum(t.numel() * t.element_size() for t in given)
            amp = torch.autocast("cpu", dtype=autocast_dtype) if autocast_dtype else contextlib.nullcontext()
            with recorder.hooks(), torch.set_grad_enabled(trains):
                with amp, recorder.saved_tensors():
                    output = meta_model(*batch.args, **batch.kwargs)
                    loss, recorder.trace.assumes_loss = _loss_of(output)
                recorder.end_forward()
                if trains:
                    loss.backward()
                recorder.end_backward()
    except ModelError:
        raise
    except Exception as error:
        raise _untraceable(model, meta_model, error) from error
    return recorder.trace


@dataclass(frozen=True)
class PipelineStep:
    """Part of a pipeline's step on one rank.

    Attributes:
        actions: Actions of the rank, with transfers.
        axis: Mesh axis pp of the planned world.
        micro_batches: Number of micro-batches of the actions.
        hidden: Shape and dtype of the tensor that is sent between stages.
    """

    actions: RankActions
    axis: MeshAxis
    micro_batches: int
    hidden: tuple[tuple[int, ...], torch.dtype]


def trace_pipeline(
    model: nn.Module,
    make_batch: Callable[[], Any],
    blocks: list[str],
    step: PipelineStep,
    *,
    param_dtype: torch.dtype | None = None,
    autocast_dtype: torch.dtype | None = None,
    activation_tier: ActivationTier = "device",
) -> ActivationTrace:
    """Trace the forwards and backwards of one pipeline rank, in the order of its schedule.

    Args:
        model: A rank's stages of a model, see `apply_pipeline_parallel`.
        make_batch, blocks, param_dtype, autocast_dtype, activation_tier: See `trace_step`.

    Raises:
        ModelError: shapes in a forward or backward depend on values. The message names the module.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)  # the forward may use constant tensors from outside the mode
    meta_model = copy_without_memory(model, mode, param_dtype)
    stages = get_pipeline_stages(meta_model)
    assert stages is not None, "the model was not split into stages"
    recorder = _TraceRecorder(meta_model, set(blocks), activation_tier)

    def call_module(*args: Any, **kwargs: Any) -> Any:
        amp = torch.autocast("cpu", dtype=autocast_dtype) if autocast_dtype else contextlib.nullcontext()
        with recorder.of_phase(FORWARD), amp, recorder.saved_tensors():
            return meta_model(*args, **kwargs)

    def run_backward(run: Callable[[], None], is_last: bool) -> None:
        with recorder.of_phase(BACKWARD):
            run()

    try:
        with _quiet_shape_errors(), mode, _plain_masks(), recorder.storages, recorder.hooks():
            shape, dtype = step.hidden
            passed = torch.empty(shape, dtype=dtype, requires_grad=True)
            transfers = PlannedTransfers(step.axis, torch.device("cpu"), passed)
            del passed
            batches = [_stage_batch(stages, make_batch()) for _ in range(step.micro_batches)]
            recorder.trace.inputs = sum(t.numel() * t.element_size() for t in iterate_tensors(batches))
            callbacks = ExecutorCallbacks(call_module=call_module, run_backward=run_backward)
            execute_schedule(step.actions, stages, transfers, batches, callbacks)
    except Exception as error:
        if isinstance(error, ScheduleFailed) and error.error is not None:
            error = error.error
        if isinstance(error, ModelError):
            raise error from None
        raise _untraceable(model, meta_model, error) from error
    return recorder.trace


def _stage_batch(stages: PipelineStages, made: Any) -> Any:
    """Return a batch in a form that the stages of a pipeline take."""
    if not isinstance(made, ForwardArguments):
        return made
    if made.kwargs and isinstance(stages, StagedModel):
        return {**stages.named_arguments(made.args), **made.kwargs}
    return made.kwargs or made.args


def _untraceable(model: nn.Module, meta_model: nn.Module, error: Exception) -> ModelError:
    first = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return ModelError(
        f"the memory of {type(model).__name__} cannot be traced on tensors without values: "
        f"{_innermost_module(error, meta_model)}: {first}; give the bytes of activations of a micro-batch with "
        "--activations"
    )


class _TraceRecorder:
    def __init__(self, model: nn.Module, blocks: set[str], tier: ActivationTier) -> None:
        self.trace = ActivationTrace(tier=tier)
        self._store = PlannedActivationStore(tier)
        if tier != "device":
            self._store.install(model)
        self.storages = _LiveStorages(self.trace.storages)
        self._model, self._blocks, self._phase = model, blocks, FORWARD
        self._own = {p.untyped_storage()._cdata for p in [*model.parameters(), *model.buffers()]}
        for tensor in [*model.parameters(), *model.buffers()]:
            self.storages.ignore(tensor)
        self._saved: dict[int, int] = {}

    def _record(self, kind: str, name: str) -> None:
        storages = self.storages
        if kind == "end":
            self.trace.storages.append(BLOCK_ENDED)
        self.trace.stored = self._store.peak
        self.trace.events.append(MemoryEvent(self._phase, kind, name, storages.take_peak(), storages.live))

    @contextlib.contextmanager
    def hooks(self) -> Iterator[None]:
        """Context in which blocks and gradients are recorded."""
        handles: list[Any] = []
        for name, module in self._model.named_modules():
            if name in self._blocks:
                handles.append(module.register_forward_pre_hook(self._before_hook(name), with_kwargs=True))
                handles.append(module.register_forward_hook(self._after_hook(name)))
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad:
                handles.append(parameter.register_post_accumulate_grad_hook(self._gradient_hook(name)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _before_hook(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._record("begin", name)
            if self._phase == FORWARD:
                for tensor in iterate_tensors((args, kwargs)):
                    if tensor.requires_grad:  # the input's gradient is complete at the end of the block's backward
                        tensor.register_hook(lambda _: self._record("end", name))

        return hook

    def _after_hook(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if self._phase == BACKWARD:
                return  # end of a recomputation: the backward of the same block follows at once
            self._record("end", name)
            for tensor in iterate_tensors(output):
                if tensor.requires_grad:
                    tensor.register_hook(lambda _: self._record("begin", name))

        return hook

    def _gradient_hook(self, name: str) -> Callable[[torch.Tensor], None]:
        def hook(parameter: torch.Tensor) -> None:
            self._record("gradient", name)
            parameter.grad = None

        return hook

    def saved_tensors(self) -> contextlib.AbstractContextManager[Any]:
        """Context in which the bytes of saved tensors are counted."""

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._own:
                self._saved[storage._cdata] = storage.nbytes()
            return tensor

        return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)

    @contextlib.contextmanager
    def of_phase(self, phase: str) -> Iterator[None]:
        """Context in which a forward or backward of a pipeline's schedule runs."""
        self._phase = phase
        yield
        self._record("done", "")
        if phase == FORWARD:
            self.trace.saved = max(self.trace.saved, self.storages.live)
            self.trace.saved_by_autograd = sum(self._saved.values())

    def end_forward(self) -> None:
        """Record the end of the forward."""
        self._record("done", "")
        self.trace.saved, self.trace.saved_by_autograd = self.storages.live, sum(self._saved.values())
        self._phase = BACKWARD

    def end_backward(self) -> None:
        """Record the end of the backward."""
        self._record("done", "")


def _arguments(batch: Any) -> ForwardArguments:
    if isinstance(batch, ForwardArguments):
        return batch
    return ForwardArguments((), batch) if isinstance(batch, dict) else ForwardArguments((batch,), {})


def _loss_of(output: Any) -> tuple[torch.Tensor, bool]:
    """Return the loss that a forward has returned and False, or the mean of its first output and True."""
    loss = getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss, False
    first = next(t for t in iterate_tensors(output) if t.is_floating_point())
    return first.float().mean(), first.numel() > 1


@contextlib.contextmanager
def _plain_masks() -> Iterator[None]:
    """Let transformers choose the mask of a plain batch, as in a run. Data pointers read as 0, without a warning.

    In a run transformers detects from the values of the positions whether documents are packed into one sequence.
    For tensors without values it would build a mask `[batch, 1, length, length]` in any case.
    """
    try:
        from transformers import masking_utils
    except ImportError:
        yield
        return
    with contextlib.ExitStack() as stack:
        # transformers 4.57, which has no `is_tracing`, builds the full mask in a run too.
        if hasattr(masking_utils, "is_tracing"):
            stack.enter_context(mock.patch.object(masking_utils, "is_tracing", lambda tensor=None: False))
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        yield


@contextlib.contextmanager
def _quiet_shape_errors() -> Iterator[None]:
    """Keep torch from logging the traceback of an operation that fails because its tensors have no values: `ModelError`
    reports it."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(before)


def _innermost_module(error: BaseException, model: nn.Module) -> str:
    """Return the name and class of the innermost module whose forward raised `error`."""
    names = {id(module): name for name, module in model.named_modules()}
    found, trace = type(model).__name__, error.__traceback__
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and id(owner) in names:
            found = f"module {names[id(owner)] or 'model'!r} ({type(owner).__name__})"
        trace = trace.tb_next
    return found
