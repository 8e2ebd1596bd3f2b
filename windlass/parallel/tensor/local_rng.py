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
- Layers of a user's own draw inside `windlass.parallel.rng_tracker.tracker.fork()`, after `seed_tracker`.
"""

from __future__ import annotations

import torch
from torch import nn

from windlass.comm.mesh_axis import MeshAxis
from windlass.parallel.rng_tracker import rng_tracker

_STRIDE = 0x9E3779B97F4A7C15  # seeds of neighbouring ranks lie far apart: 2**64 over the golden ratio
_LIMIT = 2**62
_MEGATRON_OFFSET = 2718  # as Megatron-LM seeds its tensor-parallel generator beside the common one


class LocalRng:
    """Numbers of this rank's own, between `begin` and `end`."""

    def __init__(self, axis: MeshAxis) -> None:
        self._axis = axis
        self._saved_state: tuple[torch.Generator, torch.Tensor] | None = None

    @property
    def is_active(self) -> bool:
        """Whether this rank draws numbers of its own now."""
        return self._saved_state is not None

    def begin(self, device: torch.device) -> None:
        """From now on this rank draws numbers of its own on `device`; nothing happens if it does so already."""
        if self._saved_state is not None:
            return
        base = int(torch.randint(_LIMIT, (), device="cpu"))
        generator = get_default_generator(device)
        self._saved_state = generator, generator.get_state()
        generator.manual_seed((base + _seed_offset(self._axis)) % _LIMIT)

    def end(self) -> None:
        """Go on with the common generator, where it was."""
        if self._saved_state is not None:
            generator, state = self._saved_state
            generator.set_state(state)
            self._saved_state = None


def compute_shared_seed(axis: MeshAxis, device: torch.device, salt: int) -> int:
    """A seed that is the same on all ranks, while each of them draws numbers of its own; another one for each salt."""
    base = (get_default_generator(device).initial_seed() - _seed_offset(axis)) % _LIMIT
    return (base ^ (salt + 1) * _STRIDE) % _LIMIT


def _seed_offset(axis: MeshAxis) -> int:
    return (axis.index + 1) * _STRIDE


def get_default_generator(device: torch.device) -> torch.Generator:
    """The generator that operations on `device` draw from if they are given none."""
    if device.type == "cuda":
        torch.cuda.init()
        index = device.index if device.index is not None else torch.cuda.current_device()
        return torch.cuda.default_generators[index]
    return torch.default_generator


def has_dropout(model: nn.Module) -> bool:
    """Whether anything in the model drops elements while it trains: a `Dropout`, or a probability that a module keeps
    under a name with "drop" in it."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            return True
        kept = ((name, value) for name, value in vars(module).items() if "drop" in name)
        if any(isinstance(value, float) and 0 < value <= 1 for _, value in kept):
            return True
    return False


def sync_rng_states(axis: MeshAxis) -> None:
    """All ranks of the axis go on with the generators of its first rank, of the CPU and of the current CUDA device.
    Collective."""
    places = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    generators = [get_default_generator(torch.device(place)) for place in places]
    own = [generator.get_state().numpy().tobytes() for generator in generators]
    said = axis.all_gather_object(own if axis.index == 0 else None)[0]
    for generator, state in zip(generators, said, strict=True):
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def seed_rng_tracker(axis: MeshAxis, seed: int) -> None:
    """Begin the generator of `tracker.fork()` for layers of a user's own, different on each rank of the axis."""
    rng_tracker.add("model-parallel-rng", seed + _MEGATRON_OFFSET + axis.index)
