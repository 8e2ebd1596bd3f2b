"""Allocation of KV cache blocks: reference counts, copy-on-write, and the prefix cache.

[Note: KV blocks] A block holds keys and values of `block_size` consecutive tokens of one sequence, for all layers. A
block that is full of accepted tokens never changes, so sequences with the same prefix share it. Its key is a hash of
all tokens up to its end and of the sequence's cache salt. A cached block that no sequence holds keeps its content and
key until it is allocated again.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

BlockKey = bytes


class OutOfBlocksError(RuntimeError):
    """Error for an allocation of more blocks than are free. The scheduler prevents it."""


def hash_block(parent: BlockKey, token_ids: Sequence[int]) -> BlockKey:
    """Return the key of a full block, 16 bytes.

    The hash is cryptographic, so that no user can read blocks of another user through a collision.

    Args:
        parent: key of the previous block; for the first block, bytes that identify everything else on which keys
            and values depend, e.g. the adapter's `cache_salt`. Bytes after the first 64 are ignored.
        token_ids: tokens of the block, `[block_size]`.
    """
    return hashlib.blake2b(array("q", token_ids).tobytes(), key=parent[:64], digest_size=16).digest()


class BlockManager:
    """Reference-counted blocks with a prefix cache. Cached blocks are evicted in the order of their last release.

    Args:
        num_blocks: blocks of the KV cache.
        block_size: tokens of a block.
        prefix_caching: True: later sequences can share full blocks; False: `register` does nothing.
    """

    def __init__(self, num_blocks: int, block_size: int, *, prefix_caching: bool = True) -> None:
        self.num_blocks, self.block_size, self.prefix_caching = num_blocks, block_size, prefix_caching
        self._references = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))  # the first one is allocated next
        self._key_of: dict[int, BlockKey] = {}
        self._block_of: dict[BlockKey, int] = {}

    @property
    def num_free(self) -> int:
        """Number of blocks that no sequence holds, cached ones included."""
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def references(self, block: int) -> int:
        """Return the number of sequences that hold the block."""
        return self._references[block]

    def find_cached(self, keys: Iterable[BlockKey]) -> tuple[int, list[int]]:
        """Return the number of blocks of the longest cached prefix, and a list of those blocks that are in use."""
        cached, used = 0, list[int]()
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            cached += 1
            if self._references[block] > 0:
                used.append(block)
        return cached, used

    def acquire_cached(self, keys: Iterable[BlockKey]) -> list[int]:
        """Return the blocks of the longest cached prefix, each with one more reference."""
        blocks = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            self._hold(block)
            blocks.append(block)
        return blocks

    def allocate(self, count: int) -> list[int]:
        """Return `count` blocks of undefined content: first those without cached content, then cached ones, in the
        order of their last release.

        Raises:
            OutOfBlocksError: fewer blocks are free; nothing is allocated.
        """
        if count > len(self._free):
            raise OutOfBlocksError(f"{count} KV blocks are needed and {len(self._free)} of {self.num_blocks} are free")
        blocks = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            self._forget(block)
            self._references[block] = 1
            blocks.append(block)
        return blocks

    def fork(self, blocks: Sequence[int]) -> list[int]:
        """Return the same blocks, each with one more reference."""
        for block in blocks:
            self._hold(block)
        return list(blocks)

    def make_writable(self, block: int) -> int:
        """Return the block if one sequence holds it; else drop a reference to it and return a new block, into which the
        caller copies the content.

        Raises:
            OutOfBlocksError: a new block is needed and none is free.
        """
        if self._references[block] == 1:
            return block
        (new,) = self.allocate(1)
        self._references[block] -= 1
        return new

    def register(self, block: int, key: BlockKey) -> None:
        """Add a full block to the prefix cache. Do nothing if the cache has this key or block, or is disabled."""
        if self.prefix_caching and key not in self._block_of and block not in self._key_of:
            self._key_of[block], self._block_of[key] = key, block

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference to each block. The last blocks are evicted first, so prefixes lose only their ends.

        Raises:
            RuntimeError: a block has no reference.
        """
        for block in reversed(blocks):
            count = self._references[block] - 1
            if count < 0:
                raise RuntimeError(f"KV block {block} was released more often than held; report this as a bug")
            self._references[block] = count
            if count == 0:
                self._free[block] = None
                if block not in self._key_of:
                    self._free.move_to_end(block, last=False)

    def clear_cache(self) -> None:
        """Drop all cached prefixes, e.g. after the weights have changed."""
        self._key_of.clear()
        self._block_of.clear()

    def _hold(self, block: int) -> None:
        if self._references[block] == 0:
            del self._free[block]
        self._references[block] += 1

    def _forget(self, block: int) -> None:
        key = self._key_of.pop(block, None)
        if key is not None:
            del self._block_of[key]
