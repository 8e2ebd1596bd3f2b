"""Estimated time of a step of a candidate, relative to others: an order in which to try them.

[Note: estimated order] The search measures what it returns, so the estimate decides only which candidates come first.
It counts floating-point operations, bytes on the wire and bytes that the update reads and writes, with rates of a
typical machine.
"""

from __future__ import annotations

from dataclasses import dataclass

from windlass.config.batch_sizes import ACCUMULATION, MICRO
from windlass.tune.search_space import (
    CHECKPOINTING,
    PARAMETERS_TIER,
    REUSE,
    STAGE,
    STATES_RATIO,
    STATES_TIER,
    Candidate,
)


@dataclass(frozen=True)
class EstimateFacts:
    """Facts of the model and the machine.

    Attributes:
        parameters: Number of elements of the model.
        tokens: Elements of a sample, for the count of operations.
        ranks: Number of data ranks.
        device: `cpu` or `cuda`.
    """

    parameters: int = 100_000_000
    tokens: int = 512
    ranks: int = 1
    device: str = "cpu"


@dataclass(frozen=True)
class _Rates:
    flops: float  # per second
    wire: float  # bytes per second between ranks
    memory: float  # bytes per second of the update
    link: float  # bytes per second to the host
    disk: float
    call: float  # seconds of a micro-batch beside its operations


_RATES = {
    "cpu": _Rates(flops=4e10, wire=4e9, memory=1e10, link=1e10, disk=1e9, call=5e-3),
    "cuda": _Rates(flops=2e14, wire=1e11, memory=2e12, link=2e10, disk=3e9, call=2e-3),
}


def estimate_step_seconds(candidate: Candidate, facts: EstimateFacts) -> float:
    """Return the estimated seconds of a step."""
    rates, ranks, size = _RATES[facts.device], facts.ranks, facts.parameters
    micro, accumulation = candidate.get(MICRO, 1), candidate.get(ACCUMULATION, 1)
    stage, states = candidate.get(STAGE, 0), candidate.get(STATES_TIER, "none")
    recomputed = 4 / 3 if candidate.get(CHECKPOINTING) else 1.0
    seconds = accumulation * (6 * size * facts.tokens * micro * recomputed / rates.flops + rates.call)
    if ranks > 1:
        sent = 2 * (ranks - 1) / ranks * 2 * size  # a reduction and an all-gather of two bytes an element
        passes = 1.0 if stage < 2 else float(accumulation)  # of reductions; below stage 2 once a step
        if stage == 3:
            passes += accumulation * (2.0 if candidate.get(REUSE) == 0 else 0.5)
        seconds += passes * sent / rates.wire
    share = size / ranks if stage >= 1 else size
    update = 28 * share / rates.memory
    if states != "none":
        part = float(candidate.get(STATES_RATIO, 1.0))
        update += part * share * (28 / _RATES["cpu"].memory + 4 / rates.link)
        if states == "nvme":
            update += part * share * 24 / rates.disk
    tier = candidate.get(PARAMETERS_TIER, "none")
    if tier != "none":
        rate = rates.link if tier == "cpu" else rates.disk
        seconds += 2 * accumulation * 2 * size / ranks / rate
    return float(seconds + update)
