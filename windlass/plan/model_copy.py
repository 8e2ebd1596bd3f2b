"""Copies of a model without its values, also of a model that an engine trains."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from windlass.base.errors import ModelError
from windlass.base.tensor_tree import iterate_tensors

_ENGINE = tuple(f"windlass.{name}." for name in ("zero", "engine", "observe", "verify", "compat"))
"""Packages that add hooks to a model's modules for the time of a training."""
_HOOKS = {  # dict of hooks in a module, and the dicts that mark some of them
    "_forward_pre_hooks": ("_forward_pre_hooks_with_kwargs",),
    "_forward_hooks": ("_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    "_backward_hooks": (),
    "_backward_pre_hooks": (),
}


def copy_without_values(model: nn.Module, empty: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    """Return a copy of `model` whose parameters, buffers and other tensors are those that `empty` returns for them.
    Shared parameters are shared in the copy.

    Raises:
        ModelError: an attribute of a module cannot be copied. The message names the module.
    """
    return _copied(model, _memo(model, empty))


def copy_of_trained_model(model: nn.Module, empty: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    """Return a copy as `copy_without_values` does, without hooks and compiled forwards that an engine has added.

    Raises:
        ModelError: an attribute of a module cannot be copied. The message names the module.
    """
    model = getattr(model, "_orig_mod", model)  # a module around the model, from torch.compile
    memo = _memo(model, empty)
    for module in model.modules():
        for name, marks in _HOOKS.items():
            for one in (name, *marks):
                memo[id(vars(module)[one])] = OrderedDict()  # the copy has these hooks later, without the engine's
    copied = _copied(model, memo)
    for module, made in zip(model.modules(), copied.modules(), strict=True):
        if hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable"):
            del vars(made)["forward"]  # it would call the original module
        for name, marks in _HOOKS.items():
            kept = {key: hook for key, hook in vars(module)[name].items() if not _is_of_engine(hook)}
            vars(made)[name].update(copy.deepcopy(kept, memo))
            for mark in marks:
                vars(made)[mark].update({key: True for key in vars(module)[mark] if key in kept})
    return copied


def _memo(model: nn.Module, empty: Callable[[torch.Tensor], torch.Tensor]) -> dict[int, Any]:
    """Return a memo of `copy.deepcopy` with an empty copy of each tensor."""
    memo: dict[int, Any] = {}
    others = iterate_tensors([list(vars(module).values()) for module in model.modules()])
    for tensor in [*model.parameters(), *model.buffers(), *others]:
        if id(tensor) not in memo:
            like = empty(tensor)
            is_parameter = isinstance(tensor, nn.Parameter)
            memo[id(tensor)] = nn.Parameter(like, requires_grad=tensor.requires_grad) if is_parameter else like
    for handle in _hook_handles(model):
        memo[id(handle)] = handle  # torch cannot copy the handle of a hook on a module that is gone
    return memo


def _hook_handles(model: nn.Module) -> Iterator[RemovableHandle]:
    """Yield the handles of hooks that modules keep, alone or in a list or dict."""
    for module in model.modules():
        for value in vars(module).values():
            several = (
                value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
            )
            yield from (one for one in several if isinstance(one, RemovableHandle))


def _copied(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:  # attributes raise their own types
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ModelError(
            f"{type(model).__name__} cannot be copied without its values, because of an attribute of "
            f"{_copied_module(error, model)}: {first}"
        ) from error


def _copied_module(error: BaseException, model: nn.Module) -> str:
    """Return the name and class of the innermost module that was being copied when `error` was raised."""
    names = {id(module): name for name, module in model.named_modules()}
    found, trace = type(model).__name__, error.__traceback__
    while trace is not None:
        for value in list(trace.tb_frame.f_locals.values()):
            if isinstance(value, nn.Module) and id(value) in names:
                found = f"module {names[id(value)] or 'model'!r} ({type(value).__name__})"
        trace = trace.tb_next
    return found


def _is_of_engine(hook: Any) -> bool:
    """Return True if an engine has added this hook."""
    function = getattr(hook, "func", hook)  # a partial has its function there
    return str(getattr(function, "__module__", "")).startswith(_ENGINE)
