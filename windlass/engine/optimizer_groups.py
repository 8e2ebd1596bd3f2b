"""Optimizer groups in a checkpoint: hyper-parameters, and the names of their parameters.

Groups are matched by these names, not by their positions: a group takes the hyper-parameters of the saved group with
the same parameters, where only parameters trained in both runs count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from windlass.base.errors import CheckpointError
from windlass.base.log import logger
from windlass.base.text import plural
from windlass.checkpoint.checkpoint_load import count_and_names
from windlass.checkpoint.torch_state_dicts import UNRESTORED_KEYS
from windlass.optim.one_bit_adam import MOMENTUM_MASK, count_earlier_steps
from windlass.parallel.placement import get_global_name

GroupMetadata = list[dict[str, Any]]


def group_metadata(optimizer: torch.optim.Optimizer | None, model: nn.Module) -> GroupMetadata:
    """Return the hyper-parameters of each group, with the names of its parameters in `model`."""
    if optimizer is None:
        return []
    names = {id(p): get_global_name(p, name) for name, p in model.named_parameters()}
    groups = []
    for group in optimizer.param_groups:
        values = {key: value for key, value in group.items() if key not in ("params", MOMENTUM_MASK)}
        groups.append({"parameters": [names[id(p)] for p in group["params"]], "values": values})
    return groups


@dataclass(frozen=True)
class GroupMatch:
    """Match of the saved groups with this optimizer's groups.

    Attributes:
        source: for each current group, the index of the saved group whose hyper-parameters it takes; None: the group
            keeps its own hyper-parameters.
        matched: number of parameters in both optimizers.
        missing: current parameters that are in no saved group.
        unexpected: parameters of saved groups that are not in this optimizer.
    """

    source: list[int | None]
    matched: int
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]

    @property
    def is_complete(self) -> bool:
        """True if every group has a match and no parameter is missing or unexpected."""
        return not self.missing and not self.unexpected and None not in self.source


def match_groups(current: GroupMetadata, saved: GroupMetadata) -> GroupMatch:
    """Find the saved group that matches each current group."""
    known = {name for group in saved for name in group["parameters"]}
    local = {name for group in current for name in group["parameters"]}
    common = known & local
    by_names: dict[frozenset[str], list[int]] = {}
    for number, group in enumerate(saved):
        by_names.setdefault(frozenset(group["parameters"]) & common, []).append(number)
    source: list[int | None] = []
    for number, group in enumerate(current):
        names = frozenset(group["parameters"]) & common
        like = by_names.get(names, [])
        if not names:  # groups without common parameters can only be matched by position
            like = [number] if number in like and len(current) == len(saved) else []
        source.append(like[0] if like else None)
    return GroupMatch(source, len(common), tuple(sorted(local - known)), tuple(sorted(known - local)))


def require_complete_match(match: GroupMatch, current: GroupMetadata, saved: GroupMetadata) -> None:
    """Raise CheckpointError unless the optimizer has the saved groups and parameters."""
    if match.is_complete and len(current) == len(saved):
        return
    if len(current) != len(saved):
        what = f"the checkpoint has {len(saved)} optimizer groups, this optimizer has {len(current)}"
    elif match.missing or match.unexpected:
        what = "the optimizer has other parameters than the saved one"
    else:
        what = f"optimizer group {match.source.index(None)} has other parameters than any group of the checkpoint"
    raise CheckpointError(
        f"{what}: {count_and_names('missing', match.missing)}, "
        f"{count_and_names('unexpected', match.unexpected)}. Build it with the same groups; or load with "
        "load_optimizer_strict=False: states that match by name are loaded, new parameters begin without states; or "
        "with load_optimizer_states=False"
    )


def load_hyperparameters(
    optimizer: torch.optim.Optimizer, match: GroupMatch, saved: GroupMetadata, applied_steps: int
) -> None:
    """Load the saved hyper-parameters, except those that each run chooses (`foreach`, ...), and log the match.

    Args:
        applied_steps: number of optimizer steps before the save. If another optimizer made these steps, an optimizer
            with phases (e.g. a warm-up) starts its own step count at this number.
    """
    for group, number in zip(optimizer.param_groups, match.source, strict=True):
        if number is None:
            continue
        values = {k: v for k, v in saved[number]["values"].items() if k not in UNRESTORED_KEYS}
        group.update({key: tuple(v) if isinstance(v, list) else v for key, v in values.items()})
    if not any("applied_steps" in group["values"] for group in saved) and count_earlier_steps(optimizer, applied_steps):
        counted = plural(applied_steps, "step")
        logger.info(
            f"the states come from another optimizer; phases of this optimizer, such as a warm-up, count its {counted} "
            "too"
        )
    own = [str(number) for number, source in enumerate(match.source) if source is None]
    logger.info(
        f"optimizer: {plural(match.matched, 'parameter')} matched, {count_and_names('missing', match.missing)}, "
        f"{count_and_names('unexpected', match.unexpected)}"
        + (f"; groups that keep their own hyper-parameters: {', '.join(own)}" if own else "")
    )
