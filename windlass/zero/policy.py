"""What a ZeRO stage means: which kinds of slots are cut. The only place that reads the stage number."""

from __future__ import annotations

from dataclasses import dataclass

from windlass.base.errors import ConfigError


@dataclass(frozen=True)
class Policy:
    """Which slots are cut over the shard axis of the data mesh.

    Attributes:
        stage: for people to read; no code branches on it.
        param: every rank keeps only its cut of a parameter while nobody uses it; else each keeps all.
        grad: gradients are reduced at every backward, and only the cut is kept; else once, at the accumulation
        boundary.
        state: master weights and optimizer state exist only for the cut.
    """

    stage: int
    param: bool
    grad: bool
    state: bool


_STAGES = {
    0: Policy(0, param=False, grad=False, state=False),
    1: Policy(1, param=False, grad=False, state=True),
    2: Policy(2, param=False, grad=True, state=True),
    3: Policy(3, param=True, grad=True, state=True),
}


def policy_of(stage: int, shards: int, *, away: bool = False) -> Policy:
    """The policy of a stage over `shards` ranks. A cut over one rank is no cut, unless it shall rest away from the
    device.

    Args:
        away: some slots have another home than the device.

    Raises:
        ConfigError: there is no such stage.
    """
    if stage not in _STAGES:
        raise ConfigError(f"zero_optimization.stage = {stage!r}; there are stages 0, 1, 2 and 3")
    return _STAGES[stage] if shards > 1 or away else Policy(stage, param=False, grad=False, state=False)
