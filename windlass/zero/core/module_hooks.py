"""Hooks that call the runtime: on modules (around blocks), on the autograd graph between blocks, and on gradients."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from windlass.base.functional_transforms import in_transform, outside_transforms
from windlass.base.tensor_tree import iterate_tensors, replace_tensors
from windlass.zero.core.gradient_reducer import GradientReducer
from windlass.zero.core.unit_plan import Block
from windlass.zero.core.unshard_runtime import BlockCall, UnshardRuntime


class _Boundary(torch.autograd.Function):
    """Identity on leaf inputs of a block. A hook on the leaf itself would fire before the block's backward is done."""

    @staticmethod
    def forward(ctx: Any, after: Callable[[], None], *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.after = after
        # Views are new tensors with this node as their `grad_fn`, unlike the leaves themselves.
        return tuple(x.view_as(x) for x in inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.after()
        return (None, *gradients)


def register_model_hooks(model: nn.Module, runtime: UnshardRuntime) -> list[RemovableHandle]:
    """Call the runtime when `model` runs forward and when a backward enters it.

    The outermost backward must be registered before any nested one (reentrant checkpointing). Otherwise the runtime
    would take the end of the first nested backward for the end of the outermost one.
    """

    def begin(module: nn.Module, args: Any) -> None:
        with outside_transforms():
            runtime.begin_model_forward()

    def after(module: nn.Module, args: Any, output: Any) -> None:
        if in_transform():  # torch.func transforms the full model, e.g. for per-sample gradients
            with outside_transforms():
                runtime.end_model_forward()
            return
        runtime.end_model_forward()
        if torch.is_grad_enabled():
            for tensor in iterate_tensors(output):
                if tensor.requires_grad and tensor.grad_fn is not None:
                    tensor.register_hook(lambda _: runtime.register_backward())

    before = torch.compiler.disable(begin)
    # Prepend the hook, so that the phase begins before hooks of the script touch parameters.
    return [
        model.register_forward_pre_hook(before, prepend=True),
        # `always_call`, so that an exception in the forward also closes the phase.
        model.register_forward_hook(torch.compiler.disable(after), always_call=True),
    ]


class ObservedModules:
    """Modules inside one block whose outputs a forward hook of the script receives, and may use in a loss.

    The backward can begin at such an output, so a gradient that reaches the output must unshard the block's units. The
    hooks of this class are registered on a module once it has a forward hook of the script.

    Args:
        block: The block.
        modules: Modules of the block that belong to no other block inside it.
    """

    def __init__(self, block: Block, modules: Sequence[nn.Module], runtime: UnshardRuntime) -> None:
        self._block, self._modules, self._runtime = block, modules, runtime
        self._handles: dict[int, RemovableHandle] = {}

    def find(self) -> None:
        """Observe the modules that have a forward hook of the script now, and no others."""
        for module in self._modules:
            if not module._forward_hooks:
                continue
            own = self._handles.get(id(module))
            if own is None:
                self._handles[id(module)] = module.register_forward_hook(torch.compiler.disable(self._after))
            elif len(module._forward_hooks) == 1:
                self._handles.pop(id(module)).remove()

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        call = self._runtime.current_call(self._block)
        if call is None or in_transform() or not torch.is_grad_enabled():
            return
        for tensor in iterate_tensors(output):
            if tensor.requires_grad and tensor.grad_fn is not None:
                tensor.register_hook(lambda _: self._runtime.pre_backward(call))

    def remove(self) -> None:
        """Remove the hooks of this class."""
        for handle in self._handles.values():
            handle.remove()


def register_block_hooks(
    block: Block, runtime: UnshardRuntime, inner: Sequence[nn.Module]
) -> list[RemovableHandle | ObservedModules]:
    """Unshard the units of `block` before its forward and its backward, and reshard them afterwards.

    In the backward of the model, torch does not call hooks that were registered on tensors inside a transform of
    torch.func. So the units of a block that runs inside a transform stay unsharded until the step.

    Args:
        inner: Modules of the block that belong to no other block inside it.
    """
    observed = ObservedModules(block, inner, runtime)

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        if in_transform():
            with outside_transforms():
                runtime.pre_forward(block)
            return None
        call = runtime.pre_forward(block)
        if torch.is_grad_enabled():
            observed.find()
            call.inputs = list(iterate_tensors((args, kwargs)))
        return _hook_inputs(args, kwargs, runtime, call) if torch.is_grad_enabled() else None

    def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if in_transform():
            with outside_transforms():
                if (call := runtime.post_forward(block)) is not None:
                    runtime.keep_until_step(call)
            return
        call = runtime.post_forward(block, output)
        if call is not None and call.leaves:
            old = {id(through): leaf for through, leaf in call.leaves}
            # Put the caller's tensors back, also into the original containers (`call.given`): hooks of the script may
            # have copied them.
            args, kwargs, _ = replace_tensors((args, kwargs, call.given), old, in_place=True)
            call.leaves, call.given = [], None
        if call is not None and torch.is_grad_enabled():
            _hook_outputs(output, (args, kwargs), block, runtime, call)

    # `torch.compile` of the block, or of a module around it, would trace these hooks too.
    before, after = torch.compiler.disable(before), torch.compiler.disable(after)
    return [
        block.module.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
        block.module.register_forward_hook(after, with_kwargs=True, always_call=True),
        observed,
    ]


def _hook_inputs(
    args: tuple[Any, ...], kwargs: dict[str, Any], runtime: UnshardRuntime, call: BlockCall
) -> tuple[Any, Any] | None:
    """Call the runtime at the end of the block's backward, through hooks on the block's inputs.

    Only leaf tensors are replaced, because the block may change other inputs in place, and torch forbids in-place
    changes of the outputs of `_Boundary`. Leaves that require gradients cannot be changed in place anyway. The caller's
    lists and dicts have the leaves again once the block returns.

    Return the new `args` and `kwargs`; None if there is no leaf to replace.
    """
    leaves: list[torch.Tensor] = []
    exit_backward = partial(runtime.post_backward, call)
    for tensor in iterate_tensors((args, kwargs)):
        if not tensor.requires_grad or isinstance(tensor, nn.Parameter):
            continue
        if tensor.grad_fn is None:
            leaves.append(tensor)
        else:
            tensor.register_hook(lambda _: exit_backward())
    if not leaves:
        return None
    passed = _Boundary.apply(exit_backward, *leaves)
    new = {id(old): through for old, through in zip(leaves, passed, strict=True)}
    call.leaves, call.given = list(zip(passed, leaves, strict=True)), (args, kwargs)
    # Replace in place, because the block may add to the caller's lists and dicts.
    return replace_tensors(args, new, in_place=True), replace_tensors(kwargs, new, in_place=True)


def _hook_outputs(output: Any, inputs: Any, block: Block, runtime: UnshardRuntime, call: BlockCall) -> None:
    """Unshard again in the backward, when a gradient reaches a tensor that the block made.

    Such tensors are the block's outputs, tensors that it put into a container from its inputs, and tensors that it left
    on its modules (e.g. a router loss). If there is none although an input or a parameter requires a gradient, the
    graph may continue where no search finds it (an iterator, a closure, a list of losses that the script keeps). The
    start of the backward cannot be detected then, so the units stay unsharded until the step. If only some tensors are
    found, the others are not detected: autograd raises if a backward reaches one of them first, see
    [Note: version of freed values].
    """
    enter_backward = partial(runtime.pre_backward, call)
    given = {id(tensor) for tensor in call.inputs}
    made = [tensor for tensor in iterate_tensors(output) if tensor.requires_grad and tensor.grad_fn is not None]
    # Tensors that the block added to an input container were not among the inputs at its start.
    made += [t for t in iterate_tensors(inputs) if t.requires_grad and t.grad_fn is not None and id(t) not in given]
    for module in block.module.modules():
        for name, left in vars(module).items():
            if isinstance(left, torch.Tensor) or (isinstance(left, list | dict) and name not in _OF_MODULES):
                made += [t for t in iterate_tensors(left) if t.requires_grad and t.grad_fn is not None]
    for tensor in made:
        tensor.register_hook(lambda _: enter_backward())
    # torch calls this hook after an error too, e.g. at the early end of a recomputation; the graph is dropped then.
    failed = output is None and sys.exception() is not None
    if not made and not failed and any(tensor.requires_grad for tensor in (*call.inputs, *block.parameters)):
        runtime.keep_until_step(call)
    # Do not keep activations alive until the backward.
    call.inputs = []


_OF_MODULES = frozenset(vars(nn.Module()))  # attributes that torch sets on every module


def register_gradient_hooks(
    places: list[tuple[int, int, nn.Parameter]], runtime: UnshardRuntime, reducer: GradientReducer
) -> list[RemovableHandle]:
    """Pass each gradient to the reducer once it has been added to the parameter's `.grad`.

    Args:
        places: For each parameter, the number of its trainable unit, its index in the unit, and the parameter itself.
    """
    # torch holds these hooks in C++, invisible to Python's garbage collector. A strong reference to the model in a hook
    # would keep the model and its memory alive for ever.
    weak_runtime, weak_reducer = ref(runtime), ref(reducer)

    def after_accumulate(number: int, index: int, parameter: nn.Parameter) -> None:
        runtime, reducer = weak_runtime(), weak_reducer()
        if runtime is not None and reducer is not None:
            runtime.register_backward()
            if reducer.accumulate_grad(number, index):
                runtime.scheduler.gradient_complete(number)

    return [
        parameter.register_post_accumulate_grad_hook(partial(after_accumulate, number, index))
        for number, index, parameter in places
    ]
