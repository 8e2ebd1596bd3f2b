"""Tests of the choice of a replica by the prefix index and the replicas' loads."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.serving.replicas.merged_metrics import merge_expositions
from windlass.serving.replicas.prefix_index import (
    BLOCK_CHARACTERS,
    ReplicaLoad,
    block_hashes,
    choose_replica,
    routing_text,
)


@given(shared=st.integers(0, 5 * BLOCK_CHARACTERS), rests=st.tuples(st.integers(0, 300), st.integers(0, 300)))
def test_the_cached_blocks_are_those_of_the_common_beginning(shared: int, rests: tuple[int, int]) -> None:
    draw = random.Random(shared)
    common = "".join(draw.choices("abc", k=shared))
    first, second = (common + letter * rest for letter, rest in zip("xy", rests, strict=True))
    load = ReplicaLoad()
    load.insert(block_hashes(first))
    common_blocks = min(shared, len(second)) // BLOCK_CHARACTERS
    assert load.count_cached(block_hashes(second)) == common_blocks
    assert load.count_cached(block_hashes(first)) == len(first) // BLOCK_CHARACTERS


def test_old_prefixes_are_forgotten_from_their_ends() -> None:
    load = ReplicaLoad(max_entries=10)
    old, new = (block_hashes(letter * BLOCK_CHARACTERS * 8) for letter in "ab")
    load.insert(old)
    load.insert(new)
    assert load.count_cached(new) == 8 and load.count_cached(old) == 2 and load.num_blocks == 10
    load.clear()
    assert load.count_cached(new) == 0


def test_the_replica_that_can_begin_first_is_chosen() -> None:
    loads = [ReplicaLoad(), ReplicaLoad(), ReplicaLoad()]
    text = "a" * 1000
    hashes = block_hashes(text)
    loads[1].insert(hashes)
    assert choose_replica(loads, 1000, hashes) == (1, 1000 - 15 * BLOCK_CHARACTERS)
    loads[1].running = 5  # a few answers do not outweigh the cached prefix
    assert choose_replica(loads, 1000, hashes)[0] == 1
    loads[1].prefill = 5000  # a queue of prompts does
    assert choose_replica(loads, 1000, hashes) == (0, 1000)
    loads[0].running = 1
    assert choose_replica(loads, 1000, hashes) == (2, 1000)
    with pytest.raises(ValueError, match="no replica"):
        choose_replica([], 0, [])


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"prompt": "ab"}, {"prompt": "abc", "temperature": 0}),
        ({"prompt": ["ab", "x"]}, {"prompt": ["abc"]}),
        ({"prompt": [1, 2]}, {"prompt": [[1, 2, 3]]}),
        ({"input": "ab"}, {"input": ["abc"]}),
        ({"input": "ab", "instructions": "x"}, {"input": "abc", "instructions": "x"}),
        (
            {"input": [{"role": "user", "content": "a"}], "instructions": "x"},
            {"input": [{"role": "user", "content": "a"}, {"type": "function_call"}], "instructions": "x"},
        ),
        (
            {"messages": [{"role": "user", "content": "a"}]},
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": [{"type": "text"}]}]},
        ),
    ],
)
def test_equal_beginnings_of_prompts_are_equal_beginnings_of_texts(first: Any, second: Any) -> None:
    assert routing_text(second).startswith(routing_text(first))
    assert not routing_text({**second, "model": "adapter"}).startswith(routing_text(first))


@pytest.mark.parametrize("data", [None, [], 3, {}, {"prompt": None}, {"messages": 3}, {"messages": [None, {"a": 1}]}])
def test_invalid_requests_have_a_text_too(data: Any) -> None:
    assert isinstance(routing_text(data), str)


def test_metrics_of_processes_stand_together_by_name() -> None:
    first = '# HELP a Text.\n# TYPE a counter\na_total{engine="0"} 1.0\n# HELP b More.\n# TYPE b gauge\nb 2.0\n'
    second = '# HELP a Text.\n# TYPE a counter\na_total{engine="1"} 3.0\n'
    merged = '# HELP a Text.\n# TYPE a counter\na_total{engine="0"} 1.0\na_total{engine="1"} 3.0\n'
    assert merge_expositions([first, "", second]) == merged + "# HELP b More.\n# TYPE b gauge\nb 2.0\n"
