"""Model consistency checks, which pass or raise on all ranks together: all ranks have the same model and train the same
parameters, and no forward changes a parameter on one rank alone.
"""

from __future__ import annotations

import hashlib

import torch
from torch import nn

from windlass.base.collective_activity import WaitScope
from windlass.base.errors import ModelError
from windlass.comm.rank_group import RankGroup
from windlass.parallel.placement import get_placement
from windlass.zero.core.unit_plan import UnitPlan

# Name, global shape, dtype, and the optimizer group that trains the parameter, if any.
_Summary = tuple[str, tuple[int, ...], str, str]


def check_same_model(model: nn.Module, optimizer: torch.optim.Optimizer | None, data: RankGroup) -> None:
    """Check that all data ranks have the same parameters (name, global shape, dtype, optimizer group, frozen or not).

    Experts that are separate modules are left out, because ranks along `ep` have different ones. Collective.

    Raises:
        ModelError: the models differ. Raised on all ranks, with the first parameter that differs, if any.
    """
    if data.size == 1:
        return
    local = _summary_of(model, optimizer)
    # Compare digests first: the full summaries of large models are sent only if they differ.
    digest = hashlib.sha256(repr(local).encode()).hexdigest()
    with WaitScope("the comparison of models"):
        digests = data.all_gather_object(digest)
        if len(set(digests)) == 1:
            return
        summaries = data.all_gather_object(local)
    other = next(index for index, one in enumerate(digests) if one != digests[0])
    here, there = ({summary[0]: summary for summary in summaries[index]} for index in (0, other))
    name = next((n for n in [*here, *there] if here.get(n) != there.get(n)), "")
    if not name:
        raise ModelError(
            f"rank {data.ranks[0]} and rank {data.ranks[other]} have the same parameters in different order; build the "
            "model by the same code on every rank"
        )
    raise ModelError(
        f"the model is not the same on all ranks: {name!r} is {_difference(here.get(name))} on rank {data.ranks[0]} "
        f"and {_difference(there.get(name))} on rank {data.ranks[other]}; build the same model on every rank, freeze "
        "or unfreeze the same parameters, and put them into the same optimizer groups"
    )


def check_same_units(plans: list[UnitPlan], data: RankGroup) -> None:
    """Check that all data ranks have the same number of units, and that units with the same index agree in dtype and
    in whether they hold experts, are trainable and are persistent. Collective.

    Ranks identify units by index. The number of experts in a unit may differ.

    Raises:
        ModelError: the units differ. Raised on all ranks.
    """
    local = [(plan.kind.is_expert, plan.dtype, plan.trainable, plan.persistent, plan.numel) for plan in plans]
    with WaitScope("the comparison of models"):
        summaries = data.all_gather_object(local)
    # Leave out `numel`, which may differ for experts.
    kinds = [[one[:4] for one in of_rank] for of_rank in summaries]
    if all(one == kinds[0] for one in kinds):
        return
    counts = ", ".join(f"{len(one)} on rank {rank}" for rank, one in zip(data.ranks, kinds, strict=True))
    largest = max(sum(one[4] for one in of_rank if one[0]) for of_rank in summaries)
    raise ModelError(
        f"ranks have different numbers of experts, and split a block with experts into different units ({counts}): set "
        f"zero_optimization.stage3_max_live_parameters above {largest}, the elements of all experts of a rank, so that "
        "no rank splits such a block, or choose a number of experts that parallel.ep divides"
    )


def check_renormalized_embeddings(model: nn.Module, data: RankGroup, world: RankGroup, *, trains: bool) -> None:
    """Check that no other rank has a copy of the weight of an embedding with `max_norm`. Collective over the world.

    The forward of such an embedding scales in place the rows that it reads. Each data rank reads other rows, and the
    other stages of a pipeline that share the weight read none. Ranks along tp read the same rows.

    Args:
        trains: the model will have gradients. If False, the weights of data ranks may differ: each rank scales a row
            before it uses it.

    Raises:
        ModelError: a rank has such an embedding, and trains it on several data ranks or shares it with another stage.
            Raised on all ranks.
    """
    if world.size == 1:
        return
    problems = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.Embedding | nn.EmbeddingBag) or module.max_norm is None:
            continue
        weight = module._parameters.get("weight")
        what = f"{name!r} has max_norm = {module.max_norm}: its forward scales the rows that it reads in place, so the"
        if data.size > 1 and trains and module.weight.requires_grad:
            problems.append(
                f"{what} weights of data-parallel ranks, which read other rows, would differ. Build it with "
                "max_norm=None, and scale the vectors that it returns"
            )
        elif weight is not None and get_placement(weight).shared_stages:
            problems.append(
                f"{what} copy of its weight on another pipeline stage would differ. Build it with max_norm=None, and "
                "scale the vectors that it returns, or do not tie its weight"
            )
    with WaitScope("the comparison of models"):
        found = [one for of_rank in world.all_gather_object(problems) for one in of_rank]
    if found:
        raise ModelError(found[0])


def _summary_of(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> list[_Summary]:
    groups = optimizer.param_groups if optimizer is not None else []
    stepped = {id(parameter): number for number, group in enumerate(groups) for parameter in group["params"]}
    summaries: list[_Summary] = []
    for name, parameter in model.named_parameters():
        placement = get_placement(parameter)
        if placement.is_expert and placement.is_full:
            continue
        trained = "trained" if parameter.requires_grad else "frozen"
        number = stepped.get(id(parameter))
        place = f"in group {number} of the optimizer" if number is not None else "in no group of an optimizer"
        summaries.append((name, placement.global_shape, str(parameter.dtype), f"{trained}, {place}"))
    return summaries


def _difference(summary: _Summary | None) -> str:
    return f"{list(summary[1])} in {summary[2]}, {summary[3]}" if summary is not None else "missing"
