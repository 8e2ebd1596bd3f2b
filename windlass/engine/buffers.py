"""Keeps module buffers (running statistics) equal on all ranks, by DistributedDataParallel's rule: rank 0's count."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn

from windlass.comm.groups import Group
from windlass.parallel.experts import is_bias

_NORMS = (nn.modules.batchnorm._NormBase,)


class BufferCasts:
    """Which dtype each floating-point buffer of a 16-bit model takes.

    Args:
        model: may name buffers that stay fp32, as models of transformers do.
        compute: dtype of the parameters.
        dtype: of all buffers (`data_types.buffer_dtype`). None: buffers of the saved state are cast to `compute` (a
            norm computes in one dtype), and the others (tables of positions) keep their precision.
        keep: patterns of names of buffers that are fp32, or "auto" for those that the model names.
        norms_only: without a `dtype`, cast the running statistics of torch's norms alone: torch computes them in the
            dtype of their weights and of no other.
    """

    def __init__(
        self,
        model: nn.Module,
        compute: torch.dtype,
        dtype: torch.dtype | None,
        keep: Literal["auto"] | list[str],
        norms_only: bool = False,
    ) -> None:
        self._compute, self._dtype, self._norms_only = compute, dtype, norms_only
        patterns = [_glob(name) for name in keep] if keep != "auto" else list(_named_by_model(model, compute))
        self._kept = re.compile("|".join(patterns)) if patterns else None

    def dtype_of(self, prefix: str, module: nn.Module, name: str, buffer: torch.Tensor) -> torch.dtype | None:
        """The dtype of the buffer `name` of the module at `prefix`; None: as it is."""
        if not buffer.is_floating_point() or is_bias(module, name):
            return None
        if self._kept is not None and self._kept.search(f"{prefix}.{name}" if prefix else name):
            return torch.float32
        if self._dtype is not None or name in module._non_persistent_buffers_set:
            return self._dtype
        if self._norms_only and not isinstance(module, _NORMS):
            return None
        return self._compute


def _glob(name: str) -> str:
    return re.escape(name).replace(r"\*", ".*")


def _named_by_model(model: nn.Module, compute: torch.dtype) -> Iterator[str]:
    """Patterns of what models of transformers inside `model` keep in fp32: some in both 16-bit dtypes, some in fp16."""
    lists = ["_keep_in_fp32_modules_strict"] + (["_keep_in_fp32_modules"] if compute == torch.float16 else [])
    for prefix, module in model.named_modules():
        for name in (name for one in lists for name in getattr(module, one, None) or ()):
            yield rf"^{re.escape(prefix)}\..*{_glob(name)}" if prefix else _glob(name)


class Buffers:
    """The buffers of a model. They are sent at the first training forward after a step, if anyone changed one.

    Args:
        model: whose buffers.
        data: the ranks that share them.
        device: where they shall be.
        casts: the dtypes that floating-point buffers take; None: all keep theirs.
        meet: waits until all ranks are about to send, and serves those that run a forward alone meanwhile.
    """

    def __init__(
        self,
        model: nn.Module,
        data: Group,
        device: torch.device,
        casts: BufferCasts | None,
        meet: Callable[[], None],
    ) -> None:
        self._model, self._data, self._meet = model, data, meet
        for prefix, module in model.named_modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    dtype = casts.dtype_of(prefix, module, name, buffer) if casts is not None else None
                    module._buffers[name] = buffer.to(device=device, dtype=dtype)
        self._seen: list[tuple[int, int]] = []
        self._stale = False
        self.send()

    def changed(self) -> bool:
        """Whether this rank's buffers changed since they were last equal."""
        return self._state() != self._seen

    def changed_alike(self) -> None:
        """What changed since `changed` was asked did so on all ranks: there is nothing to send."""
        self._seen = self._state()

    def invalidate(self) -> None:
        """Some rank's buffers changed: send them before the next training forward."""
        self._stale = True

    def before_forward(self) -> None:
        """Send rank 0's, if that is due. Collective then, and due on all ranks alike."""
        if self._stale:
            self._meet()
            self.send()

    def send(self) -> None:
        """Make all buffers equal to rank 0's. Collective."""
        kinds: dict[torch.dtype, list[torch.Tensor]] = {}
        for buffer in self._model.buffers():
            kinds.setdefault(buffer.dtype, []).append(buffer)
        if self._data.size > 1:
            for buffers in kinds.values():
                flat = torch.cat([buffer.detach().reshape(-1) for buffer in buffers])
                dist.broadcast(flat.view(torch.uint8), self._data.ranks[0], group=self._data.process_group)
                with torch.no_grad():
                    for buffer, part in zip(buffers, flat.split([b.numel() for b in buffers]), strict=True):
                        buffer.copy_(part.view(buffer.shape))
        self._stale = False
        self._seen = self._state()

    def _state(self) -> list[tuple[int, int]]:
        return [(id(buffer), buffer._version) for buffer in self._model.buffers()]
