"""Norms of gradients, weights and tensors, clipping by norm, and overflow checks.

If a script passes a model-parallel unit (`mpu`), norms and counts of zeros are reduced over its model-parallel group;
without an `mpu`, they are not. `CheckOverflow` reduces over all ranks in either case.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from windlass.compat.expert_groups import (
    _get_expert_model_parallel_world_size,
    _get_expert_parallel_group,
    _get_expert_parallel_group_dict,
    _get_max_expert_parallel_group,
    _get_max_expert_size_name,
)
from windlass.compat.parallel_groups import (
    bwc_pipeline_parallel_group,
    bwc_pipeline_parallel_world_size,
    bwc_tensor_model_parallel_rank,
)
from windlass.compat.runtime_constants import PIPE_REPLICATED

Tensors = torch.Tensor | Iterable[torch.Tensor]


def clip_grad_norm_(parameters: Tensors, max_norm: float, norm_type: float = 2, mpu: Any = None) -> torch.Tensor:
    """Scale the gradients down if their norm exceeds `max_norm`. Return the norm before clipping.

    If the norm is NaN, all gradients become NaN.

    Norms of experts' gradients (of parameters whose `allreduce` is False) are reduced over the expert-parallel group,
    if there is one. The call is then collective over this group.
    """
    own = _as_list(parameters)  # materialize: the argument may be a generator
    norm = _total_norm(_counted_gradients([one for one in own if _spread_of(one) is None], mpu), norm_type, mpu)
    if spread := {name for one in own if (name := _spread_of(one)) is not None}:
        apart = [_expert_norm([p for p in own if _spread_of(p) == name], norm_type, name) for name in sorted(spread)]
        norm = torch.linalg.vector_norm(torch.stack([norm.to(apart[0]), *apart]), float(norm_type))
    if norm.isnan():  # as in torch, all gradients become NaN: a step must not apply the finite ones alone
        for gradient in _gradients(own):
            gradient.detach().fill_(math.nan)
    else:
        _scale_to_max_norm(_gradients(own), max_norm, norm)
    return norm


def get_grad_norm(parameters: Tensors, norm_type: float = 2, mpu: Any = None) -> float:
    """Return the norm of all gradients as one vector; -1 if it is not finite."""
    return _finite_or_minus_one(_total_norm(_counted_gradients(parameters, mpu), norm_type, mpu))


def get_flattened_grad_norm(
    parameters: Tensors, norm_type: float = 2, mpu: Any = None, grad_norm_mask: Any = None
) -> float:
    """Return the norm of the gradients of flat buffers as one vector; -1 if it is not finite.

    Every rank counts all its buffers, because a flat buffer does not show which of its parameters are replicated.

    Raises:
        NotImplementedError: a mask is passed. A mask is not needed: flat buffers here hold each parameter once.
    """
    if grad_norm_mask is not None:
        raise NotImplementedError("get_flattened_grad_norm: grad_norm_mask is not built; pass each parameter once")
    return _finite_or_minus_one(_total_norm(_gradients(parameters), norm_type, mpu))


def get_weight_norm(parameters: Tensors, norm_type: float = 2, mpu: Any = None) -> float:
    """Return the norm of all parameters as one vector; -1 if it is not finite."""
    return _finite_or_minus_one(_total_norm(_counted_parameters(parameters, mpu), norm_type, mpu))


def get_grad_zeros(parameters: Tensors, mpu: Any = None) -> float:
    """Return the number of zero elements in the gradients."""
    zeros = sum(gradient.numel() - int(gradient.count_nonzero()) for gradient in _counted_gradients(parameters, mpu))
    total = torch.tensor(float(zeros))
    _all_reduce_over(total, _model_group(mpu), dist.ReduceOp.SUM)
    return total.item()


def count_used_parameters_in_backward(parameters: Iterable[torch.Tensor]) -> int:
    """Return the number of the given parameters that the running backward pass computes a gradient for.

    Raises:
        RuntimeError: no backward pass is running.
    """
    if torch._C._current_graph_task_id() == -1:
        raise RuntimeError("count_used_parameters_in_backward must be called in a hook, during a backward pass")
    with torch.enable_grad():  # with autograd off, a parameter has no node in the graph
        nodes = [torch.autograd.graph._get_grad_fn_or_grad_acc(one) for one in parameters if one.requires_grad]
    return sum(bool(torch._C._will_engine_execute_node(node)) for node in set(nodes) if node is not None)


def get_global_norm(norm_list: Sequence[float | torch.Tensor]) -> float:
    """Return the norm of a vector whose parts have the given norms; infinity if one of these is invalid."""
    if any(is_invalid_grad_norm(norm) for norm in norm_list):
        return math.inf
    return math.sqrt(sum(float(norm) ** 2 for norm in norm_list))


def get_global_norm_of_tensors(
    input_tensors: Iterable[torch.Tensor],
    norm_type: float = 2,
    mpu: Any = None,
    use_graph: bool = False,
    moe_ep_group: Any = None,
) -> torch.Tensor:
    """Return the norm of all tensors as one vector, a float32 scalar; -1 if it is not finite.

    Args:
        use_graph: accepted and ignored; DeepSpeed then records a CUDA graph, with the same result.
        moe_ep_group: group over which experts are spread, if the tensors belong to experts. The norm is then also
            reduced over this group, and over the pipeline stages of `mpu` instead of all its model-parallel ranks
            (unless experts are sharded by tensor parallelism). None: the tensors are dense.

    Raises:
        AssertionError: an item is not a tensor.
    """
    tensors = list(input_tensors)
    assert all(isinstance(tensor, torch.Tensor) for tensor in tensors), (
        "get_global_norm_of_tensors: an item is not a tensor; pass only tensors"
    )
    norm = _total_norm(tensors, norm_type, mpu, moe_ep_group)
    return torch.where(norm.isfinite(), norm, torch.full_like(norm, -1.0))


def clip_tensors_by_global_norm(
    input_tensors: Iterable[torch.Tensor],
    max_norm: float = 1.0,
    global_norm: float | torch.Tensor | None = None,
    mpu: Any = None,
    eps: float = 1e-6,
    use_graph: bool = False,
) -> float | torch.Tensor:
    """Scale tensors down if their norm, or the given `global_norm`, exceeds `max_norm`. Return that norm.

    Args:
        use_graph: see `get_global_norm_of_tensors`.
    """
    tensors = list(input_tensors)
    norm = get_global_norm_of_tensors(tensors, mpu=mpu) if global_norm is None else global_norm
    _scale_to_max_norm(tensors, max_norm, norm, eps)
    return norm


def clip_gradients(
    parameters: Tensors,
    max_norm: float = 1.0,
    global_grad_norm: float | torch.Tensor | None = None,
    mpu: Any = None,
    eps: float = 1e-6,
) -> float | torch.Tensor:
    """Scale gradients down if their `get_grad_norm`, or the given norm, exceeds `max_norm`. Return that norm."""
    own = _as_list(parameters)  # materialize: the argument may be a generator
    norm = get_grad_norm(own, mpu=mpu) if global_grad_norm is None else global_grad_norm
    _scale_to_max_norm(_gradients(own), max_norm, norm, eps)
    return norm


def combine_grad_norm_groups(norm_groups: Iterable[float | torch.Tensor], norm_type: float = 2) -> torch.Tensor:
    """Combine the norms of several groups into one; infinity if one of them is invalid."""
    norms = [float(norm) for norm in norm_groups]
    if any(is_invalid_grad_norm(norm) for norm in norms):
        return torch.tensor(math.inf)
    combined: torch.Tensor = torch.linalg.vector_norm(torch.tensor(norms), ord=norm_type)
    return combined


def has_inf_or_nan(x: torch.Tensor) -> torch.Tensor:
    """Return True if any value is not finite, as a scalar tensor on the tensor's device."""
    values = x._values() if x.is_sparse else x
    if not values.numel():
        return torch.tensor(False, device=x.device)
    least, most = torch.aminmax(values)
    return ~(least.isfinite() & most.isfinite())


