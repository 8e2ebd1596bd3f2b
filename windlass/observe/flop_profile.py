"""FLOPs, parameters and time of a model as a tree of its modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from windlass.observe.flop_counter import FlopCounter, ModuleFlops


@dataclass
class ModuleProfile:
    """Totals of one module with its children, for one micro-batch on this rank.

    Attributes:
        name: dotted name in the model; "" is the model.
        parameters: elements of this rank's parameters, each counted once, in full where ZeRO shards them.
        forward, backward, recomputed: FLOPs; recomputed ones are not in the other two.
        seconds: time of the forward.
        calls: forward calls; 0 for containers.
    """

    name: str
    class_name: str
    parameters: int = 0
    forward: int = 0
    backward: int = 0
    recomputed: int = 0
    seconds: float = 0.0
    calls: int = 0
    children: dict[str, ModuleProfile] = field(default_factory=dict)
    extra: str = ""

    @property
    def macs(self) -> int:
        """Multiply-accumulate operations of the forward."""
        return self.forward // 2

    def walk(self, depth: int = 0) -> Iterator[tuple[int, ModuleProfile]]:
        """Yield this module and all below it, with their depths."""
        yield depth, self
        for child in self.children.values():
            yield from child.walk(depth + 1)


@dataclass(frozen=True)
class ModelProfile:
    """Profile of a model.

    Attributes:
        root: the model; its FLOPs include those outside of its modules, such as a loss function's.
        model_parameters: elements of the model's full parameters, with those on other tensor-parallel ranks.
        uncounted: operations of other libraries that ran and have no formula.
    """

    root: ModuleProfile
    model_parameters: int
    uncounted: tuple[str, ...] = ()

    def as_data(self) -> dict[str, Any]:
        """Return the totals, and those of each module by name, as plain data."""
        modules = {
            module.name: {
                "parameters": module.parameters,
                "forward": module.forward,
                "backward": module.backward,
                "recomputed": module.recomputed,
                "seconds": module.seconds,
            }
            for _, module in self.root.walk()
        }
        return {**modules[""], "modules": modules, "uncounted": list(self.uncounted)}


def build_profile(
    model: nn.Module,
    counter: FlopCounter,
    *,
    micro_batches: int = 1,
    numel_of_model: Callable[[nn.Parameter], int] | None = None,
) -> ModelProfile:
    """Build the profile of a model from the FLOPs that `counter` counted.

    Args:
        micro_batches: number of counted micro-batches; the result is their mean.
        numel_of_model: function that returns the number of elements of a full parameter, if this rank has only a part;
            None: `numel` of the parameter itself.
    """
    root = _build_module("", model, counter, micro_batches)[0]
    for phase in ("forward", "backward", "recomputed"):
        setattr(root, phase, getattr(root, phase) + getattr(counter.outside, phase) // micro_batches)
    parameters = {id(parameter): parameter for parameter in model.parameters()}.values()
    whole = sum(p.numel() if numel_of_model is None else numel_of_model(p) for p in parameters)
    return ModelProfile(root, whole, tuple(sorted(counter.uncounted)))


def _build_module(
    name: str, module: nn.Module, counter: FlopCounter, micro_batches: int
) -> tuple[ModuleProfile, dict[int, int]]:
    """Return the profile of a module, and the number of elements of each parameter by its id."""
    own = counter.modules.get(name) or ModuleFlops(name)  # a module with two names is counted under the first
    found = ModuleProfile(
        name,
        type(module).__name__,
        forward=own.forward // micro_batches,
        backward=own.backward // micro_batches,
        recomputed=own.recomputed // micro_batches,
        seconds=own.seconds / micro_batches,
        calls=own.calls // micro_batches,
        extra=module.extra_repr(),
    )
    numels = {id(parameter): parameter.numel() for parameter in module.parameters(recurse=False)}
    for key, child in module.named_children():
        below, below_numels = _build_module(f"{name}.{key}" if name else key, child, counter, micro_batches)
        found.children[key] = below
        numels |= below_numels
        found.forward += below.forward
        found.backward += below.backward
        found.recomputed += below.recomputed
    if not own.calls:  # not `found.calls`, which is 0 for a module that runs in fewer than all micro-batches
        found.seconds = sum(child.seconds for child in found.children.values())
    found.parameters = sum(numels.values())
    return found, numels
