"""Counter of the floating-point operations of a model by module, in forward, backward and recomputation.

[Note: owner of an operation] A dispatch mode counts every operation below autograd, and changes none. An
operation of the forward belongs to the innermost module that runs. An operation of the backward belongs to the module
that ran when its autograd node was created: nodes are numbered in the order of their creation in a thread, and the
counter keeps the number at each start and end of a module. An operation of the backward counts as recomputed if a
module began in a backward and still runs, or if gradients are enabled: checkpointed functions enable them, gradient
formulas do not. With `create_graph=True` gradient formulas enable gradients too; then only the operations of a module
that began in a backward count as recomputed.
"""

from __future__ import annotations

import sys
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from windlass.base.backward_callbacks import current_backward_id
from windlass.base.compute_device import synchronize
from windlass.base.native_products import counting_native_products
from windlass.observe.flop_formulas import OperationFlops, count_operation, has_formula, may_hide_products


@dataclass
class ModuleFlops:
    """FLOPs of one module without its children, and seconds of its forward calls with its children."""

    name: str
    forward: int = 0
    backward: int = 0
    recomputed: int = 0
    seconds: float = 0.0
    calls: int = 0


@dataclass(frozen=True)
class _RunningModule:
    """Module whose forward runs since `began`; `in_backward`: a backward had started it, to recompute activations."""

    module: nn.Module
    counts: ModuleFlops
    began: float
    in_backward: bool


@dataclass
class _ThreadTrace:
    """Modules that run in one thread, and the numbers of autograd nodes at which the innermost one changed."""

    outside: ModuleFlops
    running: list[_RunningModule] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    owners: list[ModuleFlops] = field(default_factory=list)

    def innermost(self) -> ModuleFlops:
        return self.running[-1].counts if self.running else self.outside

    @property
    def is_recomputing(self) -> bool:
        return bool(self.running) and self.running[-1].in_backward

    def mark_change(self) -> None:
        self.numbers.append(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]
        self.owners.append(self.innermost())

    def owner_of(self, node: Any) -> ModuleFlops:
        position = bisect_right(self.numbers, node._sequence_nr()) - 1 if node is not None else -1
        return self.owners[position] if position >= 0 else self.outside


