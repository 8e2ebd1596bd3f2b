"""Tokens of one step as flat tensors, and the interface of the code that runs them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

IntValues = npt.NDArray[np.int64] | npt.NDArray[np.int32] | torch.Tensor


class BatchValues(NamedTuple):
    """Values of a `StepBatch`, in the order of its arguments."""

    token_ids: IntValues
    positions: IntValues
    query_start: IntValues
    context_lengths: IntValues
    block_table: IntValues
    slots: IntValues
    logit_rows: IntValues


class StepBatch:
    """Input of a forward. Sequences are concatenated, without padding.

    The values may be given as NumPy arrays, which become tensors when they are first read: a decode step of a small
    model takes a few milliseconds, and making seven tensors takes tenths of them.

    Args:
        token_ids, positions: int64 `[tokens]`; the position of a token is its index in its sequence.
        query_start: int32 `[sequences + 1]`; sequence `s` has the tokens `[query_start[s], query_start[s + 1])`.
        context_lengths: int32 `[sequences]`; number of computed tokens of each sequence after the step.
        block_table: int32 `[sequences, max_blocks]`, rows padded with 0.
        slots: int64 `[tokens]`; place of each token in the KV cache, `block * block_size + offset`.
        logit_rows: int64 `[rows]`; indices of the tokens that need logits, in ascending order.
        sequence_ids: id of each sequence.
        adapters: name of each sequence's LoRA adapter, or None; an empty list: no sequence has one.

    Attributes:
        values: the values as they were given.
    """

    def __init__(
        self,
        token_ids: IntValues,
        positions: IntValues,
        query_start: IntValues,
        context_lengths: IntValues,
        block_table: IntValues,
        slots: IntValues,
        logit_rows: IntValues,
        sequence_ids: list[int],
        adapters: Sequence[str | None] = (),
    ) -> None:
        self.values = BatchValues(token_ids, positions, query_start, context_lengths, block_table, slots, logit_rows)
        self.sequence_ids, self.adapters = sequence_ids, list(adapters)

    @cached_property
    def token_ids(self) -> torch.Tensor:
        return torch.as_tensor(self.values.token_ids)

    @cached_property
    def positions(self) -> torch.Tensor:
        return torch.as_tensor(self.values.positions)

    @cached_property
    def query_start(self) -> torch.Tensor:
        return torch.as_tensor(self.values.query_start)

    @cached_property
    def context_lengths(self) -> torch.Tensor:
        return torch.as_tensor(self.values.context_lengths)

    @cached_property
    def block_table(self) -> torch.Tensor:
        return torch.as_tensor(self.values.block_table)

    @cached_property
    def slots(self) -> torch.Tensor:
        return torch.as_tensor(self.values.slots)

    @cached_property
    def logit_rows(self) -> torch.Tensor:
        return torch.as_tensor(self.values.logit_rows)

    @property
    def num_tokens(self) -> int:
        return len(self.values.token_ids)

    @property
    def is_decode(self) -> bool:
        """True if each sequence has one token, and needs the logits of this token."""
        return self.num_tokens == len(self.sequence_ids) == len(self.values.logit_rows)

    def to(self, device: torch.device) -> StepBatch:
        """Return the batch on a device. Copies from the host do not wait for the device."""

        def move(value: IntValues) -> torch.Tensor:
            tensor = torch.as_tensor(value)
            if tensor.device == device:
                return tensor
            tensor = tensor.pin_memory() if device.type == "cuda" else tensor
            return tensor.to(device, non_blocking=True)

        if device.type == "cpu":
            return self
        moved: dict[str, Any] = {name: move(value) for name, value in self.values._asdict().items()}
        return StepBatch(**moved, sequence_ids=self.sequence_ids, adapters=self.adapters)

    def split(self, most: int) -> list[StepBatch]:
        """Return batches of at most `most` tokens, to be run in order instead of this batch.

        A sequence that is split continues in the next batch, which reads the keys and values that the previous batch
        wrote.
        """
        starts, parts = self.query_start.tolist(), []
        for begin in range(0, self.num_tokens, most):
            end = min(begin + most, self.num_tokens)
            chosen = [s for s in range(len(self.sequence_ids)) if starts[s] < end and starts[s + 1] > begin]
            index = torch.tensor(chosen, device=self.query_start.device)
            ends = self.query_start[index + 1].clamp(max=end)
            rows = self.logit_rows
            part = StepBatch(
                self.token_ids[begin:end],
                self.positions[begin:end],
                torch.cat([self.query_start[index].clamp(min=begin), ends[-1:]]) - begin,
                (self.positions[ends.long() - 1] + 1).to(self.context_lengths.dtype),
                self.block_table[index],
                self.slots[begin:end],
                rows[(rows >= begin) & (rows < end)] - begin,
                [self.sequence_ids[s] for s in chosen],
                [self.adapters[s] for s in chosen] if self.adapters else [],
            )
            parts.append(part)
        return parts


SavedBlocks = list[torch.Tensor]
"""Content of some blocks in host memory: for each tensor of the KV cache a tensor `[blocks, ...]`."""


class AdapterStore(Protocol):
    """LoRA adapters of a model by name."""

    @property
    def names(self) -> list[str]: ...

    def add(self, name: str, directory: str | Path) -> None:
        """Load an adapter of peft; see `LoraAdapters.add`."""
        ...

    def remove(self, name: str) -> None:
        """Unload an adapter; see `LoraAdapters.remove`."""
        ...

    def check_name(self, name: str) -> None:
        """Raise a RequestError if there is no adapter of this name."""
        ...

    def cache_salt(self, name: str) -> bytes:
        """Return bytes that separate the prefix cache of this adapter from those of others."""
        ...


class ModelRunner(Protocol):
    """Forward of a model over batches of sequences.

    Attributes:
        model: the module.
        description: description of the way in which the model runs, for the log.
        vocab_size: number of logits of a token.
        block_size: tokens of a KV block.
        num_blocks: blocks of the KV cache.
        block_nbytes: bytes of a block, all layers together; 0 if the model keeps its own cache.
        computes_drafts: True if a step can compute several new tokens of one sequence after its prompt.
        lora: adapters of the model; None: requests cannot use adapters.
        is_asynchronous: True if `run` returns before the logits are computed, so that the next step can be queued.
        can_repeat: True if the tokens of a batch can be computed again after `run` has raised an error, without blocks
            (`block_nbytes` is 0) from the first token on; False if other ranks take part in the batch.
    """

    model: nn.Module
    description: str
    vocab_size: int
    block_size: int
    num_blocks: int
    block_nbytes: int
    computes_drafts: bool
    can_repeat: bool

    @property
    def is_asynchronous(self) -> bool: ...

    @property
    def lora(self) -> AdapterStore | None: ...

    def run(self, batch: StepBatch) -> torch.Tensor:
        """Return the logits `[rows, vocab_size]` of `batch.logit_rows`, float32, valid until the next call."""
        ...

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks, given as pairs of source and destination."""
        ...

    def save_blocks(self, blocks: Sequence[int]) -> SavedBlocks:
        """Return copies of blocks in host memory."""
        ...

    def restore_blocks(self, blocks: Sequence[int], saved: SavedBlocks) -> None:
        """Write saved values into blocks, which may differ from the original ones."""
        ...

    def release(self, sequence_id: int) -> None:
        """Free the runner's state of a sequence; do nothing for a paged cache."""
        ...

    def fork(self, sequence_id: int, new_ids: Sequence[int]) -> None:
        """Let new sequences continue from the computed tokens of another one."""
        ...

    def use_idle_time(self) -> bool:
        """Do some milliseconds of work that makes later steps faster; return False if there is none."""
        ...

    def refresh_weights(self) -> None:
        """Pack the weights of a live module (one that is still trained) again, after they have changed."""
        ...

    def close(self) -> None:
        """Free the KV cache and packed weights, and restore the model's attention function."""
        ...


@runtime_checkable
class PipelinedRunner(ModelRunner, Protocol):
    """Runner that computes several steps, of different sequences, at the same time.

    Attributes:
        depth: largest number of started steps that are not finished.
    """

    depth: int

    def start(self, batch: StepBatch) -> None:
        """Start the forward of a batch. None of its sequences may be in another unfinished step."""
        ...

    def finish(self) -> torch.Tensor:
        """Return the logits of the oldest batch that was started, as `run` does."""
        ...
