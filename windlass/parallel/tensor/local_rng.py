"""Random numbers in a model with sharded layers: equal for replicated activations, different for sharded ones.

[Note: dropout in sharded layers] Dropout on replicated activations (hidden states between blocks) must drop the same
elements on all ranks, and routers must add the same noise; otherwise ranks compute with different inputs, and
replicated parameters diverge. Dropout on sharded activations (heads, features of a feed-forward layer, tokens
between blocks under `tp_sequence_norms`) must drop different elements; otherwise all ranks use the same pattern.
Therefore:

- All ranks of the tensor-parallel axis use generators in the same state. `sync_rng_states` copies the first rank's
  state, for every model, because no attribute shows that a router draws random numbers. Seeds of ranks along other
  axes may differ.
- Between the first column-parallel layer of a chain and the row-parallel layer at its end, numbers come from a
  generator seeded with one number drawn from the shared generator, plus an offset for the rank's index. A caller that
  restores the shared generator (activation checkpointing before a recomputation) thus gets the same numbers again. No
  other state is saved.
- If a module between sequence-sharded layers receives full sequences, the shared number is recovered from the rank's
  own seed (`compute_shared_seed`), also in a recomputation.
- A user's own layers draw inside `windlass.parallel.rng_tracker.rng_tracker.fork()`, after `seed_rng_tracker`.
"""

from __future__ import annotations

import torch
from torch import nn

from windlass.comm.mesh_axis import MeshAxis
from windlass.parallel.rng_tracker import MODEL_PARALLEL_RNG, rng_tracker

_STRIDE = 0x9E3779B97F4A7C15  # 2**64 over the golden ratio: keeps the seeds of neighbouring ranks far apart
_LIMIT = 2**62
_MEGATRON_OFFSET = 2718  # offset of Megatron-LM's tensor-parallel generator from the shared seed


class LocalRng:
    """Rank-specific random numbers between `begin` and `end`."""

    def __init__(self, axis: MeshAxis) -> None:
        self._axis = axis
        self._saved_state: tuple[torch.Generator, torch.Tensor] | None = None

    @property
    def is_active(self) -> bool:
        """True if this rank currently draws its own random numbers."""
        return self._saved_state is not None

    def begin(self, device: torch.device) -> None:
        """Switch to this rank's own random numbers on `device`. No effect if that is already active."""
        if self._saved_state is not None:
            return
        base = int(torch.randint(_LIMIT, (), device="cpu"))
        generator = get_default_generator(device)
        self._saved_state = generator, generator.get_state()
        generator.manual_seed((base + _seed_offset(self._axis)) % _LIMIT)

    def end(self) -> None:
        """Restore the shared generator to its state at `begin`."""
        if self._saved_state is not None:
            generator, state = self._saved_state
            generator.set_state(state)
            self._saved_state = None


def compute_shared_seed(axis: MeshAxis, device: torch.device, salt: int) -> int:
    """Return a seed that is equal on all ranks, for a call between `begin` and `end` of a `LocalRng`. Each `salt` gives
    a different seed.
    """
    base = (get_default_generator(device).initial_seed() - _seed_offset(axis)) % _LIMIT
    return (base ^ (salt + 1) * _STRIDE) % _LIMIT


def _seed_offset(axis: MeshAxis) -> int:
    return (axis.index + 1) * _STRIDE


def get_default_generator(device: torch.device) -> torch.Generator:
    """Return the default generator of operations on `device`."""
    if device.type == "cuda":
        torch.cuda.init()
        index = device.index if device.index is not None else torch.cuda.current_device()
        return torch.cuda.default_generators[index]
    return torch.default_generator


def has_dropout(model: nn.Module) -> bool:
    """Return True if a module of the model drops elements in training: a `Dropout`, or a probability in an attribute
    whose name contains "drop".
    """
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            return True
        kept = ((name, value) for name, value in vars(module).items() if "drop" in name)
        if any(isinstance(value, float) and 0 < value <= 1 for _, value in kept):
            return True
    return False


def sync_rng_states(axis: MeshAxis) -> None:
    """Copy the generator states of the axis's first rank to all its ranks, for the CPU and the current CUDA device.
    Collective.
    """
    places = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    generators = [get_default_generator(torch.device(place)) for place in places]
    own = [generator.get_state().numpy().tobytes() for generator in generators]
    states = axis.all_gather_object(own)[0]
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def seed_rng_tracker(axis: MeshAxis, seed: int) -> None:
    """Seed the generator of `rng_tracker.fork()` for users' own layers, differently on each rank of the axis."""
    rng_tracker.add(MODEL_PARALLEL_RNG, seed + _MEGATRON_OFFSET + axis.index)
