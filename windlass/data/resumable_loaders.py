"""Loaders that resume at the exact sample: of packed token sequences, and of any torch dataset."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler

from windlass.base.errors import DataError
from windlass.data.resumable_samplers import EpochSampler, StreamSampler


class SequenceLoader:
    """Endless micro-batches of sequences, split from a token stream at multiples of `seq_len`.

    Args:
        tokens: `[tokens]` of any integer dtype, usually mapped from a file.
        digest: hash of the tokens; a resume with other data is refused.

    Raises:
        DataError: there are fewer than `seq_len` tokens.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        seq_len: int,
        micro_batch: int,
        *,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        digest: str = "",
    ) -> None:
        sequences = len(tokens) // seq_len
        if sequences < 1:
            raise DataError(
                f"the corpus has {len(tokens)} training tokens, fewer than one sequence of {seq_len}; "
                "give more text or a smaller --seq-len"
            )
        self._tokens, self._seq_len, self._micro_batch = tokens, seq_len, micro_batch
        self._rank, self._world_size = rank, world_size
        self._digest = digest
        self._sampler = StreamSampler(sequences, seed)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return self

    def __next__(self) -> dict[str, torch.Tensor]:
        """Return `input_ids` and `labels`, equal `[micro_batch, seq_len]` int64 ids.

        Causal models shift the labels themselves.
        """
        starts = self._sampler.next_batch(self._micro_batch, self._rank, self._world_size) * self._seq_len
        rows = np.stack([self._tokens[start : start + self._seq_len] for start in starts])
        ids = torch.from_numpy(rows.astype(np.int64))
        return {"input_ids": ids, "labels": ids}

    @property
    def epoch(self) -> float:
        """Number of passes over the corpus so far."""
        return self._sampler.consumed / self._sampler.length

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the stream, equal on all ranks; see [Note: sample order]."""
        return {"consumed": self._sampler.consumed, "seed": self._sampler.seed} | self._data_identity()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the position of `state`, on any number of ranks.

        Raises:
            DataError: the state is of another corpus or sequence length.
        """
        self.check(state)
        self._sampler = StreamSampler(self._sampler.length, int(state["seed"]), int(state["consumed"]))

    def check(self, state: dict[str, Any]) -> None:
        """Check a state as `load_state_dict` does, without loading it."""
        for name, here in self._data_identity().items():
            if state.get(name) != here:
                raise DataError(
                    f"cannot resume the data order: {name} was {state.get(name)!r} and is now {here!r}; "
                    "give the same data, tokenizer and --seq-len as before"
                )

    def _data_identity(self) -> dict[str, Any]:
        return {"digest": self._digest, "seq_len": self._seq_len, "sequences": self._sampler.length}


