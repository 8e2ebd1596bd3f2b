"""Tests of KV blocks: none leaks, none is shared wrongly, and the prefix cache finds exactly the equal prefixes."""

from __future__ import annotations

import random

import pytest

from windlass.inference.block_manager import BlockManager, OutOfBlocksError, hash_block

SIZE = 4


def keys_of(tokens: list[int], salt: bytes = b"") -> list[bytes]:
    keys, parent = [], salt
    for start in range(0, len(tokens) - len(tokens) % SIZE, SIZE):
        parent = hash_block(parent, tokens[start : start + SIZE])
        keys.append(parent)
    return keys


@pytest.mark.parametrize("seed", range(4))
def test_random_operations_keep_references_and_content(seed: int) -> None:
    """Run 2,500 operations, and compare the holders and content of each block with a simple model of the manager."""
    r = random.Random(seed)
    manager = BlockManager(24, SIZE)
    content: dict[int, tuple[int, ...]] = {}  # by full block: all tokens up to its end
    held: list[tuple[list[int], list[int]]] = []  # tokens and blocks of each sequence
    found = copied = 0
    for _ in range(2500):
        kind = r.random()
        if kind < 0.45:
            tokens = [r.randrange(2) for _ in range(r.randrange(1, 4 * SIZE))]
            keys = keys_of(tokens)
            # 30 % are not looked up: sequences admitted together compute a common prefix twice.
            looked_up = keys if r.random() < 0.7 else []
            cached, used = manager.find_cached(looked_up)
            needed = manager.blocks_for(len(tokens))
            if needed - len(used) > manager.num_free:
                free = manager.num_free
                with pytest.raises(OutOfBlocksError):
                    manager.allocate(manager.num_free + 1)
                assert manager.num_free == free
                continue
            blocks = manager.acquire_cached(looked_up)
            assert len(blocks) == cached
            found += cached
            for place, block in enumerate(blocks):
                assert content[block] == tuple(tokens[: (place + 1) * SIZE]), "a cached block has other tokens"
            new = manager.allocate(needed - cached)
            others = {block for _, theirs in held for block in theirs}
            assert not others & set(new), "a block in use was allocated"
            blocks += new
            for place in range(cached, len(tokens) // SIZE):
                content[blocks[place]] = tuple(tokens[: (place + 1) * SIZE])
                manager.register(blocks[place], keys[place])
            held.append((tokens, blocks))
        elif held and kind < 0.6:
            tokens, blocks = r.choice(held)
            held.append((list(tokens), manager.fork(blocks)))
        elif held and kind < 0.75:
            tokens, blocks = r.choice(held)
            place = len(tokens) // SIZE
            if place < len(blocks) and (manager.num_free or manager.references(blocks[place]) == 1):
                shared = manager.references(blocks[place]) > 1
                new_block = manager.make_writable(blocks[place])
                assert (new_block != blocks[place]) == shared
                copied += shared
                blocks[place] = new_block
                assert manager.references(new_block) == 1
        elif held:
            _, blocks = held.pop(r.randrange(len(held)))
            manager.release(blocks)
        counts: dict[int, int] = {}
        for _, blocks in held:
            for block in blocks:
                counts[block] = counts.get(block, 0) + 1
        assert all(manager.references(block) == counts.get(block, 0) for block in range(24))
        assert manager.num_free == 24 - len(counts)
    for _, blocks in held:
        manager.release(blocks)
    assert manager.num_free == 24
    assert found and copied


def test_keys_depend_on_all_tokens_before_and_on_the_salt() -> None:
    tokens = list(range(3 * SIZE))
    changed = [99, *tokens[1:]]
    assert not set(keys_of(tokens)) & set(keys_of(changed))
    assert not set(keys_of(tokens)) & set(keys_of(tokens, b"adapter"))
    assert keys_of(tokens)[:2] == keys_of(tokens[: 2 * SIZE])


def test_eviction_takes_empty_blocks_first_then_the_oldest() -> None:
    manager = BlockManager(4, SIZE)
    first, second = manager.allocate(1), manager.allocate(1)
    keys = keys_of(list(range(SIZE))), keys_of(list(range(SIZE, 2 * SIZE)))
    manager.register(first[0], keys[0][0])
    manager.register(second[0], keys[1][0])
    manager.release(first)
    manager.release(second)
    assert set(manager.allocate(2)) == {2, 3}
    assert manager.allocate(1) == first
    assert manager.find_cached(keys[0]) == (0, [])
    assert manager.find_cached(keys[1]) == (1, [])


def test_double_release_is_an_error() -> None:
    manager = BlockManager(2, SIZE)
    blocks = manager.allocate(1)
    manager.release(blocks)
    with pytest.raises(RuntimeError, match="released more often"):
        manager.release(blocks)


def test_without_prefix_caching_nothing_is_found() -> None:
    manager = BlockManager(2, SIZE, prefix_caching=False)
    keys = keys_of(list(range(SIZE)))
    manager.register(manager.allocate(1)[0], keys[0])
    assert manager.find_cached(keys) == (0, [])
