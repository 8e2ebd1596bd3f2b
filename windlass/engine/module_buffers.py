"""Synchronization of module buffers (running statistics): broadcast from rank 0, as in DistributedDataParallel."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Literal

import torch
from torch import nn

from windlass.base.dtypes import is_castable
from windlass.base.errors import CheckpointError
from windlass.comm.mesh import Mesh
from windlass.comm.rank_group import RankGroup
from windlass.parallel.experts import is_router_bias, sharded_expert_modules

_NORMS = (nn.modules.batchnorm._NormBase,)


class BufferDtypePolicy:
    """Dtype of each floating-point buffer of a 16-bit model.

    Args:
        model: the model; modules of transformers may list names of buffers that stay fp32.
        param_dtype: dtype of the parameters.
        buffer_dtype: dtype of all buffers that do not stay fp32 (`data_types.buffer_dtype`). None: persistent buffers
            are cast to `param_dtype`, and non-persistent ones (e.g. position tables) keep their precision.
        keep_in_fp32_modules: patterns of names of buffers that stay fp32, or "auto" for the names that the model lists.
        norms_only: without a `buffer_dtype`, cast only the running statistics of torch's norms, which torch requires in
            the dtype of their weights.
    """

    def __init__(
        self,
        model: nn.Module,
        param_dtype: torch.dtype,
        buffer_dtype: torch.dtype | None,
        keep_in_fp32_modules: Literal["auto"] | list[str],
        norms_only: bool = False,
    ) -> None:
        self._param_dtype, self._buffer_dtype, self._norms_only = param_dtype, buffer_dtype, norms_only
        patterns = (
            [_glob(name) for name in keep_in_fp32_modules]
            if keep_in_fp32_modules != "auto"
            else list(_fp32_patterns_of_model(model, param_dtype))
        )
        self._fp32_pattern = re.compile("|".join(patterns)) if patterns else None

    def dtype_of(self, prefix: str, module: nn.Module, name: str, buffer: torch.Tensor) -> torch.dtype | None:
        """Return the dtype of the buffer `name` of the module at `prefix`; None: unchanged."""
        if not is_castable(buffer.dtype) or is_router_bias(module, name):
            return None
        if self._fp32_pattern is not None and self._fp32_pattern.search(f"{prefix}.{name}" if prefix else name):
            return torch.float32
        if self._buffer_dtype is not None or name in module._non_persistent_buffers_set:
            return self._buffer_dtype
        if self._norms_only and not isinstance(module, _NORMS):
            return None
        return self._param_dtype


def _glob(name: str) -> str:
    return re.escape(name).replace(r"\*", ".*")


def _fp32_patterns_of_model(model: nn.Module, param_dtype: torch.dtype) -> Iterator[str]:
    """Yield patterns of the names that transformers models in `model` keep in fp32.

    Names in `_keep_in_fp32_modules_strict` apply to both 16-bit dtypes, names in `_keep_in_fp32_modules` only to fp16.
    """
    lists = ["_keep_in_fp32_modules_strict"] + (["_keep_in_fp32_modules"] if param_dtype == torch.float16 else [])
    for prefix, module in model.named_modules():
        for name in (name for one in lists for name in getattr(module, one, None) or ()):
            yield rf"^{re.escape(prefix)}\..*{_glob(name)}" if prefix else _glob(name)


class BufferSynchronizer:
    """Synchronizer of a model's buffers. The constructor casts, moves and broadcasts them. Collective.

    If a rank changed a buffer before a step, buffers are broadcast at the next training forward, or at the next step if
    a rank runs no forward before it.

    Args:
        model: the model.
        mesh: the ranks of the model. Data ranks of dense parameters share the buffers of dense modules; data ranks of
            experts share the buffers of their experts.
        device: device to move the buffers to.
        dtype_policy: dtypes of floating-point buffers; None: unchanged.
        sync_point: function that waits until all ranks are about to broadcast, and meanwhile joins the collectives of
            ranks that run a forward which this rank does not run.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        device: torch.device,
        dtype_policy: BufferDtypePolicy | None,
        sync_point: Callable[[], None],
    ) -> None:
        self._model, self._mesh, self._sync_point = model, mesh, sync_point
        for prefix, module in model.named_modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    dtype = dtype_policy.dtype_of(prefix, module, name, buffer) if dtype_policy is not None else None
                    module._buffers[name] = as_writable(buffer.to(device=device, dtype=dtype))
        self._synced_versions: list[tuple[int, int]] = []
        self._stale = False
        self.broadcast()

    def has_changed(self) -> bool:
        """Return True if this rank's buffers changed since the last synchronization."""
        return self._versions() != self._synced_versions

    def mark_synchronized(self) -> None:
        """Record that all ranks made the same changes, so that nothing has to be sent."""
        self._synced_versions = self._versions()

    def mark_stale(self) -> None:
        """Record that some rank's buffers changed, so that `broadcast_if_stale` broadcasts all buffers."""
        self._stale = True

    def broadcast_if_stale(self) -> None:
        """Broadcast all buffers if they are marked stale. Collective: all ranks must have the same mark."""
        if self._stale:
            self._sync_point()
            self.broadcast()

    def broadcast(self) -> None:
        """Make all buffers equal to those of the first rank that shares them. Collective."""
        _replace_inference_buffers(self._model)
        of_experts = set(sharded_expert_modules(self._model))
        dense = [module for module in self._model.modules() if module not in of_experts]
        experts = [module for module in self._model.modules() if module in of_experts]
        for modules, group in ((dense, self._mesh.dense.data), (experts, self._mesh.experts.data)):
            if group.size > 1:
                broadcast_sparse_buffers(modules, group)
                _broadcast_dense(modules, group)
        self._stale = False
        self._synced_versions = self._versions()

    def _versions(self) -> list[tuple[int, int]]:
        # Inference tensors count no changes. A forward in inference mode registers them as new objects.
        return [(id(buffer), 0 if buffer.is_inference() else buffer._version) for buffer in self._model.buffers()]


