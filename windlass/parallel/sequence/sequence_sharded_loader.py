"""Data loader that shards batches along the sequence, before they reach the device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from windlass.base.errors import DataError
from windlass.parallel.sequence.apply_sequence_parallel import SequenceParallel


class SequenceShardedLoader:
    """Data loader of this rank's part of each batch, with its `SequenceShard`.

    The model does not shard such a batch again. Ranks along sp read the same samples, because samplers divide samples
    among the data-loading axes, and sp is not one of them. Labels are returned as `labels` and as `shift_labels`, as
    `shard_batch` does.

    Args:
        loader: yields dicts, the keyword arguments of the model. With `broadcast_from_first` only the loader of the
            first rank along sp is used; the loaders of other ranks may be None.
        sequence_parallel: sequence parallelism of the model that consumes the batches (`sequence_parallel_of(model)`).
        broadcast_from_first: the first rank along sp reads and broadcasts its batches. Collective at every step.
        device: device of the broadcast, for process groups without support for CPU tensors.

    Raises:
        DataError: a rank that reads has no loader.
    """

    def __init__(
        self,
        loader: Iterable[dict[str, Any]] | None,
        sequence_parallel: SequenceParallel,
        *,
        broadcast_from_first: bool = False,
        device: torch.device | None = None,
    ) -> None:
        if loader is None and not (broadcast_from_first and sequence_parallel.axis.index > 0):
            raise DataError(
                "this rank has no loader; pass one on every rank, or broadcast_from_first=True and one on the first"
            )
        self.loader: Any = loader
        self._sequence_parallel, self._broadcast_from_first, self._device = (
            sequence_parallel,
            broadcast_from_first,
            device,
        )

    def __len__(self) -> int:
        if self.loader is None:
            raise TypeError("only the first rank along sp has a loader, and knows its length; read len() there")
        return len(self.loader)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in self._receive_batches() if self._broadcast_from_first else self.loader:
            local = self._sequence_parallel.shard_batch(dict(batch))
            yield {name: _clone_if_view(value) for name, value in local.items()}

    def _receive_batches(self) -> Iterator[dict[str, Any]]:
        """Receive the batches of the first rank along sp: first the shapes, then tensor by tensor."""
        axis = self._sequence_parallel.axis
        batches = iter(self.loader) if axis.index == 0 else iter(())
        while True:
            batch = next(batches, None) if axis.index == 0 else None
            specs = axis.all_gather_object(
                None if batch is None else {name: _describe(value) for name, value in batch.items()}
            )
            if specs[0] is None:
                return
            full = {}
            for name, described in specs[0].items():
                if not isinstance(described, _TensorMeta):
                    full[name] = described
                    continue
                own = batch[name] if batch is not None else torch.empty(described.shape, dtype=described.dtype)
                full[name] = axis.broadcast(own.to(self._device or own.device).contiguous())
            yield full

    def set_epoch(self, epoch: int) -> None:
        """Call `set_epoch` of the loader, if it has one."""
        if hasattr(self.loader, "set_epoch"):
            self.loader.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the loader; empty if it has none."""
        found: dict[str, Any] = self.loader.state_dict() if hasattr(self.loader, "state_dict") else {}
        return found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state into the loader, which continues from there; no effect without a method `load_state_dict`."""
        if hasattr(self.loader, "load_state_dict"):
            self.loader.load_state_dict(state)

    def check(self, state: dict[str, Any]) -> None:
        """Call `check` of the loader, if it has one."""
        if hasattr(self.loader, "check"):
            self.loader.check(state)


class _TensorMeta:
    """Shape and dtype of a tensor that a rank is about to receive."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype


def _describe(value: Any) -> Any:
    return _TensorMeta(value) if isinstance(value, torch.Tensor) else value


def _clone_if_view(value: Any) -> Any:
    """Clone a view, because a view would keep the full batch in memory."""
    if not isinstance(value, torch.Tensor):
        return value
    return value if value.untyped_storage().nbytes() == value.nbytes else value.clone()