def is_invalid_grad_norm(norm: float | torch.Tensor) -> bool:
    """Return True if a norm is negative, infinite or NaN."""
    if isinstance(norm, torch.Tensor):
        return bool((~norm.isfinite() | (norm < 0)).any())
    return not math.isfinite(norm) or norm < 0


def mask_nan_or_inf_with_val_inplace(input: torch.Tensor, device: Any = None, val: float = -1.0) -> None:
    """Replace non-finite elements by `val`, in place."""
    input.masked_fill_(~input.isfinite(), val)


def is_model_parallel_parameter(p: torch.Tensor) -> bool:
    """Return True if each rank of a model-parallel group holds a different part of this parameter."""
    return bool(getattr(p, "model_parallel", False) or getattr(p, "tensor_model_parallel", False))


class CheckOverflow:
    """Check for non-finite gradients on any rank.

    Args:
        param_groups: lists of parameters.
        mpu: model-parallel unit, stored for scripts that read it.
    """

    def __init__(
        self, param_groups: Any = None, mpu: Any = None, zero_reduce_scatter: bool = False, deepspeed: Any = None
    ) -> None:
        self.params = [parameter for group in param_groups or () for parameter in group]
        self.mpu = mpu

    def check(self, param_groups: Any = None) -> bool:
        """Run `has_overflow` on these groups, or on those passed to the constructor."""
        return self.has_overflow([p for group in param_groups for p in group] if param_groups else self.params)

    def check_using_norm(self, norm_group: Iterable[float | torch.Tensor], reduce_overflow: bool = True) -> bool:
        """Return True if a norm is invalid on any rank. Collective.

        With `reduce_overflow=False`: on any rank of the largest expert-parallel group if there are experts, else on
        this rank (not collective).
        """
        found = any(is_invalid_grad_norm(norm) for norm in norm_group)
        if reduce_overflow:
            return self._any_rank(found)
        if any(_spread_of(parameter) is not None for parameter in self.params):
            return self._any_rank(found, _get_max_expert_parallel_group())
        return found

    def has_overflow(self, params: Iterable[torch.Tensor], has_moe_params: bool | None = None) -> bool:
        """Return True if any rank has a non-finite gradient. Collective."""
        return self._any_rank(self.has_overflow_serial(params))

    def _any_rank(self, here: bool, group: dist.ProcessGroup | None = None) -> bool:
        found = torch.tensor(float(here))
        if dist.is_initialized():
            _all_reduce_over(found, group or dist.group.WORLD, dist.ReduceOp.MAX)
        return bool(found.item())

    def has_overflow_serial(self, params: Iterable[torch.Tensor]) -> bool:
        """Return True if this rank has a non-finite gradient."""
        return any(bool(has_inf_or_nan(p.grad)) for p in params if p.grad is not None)


