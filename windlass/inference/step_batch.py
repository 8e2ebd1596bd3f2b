"""Tokens of one step as flat tensors, and the interface of the code that runs them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn


@dataclass
class StepBatch:
    """Input of a forward. Sequences are concatenated, without padding.

    Attributes:
        token_ids, positions: int64 `[tokens]`; the position of a token is its index in its sequence.
        query_start: int32 `[sequences + 1]`; sequence `s` has the tokens `[query_start[s], query_start[s + 1])`.
        context_lengths: int32 `[sequences]`; number of computed tokens of each sequence after the step.
        block_table: int32 `[sequences, max_blocks]`, rows padded with 0.
        slots: int64 `[tokens]`; place of each token in the KV cache, `block * block_size + offset`.
        logit_rows: int64 `[rows]`; indices of the tokens that need logits, in ascending order.
        sequence_ids: id of each sequence.
        adapters: name of each sequence's LoRA adapter, or None; an empty list: no sequence has one.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    query_start: torch.Tensor
    context_lengths: torch.Tensor
    block_table: torch.Tensor
    slots: torch.Tensor
    logit_rows: torch.Tensor
    sequence_ids: list[int]
    adapters: list[str | None] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]

    @property
    def is_decode(self) -> bool:
        """True if each sequence has one token, and needs the logits of this token."""
        return self.num_tokens == len(self.sequence_ids) == self.logit_rows.shape[0]

    def to(self, device: torch.device) -> StepBatch:
        """Return the batch on a device. Copies from the host do not wait for the device."""

        def move(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.device == device:
                return tensor
            tensor = tensor.pin_memory() if device.type == "cuda" else tensor
            return tensor.to(device, non_blocking=True)

        if device.type == "cpu":
            return self
        values: dict[str, Any] = {
            name: move(value) for name, value in vars(self).items() if isinstance(value, torch.Tensor)
        }
        return replace(self, **values)

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
        can_repeat: True if a batch can run again after `run` has raised an error; False if other ranks take part in the
            batch, or layers may have updated their state.
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