class EpochLoader:
    """torch DataLoader over this rank's part of a dataset. One iteration is one epoch and can be resumed inside it.

    Each complete iteration advances to the next epoch, and so to the next shuffle; `set_epoch` overrides that. After an
    interrupted iteration the next one restarts its epoch, as in torch, unless `load_state_dict` set a position.
    `load_state_dict` also moves a running iteration. The state after an interrupted iteration is the position after
    its last batch, since a script that ends there saves it to continue later.

    Iteration draws nothing from torch's global generator, from which a plain DataLoader draws its workers' seeds. So a
    run that resumes inside an epoch draws the same random numbers as an uninterrupted one.
    """

    def __init__(self, loader: DataLoader[Any], sampler: EpochSampler | None, micro_batch: int) -> None:
        self._loader, self._sampler, self._micro_batch = loader, sampler, micro_batch
        self.dataset = loader.dataset
        self.batch_size = micro_batch
        self._is_resumed = False
        self._iterations = 0

    def __len__(self) -> int:
        """Return the number of this rank's batches in a full epoch."""
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        if self._sampler is None:
            self._seed_workers(self._iterations)
            yield from self._loader
            return
        yield from self._rest_of_epoch(self._sampler)
        while self._is_resumed:  # `load_state_dict` was called after the last batch
            yield from self._rest_of_epoch(self._sampler)

    def _rest_of_epoch(self, sampler: EpochSampler) -> Iterator[Any]:
        sampler.seek(sampler.epoch, sampler.consumed if self._is_resumed else 0)
        self._is_resumed = False
        self._seed_workers(sampler.epoch)
        step = self._micro_batch * sampler.world_size
        batches = iter(self._loader)
        while not self._is_resumed:  # else the iterator would return batches of the old position
            try:
                batch = next(batches)
            except StopIteration:
                sampler.seek(sampler.epoch + 1)
                return
            # Count when the batch is returned: samples that workers have prefetched are read again after a resume.
            sampler.consumed += step
            yield batch

    def _seed_workers(self, number: int) -> None:
        self._iterations += 1
        if self._loader.generator is not None:
            rank = self._sampler.rank if self._sampler is not None else 0
            seed = torch.initial_seed() + (number << 20) + rank
            self._loader.generator.manual_seed(seed % (1 << 63))

    def set_epoch(self, epoch: int) -> None:
        """Move to the beginning of `epoch`, with its shuffle. Does nothing if it is the current epoch."""
        if self._sampler is not None and epoch != self._sampler.epoch:
            self._sampler.seek(epoch)
            self._is_resumed = False

    def state_dict(self) -> dict[str, int]:
        """Return the position in the epoch, equal on all ranks.

        Empty for an iterable dataset or a custom sampler, which have their own order.
        """
        if self._sampler is None:
            return {}
        sampler = self._sampler
        place = {"epoch": sampler.epoch, "consumed": sampler.consumed, "length": sampler.length}
        return {**place, "seed": sampler.seed, "shuffle": int(sampler.shuffle)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue at the position of `state`, on any number of ranks.

        Raises:
            DataError: the state is of a dataset of another length.
        """
        if self._sampler is None:
            return
        self.check(state)
        # the rest of the epoch keeps the order in which it began
        self._sampler.seed = state.get("seed", self._sampler.seed)
        self._sampler.shuffle = bool(state.get("shuffle", self._sampler.shuffle))
        self._sampler.seek(state["epoch"], state["consumed"])
        self._is_resumed = True

    def check(self, state: dict[str, int]) -> None:
        """Check a state as `load_state_dict` does, without loading it."""
        if self._sampler is not None and state.get("length") != self._sampler.length:
            raise DataError(
                f"cannot resume the data order: the dataset had {state.get('length')} samples and has "
                f"{self._sampler.length} now; give the same dataset"
            )


class CyclingLoader:
    """Endless iteration over a loader."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self._iterator = iter(loader)

    def __iter__(self) -> CyclingLoader:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._iterator)
        except StopIteration:
            self._iterator = iter(self.loader)
        try:
            return next(self._iterator)
        except StopIteration:
            raise DataError(
                "the repeated loader returns no batch; is the dataset smaller than one batch of all ranks?"
            ) from None

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state; empty if it has none."""
        found: dict[str, Any] = self.loader.state_dict() if hasattr(self.loader, "state_dict") else {}
        return found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the loader's state."""
        if hasattr(self.loader, "load_state_dict"):
            self.loader.load_state_dict(state)

    def check(self, state: dict[str, Any]) -> None:
        """Check a state with the loader's `check`, if the loader has one."""
        if hasattr(self.loader, "check"):
            self.loader.check(state)


def make_loader(
    dataset: Any,
    micro_batch: int,
    rank: int,
    world_size: int,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    seed: int = 0,
    drop_last: bool = False,
    *,
    shuffle: bool = True,
    num_workers: int = 0,
    pin_memory: bool = False,
    custom_sampler: Sampler[int] | None = None,
) -> EpochLoader:
    """Make a loader of this rank's micro-batches of `dataset`. Every rank reads an iterable dataset completely.

    Args:
        custom_sampler: sampler of this rank's samples; None: an `EpochSampler`, which makes the loader resumable.

    Raises:
        DataError: the dataset is empty.
    """
    sampler = None
    if not isinstance(dataset, IterableDataset) and custom_sampler is None:
        if len(dataset) == 0:
            raise DataError("training_data is empty: its length is 0")
        sampler = EpochSampler(len(dataset), rank, world_size, shuffle=shuffle, seed=seed, drop_last=drop_last)
    loader: DataLoader[Any] = DataLoader(
        dataset,
        batch_size=micro_batch,
        sampler=sampler if custom_sampler is None else custom_sampler,
        collate_fn=collate_fn,
        drop_last=drop_last,
        num_workers=num_workers,
        pin_memory=pin_memory,
        generator=torch.Generator(),
    )
    return EpochLoader(loader, sampler, micro_batch)