class FlopCounter(TorchDispatchMode):
    """Dispatch mode that counts the operations of `model` inside `counting`; `attach` adds hooks to the modules.

    Losses, gradients and random numbers do not change. Compiled parts run uncompiled inside `counting`, since a
    compiled kernel hides its operations.

    Args:
        device: device of the model, which is synchronized at the start and end of every module.
        ignored: types of modules whose operations are not counted.

    Attributes:
        modules: counts by the name of each module; "" is the model.
        outside: counts of operations outside of all modules, such as a loss function.
        uncounted: names of executed operations of other libraries for which there is no formula.
    """

    supports_higher_order_operators = True

    def __init__(self, model: nn.Module, device: torch.device, ignored: Collection[type[nn.Module]] = ()) -> None:
        super().__init__()
        self._device = device
        self._ignored = tuple(ignored)
        self.modules = {name: ModuleFlops(name) for name, _ in model.named_modules()}
        self.outside = ModuleFlops("outside of modules")
        self.uncounted: set[str] = set()
        self._named = list(model.named_modules())
        self._dropped = ModuleFlops("ignored")
        self._traces: dict[int, _ThreadTrace] = {}
        self._forward_thread = threading.get_ident()
        self._outer_backward: int | None = None
        self._create_graph: list[bool] = []  # argument of each backward in progress, the innermost last
        self._own_seconds = 0.0
        self._native_depth = 0  # number of native products in progress; torch operations inside are not counted
        self._handles: list[Any] = []

    def attach(self) -> None:
        """Add the hooks that record which modules run."""
        self._forward_thread = threading.get_ident()
        for name, module in self._named:
            counts = self._dropped if isinstance(module, self._ignored) else self.modules[name]
            self._handles += [
                module.register_forward_pre_hook(self._begin_hook(counts), prepend=True),
                module.register_forward_hook(self._end_module, always_call=True),
            ]

    def detach(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count a forward or a backward inside the context."""
        self._outer_backward = None
        with _uncompiled(), self._noting_create_graph(), counting_native_products(self._native_product), self:
            yield

    @contextmanager
    def _noting_create_graph(self) -> Iterator[None]:
        run_backward = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

        def noting(*given: Any, **options: Any) -> Any:
            self._create_graph.append(bool(given[3]))  # the argument `create_graph`
            try:
                return run_backward(*given, **options)
            finally:
                self._create_graph.pop()

        torch.autograd._engine_run_backward = noting  # type: ignore[attr-defined]
        try:
            yield
        finally:
            torch.autograd._engine_run_backward = run_backward  # type: ignore[attr-defined]

    @contextmanager
    def _native_product(self, flops: int) -> Iterator[None]:
        self._add(OperationFlops(flops))
        self._native_depth += 1
        try:
            yield
        finally:
            self._native_depth -= 1

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        began = time.perf_counter()
        kwargs = kwargs or {}
        operation = getattr(func, "_overloadpacket", func)
        if torch.is_inference_mode_enabled() and hasattr(func, "decompose") and not has_formula(operation):
            with self:  # in inference mode, composite operations arrive undecomposed: count their parts
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        called = time.perf_counter()
        output = func(*args, **kwargs)
        returned = time.perf_counter()
        self._record(operation, args, kwargs, output)
        if self._device.type == "cpu":  # elsewhere counting overlaps with the device's work, and delays nothing
            self._own_seconds += called - began + time.perf_counter() - returned
        return output

    def _record(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if self._native_depth:
            return
        found = count_operation(operation, args, kwargs, output)
        if found is not None:
            self._add(found)
        elif may_hide_products(operation):
            self.uncounted.add(str(operation))

    def _add(self, found: OperationFlops) -> None:
        trace, backward = self._trace(), current_backward_id()
        if backward < 0:
            trace.innermost().forward += found.flops
            return
        if trace.is_recomputing:
            owner, again = trace.innermost(), True
        else:
            node = torch._C._current_autograd_node()
            owner = self._nodes_of(trace, backward).owner_of(node)
            creates_graph = bool(self._create_graph) and self._create_graph[-1]
            again = torch.is_grad_enabled() and not creates_graph
        owner.recomputed += found.recomputed + (found.flops if again else 0)
        owner.backward += 0 if again else found.flops

    def _nodes_of(self, current: _ThreadTrace, backward: int) -> _ThreadTrace:
        """Return the trace of the thread that created a backward's nodes: this thread, if the backward is nested."""
        if self._outer_backward is None:
            self._outer_backward = backward
        if backward == self._outer_backward:
            return self._traces.get(self._forward_thread, current)
        return current

    def _trace(self) -> _ThreadTrace:
        thread = threading.get_ident()
        if thread not in self._traces:
            self._traces[thread] = _ThreadTrace(self.outside)
        return self._traces[thread]

    def _now(self) -> float:
        synchronize(self._device)
        return time.perf_counter() - self._own_seconds

    def _begin_hook(self, counts: ModuleFlops) -> Callable[[nn.Module, Any], None]:
        def begin(module: nn.Module, args: Any) -> None:
            trace = self._trace()
            ignored = trace.running and trace.innermost() is self._dropped
            in_backward = trace.is_recomputing or current_backward_id() >= 0
            trace.running.append(_RunningModule(module, self._dropped if ignored else counts, self._now(), in_backward))
            trace.mark_change()

        return begin

    def _end_module(self, module: nn.Module, args: Any, output: Any) -> None:
        trace = self._trace()
        while trace.running:
            ended = trace.running.pop()
            if ended.module is module:
                if current_backward_id() < 0:
                    counts = ended.counts
                    counts.seconds, counts.calls = counts.seconds + self._now() - ended.began, counts.calls + 1
                break
        trace.mark_change()


@contextmanager
def _uncompiled() -> Iterator[None]:
    if "torch._dynamo" not in sys.modules:  # nothing was compiled, and the import takes seconds
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield
