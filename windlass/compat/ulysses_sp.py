"""Names and arguments of `deepspeed.runtime.sequence_parallel.ulysses_sp`: sharding of the sequences of a
model and of a data loader.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from windlass.base.errors import ConfigError, DataError
from windlass.comm.mesh_axis import MeshAxis, axis_from_process_group
from windlass.comm.mesh_shape import AXES, DATA_LOADING_AXES, MeshShape
from windlass.comm.rank_group import create_rank_group
from windlass.parallel.sequence.apply_sequence_parallel import (
    apply_sequence_parallel,
    derivation_along,
    sequence_parallel_of,
)
from windlass.parallel.sequence_loss import IGNORE_INDEX, shift_targets


class SequenceParallelGroups:
    """Process groups of neighbouring ranks along sp and of the data ranks, for `initialize(mpu=...)`.

    `UlyssesSPAttentionHF.register_with_transformers` returns such an object. The construction is collective over all
    ranks.

    Args:
        size: number of ranks along sp.
        only_training: shard sequences in train mode only; in eval mode every rank computes full sequences.

    Raises:
        ConfigError: `size` does not divide the number of ranks.
    """

    def __init__(self, size: int, *, only_training: bool = False) -> None:
        world = dist.get_world_size()
        if size < 1 or world % size:
            raise ConfigError(
                f"sequence_parallel_size = {size} does not divide the {world} ranks; write one of "
                f"{[n for n in range(1, world + 1) if world % n == 0]}"
            )
        grid = MeshShape(dp_shard=world // size, sp=size)
        self._only_training = only_training
        self.sp = _make_axis("sp", grid.groups("sp"))
        self.data_loading = _make_axis("dp", grid.groups(*DATA_LOADING_AXES))
        self.data = _make_axis("dp x sp", grid.groups(*AXES))
        self.model_parallel = _make_axis("tp", grid.groups("tp"))

    shards_model = True  # `initialize(mpu=...)` calls `apply`

    def apply(self, model: Any) -> None:
        """Shard the sequences of `model` unless they are sharded already.

        Each rank's batches must contain only its own tokens.
        """
        if self.sp.size > 1 and sequence_parallel_of(model) is None:
            apply_sequence_parallel(model, self.sp, pre_sharded=True, only_training=self._only_training)

    def __getattr__(self, name: str) -> Any:
        """Return the function `get_KIND_group`, `get_KIND_rank` or `get_KIND_world_size`, for a KIND in `_GROUPS`."""
        for words, axis in _GROUPS.items():
            what = name.removeprefix(f"get_{words}_")
            if what != name and what in _GETTERS:
                found = self.__dict__[axis]
                return lambda: _GETTERS[what](found)
        raise AttributeError(f"{type(self).__name__} has no {name}")


_GROUPS = {
    "sequence_parallel": "sp",
    "data_parallel": "data_loading",
    "sequence_data_parallel": "data",
    "model_parallel": "model_parallel",
    "tensor_model_parallel": "model_parallel",
}
_GETTERS = {
    "group": lambda axis: axis.group.process_group,
    "rank": lambda axis: axis.index,
    "world_size": lambda axis: axis.size,
}


def _make_axis(name: str, partition: list[tuple[int, ...]]) -> MeshAxis:
    """Create all groups of a partition of the ranks, and return this rank's group as an axis. Collective."""
    return MeshAxis(name, create_rank_group(partition))


class UlyssesSPAttentionHF:
    """DeepSpeed's entry point for sequence parallelism of transformers models."""

    @classmethod
    def register_with_transformers(
        cls,
        model_name_or_path: Any,
        core_attn_implementation: str = "sdpa",
        sequence_parallel_size: int = 1,
        micro_batch_size: int = 1,
        seq_length: int | None = None,
        seq_length_is_variable: bool = True,
        disable_in_eval: bool = False,
        max_length: int | None = None,
    ) -> SequenceParallelGroups:
        """Shard the sequences of a model over neighbouring ranks. Collective over all ranks.

        Args:
            model_name_or_path: the model; if it is a name or path, pass the model to `apply` of the result.
            core_attn_implementation: any name but "eager", which needs a mask of all pairs of tokens. The name has no
                other effect: torch's kernels compute the attention.
            sequence_parallel_size: number of ranks along sp.
            micro_batch_size, seq_length, seq_length_is_variable, max_length: ignored; any length works.
            disable_in_eval: do not shard sequences in eval mode; every rank then computes full sequences.

        Raises:
            ConfigError: the size does not divide the number of ranks, or the implementation is "eager".
            ModelError: the model's sequences cannot be sharded.
        """
        del micro_batch_size, seq_length, seq_length_is_variable, max_length
        if core_attn_implementation in ("eager", "paged|eager"):
            raise ConfigError(
                f'core_attn_implementation = "{core_attn_implementation}" needs a mask of all pairs of tokens, '
                'which sequence parallelism does not build; write "sdpa"'
            )
        groups = SequenceParallelGroups(sequence_parallel_size, only_training=disable_in_eval)
        if isinstance(model_name_or_path, nn.Module):
            groups.apply(model_name_or_path)
        return groups


class UlyssesSPDataLoaderAdapter:
    """Adapter for a loader that yields different samples on each rank.

    The ranks along sp exchange one batch each. The adapter then yields, for each rank's batch in turn, this rank's part
    of it. `labels` become `shift_labels`. Missing `position_ids` are computed as the model that is sharded over the
    group computes them, or count from 0 without such a model. Collective.

    Args:
        dl: yields dicts of tensors `[samples, tokens, ...]` and of other values.
        sp_rank, sp_world_size: rank and size of `sp_group`.
        sp_group: the ranks along sp.
        device: device of the exchange.
        pad_to_sp_multiple: pad sequences, so that all parts have the same length.
        pad_token_id: padding of `input_ids`.

    Raises:
        DataError: a batch has no `input_ids` or `labels`, or fewer tokens than ranks, or the batches of the ranks have
            different keys.
    """

    def __init__(
        self,
        dl: Iterable[dict[str, Any]],
        sp_rank: int,
        sp_group: dist.ProcessGroup,
        sp_world_size: int,
        device: torch.device | str,
        pad_to_sp_multiple: bool = True,
        pad_token_id: int = 0,
    ) -> None:
        self.dl: Any = dl
        self.device, self.sp_rank, self.sp_group, self.sp_world_size = device, sp_rank, sp_group, sp_world_size
        self._axis, self._pad_to_multiple, self._pad_token = (
            axis_from_process_group(sp_group),
            pad_to_sp_multiple,
            pad_token_id,
        )
        self._batches: Iterator[dict[str, Any]] | None = None
        self._shards: deque[dict[str, Any]] = deque()

    def __len__(self) -> int:
        return len(self.dl) * self.sp_world_size

    def __iter__(self) -> UlyssesSPDataLoaderAdapter:
        return self

    def __next__(self) -> dict[str, Any]:
        if not self._shards:
            if self._batches is None:  # made at the first batch, so that the script can set its sampler's epoch before
                self._batches = iter(self.dl)
            try:
                batch = next(self._batches)
            except StopIteration:
                self._batches = None
                raise
            self._shards.extend(self._shard_batch(whole) for whole in self._all_gather_batches(batch))
        return self._shards.popleft()

    def _all_gather_batches(self, batch: dict[str, Any]) -> list[dict[str, Any]]:
        """All-gather the batches of the ranks."""
        missing = [name for name in ("input_ids", "labels") if not isinstance(batch.get(name), torch.Tensor)]
        if missing:
            raise DataError(f"a batch for sequence parallelism has the keys {sorted(batch)}; add tensors for {missing}")
        summaries = self._axis.all_gather_object(
            {k: (tuple(v.shape), v.dtype) if isinstance(v, torch.Tensor) else v for k, v in batch.items()}
        )
        keys = [sorted(summary) for summary in summaries]
        if any(one != keys[0] for one in keys):
            raise DataError(
                f"the batches of the ranks along sp have different keys: {' and '.join(map(str, keys))}; give all "
                "batches the same keys"
            )
        found: list[dict[str, Any]] = [{} for _ in summaries]
        for name in summaries[0]:  # in one order on all ranks
            value = batch[name]
            if not isinstance(value, torch.Tensor):
                for one, summary in zip(found, summaries, strict=True):
                    one[name] = summary[name]
                continue
            shapes = [summary[name][0] for summary in summaries]
            sizes = [torch.Size(shape).numel() for shape in shapes]
            flat = self._axis.all_gather(value.to(self.device).reshape(-1), 0, sizes)
            for one, part, shape in zip(found, flat.split(sizes), shapes, strict=True):
                one[name] = part.view(shape).to(value.device)
        return found

    def _shard_batch(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return this rank's part of a full batch. Changes `batch`."""
        samples, length = batch["input_ids"].shape[:2]
        if length < self.sp_world_size:
            raise DataError(
                f"a sequence of {length} tokens cannot be sharded over {self.sp_world_size} ranks; use longer ones"
            )
        if batch.get("position_ids") is None:
            derive = derivation_along(self.sp_group)
            counted = torch.arange(length, device=batch["input_ids"].device)
            batch["position_ids"] = (derive(batch) if derive is not None else counted).expand(samples, length)
        batch["shift_labels"] = shift_targets(batch.pop("labels"))
        more = -length % self.sp_world_size if self._pad_to_multiple else 0
        each, rest = divmod(length + more, self.sp_world_size)
        start = self.sp_rank * each + min(self.sp_rank, rest)
        stop = start + each + (self.sp_rank < rest)
        for name, value in batch.items():
            if not isinstance(value, torch.Tensor):
                continue
            if name == "position_ids" and value.shape[-1:] == (length,):  # `[..., samples or 1, tokens]`
                batch[name] = self._padded(name, value, more)[..., start:stop].clone()
            elif value.shape[:2] == (samples, length):
                batch[name] = self._padded(name, value, more)[:, start:stop].clone()
        return batch

    def _padded(self, name: str, value: torch.Tensor, more: int) -> torch.Tensor:
        if more == 0:
            return value
        if name == "position_ids":
            steps = torch.arange(1, more + 1, device=value.device, dtype=value.dtype)
            return torch.cat([value, value[..., -1:] + steps], dim=-1)
        filling = {"shift_labels": IGNORE_INDEX, "input_ids": self._pad_token}.get(name, 0)
        return functional.pad(value, (0, 0) * (value.dim() - 2) + (0, more), value=filling)
