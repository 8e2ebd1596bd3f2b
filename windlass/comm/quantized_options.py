"""Options and error feedback of quantized reductions, see [Note: quantized messages]."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from windlass.comm.rank_group import RankGroup


@dataclass(frozen=True)
class LocoOptions:
    """Options of the error feedback of quantized gradients (`zeropp_loco_param`).

    Attributes:
        err_beta: weight of the previous error.
        reset_t: number of reductions of a unit after which its errors are set to zero.
    """

    err_beta: float = 0.8
    reset_t: int = 1024


@dataclass(frozen=True)
class QuantizedGradients:
    """Options of quantized reductions.

    Attributes:
        inside, across: codecs inside a node, and between nodes.
        loco: options of error feedback; None: no error feedback.
    """

    inside: str = "int8"
    across: str = "int4"
    loco: LocoOptions | None = None


class ErrorStorage(Protocol):
    """Memory of another tier that holds the errors of one lane (the reductions of one gradient) between reductions."""

    def fetch(self) -> torch.Tensor:
        """Return the errors `[numel]` on the device, zeros at first."""
        ...

    def put(self, errors: torch.Tensor) -> None:
        """Start to store the errors that `fetch` returned. They must not change afterwards."""
        ...

    def rescale(self, factor: float) -> None:
        """Multiply the errors by `factor`."""
        ...


class LaneErrors:
    """Error feedback of one lane of a transport, which is the sequence of reductions of one gradient.

    Each element of the gradient has one error, because a rank sends each element of the other shards once: in the first
    or in the second hop.

    Attributes:
        is_open: True if the lane has errors: from the first reduction or from `open` on, until `forget`.
        reductions: `[parts]` int64, the number of reductions of each part. The lane is one part until `divide`.
        storage: holds the errors between reductions; None: they stay on the device.
    """

    def __init__(self) -> None:
        self.is_open = False
        self._flat: torch.Tensor | None = None
        self.reductions = torch.zeros(1, dtype=torch.int64)
        self.storage: ErrorStorage | None = None
        self._parts: list[slice] = [slice(None)]

    def divide(self, parts: list[slice]) -> None:
        """Count the reductions of these parts separately, because a checkpoint may hold a different number for each."""
        if self._parts != parts:
            self._parts, self.reductions = parts, self.reductions[:1].repeat(len(parts))

    def open(self) -> None:
        """Set `is_open`: the lane has errors from now on, zeros at first."""
        self.is_open = True

    def flat(self, numel: int, device: torch.device) -> torch.Tensor:
        """Return the errors `[numel]` in float32, which stay on the device. Only without `storage`."""
        assert self.storage is None
        if self._flat is None:
            self._flat = torch.zeros(numel, dtype=torch.float32, device=device)
        return self._flat

    def begin(self, options: LocoOptions, numel: int, device: torch.device) -> torch.Tensor:
        """Count a reduction, and return the errors `[numel]`, which the caller updates in place and passes to `end`.

        The errors of a part are set to zero first if its number of earlier reductions is a multiple of `reset_t`.
        """
        self.open()
        flat = self.flat(numel, device) if self.storage is None else self.storage.fetch()
        for part, reductions in zip(self._parts, self.reductions.tolist(), strict=True):
            if reductions and reductions % options.reset_t == 0:
                flat[part].zero_()
        self.reductions += 1
        return flat

    def end(self, errors: torch.Tensor) -> None:
        """Store the new errors of the reduction that `begin` counted."""
        if self.storage is not None:
            self.storage.put(errors)

    def rescale(self, factor: float) -> None:
        """Multiply the errors by `factor`."""
        if self.storage is not None:
            self.storage.rescale(factor)
        elif self._flat is not None:
            self._flat.mul_(factor)

    def forget(self) -> None:
        """Discard errors and counts, as before the first reduction. The owner of `storage` resets the storage."""
        self.is_open, self._flat = False, None
        self.reductions.zero_()


def ranks_of_node(group: RankGroup, node_size: int) -> int:
    """Return the number of the group's ranks on a node: `node_size` if it divides the group's size, else all ranks."""
    return node_size if group.size % node_size == 0 else group.size


def ranks_of_host(ranks: Sequence[int], host_size: int) -> int:
    """Return how many of the global ranks `ranks` are on the host of `ranks[0]`, with `host_size` ranks per host.

    Ranks of a group need not be neighbours: numbers of those along the data axis differ by the tensor-parallel size.
    """
    return sum(rank // host_size == ranks[0] // host_size for rank in ranks)