def _as_list(tensors: Tensors) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _gradients(parameters: Tensors) -> list[torch.Tensor]:
    return [parameter.grad for parameter in _as_list(parameters) if parameter.grad is not None]


def _counted_parameters(parameters: Tensors, mpu: Any) -> list[torch.Tensor]:
    """Return the parameters that this rank counts in a norm.

    Only the first rank of a model-parallel group counts replicated parameters. Only the owning stage counts a parameter
    that several stages hold.
    """
    first = bwc_tensor_model_parallel_rank(mpu) == 0
    return [
        parameter
        for parameter in _as_list(parameters)
        if (first or is_model_parallel_parameter(parameter)) and not getattr(parameter, PIPE_REPLICATED, False)
    ]


def _counted_gradients(parameters: Tensors, mpu: Any) -> list[torch.Tensor]:
    return _gradients(_counted_parameters(parameters, mpu))


def _spread_of(parameter: torch.Tensor) -> str | None:
    """Return the name of the expert-parallel group of an expert's parameter.

    None for a dense parameter, or if there are no expert-parallel groups.
    """
    if getattr(parameter, "allreduce", True):
        return None
    known = _get_expert_parallel_group_dict()
    own: str | None = getattr(parameter, "group_name", None)
    return own if own in known else _get_max_expert_size_name() if known else None


def _expert_norm(parameters: list[torch.Tensor], norm_type: float, name: str) -> torch.Tensor:
    """Return the norm of the experts' gradients on all ranks of a group. Collective."""
    return _total_norm(_gradients(parameters), norm_type, None, _get_expert_parallel_group(name))


def _total_norm(tensors: list[torch.Tensor], norm_type: float, mpu: Any, moe_ep_group: Any = None) -> torch.Tensor:
    kind = float(norm_type)
    each = [torch.linalg.vector_norm(tensor.detach().float(), kind) for tensor in tensors]
    largest = math.isinf(kind)
    if largest:
        total, how = torch.stack(each).max() if each else torch.tensor(0.0), dist.ReduceOp.MAX
    else:
        total, how = torch.stack(each).pow(kind).sum() if each else torch.tensor(0.0), dist.ReduceOp.SUM
    _all_reduce_over(total, _model_group(mpu, of_experts=moe_ep_group is not None), how)
    _all_reduce_over(total, moe_ep_group, how)
    return total if largest else total.pow(1 / kind)


def _finite_or_minus_one(norm: torch.Tensor) -> float:
    value = norm.item()
    return value if math.isfinite(value) else -1.0


def _model_group(mpu: Any, *, of_experts: bool = False) -> Any:
    """Return the group whose ranks hold other parts of the model; None if there is no such group."""
    if mpu is None:
        return None
    if not of_experts or _get_expert_model_parallel_world_size() > 1:
        return mpu.get_model_parallel_group()
    # Without tensor parallelism of experts, the ranks of a stage hold the same experts: only stages hold other parts.
    return bwc_pipeline_parallel_group(mpu) if bwc_pipeline_parallel_world_size(mpu) > 1 else None


def _all_reduce_over(total: torch.Tensor, group: Any, how: Any) -> None:
    """Reduce a scalar in place over `group`, or do nothing for None."""
    if group is None:
        return
    # The total of a rank without tensors is a CPU scalar, which NCCL does not reduce: move it to a device of the group.
    try:
        devices = [part.partition(":")[0] for part in dist.get_backend_config(group).split(",")]  # "cpu:gloo,cuda:nccl"
    except (ValueError, TypeError):  # this rank is not in the group, or the group was made without torch's registry
        devices = [total.device.type]
    moved = total if total.device.type in devices else total.to(devices[0])
    dist.all_reduce(moved, op=how, group=group)
    total.copy_(moved)


@torch.no_grad()
def _scale_to_max_norm(
    tensors: list[torch.Tensor], max_norm: float, norm: float | torch.Tensor, eps: float = 1e-6
) -> None:
    factor = float(max_norm / (float(norm) + eps))
    if 0 <= factor < 1:  # the factor is negative if the norm is -1, i.e. a gradient is not finite
        for tensor in tensors:
            tensor.detach().mul_(factor)