def modules_with_saved_buffers(model: nn.Module, mesh: Mesh) -> set[nn.Module]:
    """Return the modules whose buffers this rank saves. Each buffer is saved by one rank.

    The first rank of a pipeline stage saves the buffers of all its modules. Buffers of experts that this first rank
    lacks are saved by the first rank that has these experts.
    """
    if mesh.first_of_stage:
        return set(model.modules())
    return set(sharded_expert_modules(model)) if mesh.experts.data.index == mesh.tp.index == 0 else set()


def _replace_inference_buffers(model: nn.Module) -> None:
    """Replace buffers that were created in `torch.inference_mode` by copies, since they can't be changed outside it."""
    copies: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_inference():
                module._buffers[name] = copies.setdefault(id(buffer), buffer.clone())


def _broadcast_dense(modules: list[nn.Module], group: RankGroup) -> None:
    found = {id(buffer): buffer for module in modules for buffer in module._buffers.values() if buffer is not None}
    kinds: dict[torch.dtype, list[torch.Tensor]] = {}
    for buffer in found.values():
        if buffer.layout is torch.strided:
            kinds.setdefault(buffer.dtype, []).append(buffer)
    for buffers in kinds.values():
        flat = torch.cat([buffer.detach().reshape(-1) for buffer in buffers])
        group.broadcast(flat.view(torch.uint8))
        with torch.no_grad():
            for buffer, part in zip(buffers, flat.split([b.numel() for b in buffers]), strict=True):
                buffer.copy_(part.view(buffer.shape))


def broadcast_sparse_buffers(modules: Iterable[nn.Module], group: RankGroup) -> None:
    """Replace sparse buffers by those of the first rank. Ranks may have different numbers of stored elements.

    Collective.
    """
    received: dict[int, torch.Tensor] = {}
    for module in modules:
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.layout is not torch.strided:
                if id(buffer) not in received:
                    values = group.broadcast_object(buffer.detach().cpu())
                    received[id(buffer)] = buffer if group.index == 0 else values.to(buffer.device)
                module._buffers[name] = received[id(buffer)]


def as_writable(buffer: torch.Tensor) -> torch.Tensor:
    """Return the buffer, or a copy if elements share memory (`expand`): torch refuses to write to such a tensor."""
    if buffer.layout is not torch.strided:
        return buffer
    shares = any(stride == 0 and size > 1 for stride, size in zip(buffer.stride(), buffer.shape, strict=True))
    return buffer.contiguous() if shares else buffer


def require_dense_buffers(model: nn.Module) -> None:
    """Check that all persistent buffers can be saved.

    Raises:
        CheckpointError: a persistent buffer is sparse.
    """
    for name, buffer in persistent_buffers(model, set(model.modules())).items():
        if buffer.layout is not torch.strided:
            raise CheckpointError(
                f"{name.partition('/')[2]!r} is a buffer of the layout {buffer.layout}, which a checkpoint cannot "
                "hold; register it with persistent=False, or register its indices and values as buffers"
            )


def persistent_buffers(model: nn.Module, modules: set[nn.Module]) -> dict[str, torch.Tensor]:
    """Return the persistent buffers of `modules` by their name in a checkpoint, `buffer/...`."""
    tensors = {}
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items() if module in modules else ():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                tensors[f"buffer/{prefix}.{name}" if prefix else f"buffer/{name}"] = buffer
    return tensors
