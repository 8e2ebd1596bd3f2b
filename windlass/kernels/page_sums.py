"""Checksums of the pages of a buffer, compared and renewed while an update has the pages in the CPU cache."""

from __future__ import annotations

from enum import IntEnum

import torch


class PageState(IntEnum):
    """Result of the comparison of one page. The numbers are those in windlass/kernels/native/page_sums.hpp."""

    UNREAD = 0
    INTACT = 1
    DAMAGED = 2


class PageSums:
    """Checksums (CRC-32C) of memory that was read from a disk without a check, and will be written again.

    Args:
        memory: `[pages * 4096]` uint8, page-aligned.
        expected: `[pages]` int32, checksums of the pages as they were written.

    Attributes:
        renewed: `[pages]` int32, checksums of the present contents of the compared pages.
        states: `[pages]` uint8, a `PageState` for each page.
    """

    def __init__(self, memory: torch.Tensor, expected: torch.Tensor) -> None:
        self.memory, self.expected = memory, expected
        self.renewed, self.states = torch.empty_like(expected), torch.zeros(expected.numel(), dtype=torch.uint8)
        self._version = memory._version

    @property
    def addresses(self) -> tuple[int, int, int, int, int]:
        """For native code: address and count of the pages, and addresses of `expected`, `renewed` and `states`."""
        tables = (self.expected, self.renewed, self.states)
        return (self.memory.data_ptr(), self.states.numel(), *(table.data_ptr() for table in tables))  # type: ignore[return-value]

    @property
    def is_current(self) -> bool:
        """True if no operation of torch has changed the memory. Native updates renew the checksums of their changes."""
        return self.memory._version == self._version

    def first_damaged(self) -> int | None:
        """Return the number of the first damaged page; None if no compared page is damaged."""
        damaged = (self.states == PageState.DAMAGED).nonzero()
        return int(damaged[0]) if len(damaged) else None
