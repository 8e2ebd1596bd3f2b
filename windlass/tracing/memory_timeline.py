"""Memory of one rank over the time of a profile, by kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from windlass.engine.engine_reporter import memory_report
from windlass.zero.core.unit import ShardState
from windlass.zero.sharded_model import ShardedModel

ACTIVATIONS, UNSHARDED = "activations and temporaries", "unsharded parameters"
_MAX_SAMPLES = 2000
_KIND_OF_SLOT = {"param": "parameters", "secondary": "parameters", "next param": "parameters"}


@dataclass(frozen=True)
class MemorySample:
    """Bytes by kind at one time (us of the monotonic clock)."""

    time: float
    amounts: dict[str, int]

    @property
    def total(self) -> int:
        """Bytes of all kinds."""
        return sum(self.amounts.values())


@dataclass(frozen=True)
class HeldMemory:
    """Memory that a rank keeps between steps, and units that it unshards.

    Attributes:
        kept: bytes by kind; the name of a kind that is not on the device includes its tier.
        unsharded: bytes of units that are unsharded now, by their name in the memory ledger (`parameters of NAME`).
        from_allocator: those names in the ledger whose memory comes from torch's allocator; other memory is mapped.
    """

    kept: dict[str, int]
    unsharded: dict[str, int]
    from_allocator: frozenset[str]


def held_memory(model: ShardedModel) -> HeldMemory:
    """Return the memory of a sharded model between two steps. Collective if an update is in flight."""
    report, kept = memory_report(model), dict[str, int]()
    for (slot, tier), nbytes in report["slots"].items():
        kind = _KIND_OF_SLOT.get(slot, "gradients" if slot.startswith("grad") else "optimizer states")
        place = kind if tier == "device" else f"{kind} ({tier})"
        kept[place] = kept.get(place, 0) + nbytes
    buffers = {id(one): one for one in model.model.buffers()}
    sizes = sum(one.numel() * one.element_size() for one in buffers.values())
    kept["buffers"] = report["transit"] + sizes
    freed = [unit for unit in model.units if unit.frees_memory]
    unsharded = {
        f"parameters of {unit.names[0]}": unit.nbytes for unit in freed if unit.shard_state is not ShardState.SHARDED
    }
    allocated = (unit for unit in freed if unit.buffer.pages is None and not unit.buffer.shared)
    return HeldMemory(
        {kind: nbytes for kind, nbytes in kept.items() if nbytes},
        unsharded,
        frozenset(f"parameters of {unit.names[0]}" for unit in allocated),
    )


def memory_timeline(
    held: HeldMemory,
    changes: Sequence[tuple[float, str, int]],
    allocations: Sequence[tuple[float, int]] | None,
    start: float,
    end: float,
) -> list[MemorySample]:
    """Return samples of the memory from `start` to `end`: at most 2,001, including the peak.

    The bytes of activations and temporary tensors are those that torch's allocator has added since `start`, less the
    bytes of unsharded parameters.

    Args:
        held: memory at `start`.
        changes: time, name in the memory ledger, and new bytes of each change of device memory, in order.
        allocations: time and bytes of each allocation and release, in order; None: activations are unknown.
    """
    unsharded, begun = (
        dict(held.unsharded),
        sum(nbytes for holder, nbytes in held.unsharded.items() if holder in held.from_allocator),
    )
    events: list[tuple[float, str | None, int]] = [(time, holder, size) for time, holder, size in changes]
    events += [(time, None, size) for time, size in allocations or ()]
    events.sort(key=lambda one: one[0])
    allocated, width, samples = 0, max(end - start, 1e-9) / _MAX_SAMPLES, dict[int, MemorySample]()

    def sample(time: float) -> None:
        amounts = dict(held.kept)
        if held.from_allocator or unsharded:
            amounts[UNSHARDED] = sum(unsharded.values())
        if allocations is not None:
            counted = sum(nbytes for holder, nbytes in unsharded.items() if holder in held.from_allocator)
            amounts[ACTIVATIONS] = max(0, allocated - (counted - begun))
        one, place = MemorySample(time, amounts), min(int((time - start) / width), _MAX_SAMPLES - 1)
        if place not in samples or one.total >= samples[place].total:
            samples[place] = one  # keep the largest sample of each interval

    sample(start)
    for time, holder, size in events:
        if holder is None:
            allocated += size
        elif holder.startswith("parameters of "):
            unsharded[holder] = size
        if start <= time <= end:
            sample(time)
    return [samples[place] for place in sorted(samples)]
