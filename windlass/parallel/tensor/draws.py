"""Random numbers in a model whose layers are cut: the same where activations are, different ones where they are not.

[Note: dropout in cut layers] What is whole on every rank (hidden states between blocks) has to lose the same elements
on all of them, or ranks compute with different inputs. What is cut (heads, features of a feed-forward layer, tokens
between blocks under `sequence_norms`) has to lose different ones, or ranks repeat each other's pattern. So:

- All ranks of the axis draw from generators in the same state. `agree` takes the first rank's; seeds of ranks along
  other axes may differ.
- Between the first column of a chain and its row, numbers come from a generator that is seeded with one number of the
  common generator and the rank's place. Whoever winds the common generator back (activation checkpointing does so for
  a recomputation) therefore gets the same numbers again, here too. Nothing else is kept.
- Where a module between cut sequences is given whole ones, the seed of the rank's own numbers tells that common number
  again (`common_seed`), in a recomputation too.
- Layers of a user's own draw inside `windlass.parallel.rng.tracker.fork()`, after `seed_tracker`.
"""

from __future__ import annotations

import torch
from torch import nn

from windlass.comm.axis import Axis
from windlass.parallel.rng import tracker

_STRIDE = 0x9E3779B97F4A7C15  # seeds of neighbouring ranks lie far apart: 2**64 over the golden ratio
_LIMIT = 2**62
_APART = 2718  # as Megatron-LM seeds its tensor-parallel generator beside the common one


class Draws:
    """Numbers of this rank's own, between `begin` and `end`."""

    def __init__(self, axis: Axis) -> None:
        self._axis = axis
        self._before: tuple[torch.Generator, torch.Tensor] | None = None

    @property
    def running(self) -> bool:
        """Whether this rank draws numbers of its own now."""
        return self._before is not None

    def begin(self, device: torch.device) -> None:
        """From now on this rank draws numbers of its own on `device`; nothing happens if it does so already."""
        if self._before is not None:
            return
        base = int(torch.randint(_LIMIT, (), device="cpu"))
        generator = generator_of(device)
        self._before = generator, generator.get_state()
        generator.manual_seed((base + _offset(self._axis)) % _LIMIT)

    def end(self) -> None:
        """Go on with the common generator, where it was."""
        if self._before is not None:
            generator, state = self._before
            generator.set_state(state)
            self._before = None


def common_seed(axis: Axis, device: torch.device, salt: int) -> int:
    """A seed that is the same on all ranks, while each of them draws numbers of its own; another one for each salt."""
    base = (generator_of(device).initial_seed() - _offset(axis)) % _LIMIT
    return (base ^ (salt + 1) * _STRIDE) % _LIMIT


def _offset(axis: Axis) -> int:
    return (axis.index + 1) * _STRIDE


def generator_of(device: torch.device) -> torch.Generator:
    """The generator that operations on `device` draw from if they are given none."""
    if device.type == "cuda":
        torch.cuda.init()
        index = device.index if device.index is not None else torch.cuda.current_device()
        return torch.cuda.default_generators[index]
    return torch.default_generator


def draws_numbers(model: nn.Module) -> bool:
    """Whether anything in the model drops elements while it trains: a `Dropout`, or a probability that a module keeps
    under a name with "drop" in it."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            return True
        kept = ((name, value) for name, value in vars(module).items() if "drop" in name)
        if any(isinstance(value, float) and 0 < value <= 1 for _, value in kept):
            return True
    return False


def agree(axis: Axis) -> None:
    """All ranks of the axis go on with the generators of its first rank, of the CPU and of the current CUDA device.
    Collective."""
    places = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    generators = [generator_of(torch.device(place)) for place in places]
    own = [generator.get_state().numpy().tobytes() for generator in generators]
    said = axis.everyone(own if axis.index == 0 else None)[0]
    for generator, state in zip(generators, said, strict=True):
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def seed_tracker(axis: Axis, seed: int) -> None:
    """Begin the generator of `tracker.fork()` for layers of a user's own, different on each rank of the axis."""
    tracker.add("model-parallel-rng", seed + _APART + axis.index)
