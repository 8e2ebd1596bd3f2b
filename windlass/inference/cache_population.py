"""Allocation of a KV cache's pages before its blocks are used.

[Note: pages of the cache] The system allocates a page of the cache at the first write to the page: 0.2 ms for a huge
page, and up to 10 ms in a virtual machine if the host allocates the page too. A new page begins at the same token in
all layers, so one step would wait for the pages of all layers, 160 ms with 16 tensors. An engine without requests
therefore allocates pages ahead of the blocks in use.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from windlass.base.log import logger
from windlass.kernels.huge_pages import HUGE_PAGE, populate_pages

_LEAD_TOKENS = 16384
_LEAD_RATIO = 4


class CachePopulation:
    """Allocator of the pages of the blocks that will be used next. Blocks are first used in ascending order.

    Args:
        tensors: tensors of the cache in host memory, contiguous, with the blocks as their first dimension.
        block_size: tokens of a block.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], block_size: int) -> None:
        # smaller tensors are not on huge pages
        self._tensors = [tensor for tensor in tensors if tensor.nbytes >= HUGE_PAGE]
        self._lead = -(-_LEAD_TOKENS // block_size)
        self._num_blocks = min((len(tensor) for tensor in self._tensors), default=0)
        largest = max((tensor[0].nbytes for tensor in self._tensors), default=1)
        self._step = max(HUGE_PAGE // largest, 1)
        self._wanted = self._done = self._tensor = 0
        self.reach(0)

    @property
    def has_all(self) -> bool:
        """True if the pages of all blocks are to be allocated, so that `reach` changes nothing."""
        return self._wanted >= self._num_blocks

    def reach(self, block: int) -> None:
        """Record that blocks up to `block` are in use. `advance` then allocates the pages of all blocks up to
        16,384 tokens after `block`, or up to `4 * block` if that is more.
        """
        self._wanted = max(self._wanted, min(max(block + self._lead, _LEAD_RATIO * block), self._num_blocks))

    def advance(self) -> bool:
        """Allocate the next pages of one tensor. Return False if the blocks to prepare all have pages, or if the system
        cannot allocate pages in advance.
        """
        if self._done >= self._wanted:
            return False
        problem = populate_pages(self._tensors[self._tensor][self._done : self._done + self._step])
        if problem is not None:
            logger.debug("pages of the KV cache are allocated at their first use: %s", problem)
            self._wanted = self._num_blocks = 0
            return False
        self._tensor = (self._tensor + 1) % len(self._tensors)
        if self._tensor == 0:
            self._done += self._step
        return True

    def close(self) -> None:
        """Release the tensors."""
        self._tensors, self._wanted, self._num_blocks = [], 0, 0
